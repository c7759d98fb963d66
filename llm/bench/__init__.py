"""`python -m llm bench`: speed, start-up and memory, judged against what this machine can do.

Owns measuring. Nothing in the engine knows of it; it reads public counters, and its profiler wraps a live engine from
outside. Imports nothing here: the command line reads its arguments without PyTorch.
"""
