"""Saves a quantized model as a checkpoint that transformers and vLLM load too, or as a GGUF file for llama.cpp.

A folder with its files and shards appears complete or not at all. `saved_formats.py` has the tensors of each format,
`gguf/save.py` the file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from llm.base.library_settings import library_defaults
from llm.base.system import partial_folder
from llm.errors import LLMError, ValidationError
from llm.loading.gguf.save import GGUFFile, identity_of
from llm.loading.model_files import SMALL_FILES, check_model_file
from llm.loading.saved_formats import (
    BitsAndBytesWriter,
    CompressedTensorsWriter,
    GPTQWriter,
    HeldModule,
    ModelSlimWriter,
    StoredLayer,
    Writer,
    stored_layers,
    with_positive_scales,
)
from llm.loading.weight_map import Target
from llm.quantization.kv_cache import has_cache_scales

logger = logging.getLogger("llm")

_WRITERS: dict[str, type[Writer]] = {
    "compressed-tensors": CompressedTensorsWriter,
    "modelslim": ModelSlimWriter,
    "gptq": GPTQWriter,
    "bitsandbytes": BitsAndBytesWriter,
}
_GGUF = "gguf"
_WITH_CACHE_SCALES = _WITH_ROTATIONS = "compressed-tensors"
FORMATS = (*_WRITERS, _GGUF)
_SHARD_BYTES = 2 << 30
# Small files that are not copied; the tokenizer's and generation_config.json are.
_NOT_COPIED = (
    *("config.json", "*.index.json", "quant_model_description*.json", "results.json"),
    *("quantize_config.json", "quant_config.json"),
)


@library_defaults()
def save_quantized(
    model: nn.Module,
    targets: Mapping[str, Target],
    source: Path,
    hf_config: Mapping[str, object],
    path: str | Path,
    format: str,
    hold: Callable[[str], HeldModule] | None = None,
) -> Path:
    """Write `model` into the new folder `path`, or of GGUF the new file.

    It is written under a temporary name beside `path` and renamed when it is complete, so a killed save leaves
    nothing at `path`; the next save removes what it left.

    Args:
        targets: the target of each tensor of the model's checkpoint.
        source: the checkpoint's folder, whose other files are copied.
        hf_config: the checkpoint's config.json.
        hold: what the module at a path holds; None: what it has.

    Raises:
        ValidationError: the format is unknown, `path` exists, or the model is not quantized.
        CheckpointError: a file to be copied is a link out of `source`.
        LLMError: the format cannot store a layer's scheme, or the folder cannot be written.
    """
    path = check_place(path, format)
    layers = stored_layers(model, targets, hold)
    if not any(layer.is_quantized for layer in layers):
        raise ValidationError(
            "the model is not quantized, there is nothing to save; open it with quantization='w8a8' or another.",
            parameter="format",
            value=format,
        )
    scaled = next((layer.name for layer in layers if has_cache_scales(layer.floats)), None)
    if scaled is not None and format != _WITH_CACHE_SCALES:
        raise LLMError(f"{scaled} has static scales of a KV cache, which only {_WITH_CACHE_SCALES!r} has a form for.")
    write = _gguf(model, layers, source, hf_config) if format == _GGUF else _folder(format, layers, source, hf_config)
    rotated = next((layer.name for layer in layers if layer.weight is not None and layer.weight.rotation), None)
    if rotated is not None and format != _WITH_ROTATIONS:
        raise LLMError(
            f"{rotated} is rotated before it is rounded, which {format!r} has no form for; save it as "
            f"{_WITH_ROTATIONS!r}, or load it with quantization={{'scheme': ..., 'rotate': False}}."
        )
    if rotated is not None:
        logger.warning(
            "the layers of %s are rotated before they are rounded (transform_config): vLLM computes that, and "
            "transformers does not and would answer wrongly; quantization={'scheme': ..., 'rotate': False} is read by "
            "both.",
            path,
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(path) as partial:
            write(partial).rename(path)
    except (OSError, SafetensorError) as error:
        raise LLMError(f"the model could not be saved to {path}: {error}") from error
    return path


def _folder(
    format: str, layers: list[StoredLayer], source: Path, hf_config: Mapping[str, object]
) -> Callable[[Path], Path]:
    """Writes everything into a folder, and gives what has to be renamed."""
    layers = [with_positive_scales(layer) for layer in layers]
    writer = _WRITERS[format](hf_config, layers)
    others = _others(source)

    def write(partial: Path) -> Path:
        for file in others:
            shutil.copyfile(file, partial / file.name)
        for name, content in writer.json_files().items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")
        _write_tensors(partial, writer.file_stem, _tensors(writer, layers))
        partial.chmod(0o755)
        return partial

    return write


def _gguf(
    model: nn.Module, layers: list[StoredLayer], source: Path, hf_config: Mapping[str, object]
) -> Callable[[Path], Path]:
    """The same for the one file."""
    file = GGUFFile(identity_of(model, source, hf_config), layers)

    def write(partial: Path) -> Path:
        written = partial / "model.gguf"
        file.write(written)
        return written

    return write


def check_place(path: str | Path, format: str) -> Path:
    """Where to save; raises `ValidationError` for a format that is unknown, or a path that exists or is none of it."""
    path = Path(os.path.expanduser(path))
    if format not in FORMATS:
        raise ValidationError(
            f"format={format!r} is not known; use one of {', '.join(map(repr, FORMATS))}.",
            parameter="format",
            value=format,
        )
    if (path.suffix == ".gguf") != (format == _GGUF):
        right = "name a file that ends in .gguf" if format == _GGUF else "pass a folder, or format='gguf'"
        raise ValidationError(f"{path} is no place for {format}; {right}.", parameter="path", value=str(path))
    if path.exists():
        raise ValidationError(
            f"{path} exists already; pass a new {'file' if format == _GGUF else 'folder'}.",
            parameter="path",
            value=str(path),
        )
    return path


def _tensors(writer: Writer, layers: list[StoredLayer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, layer by layer."""
    for layer in layers:
        yield from writer.tensors(layer).items()


def _others(source: Path) -> list[Path]:
    """The files of the checkpoint's folder that are copied; raises `CheckpointError` for one that links out of it."""
    found = {file for pattern in SMALL_FILES for file in source.glob(pattern) if not file.is_dir()}
    copied = sorted(file for file in found if not any(file.match(left_out) for left_out in _NOT_COPIED))
    for file in copied:
        check_model_file(file)
    return copied


def _write_tensors(folder: Path, stem: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write one file, or shards of at most 2 GiB (unless one tensor is larger) and their index."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > _SHARD_BYTES:
            shards.append(_flush(folder, stem, len(shards), held))
            held, size = {}, 0
        held[name] = tensor.detach().contiguous().clone()
        size += tensor.nbytes
        total += tensor.nbytes
    shards.append(_flush(folder, stem, len(shards), held))
    if len(shards) == 1:
        (folder / _shard_name(stem, 0)).rename(folder / f"{stem}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"{stem}-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _shard_name(stem, index)).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _flush(folder: Path, stem: str, index: int, held: dict[str, torch.Tensor]) -> list[str]:
    save_file(held, folder / _shard_name(stem, index), metadata={"format": "pt"})
    return list(held)


def _shard_name(stem: str, index: int) -> str:
    """The name of a shard while the number of shards is unknown."""
    return f"{stem}-{index}.partial"
