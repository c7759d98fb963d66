"""What a job's answers depend on, as plain data: the model and its settings for all rows, tokens and parameters of one.

Two processes in which both are equal give the same answers, bit for bit. The header of a journal has the identity of
its job, and so has `OUTPUT.job` beside a finished output, so that `resume=True` returns the answers of this job and of
no other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llm.base.system import whole_file
from llm.base.text import show
from llm.base.types import JsonObject
from llm.config.engine import EngineConfig, LLMArgs
from llm.engine.boundary import PoolingPlan
from llm.engine.interrupt import InterruptGuard
from llm.engine.rows import AnyRow, RefusedRow
from llm.errors import JobError, ValidationError
from llm.inside.capture import Capture
from llm.jobs.journal import difference
from llm.loading.adapters.folder import AdapterFolder
from llm.loading.resolve import resolve_folder
from llm.loading.source import ModelSource
from llm.output_formats import params_as_json, plain
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.pipeline import qualified_name
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.llm import LLM

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


def identity_of(llm: LLM) -> JsonObject:
    """What all answers of an open `LLM` depend on. Raises `ValidationError` as `identity`."""
    config = llm._open_engine().config
    found = identity(llm._args, config, fingerprint_of(llm), llm._preprocessor.logits_processors)
    return found | pooling_identity(llm._pooling)


def fingerprint_of(llm: LLM) -> str:
    """Of an LLM's weights; they are read for it once."""
    if not llm._weights:
        llm._weights = "random" if llm._source is None else fingerprint(llm._source)
    return llm._weights


def identity(
    args: LLMArgs,
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


def model_identity(args: LLMArgs, config: EngineConfig, weights: str) -> JsonObject:
    """What the model's hidden states depend on besides the tokens and a row's adapter."""
    adapter = None
    if args.merge_lora is not None:
        with AdapterFolder(resolve_folder(args.merge_lora, weights=False, argument="merge_lora")) as folder:
            adapter = folder.digest()
    calibration = hashlib.sha256(_json(list(args.calibration))).hexdigest() if args.calibration else None
    # If bfloat16 is asked for, it lets GEMMs round their inputs where that is faster.
    rounds = str(args.dtype).removeprefix("torch.") == "bfloat16"
    activations = config.model_config.dtype
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
        **({} if activations is torch.float32 else {"activations": str(activations)}),
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
    """SHA-256 over the tokens of a row, its images, its parameters and the model's identity.

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
    if row.images is not None:
        of_row.append([image.key.hex() for image in row.images.images])
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
        json.dumps({key: value for key, value in (params.extra_args or {}).items() if not _is_plain_capture(value)})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(
            f"extra_args cannot be recorded in a journal ({error}); use numbers, texts, lists and dicts.",
            parameter="extra_args",
        ) from error


def _is_plain_capture(value: object) -> bool:
    return isinstance(value, Capture) and not callable(value.positions)


def rows_key(rows: Sequence[AnyRow], model: Mapping[str, object]) -> str:
    """The key of a row of a file, from the engine's rows that it became."""
    keys = [row_key(row, model) for row in rows]
    return keys[0] if len(keys) == 1 else hashlib.sha256(_json(keys)).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":")).encode()


# --- Of a finished output: the file `OUTPUT.job`. ---

_VERSION = 1
_MOST_BYTES = 1 << 24
# Shards of one job differ in these.
_OF_SHARD = ("shard", "rows")


def path_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.job")


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def write_finished(output: Path, identity: Mapping[str, object]) -> None:
    """Written before the output appears: no output is without it."""
    path = path_of(output)
    try:
        with whole_file(path) as fresh:
            fresh.write_text(json.dumps({"job": _VERSION, "identity": identity}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise JobError(
            f"{path} cannot be written: {error.strerror or error}; the answers are in the journal, so run the job "
            "again with resume=True when that is repaired."
        ) from error


def read_finished(output: Path) -> JsonObject | None:
    """The identity of a finished output; None: there is no such file.

    Raises:
        JobError: it is not one of these.
    """
    path = path_of(output)
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):
        found = None
    identity = found.get("identity") if isinstance(found, dict) and found.get("job") == _VERSION else None
    if not isinstance(identity, dict):
        raise JobError(f"{path} does not say of what job {output} is; delete both to answer the rows again.")
    return identity


def check_finished(output: Path, identity: Mapping[str, object], rows: Callable[[], str]) -> None:
    """Raise `JobError` if a finished output is of another job, or nothing says of which.

    Args:
        identity: without `rows`.
        rows: the key of all rows, asked for if nothing else differs.
    """
    before = read_finished(output)
    if before is None:
        raise JobError(
            f"{output} is complete, and {path_of(output).name}, which says of what job, is not beside it; delete the "
            "output to answer the rows again, or name another one."
        )
    key = before.pop("rows", None)
    differs = difference(before, identity)
    if differs is None and key != rows():
        differs = "its rows have other tokens, parameters or adapters"
    if differs is not None:
        raise JobError(
            f"{output} is complete and of another job: {differs}; delete it to answer the rows again, or name another "
            "output."
        )


def merge_finished(parts: Sequence[Path], output: Path) -> None:
    """Write what job the output of all parts is of, if each has said so.

    Raises:
        JobError: they are of several jobs.
    """
    found = [read_finished(part) for part in parts]
    first = found[0]
    if first is None or None in found:
        return
    own = {name: value for name, value in first.items() if name not in _OF_SHARD}
    for part, other in zip(parts, found, strict=True):
        differs = difference(own, {name: value for name, value in (other or {}).items() if name not in _OF_SHARD})
        if differs is not None:
            raise JobError(f"{part.name} is of another job than {parts[0].name}: {differs}; run that shard again.")
    write_finished(output, {**own, "shard": None, "rows": sum_of([str((other or {}).get("rows")) for other in found])})


def sum_of(keys: Sequence[str]) -> str:
    """One key of all rows: the sum of theirs, so that those of shards can be added."""
    try:
        return f"{sum(int(key, 16) for key in keys) % (1 << 256):064x}"
    except ValueError:
        raise JobError("a .job file of a part is damaged; run that shard again.") from None
