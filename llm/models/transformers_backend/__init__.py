"""Models that run on transformers' own modeling code, with our layers and our paged KV cache in it.

`architecture.py` reads config.json, `skeleton.py` builds the model without weights, `stubs.py` gives it values to try
it with, `probe.py` tries it and compares the result with transformers' own forward, `trace.py` records what its
attention asks for, `recognise.py` finds the modules that our operations compute, `tables.py` replaces those that
compute from positions alone, `invariance.py` says whether rounding depends on the batch, `interface.py` is the
attention that transformers calls, `replace.py` puts our layers in the place of theirs, `weights.py` knows the
checkpoint's names, and `model.py` is the class that the registry gives.
"""
