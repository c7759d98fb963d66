"""What the model folder says, read once.

Owns finding the folder, reading config.json and the headers of the weights, and the objects that stand for what was
read: the family's class, its config, how the checkpoint is quantized. Decides no number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llm.base.errors import CheckpointError, ValidationError
from llm.config.engine import DTYPES, EngineArgs
from llm.loading.quantization import Resolved, resolve_quantization, without_quantization_keys
from llm.loading.resolve import resolve_folder
from llm.loading.source import FolderSource, ModelSource
from llm.models.config_reader import ConfigReader
from llm.models.registry import resolve_model_cls
from llm.sampling_params import SamplingParams
from llm.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReadModel:
    """A model that was read and not loaded.

    Attributes:
        reader: of config.json, without what it says of quantization.
        model_class: the family's, see `llm.models.interface.CausalLM`.
        architecture: what `model_class` read from config.json.
        stored_dtype: the floating type of the unquantized weights.
        has_weights: False: they are made up (`load_format="dummy"`).
    """

    source: ModelSource
    reader: ConfigReader
    model_class: Any
    architecture: Any
    stored_dtype: torch.dtype
    quantization: Resolved
    has_weights: bool


def read_model(args: EngineArgs) -> ReadModel:
    """Read config.json and the weights' headers; no tensor is read."""
    has_weights = args.load_format != "dummy"
    folder = resolve_folder(args.model, args.revision, weights=has_weights)
    source = FolderSource(folder, args.hf_overrides)
    raw = source.config()
    quantization = resolve_quantization(args.quantization, args.calibration, folder, raw)
    reader = ConfigReader(without_quantization_keys(raw, quantization))
    model_class = resolve_model_cls(list(reader.raw.get("architectures") or []), reader.family)
    architecture = model_class.read_config(reader)
    is_quantized = quantization.config is not None and not quantization.on_load
    if has_weights:
        source.tensors()
    # The floats of a quantized checkpoint are mostly scales, whose type says nothing of the model.
    stored = _stored_dtype(source) if has_weights and not is_quantized else reader.dtype()
    return ReadModel(source, reader, model_class, architecture, stored, quantization, has_weights)


def read_tokenizer(args: EngineArgs, source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer, or the one that was asked for; None with `skip_tokenizer_init`."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None:
        return Tokenizer(source.tokenizer(), args.chat_template)
    return Tokenizer(resolve_folder(args.tokenizer, weights=False, argument="tokenizer"), args.chat_template)


def eos_token_ids(reader: ConfigReader, generation: Mapping[str, Any]) -> frozenset[int]:
    """EOS of config.json and of generation_config.json together."""
    defaults = ConfigReader(generation, "generation_config.json")
    return frozenset((*reader.eos_token_ids(), *defaults.eos_token_ids()))


def default_params(args: EngineArgs, generation: Mapping[str, Any]) -> SamplingParams:
    """What `generate` uses when it is given no params: the model's generation_config.json, unless told not to."""
    if args.generation_config == "vllm":
        return SamplingParams()
    names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        given["max_tokens"] = generation["max_new_tokens"]
    try:
        params = SamplingParams(**given)
        params.set_from("generation_config.json", **{name: getattr(params, name) for name in given})
        return params
    except ValidationError as error:
        raise CheckpointError(
            f"generation_config.json of the model is not usable ({error}); pass generation_config='vllm' to do without."
        ) from error


def _stored_dtype(source: ModelSource) -> torch.dtype:
    """The floating type that most bytes of the checkpoint are in."""
    sizes: Counter[torch.dtype] = Counter()
    for info in source.tensors().tensors.values():
        if info.dtype in DTYPES.values():
            sizes[info.dtype] += info.nbytes
    if not sizes:
        raise CheckpointError("the checkpoint holds no float32, bfloat16 or float16 tensors.")
    return sizes.most_common(1)[0][0]
