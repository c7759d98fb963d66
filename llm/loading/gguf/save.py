"""A quantized model as one GGUF file, which llama.cpp reads: the inverse of `llm/loading/gguf`.

Tensors are written under GGUF's names, in the types that hold them bit for bit, with rows as llama.cpp has them.
Vectors are float32, matrices that are not quantized keep their type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from llm.errors import LLMError
from llm.loading.gguf.container import Planned, Value, write_gguf
from llm.loading.gguf.metadata import ARCHITECTURES, DTYPE_KEY, Described, describe
from llm.loading.gguf.names import FAMILIES, Family, as_stored, gguf_name
from llm.loading.gguf.tokenizer import tokenizer_metadata
from llm.loading.resolve import has_tokenizer
from llm.loading.saved_formats import StoredLayer
from llm.loading.source import FolderSource
from llm.loading.weight_map import rename
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, LatentAttentionConfig
from llm.quantization.formats.gguf import pack_blocks, type_of
from llm.text.tokenizer import Tokenizer

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# GGUF's name of the projection behind latents where it is one.
_LATENT = "attn_kv_b.weight"
# Matrices that are float32 in GGUF; of one row, which is a vector there.
_ROUTER, _ONE_ROW = "mlp.gate.weight", "mlp.shared_expert_gate.weight"
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
        dtype: the name of the type that it computes in where nobody asks for another.
        bos, ends: the id that begins a text, those that end an answer.
        tokenizer: None: there is none.
        renames: of the model class: the checkpoint's names -> the model's, which GGUF's are made from.
    """

    config: DecoderConfig
    model_type: str
    name: str
    dtype: str
    bos: int | None
    ends: Sequence[int]
    tokenizer: Tokenizer | None
    renames: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _Part:
    """A tensor of the file: a layer's quantized weight, or one of its floats; of experts, those of a whole layer.

    Attributes:
        layers: one, or all experts.
        values: floats of each; None: its quantized weight.
        is_stack: a tensor of the file has the values of all of them.
    """

    plan: Planned
    source: str
    layers: tuple[StoredLayer, ...]
    values: tuple[torch.Tensor, ...] | None
    is_stack: bool = False


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
    renames: tuple[tuple[str, str], ...] = getattr(model, "renames", ())
    dtype = str(reader.dtype()).removeprefix("torch.")
    bos = bos if isinstance(bos, int) else None
    return Identity(config, model_type, folder.name, dtype, bos, ends, tokenizer, renames)


class GGUFFile:
    """Everything that is written; constructing it raises `LLMError` for what GGUF has no form for."""

    def __init__(self, identity: Identity, layers: Sequence[StoredLayer]) -> None:
        described = describe(identity.config, identity.model_type, identity.bos, identity.ends)
        self._family: Family = FAMILIES[ARCHITECTURES[identity.model_type]]
        self._heads = described.heads
        self._identity = identity
        self._parts = stacked([part for layer in layers for part in self._parts_of(layer)])
        self._ropes = {name: torch.tensor(values) for name, values in described.ropes.items()}
        self._described = described

    def write(self, path: Path) -> None:
        plans = [Planned(name, "F32", tuple(values.shape)) for name, values in self._ropes.items()]
        plans += [part.plan for part in self._parts]
        write_gguf(path, self._metadata(path, self._described), plans, self._tensors())

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._ropes.values()
        for part in self._parts:
            found = [as_stored(part.source, values, self._family, *self._heads) for values in _values(part)]
            stored = torch.stack(found) if part.is_stack else found[0]
            yield stored.float() if part.plan.type == "F32" else stored

    def _parts_of(self, layer: StoredLayer) -> Iterator[_Part]:
        if layer.weight is not None:
            try:
                kind = type_of(layer.weight)
            except ValueError as error:
                raise _no_form(layer, error) from error
            name, source = self._named(layer, "weight")
            yield _Part(Planned(name, kind, tuple(layer.weight.q.shape)), source, (layer,), None)
        for last, whole in layer.floats.items():
            named, source = self._named(layer, last)
            for name, values in self._by_heads(named, whole):
                values = values[0] if source.endswith(_ONE_ROW) else values
                kind = "F32" if values.dim() == 1 or source.endswith(_ROUTER) else _FLOATS[values.dtype]
                yield _Part(Planned(name, kind, tuple(values.shape)), source, (layer,), (values,))

    def _by_heads(self, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the projection behind latents its two parts, [heads, latent, key] and [heads, value, latent]."""
        attention = self._identity.config.layers[0].attention
        if not isinstance(attention, LatentAttentionConfig) or not name.endswith(_LATENT):
            yield name, values
            return
        parts = values.unflatten(0, (attention.heads, -1))
        keys, others = parts.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        yield name.replace(_LATENT, "attn_k_b.weight"), keys.transpose(1, 2)
        yield name.replace(_LATENT, "attn_v_b.weight"), others

    def _named(self, layer: StoredLayer, last: str) -> tuple[str, str]:
        """(GGUF's name, Hugging Face's under which GGUF's is known)."""
        source = f"{rename(layer.name, self._identity.renames)}.{last}"
        name = gguf_name(_EXPERT.sub(r".experts.", source), self._family)
        if not name:
            raise LLMError(f"{source} has no name in GGUF's models of {self._identity.model_type!r}.")
        return name, source

    def _metadata(self, path: Path, described: Described) -> dict[str, Value]:
        kinds = Counter(part.plan.type for part in self._parts if part.values is None)
        found: dict[str, Value] = {**described.metadata, "general.name": self._identity.name}
        found["general.quantization_version"] = 2
        found[DTYPE_KEY] = self._identity.dtype
        found["general.file_type"] = _FILE_TYPES[kinds.most_common(1)[0][0]]
        tokenizer = self._identity.tokenizer
        if tokenizer is None:
            return {**found, "tokenizer.ggml.model": "none"}
        return found | tokenizer_metadata(tokenizer, self._identity.config.vocab_size, path)


def _values(part: _Part) -> Iterator[torch.Tensor]:
    """As the file has them, of each layer."""
    if part.values is not None:
        yield from part.values
        return
    for layer in part.layers:
        if layer.weight is None:
            raise RuntimeError(f"{part.plan.name} has no values")
        try:
            yield pack_blocks(layer.weight, part.plan.type)
        except ValueError as error:
            raise _no_form(layer, error) from error


def stacked(parts: Sequence[_Part]) -> list[_Part]:
    """The parts of one layer's experts as one, in the order of the experts.

    Raises:
        LLMError: experts are stored in several ways.
    """
    found: list[_Part] = []
    experts: dict[str, list[tuple[int, _Part]]] = {}
    for part in parts:
        expert = _EXPERT.search(part.source)
        if expert is None:
            found.append(part)
        else:
            experts.setdefault(part.plan.name, []).append((int(expert[1]), part))
    for name, members in experts.items():
        members.sort(key=lambda item: item[0])
        plans = {member.plan for _, member in members}
        if len(plans) > 1 or [index for index, _ in members] != list(range(len(members))):
            raise LLMError(f"{name} would hold experts that are stored in several ways, which GGUF has no form for.")
        first, plan = members[0][1], plans.pop()
        layers = tuple(member.layers[0] for _, member in members)
        values = tuple(member.values[0] for _, member in members if member.values is not None)
        plan = Planned(name, plan.type, (len(members), *plan.shape))
        found.append(_Part(plan, first.source, layers, values or None, is_stack=True))
    return found


def _no_form(layer: StoredLayer, error: ValueError) -> LLMError:
    return LLMError(
        f"{layer.name} computes as {layer.scheme} with {error}, which no type of GGUF holds exactly; open the "
        "unquantized model with quantization='q8_0', 'q4_0', 'q4_k' or 'mxfp4' (lm_head='q8_0'), or save it as "
        "'compressed-tensors'."
    )
