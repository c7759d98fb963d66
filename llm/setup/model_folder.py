"""Reading the model folder, once.

From config.json and the headers of the weights follow the model class, its config and the quantization; no number is
decided.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llm.base.checks import refuse
from llm.base.types import JsonObject
from llm.config.engine import DTYPES, LLMArgs, SpeculativeConfig
from llm.engine.boundary import PoolingPlan
from llm.errors import CheckpointError, UnsupportedModelError, ValidationError, nearest
from llm.loading.checkpoint import TensorInfo
from llm.loading.gguf.source import GgufSource
from llm.loading.quantization import Resolved, requantized, resolve_quantization, without_quantization_keys
from llm.loading.resolve import resolve_folder, resolve_gguf
from llm.loading.source import FolderSource, ModelSource, resolve_overrides
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.registry import resolve_model_cls, resolve_pooling_cls
from llm.sampling_params import SamplingParams
from llm.setup.pooling import Purpose, choose_purpose, plan_pooling, with_head
from llm.text.tokenizer import Tokenizer

_NO_FOLDERS = ("auto", "vllm")
# Key of generation_config.json -> the field of `SamplingParams` whose default it is.
_GENERATION_DEFAULTS = {
    **{name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")},
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class ReadModel:
    """A model whose folder has been read but not its weights.

    Attributes:
        reader: reads config.json without its quantization config.
        model_class: the family's class, see `llm.models.interface.CausalLM`.
        architecture: what `model_class` read from config.json.
        chosen: which implementation `model_class` is, and why.
        stored_dtype: the floating type of the unquantized weights.
        has_weights: False: the weights are random (`load_format="dummy"`).
        purpose: what the model is for.
        pooling: what becomes of its hidden states; None: it generates.
    """

    source: ModelSource
    reader: ConfigReader
    model_class: Any
    architecture: Any
    stored_dtype: torch.dtype
    quantization: Resolved
    has_weights: bool
    chosen: Implementation
    purpose: Purpose
    pooling: PoolingPlan | None


def read_model(args: LLMArgs, chosen: Implementation | None = None) -> ReadModel:
    """Read config.json and the weights' headers; no tensor is read. `chosen`: None: by config.json."""
    has_weights = args.load_format != "dummy"
    source, quantization, reader = _read_config(args, _find_source(args, has_weights))
    purpose = choose_purpose(args, reader, source)
    pools, is_gguf = purpose.runner == "pooling", isinstance(source, GgufSource)
    chosen = chosen or choose_implementation(reader, args.model_impl, is_gguf=is_gguf, pools=pools)
    architecture = with_head(chosen.model_class.read_config(reader), purpose, reader, source)
    architecture = with_draft_head(args, architecture, source, has_weights)
    pooling = plan_pooling(args, purpose, reader, source, architecture)
    is_quantized = quantization.config is not None and not quantization.on_load
    if has_weights and quantization.found and quantization.config is not None:
        # Some formats say by their tensors alone that there are scales of a KV cache.
        quantization.config.describe_tensors({name: info.shape for name, info in source.tensors().tensors.items()})
    if has_weights:
        _check_counts(reader.layers(), getattr(architecture, "experts", 0), source.tensors().tensors)
    # The float tensors of a quantized checkpoint are mostly scales, whose type is not the model's.
    stored = _stored_dtype(source) if has_weights and not is_quantized else reader.dtype()
    return ReadModel(
        source=source,
        reader=reader,
        model_class=chosen.model_class,
        architecture=architecture,
        stored_dtype=stored,
        quantization=quantization,
        has_weights=has_weights,
        chosen=chosen,
        purpose=purpose,
        pooling=pooling,
    )


def _read_config(args: LLMArgs, source: ModelSource) -> tuple[ModelSource, Resolved, ConfigReader]:
    """(the source with `hf_overrides`, its quantization, the reader of its config.json without that)."""
    source = source.with_overrides(resolve_overrides(args.hf_overrides, source.config()))
    raw = source.config()
    quantization = resolve_quantization(args.quantization, args.calibration, source.folder, raw)
    if args.requantize is not None:
        quantization = requantized(quantization, args.requantize)
    return source, quantization, ConfigReader(without_quantization_keys(raw, quantization))


def _find_source(args: LLMArgs, has_weights: bool) -> ModelSource:
    """A GGUF file where `model` names one, else a folder."""
    file = resolve_gguf(args.model, args.revision)
    if file is None:
        return FolderSource(
            resolve_folder(
                args.model, args.revision, weights=has_weights, check=lambda folder: check_supported(args, folder)
            )
        )
    if not has_weights:
        right = "'auto' for a GGUF file, whose sizes are those of its weights"
        refuse("load_format", args.load_format, right)
    return GgufSource(file)


def check_supported(args: LLMArgs, folder: Path) -> None:
    """Refuse what config.json alone shows to be impossible: before the weights of a hub model are downloaded."""
    source, _, reader = _read_config(args, FolderSource(folder))
    purpose = choose_purpose(args, reader, source)
    chosen = choose_implementation(reader, args.model_impl, is_gguf=False, pools=purpose.runner == "pooling")
    chosen.model_class.read_config(reader)


def _check_counts(layers: int, experts: int, tensors: Mapping[str, TensorInfo]) -> None:
    """Checked before memory is allocated for the layers and their experts, whose weights may be stacked."""
    if layers > len(tensors):
        raise CheckpointError(
            f"config.json says that the model has {layers} layers, and the checkpoint holds {len(tensors)} tensors."
        )
    matrices = sum(info.shape[0] if len(info.shape) > 2 else 1 for info in tensors.values())
    if experts > matrices:
        raise CheckpointError(
            f"config.json says that the model has {experts} experts, and the checkpoint holds {matrices} matrices."
        )


def read_tokenizer(args: LLMArgs, source: ModelSource) -> Tokenizer | None:
    """The tokenizer of the arguments or else the model's; None with `skip_tokenizer_init`."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None:
        return Tokenizer(source.tokenizer(), args.chat_template)
    return Tokenizer(resolve_folder(args.tokenizer, weights=False, argument="tokenizer"), args.chat_template)


def eos_token_ids(reader: ConfigReader, generation: Mapping[str, Any]) -> frozenset[int]:
    """The EOS ids of config.json and generation_config.json together."""
    defaults = ConfigReader(generation, "generation_config.json")
    return frozenset((*reader.eos_token_ids(), *defaults.eos_token_ids()))


def generation_defaults(args: LLMArgs, source: ModelSource) -> JsonObject:
    """generation_config.json of the model, or of the folder that `generation_config` names."""
    if args.generation_config in _NO_FOLDERS:
        return source.generation_defaults()
    folder = Path(args.generation_config)
    if not os.path.isfile(folder / "generation_config.json"):
        right = "'auto', 'vllm' or a folder that holds a generation_config.json"
        refuse("generation_config", str(args.generation_config), right)
    return FolderSource(folder).generation_defaults()


def default_params(args: LLMArgs, generation: Mapping[str, Any]) -> SamplingParams:
    """The params of `generate` if it gets none: the values of generation_config.json, unless `generation_config` says
    otherwise, overridden by `override_generation_config`."""
    files = {} if args.generation_config == "vllm" else _known(generation)
    overrides = args.override_generation_config or {}
    for name in overrides:
        if name not in _GENERATION_DEFAULTS:
            known = ", ".join(_GENERATION_DEFAULTS)
            raise ValidationError(
                f"override_generation_config has no key {name!r}.{nearest(str(name), _GENERATION_DEFAULTS)} "
                f"Known: {known}.",
                parameter="override_generation_config",
                value=name,
            )
    given = _known(overrides)
    params = SamplingParams()
    for origin, values in (("generation_config.json", files), ("override_generation_config", given)):
        params = _with_defaults(params, origin, values)
    return params


def _known(generation: Mapping[str, object]) -> dict[str, Any]:
    """The keys of generation_config.json that `SamplingParams` has, under its names."""
    found = {field: generation.get(name) for name, field in _GENERATION_DEFAULTS.items()}
    return {field: value for field, value in found.items() if value is not None}


def _with_defaults(params: SamplingParams, origin: str, values: dict[str, Any]) -> SamplingParams:
    try:
        changed = replace(params, **values)
    except ValidationError as error:
        if origin == "override_generation_config":
            raise ValidationError(f"{origin}: {error}", parameter=origin, value=values) from error
        raise CheckpointError(
            f"generation_config.json of the model is not usable ({error}); pass generation_config='vllm' to do without."
        ) from error
    for name, old in params.origins.items():
        if old not in ("default", "given"):
            changed.set_from(old, **{name: getattr(changed, name)})
    changed.set_from(origin, **{name: getattr(changed, name) for name in values})
    return changed


def _stored_dtype(source: ModelSource) -> torch.dtype:
    """The floating type of most bytes of the checkpoint."""
    sizes: Counter[torch.dtype] = Counter()
    for info in source.tensors().tensors.values():
        if info.dtype in DTYPES.values():
            sizes[info.dtype] += info.nbytes
    if not sizes:
        raise CheckpointError("the checkpoint holds no float32, bfloat16 or float16 tensors.")
    return sizes.most_common(1)[0][0]


_OF_IMAGES = "the language model of a family that reads images"


@dataclass(frozen=True)
class Implementation:
    """A model class; `name`: "native" or "transformers", `why`: it was chosen for this reason."""

    model_class: Any
    name: str
    why: str


def choose_implementation(
    reader: ConfigReader, model_impl: str, *, is_gguf: bool, pools: bool = False
) -> Implementation:
    """The class for a config.json, read or not; raises `UnsupportedModelError` if there is none.

    `pools`: for one whose hidden states are pooled, which needs no head of the checkpoint's architecture.
    """
    if pools:
        if model_impl == "transformers":
            refuse("model_impl", model_impl, "'auto' or 'native' for a pooling model")
        try:
            return Implementation(resolve_pooling_cls(reader.family), "native", "the class of config.json's model_type")
        except UnsupportedModelError:
            reading = _reads_images(reader)
            if reading is None:
                raise
        return Implementation(reading, "native", _OF_IMAGES)
    if model_impl == "transformers":
        if is_gguf:
            refuse("model_impl", model_impl, "'auto' for a GGUF file, whose tensors have other names")
        return _of_transformers("asked for")
    try:
        native = resolve_model_cls(reader.names("architectures") or [], reader.family)
    except UnsupportedModelError:
        reading = None if is_gguf else _reads_images(reader)
        if reading is not None:
            return Implementation(reading, "native", _OF_IMAGES)
        if model_impl != "auto" or is_gguf or not _may_run_on_transformers(reader):
            raise
        return _of_transformers(f"no class of this package for {reader.family}")
    declined = _declined(native, reader)
    if declined is not None and model_impl == "auto" and not is_gguf and _may_run_on_transformers(reader):
        return _of_transformers(f"{native.__name__} leaves this one: {declined}")
    reason = "registered for config.json's architectures or model_type"
    return Implementation(native, "native", f"asked for; {reason}" if model_impl != "auto" else reason)


def _reads_images(reader: ConfigReader) -> type | None:
    """The class for the language model in a checkpoint that reads images; None: it is no such, or has none here."""
    if "vision_config" not in reader.raw and "text_config" not in reader.raw:
        return None
    from llm.models.vision.language import class_of, language_family
    from llm.models.vision.tower import known_tower

    name = known_tower(reader.family)
    if name is None or name not in (reader.names("architectures") or [name]):
        return None
    return class_of(language_family(reader.raw))


def _declined(native: type, reader: ConfigReader) -> str | None:
    """Why a native class computes some models of its family and not this one; None: it computes it."""
    declines: Callable[[Mapping[str, object]], str | None] | None = getattr(native, "declines", None)
    return None if declines is None else declines(reader.raw)


def _of_transformers(why: str) -> Implementation:
    from llm.models.transformers_backend.model import TransformersForCausalLM

    return Implementation(TransformersForCausalLM, "transformers", why)


def _may_run_on_transformers(reader: ConfigReader) -> bool:
    """True for a causal language model of transformers; other uses of its layers are refused with the native reason."""
    from llm.models.transformers_backend.model import known_to_transformers

    name = known_to_transformers(reader.family)
    return name is not None and name in (reader.names("architectures") or [name])


def with_draft_head(args: LLMArgs, architecture: object, source: ModelSource, has_weights: bool) -> object:
    """The architecture, with its head if `speculative_config` asks for it.

    Raises:
        ValidationError: it has none, or the checkpoint lacks its weights.
    """
    config = SpeculativeConfig.of(args.speculative_config)
    if config is None or config.method != "mtp":
        return architecture
    head = architecture.multi_token if isinstance(architecture, DecoderConfig) else None
    if head is None or not isinstance(architecture, DecoderConfig):
        problem = "config.json names no layer for multi-token prediction that is read"
    elif has_weights and not any(name.startswith(f"{head.prefix}.") for name in source.tensors().tensors):
        problem = f"the checkpoint has no tensors under {head.prefix}, where its layer for multi-token prediction is"
    else:
        return replace(architecture, draft_head=head)
    raise ValidationError(
        f"speculative_config method='mtp' cannot be used with {str(args.model)!r}: {problem}; leave it out, or use "
        "another method.",
        parameter="speculative_config",
        value="mtp",
    )
