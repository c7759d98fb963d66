"""Models that run on transformers' own modeling code, with our layers and our paged KV cache in it.

`model.py` reads config.json and is the class that the registry gives. Before its weights are loaded `probe.py` tries
the model: `skeleton.py` builds it without weights, `attention.py` records what attention asks for, and `recognise.py`
finds the modules that our operations compute. Then `replace.py` puts our layers in the place of theirs, `attention.py`
is the attention that transformers calls, and `rows.py` runs models with other attention row by row.
"""
