"""What an answer depends on: the model and its settings for a whole job, tokens and parameters for a row.

Owns both as plain data. Two processes in which they are equal give the same answers, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from llm.base.text import show
from llm.base.types import JsonObject
from llm.config.engine import EngineArgs, EngineConfig
from llm.engine.boundary import PoolingPlan
from llm.engine.interrupt import InterruptGuard
from llm.engine.rows import AnyRow, RefusedRow
from llm.errors import ValidationError
from llm.loading.adapters.folder import AdapterFolder
from llm.loading.resolve import resolve_folder
from llm.loading.source import ModelSource
from llm.outputs_json import params_as_json, plain
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.loading import qualified_name
from llm.sampling_params import SamplingParams

# Raise it when a change of this package changes answers.
NUMERICS_VERSION = 1


def fingerprint(source: ModelSource) -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights, and the configuration.

    Raises:
        KeyboardInterrupt: Ctrl-C; between two tensors, because within one safetensors makes it another error.
    """
    digest = hashlib.sha256(_json(source.config()))
    try:
        with InterruptGuard() as guard:
            for name, tensor in source.tensors().stream():
                if guard.requested:
                    raise KeyboardInterrupt
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    finally:
        source.close()
    return digest.hexdigest()


def identity(
    args: EngineArgs,
    config: EngineConfig,
    weights: str,
    processors: Sequence[type[LogitsProcessor]],
) -> JsonObject:
    """What all answers of an `LLM` depend on.

    Raises:
        ValidationError: the LLM has no seed, so its answers cannot be repeated.
    """
    if args.seed is None:
        raise ValidationError(
            "a job that can be resumed needs LLM(seed=...): without it every process draws its own.", parameter="seed"
        )
    return {
        **model_identity(args, config, weights),
        "logits_processors": [qualified_name(kind) for kind in processors],
        "logprobs_mode": args.logprobs_mode,
        "seed": config.model_config.seed,
    }


def model_identity(args: EngineArgs, config: EngineConfig, weights: str) -> JsonObject:
    """What the model's hidden states depend on besides the tokens and a row's adapter."""
    adapter = None
    if args.merge_lora is not None:
        with AdapterFolder(resolve_folder(args.merge_lora, weights=False, argument="merge_lora")) as folder:
            adapter = folder.digest()
    calibration = hashlib.sha256(_json(list(args.calibration))).hexdigest() if args.calibration else None
    # Asked for, it lets GEMMs round their inputs where that is faster.
    rounds = str(args.dtype).removeprefix("torch.") == "bfloat16"
    return {
        "weights": weights,
        "numerics": NUMERICS_VERSION,
        "kernels": config.reasons.get("invariant"),
        "torch": torch.__version__,
        "dtype": str(config.model_config.weight_dtype),
        "kv_cache_dtype": str(config.cache_config.kv_cache_dtype),
        "quantization": plain(args.quantization),
        "calibration": calibration,
        **({"may_round": True} if rounds else {}),
        **({} if args.requantize is None else {"requantize": plain(args.requantize)}),
        **({} if adapter is None else {"merge_lora": adapter}),
        "hf_overrides": show(args.hf_overrides) if callable(args.hf_overrides) else plain(args.hf_overrides),
        "compilation_config": plain(config.compilation_config),
    }


def pooling_identity(plan: PoolingPlan | None) -> JsonObject:
    """What answers of a model that pools depend on besides; {}: it generates."""
    if plan is None:
        return {}
    digest = hashlib.sha256(_json(replace(plan, modules=replace(plan.modules, dense=()))))
    for module in plan.modules.dense:
        digest.update(_json([module.inputs, module.outputs, module.bias, module.activation]))
        for path in sorted(module.folder.glob("*.safetensors")):
            digest.update(path.read_bytes())
    return {"pooling": digest.hexdigest()}


def row_key(row: AnyRow, model: Mapping[str, object]) -> str:
    """SHA-256 over the tokens of a row, its parameters and the model's identity.

    Raises:
        ValidationError: a parameter is an object that cannot be written down.
    """
    if isinstance(row, RefusedRow):
        return hashlib.sha256(_json(["refused", str(row.error), model])).hexdigest()
    check_recordable(row.params)
    params = params_as_json(row.params)
    of_row = [row.token_ids, row.seed, params, model]
    if row.adapter is not None:
        of_row.append(row.adapter.digest)
    if row.pooling is not None:
        of_row.append(plain(row.pooling))
    return hashlib.sha256(_json(of_row)).hexdigest()


def check_recordable(params: SamplingParams) -> None:
    """Raise `ValidationError` if a parameter is an object that cannot be written down."""
    if params.logits_processors:
        raise ValidationError(
            "SamplingParams(logits_processors=...) cannot be recorded in a journal; load a class with "
            "LLM(logits_processors=...) and pass its arguments in extra_args.",
            parameter="logits_processors",
        )
    try:
        json.dumps(params.extra_args)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(
            f"extra_args cannot be recorded in a journal ({error}); use numbers, texts, lists and dicts.",
            parameter="extra_args",
        ) from error


def rows_key(rows: Sequence[AnyRow], model: Mapping[str, object]) -> str:
    """The key of a row of a file, from the engine's rows that it became."""
    keys = [row_key(row, model) for row in rows]
    return keys[0] if len(keys) == 1 else hashlib.sha256(_json(keys)).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":")).encode()
