"""Structured output: a constraint on the completion, applied as a mask of the tokens that can come next.

`processor.py` is the logits processor. `structure.py` compiles params into llguidance's grammar and, where possible, a
`Language`, and has the masks. `schema.py` reads the JSON schema that was given and brings it into alternatives of one
type. `language.py`, `regex.py` and `json_schema.py` compute how many bytes an answer still needs, and `language.py`
writes the same language for llguidance. `structural_tag.py` is free text with tags. Here are the sentences in which a
constraint is refused, and llguidance's messages in one line.
"""

from __future__ import annotations

from llm.errors import ValidationError


def refused(reason: str) -> ValidationError:
    """No constraint can be used with this model."""
    return ValidationError(f"structured_outputs cannot be used: {reason}.", parameter="structured_outputs")


def unusable(kind: str, value: object, reason: str) -> ValidationError:
    """This constraint cannot be used."""
    return ValidationError(f"the {kind} of structured_outputs is not usable: {reason}.", parameter=kind, value=value)


def first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    details = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]  # of a regex
    return ": ".join([lines[0].rstrip(".:"), *details[:1]])
