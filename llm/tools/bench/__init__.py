"""`python -m llm bench`: speed, start-up and memory, compared with the best this machine allows.

The engine does not depend on it: it reads public counters, and its profiler patches a live engine. This file imports
nothing, so that the command line parses its arguments without PyTorch.
"""
