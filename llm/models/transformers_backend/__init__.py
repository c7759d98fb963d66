"""Models that run on transformers' own modeling code, with our layers and our paged KV cache in it.

To try a model before its weights are loaded: `architecture.py` reads config.json, `skeleton.py` builds the model
without weights, `stubs.py` gives it values, `trial.py` makes short requests, `probe.py` computes them and compares the
result with transformers' own forward; `trace.py` records what attention asks for, `observe.py` which modules are
called, `recognise.py` finds those that our operations compute, `tables.py` replaces those that compute from positions
alone, and `invariance.py` says whether rounding depends on the batch.

To run it: `replace.py` puts our layers in the place of theirs, `weights.py` knows the checkpoint's names, `passes.py`
calls the two halves of a forward pass, `interface.py` is the attention that transformers calls, `rows.py` runs models
with other attention row by row, and `model.py` is the class that the registry gives.
"""
