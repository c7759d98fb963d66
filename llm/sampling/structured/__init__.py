"""Structured output: a constraint on the completion, applied as a mask of the tokens that can come next.

`processor.py` is the logits processor. `compile.py` compiles params into llguidance's grammar and, where possible, a
`Language`. `language.py`, `regex.py` and `json_schema.py` compute how many bytes an answer still needs.
"""
