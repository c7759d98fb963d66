"""A third backend, in one folder: the CPU's kernels, each call counted. `CountingPlatform` names it in one line."""
