"""Families in which tokens of a picture see each other in both directions, and where."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llm.base.types import JsonObject


def sees_both_ways(config: JsonObject) -> str:
    """ "images": the tokens of a picture do; "prompt": all of a prompt with pictures (a prefix language model);
    "windows": those of a picture, in layers with a window alone; "": none do. `config`: the decoded config.json."""
    text = config.get("text_config")
    gemma4 = text.get("use_bidirectional_attention") if isinstance(text, Mapping) else None
    if config.get("model_type") in ("gemma4", "gemma4_unified"):
        return "windows" if gemma4 == "vision" else ""
    return {"gemma3": "images", "shieldgemma2": "images", "paligemma": "prompt"}.get(str(config.get("model_type")), "")


def spans_of(kind: str, places: np.ndarray, length: int) -> tuple[tuple[int, int], ...]:
    """(first, end) of each run. places: int64, increasing, the positions of pictures' tokens in a prompt."""
    if not kind or not len(places):
        return ()
    if kind == "prompt":
        return ((0, length),)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)
