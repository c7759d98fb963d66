"""Structured output: what a completion must be, as a mask of the tokens that can come next.

`processor.py` is the logits processor, `compile.py` turns params into a grammar (llguidance's, and where it can a
language of ours), `language.py`, `regex.py` and `json_schema.py` know how many bytes an answer still needs.
"""
