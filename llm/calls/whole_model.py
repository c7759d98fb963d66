"""What `LLM` does with a model as a whole: giving it to a callable, changing its logits processors, planning it, and
comparing it with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from llm.base.checks import check_flag, check_integer, refuse
from llm.base.types import JsonObject
from llm.config.arguments import check_arguments
from llm.config.engine import EngineConfig, LLMArgs
from llm.engine.engine import Engine
from llm.errors import ValidationError, nearest
from llm.inputs import PromptType
from llm.loading.resolve import resolve_folder
from llm.loading.source import FolderSource, ModelSource, UpdatedSource
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.pipeline import load_logits_processor, qualified_name

if TYPE_CHECKING:
    from llm.llm import LLM
    from llm.setup.preview import ModelPlan
    from llm.tools.compare import Comparison
    from llm.tools.quantization_report import QuantizationReport
    from llm.tools.verify import SelfCheck, Verification


R = TypeVar("R")
_CALIBRATION_SECONDS = 0.5


@dataclass(frozen=True)
class Worker:
    """Stands in for vLLM's worker: there is one, in this process."""

    model: torch.nn.Module
    vllm_config: EngineConfig
    rank: int = 0
    local_rank: int = 0

    @property
    def device(self) -> torch.device:
        return self.vllm_config.device_config.device

    @property
    def model_runner(self) -> Worker:
        """In vLLM the model is an attribute of the worker's runner: `worker.model_runner.model`."""
        return self

    def get_model(self) -> torch.nn.Module:
        return self.model


def apply_model(llm: LLM, func: Callable[[torch.nn.Module], R]) -> list[R]:
    """[func(model)]; what is known of its weights is forgotten."""
    if not callable(func):
        raise ValidationError(
            f"func must be a callable that takes the model, got {type(func).__name__}.", parameter="func", value=func
        )
    with llm._exclusive():
        engine = _idle(llm, "apply_model", "func")
        try:
            return [engine.runner.apply_model(func)]
        finally:
            engine.reset_prefix_cache()
            llm._may_have_changed = True


class Weights(Mapping[str, torch.Tensor]):
    """The weights of an `LLM` by the checkpoint's names, read when they are asked for."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._llm._exclusive():
            return self._llm._begin().runner.read_weight(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._llm._open_engine().runner.weight_names())

    def __len__(self) -> int:
        return len(self._llm._open_engine().runner.weight_names())

    def __repr__(self) -> str:
        return f"Weights({len(self)} tensors)"


def update_weights(llm: LLM, tensors: Mapping[str, torch.Tensor]) -> None:
    if not isinstance(tensors, Mapping):
        refuse("tensors", type(tensors).__name__, "a dict of names and tensors")
    source = llm._source
    if source is None:
        refuse("load_format", "dummy", "that of a checkpoint, whose tensors have names")
    try:
        updated = source.updated(tensors) if isinstance(source, UpdatedSource) else UpdatedSource(source, tensors)
        _replace_weights(llm, updated)
    finally:
        source.close()


def load_new_weights(llm: LLM, path: str | Path) -> None:
    from llm.setup.model_folder import read_model

    before, found = read_model(llm._args), read_model(replace(llm._args, model=path))
    if (found.model_class, found.architecture) != (before.model_class, before.architecture):
        refuse("path", str(path), "of a checkpoint whose config.json is that of the model")
    _replace_weights(llm, found.source)


def _replace_weights(llm: LLM, source: ModelSource) -> None:
    with llm._exclusive():
        engine = _idle(llm, "update_weights", "weights")
        engine.runner.replace_weights(source)
        llm._source, llm._weights, llm._may_have_changed = source, "", False
        engine.reset_prefix_cache()


def sleep(llm: LLM, level: int) -> None:
    check_integer("level", level, 1, 2)
    with llm._exclusive():
        if llm._is_asleep:
            return
        engine = _idle(llm, "sleep", "level")
        engine.runner.sleep(level)
        engine.reset_prefix_cache()
        llm._is_asleep = True


def wake_up(llm: LLM) -> None:
    with llm._exclusive():
        if not llm._is_asleep:
            return
        llm._open_engine().runner.wake_up()
        llm._is_asleep = False


def _idle(llm: LLM, method: str, parameter: str) -> Engine:
    engine = llm._begin()
    engine.needs_model_here(method)
    if engine.scheduler.has_unfinished():
        raise ValidationError(
            "the model cannot be changed while a stream is suspended; end the stream first.", parameter=parameter
        )
    return engine


def collective_rpc(
    llm: LLM,
    method: str | Callable[..., R],
    timeout: float | None,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> list[R]:
    """[method(worker, *args, **kwargs)]"""
    if timeout is not None:
        raise ValidationError(
            f"timeout must be None, as the call is in this process, got {timeout!r}.",
            parameter="timeout",
            value=timeout,
        )
    function = _worker_method(method) if isinstance(method, str) else method
    if not callable(function):
        raise ValidationError(
            f"method must be a callable that takes the worker, got {type(method).__name__}.",
            parameter="method",
            value=method,
        )
    config = llm._open_engine().config
    return apply_model(llm, lambda model: function(Worker(model, config), *args, **(kwargs or {})))


def _worker_method(name: str) -> Callable[..., R]:
    found: Callable[..., R] | None = getattr(Worker, name, None) if not name.startswith("_") else None
    if not callable(found):
        raise ValidationError(
            f"the worker has no method {name!r}; pass a callable that takes the worker, whose get_model() is the model."
            f"{nearest(name, ['get_model'])}",
            parameter="method",
            value=name,
        )
    return found


def add_logits_processor(llm: LLM, processor: type[LogitsProcessor] | str) -> None:
    """The loaded classes of the preprocessor and of the runner stay the same."""
    added = load_logits_processor(processor)
    with llm._exclusive():
        llm._begin()
        current = list(llm._preprocessor.logits_processors)
        names = [qualified_name(kind) for kind in current]
        if qualified_name(added) in names:
            current[names.index(qualified_name(added))] = added
        else:
            current.append(added)
        _set_processors(llm, current)


def remove_logits_processor(llm: LLM, processor: type[LogitsProcessor] | str) -> None:
    with llm._exclusive():
        llm._begin()
        current = llm._preprocessor.logits_processors
        name = processor if isinstance(processor, str) else qualified_name(processor)
        kept = [kind for kind in current if qualified_name(kind) != name]
        if len(kept) == len(current):
            loaded = ", ".join(map(qualified_name, current)) or "none"
            raise ValidationError(
                f"{name} is not loaded; loaded are: {loaded}.", parameter="processor", value=processor
            )
        _set_processors(llm, kept)


def _set_processors(llm: LLM, classes: Sequence[type[LogitsProcessor]]) -> None:
    llm._open_engine().runner.set_processors(classes)
    llm._preprocessor.logits_processors = classes


def plan(model: str | Path, calibrate: bool, arguments: Mapping[str, object], image: str | None = None) -> ModelPlan:
    """`LLM.plan`; the highest speed to expect follows from what was measured of this machine."""
    from llm.setup.preview import preview, with_image
    from llm.tools.bench import machine as bench

    check_flag("calibrate", calibrate)
    known = {item.name for item in fields(LLMArgs)}
    check_arguments({name: value for name, value in arguments.items() if name not in (*known, "verbose")})
    given = {name: value for name, value in arguments.items() if name in known}
    args = LLMArgs.from_user(model=model, **given)
    measured = bench.calibrate(_CALIBRATION_SECONDS) if calibrate else bench.stored()
    if calibrate and measured is not None:
        bench.keep(measured)
    found = preview(args, None if measured is None else measured.rates)
    if measured is not None:
        found = replace(found, notes=tuple(measured.warnings()))
    return found if image is None else with_image(found, args, image)


def quantization_report(
    llm: LLM, texts: Sequence[str], prompts: Sequence[PromptType] | None, against: str | Path | None, speed: bool
) -> QuantizationReport:
    from llm.tools.quantization_report import make_report

    engine = llm._open_engine()
    engine.needs_model_here("quantization_report")
    plain = replace(llm._args, quantization=None, calibration=None, requantize=None)
    if against is not None:
        plain = replace(plain, model=against)
    has_plain = against is not None or not llm._is_quantized or llm._args.requantize is not None
    open_plain = (lambda: _open_another(llm, plain)) if has_plain else None
    return make_report(llm, engine, open_plain, texts, prompts, speed)


def verify(llm: LLM, texts: Sequence[str], against: str | Path | None) -> Verification:
    from llm.tools.verify import is_exact, verify

    llm._open_engine()
    args = llm._args
    plain = replace(args, quantization=None, calibration=None, requantize=None, dtype="auto", speculative_config=None)
    plain = replace(plain, kv_cache_dtype="float32", kv_cache_memory_bytes=None, model=against or args.model)
    if args.hf_overrides is not None:
        refuse("hf_overrides", args.hf_overrides, "None for verify(): transformers reads config.json as it is")
    if against is not None:
        folder = resolve_folder(against, args.revision)
    elif isinstance(llm._source, FolderSource) and not llm._is_quantized:
        folder = llm._source.folder
    else:
        raise ValidationError(
            "verify() needs the unquantized model as transformers reads it; pass against='its folder'.",
            parameter="against",
            value=None,
        )
    same = against is None and is_exact(llm)
    return verify(llm, texts, folder, None if same else lambda: _open_another(llm, plain))


def _open_another(llm: LLM, args: LLMArgs) -> LLM:
    """It begins without a prompt cache, which is this model's, and is in this process."""
    given: JsonObject = {item.name: getattr(args, item.name) for item in fields(args)}
    here = {"data_parallel_size": 1, "devices": None, "distributed_executor_backend": None}
    return type(llm)(**given | here | {"prefix_cache": None})


def compare(
    cls: type[LLM],
    model: str | Path,
    schemes: Sequence[str | None],
    texts: Sequence[str],
    speed: bool,
    arguments: Mapping[str, object],
) -> Comparison:
    from llm.tools.compare import compare

    argument = "requantize" if _is_quantized(model, arguments) else "quantization"

    def open_scheme(scheme: str | None) -> LLM:
        given: JsonObject = {"use_tqdm_on_load": False, **arguments, argument: scheme}
        return cls(model, **given)

    return compare(open_scheme, schemes, texts, speed)


def _is_quantized(model: str | Path, arguments: Mapping[str, object]) -> bool:
    """The checkpoint is quantized already, as its headers say."""
    from llm.setup.model_folder import read_model

    known = {item.name for item in fields(LLMArgs)} - {"quantization", "requantize", "calibration"}
    given: JsonObject = {name: value for name, value in arguments.items() if name in known}
    found = read_model(LLMArgs.from_user(model=model, **given))
    found.source.close()
    return found.quantization.found


def selfcheck(llm: LLM) -> SelfCheck:
    from llm.tools.verify import selfcheck

    with llm._exclusive():
        engine = llm._begin()
        engine.needs_model_here("selfcheck")
        if engine.scheduler.has_unfinished():
            raise ValidationError("selfcheck() needs an idle engine; end the stream first.", parameter="stream")
        try:
            return selfcheck(llm, engine)
        finally:
            engine.reset_prefix_cache()
