"""The files by which sentence-transformers describes an embedding model: how hidden states become one vector.

modules.json is read, the folders that it names, and the prompts. Versions 2 to 6 of that package wrote these files.
What cannot be computed here is refused by name; classes are never imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llm.base.text import clip, quote, show
from llm.base.types import JsonObject
from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.model_files import check_model_file, parse_object, read_json
from llm.loading.resolve import snapshot_of

_BYTES = 1 << 20
_MOST_MODULES = 32
_WIDEST = 1 << 20
MODULES = "modules.json"
# The last part of a torch class's name, or nothing -> the activation.
ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
}
_MODES = {
    "cls": "CLS",
    "mean": "MEAN",
    "lasttoken": "LAST",
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}


@dataclass(frozen=True)
class DenseModule:
    """A matrix after pooling: activation(x W^T + b); the tensors are in `folder`."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class SentenceModules:
    """What follows the transformer.

    Attributes:
        pooling_type: "CLS", "LAST" or "MEAN".
        includes_prompt: False: the mean leaves out the tokens of the prompt before a text.
        dense: in order.
        normalizes: the vector's length becomes 1.
        max_seq_length: the longest text in tokens; None: the model's.
        prompts: name -> text that precedes a text.
        default_prompt: the name of the prompt that is taken if none is asked for.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
    """

    pooling_type: str = "MEAN"
    includes_prompt: bool = True
    dense: tuple[DenseModule, ...] = ()
    normalizes: bool = False
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"


def read_sentence_modules(folder: Path, hub_name: str = "", revision: str | None = None) -> SentenceModules | None:
    """The modules of a model folder, None if it has no modules.json.

    Args:
        hub_name: where the modules' own folders are fetched from; "": they are in `folder`.

    Raises:
        CheckpointError: a file is missing or not usable. UnsupportedModelError: a module is not computed here.
    """
    if not (folder / MODULES).exists():
        return None
    modules = _listed_modules(folder / MODULES)
    own = [path for _, path in modules if path]
    if hub_name and not all((folder / path).is_dir() for path in own):
        patterns = tuple(f"{path}/{name}" for path in own for name in ("config.json", "model.safetensors"))
        folder = snapshot_of(hub_name, revision, patterns, lambda copy: all((copy / path).is_dir() for path in own))
    found = SentenceModules(max_seq_length=_max_seq_length(folder), **_prompts(folder))
    for kind, path in modules:
        found = _with_module(found, kind, folder / path)
    return found


def _listed_modules(path: Path) -> list[tuple[str, str]]:
    """(class name, subfolder) of each module, in order."""
    check_model_file(path, limit_bytes=_BYTES)
    # A list, which only an object can hold to be read like every other file.
    entries = parse_object(b'{"modules":' + path.read_bytes() + b"}", str(path))["modules"]
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST_MODULES:
        raise CheckpointError(f"{path} must hold a list of 1 to {_MOST_MODULES} modules")
    modules = []
    for entry in entries:
        kind, where = (entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(where, str) or not _is_plain(where):
            raise CheckpointError(
                f"{path}: a module is {clip(json.dumps(entry))}, must have a type and a folder's name"
            )
        modules.append((kind.rpartition(".")[2], where))
    return modules


def _is_plain(name: str) -> bool:
    return "/" not in name and "\\" not in name and not name.startswith(".") and "*" not in name


def _with_module(found: SentenceModules, kind: str, folder: Path) -> SentenceModules:
    if kind == "Transformer":
        return found
    if kind == "Normalize":
        return replace(found, normalizes=True)
    if kind == "Dropout":
        return found
    if found.normalizes:
        raise UnsupportedModelError(f"{folder.parent / MODULES}: {quote(kind)} follows Normalize, which must be last.")
    if kind == "Pooling":
        config = _module_config(folder)
        return replace(
            found,
            pooling_type=_pooling_type(config, folder),
            includes_prompt=config.get("include_prompt", True) is not False,
        )
    if kind == "Dense":
        return replace(found, dense=(*found.dense, _dense(folder)))
    raise UnsupportedModelError(
        f"{folder.parent / MODULES} has a module {quote(kind)}; computed here are Transformer, Pooling, Dense, Dropout "
        "and Normalize."
    )


def _module_config(folder: Path) -> JsonObject:
    return read_json(folder / "config.json", limit_bytes=_BYTES)


def _pooling_type(config: JsonObject, folder: Path) -> str:
    given = config.get("pooling_mode")
    if given is None:
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    else:
        modes = given if isinstance(given, list) else [given]
    kinds = [_MODES.get(mode) if isinstance(mode, str) else None for mode in modes]
    if len(kinds) == 1 and kinds[0] is not None:
        return kinds[0]
    raise UnsupportedModelError(
        f"{folder / 'config.json'}: the pooling mode is {show(modes)}; computed here are cls, mean and lasttoken."
    )


def _dense(folder: Path) -> DenseModule:
    config, where = _module_config(folder), folder / "config.json"
    sizes: list[int] = [size for key in ("in_features", "out_features") if isinstance(size := config.get(key), int)]
    if len(sizes) < 2 or not all(1 <= size <= _WIDEST for size in sizes):
        raise CheckpointError(f"{where}: in_features and out_features are {show(sizes)}, must be from 1 to {_WIDEST}")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(f"{where}: activation_function is {show(name)}; computed here are {known}.")
    for key, expected in (("module_input_name", "sentence_embedding"), ("module_output_name", "sentence_embedding")):
        if config.get(key, expected) != expected:
            raise UnsupportedModelError(f"{where}: {key} is {show(config[key])}, must be {expected!r}.")
    return DenseModule(folder, sizes[0], sizes[1], config.get("bias", True) is not False, ACTIVATIONS[name])


def _max_seq_length(folder: Path) -> int | None:
    """Of the older file, or of the tokenizer, which has a number without meaning where there is no limit."""
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        path = folder / name
        value = read_json(path, limit_bytes=64 << 20).get(key) if path.exists() else None
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _WIDEST * 1024:
            return value
    return None


def _prompts(folder: Path) -> JsonObject:
    path = folder / "config_sentence_transformers.json"
    config = read_json(path, limit_bytes=_BYTES) if path.exists() else {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: prompts must be texts by name")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path}: default_prompt_name is {show(default)}, which is none of prompts")
    similarity = config.get("similarity_fn_name") or "cosine"
    return {"prompts": prompts, "default_prompt": default, "similarity": str(similarity)}
