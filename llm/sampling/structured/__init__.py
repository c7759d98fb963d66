"""Structured output: a constraint on the completion, applied as a mask of the tokens that can come next.

`processor.py` is the logits processor, `structure.py` the constraint and its masks. `compile.py` compiles params into
llguidance's grammar and, where possible, a `Language`; `schema.py` reads the JSON schema that was given. `language.py`,
`regex.py` and `json_schema.py` compute how many bytes an answer still needs; `algebra.py` brings schemas into
alternatives of one type, `formats.py` has the formats of strings, and `lark.py` writes the same language for
llguidance.
"""
