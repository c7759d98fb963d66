"""The CPU kernels: C++17 behind a plain C interface, one shared library per instruction set. See kernels/README.md."""
