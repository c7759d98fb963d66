"""What a model is that cannot be loaded here, and what to do instead.

Owns the sentences' second halves for formats of quantized checkpoints, and for folders and files of other kinds. Who
refuses, and why, is beside each check.
"""

from __future__ import annotations

import os
from pathlib import Path

from llm.loading.adapters.folder import described

# Part of a format's name -> the schemes to quantize the float checkpoint by.
_SCHEMES = {
    "bnb": ("w8a16", "nf4"),
    "fp8": ("w8a16", "w8a8"),
    "int8": ("w8a16", "w8a8"),
    "mxfp8": ("w8a16",),
    "fp4": ("w4a16",),
    "modelopt": ("w8a16",),
    "torchao": ("w8a16", "w4a16"),
    "marlin": ("w4a16",),
    "hqq": ("w4a16",),
    "aqlm": ("w4a16",),
    "auto-round": ("w4a16",),
    "auto_round": ("w4a16",),
    "quark": ("w8a16",),
}


def schemes_instead(name: str) -> str:
    """ "'w4a16'" for "awq": the schemes that come nearest to a format that is not computed; "" if it is unknown."""
    for part, schemes in _SCHEMES.items():
        if part in name.lower():
            return " or ".join(map(repr, schemes))
    return ""


def of_file(path: Path) -> str:
    """What to do about a file where a folder is needed."""
    return "a GGUF file is read as the model alone" if path.suffix.lower() == ".gguf" else ""


def of_folder(folder: Path) -> str:
    """Why a folder has no config.json, and what to do."""
    if os.path.isfile(folder / "adapter_config.json"):
        return described(folder)
    if any(folder.glob("*.gguf")):
        return "it holds GGUF files: pass the path of one of them"
    return "is it a Hugging Face model folder?"
