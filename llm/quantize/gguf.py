"""A quantized model as one GGUF file, which llama.cpp reads: the inverse of `llm/loading/gguf`.

Owns the tensors: under GGUF's names, in the types that hold them bit for bit, with rows as llama.cpp has them. Vectors
are float32, matrices that are not quantized keep their type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from llm.base.errors import LLMError
from llm.loading.gguf.container import Value
from llm.loading.gguf.names import FAMILIES, Family, as_stored, gguf_name
from llm.loading.gguf.writer import Planned, write_gguf
from llm.loading.resolve import has_tokenizer
from llm.loading.source import FolderSource
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.quantization.storage.gguf_pack import pack_blocks, type_of
from llm.quantize.formats import StoredLayer
from llm.quantize.gguf_metadata import ARCHITECTURES, Described, describe
from llm.quantize.gguf_tokenizer import tokenizer_metadata
from llm.tokenizer import Tokenizer

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# general.file_type: what llama.cpp calls the file.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 14, "BF16": 32, "MXFP4": 38}


@dataclass(frozen=True)
class Identity:
    """What a file says beside the weights.

    Attributes:
        config: the decoder.
        model_type: Hugging Face's.
        name: of the model, for people.
        bos, ends: the id that begins a text, those that end an answer.
        tokenizer: None: there is none.
    """

    config: DecoderConfig
    model_type: str
    name: str
    bos: int | None
    ends: Sequence[int]
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Part:
    """A tensor of the file: a layer's quantized weight, or one of its floats."""

    plan: Planned
    source: str
    layer: StoredLayer
    values: torch.Tensor | None


def identity_of(model: nn.Module, folder: Path, hf_config: Mapping[str, object]) -> Identity:
    """Of the model that was loaded from a folder; raises `LLMError` for one that is no decoder of ours."""
    config = getattr(model, "config", None)
    model_type = str(hf_config.get("model_type"))
    if not isinstance(config, DecoderConfig):
        raise LLMError(f"models of the type {model_type!r} are not written in GGUF.")
    reader = ConfigReader(hf_config)
    given = (reader, ConfigReader(FolderSource(folder).generation_defaults(), "generation_config.json"))
    ends = list(dict.fromkeys(index for each in given for index in sorted(each.eos_token_ids())))
    bos = hf_config.get("bos_token_id")
    tokenizer = Tokenizer(folder) if has_tokenizer(folder) else None
    first = None if tokenizer is None else tokenizer.huggingface().eos_token_id
    ends.sort(key=lambda index: index != first)
    return Identity(config, model_type, folder.name, bos if isinstance(bos, int) else None, ends, tokenizer)


class GGUFFile:
    """Everything that is written; constructing it raises `LLMError` for what GGUF has no form for."""

    def __init__(self, identity: Identity, layers: Sequence[StoredLayer]) -> None:
        described = describe(identity.config, identity.model_type, identity.bos, identity.ends)
        self._family: Family = FAMILIES[ARCHITECTURES[identity.model_type]]
        self._heads = described.heads
        self._parts = [part for layer in layers for part in self._parts_of(layer)]
        self._ropes = {name: torch.tensor(values) for name, values in described.ropes.items()}
        self._identity = identity
        self._described = described

    def write(self, path: Path) -> None:
        plans = [Planned(name, "F32", tuple(values.shape)) for name, values in self._ropes.items()]
        plans += [part.plan for part in self._parts]
        write_gguf(path, self._metadata(path, self._described), plans, self._tensors())

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._ropes.values()
        for part in self._parts:
            values = part.values
            if values is None and part.layer.weight is not None:
                try:
                    values = pack_blocks(part.layer.weight, part.plan.type)
                except ValueError as error:
                    raise _no_form(part.layer, error) from error
            if values is None:
                raise RuntimeError(f"{part.plan.name} has no values")
            stored = as_stored(part.source, values, self._family, *self._heads)
            yield stored.float() if part.plan.type == "F32" else stored

    def _parts_of(self, layer: StoredLayer) -> Iterator[_Part]:
        if layer.weight is not None:
            try:
                kind = type_of(layer.weight)
            except ValueError as error:
                raise _no_form(layer, error) from error
            name, source = self._named(layer, "weight")
            yield _Part(Planned(name, kind, tuple(layer.weight.q.shape)), source, layer, None)
        for last, values in layer.floats.items():
            name, source = self._named(layer, last)
            kind = "F32" if values.dim() == 1 else _FLOATS[values.dtype]
            yield _Part(Planned(name, kind, tuple(values.shape)), source, layer, values)

    def _named(self, layer: StoredLayer, last: str) -> tuple[str, str]:
        """(GGUF's name, Hugging Face's)."""
        source = f"{layer.name}.{last}"
        name = gguf_name(source, self._family)
        if not name:
            raise LLMError(f"{source} has no name in GGUF's models of {self._identity.model_type!r}.")
        return name, source

    def _metadata(self, path: Path, described: Described) -> dict[str, Value]:
        kinds = Counter(part.plan.type for part in self._parts if part.values is None)
        found: dict[str, Value] = {**described.metadata, "general.name": self._identity.name}
        found["general.quantization_version"] = 2
        found["general.file_type"] = _FILE_TYPES[kinds.most_common(1)[0][0]]
        tokenizer = self._identity.tokenizer
        if tokenizer is None:
            return {**found, "tokenizer.ggml.model": "none"}
        return found | tokenizer_metadata(tokenizer, self._identity.config.vocab_size, path)


def _no_form(layer: StoredLayer, error: ValueError) -> LLMError:
    return LLMError(
        f"{layer.name} computes as {layer.scheme} with {error}, which no type of GGUF holds exactly; open the "
        "unquantized model with quantization='q8_0', 'q4_0', 'q4_k' or 'mxfp4' (lm_head='q8_0'), or save it as "
        "'compressed-tensors'."
    )
