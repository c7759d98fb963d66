"""Building a model from a `RunnerPlan` and loading its weights.

Owns the order in which the model class, the quantization config and the loader are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from llm.base.construction import constructing_for
from llm.engine.boundary import RunnerPlan
from llm.errors import OutOfMemoryError
from llm.layers.parallel import tensor_parallel
from llm.loading.adapters.folder import AdapterFolder
from llm.loading.adapters.merge import MergedTensors
from llm.loading.loader import load_dummy_weights, load_weights
from llm.loading.weight_file import WeightFile
from llm.loading.weight_map import Target, stored_name
from llm.platforms.interface import Platform


def weight_file(plan: RunnerPlan, platform: Platform) -> WeightFile | None:
    """The file of the weights that memory has no room for; None: all of them stay in memory."""
    offload = plan.config.offload_config
    if not offload.offload_weights:
        return None
    return WeightFile(Path(offload.offload_folder), offload.resident_weight_bytes, platform.release_memory)


def constructing(plan: RunnerPlan, platform: Platform, file: WeightFile | None = None) -> AbstractContextManager[None]:
    """Layers constructed inside this context are bound as those of the plan's model."""
    may_round = plan.store_as is torch.bfloat16
    return constructing_for(platform, plan.config.compilation_config, may_round=may_round, weights=file)


def build_model(plan: RunnerPlan, platform: Platform, file: WeightFile | None = None) -> Any:
    """The model with empty weights; raises `ValidationError` for a setting of the user that matched no layer."""
    quant_config = plan.config.quant_config
    if quant_config is not None:
        renames = getattr(plan.model_class, "renames", ())
        names = plan.source.tensors().tensors if plan.has_weights else ()
        modules = {name.rpartition(".")[0] for name in names}
        quant_config.packed_modules_mapping = getattr(plan.model_class, "packed_modules_mapping", {})
        quant_config.apply_mapper(lambda name: stored_name(name, renames, modules))
        if plan.has_weights:
            quant_config.describe_tensors({name: info.shape for name, info in plan.source.tensors().tensors.items()})
    with constructing(plan, platform, file), _told_of_memory():
        tp = tensor_parallel(platform, plan.rank, plan.tp_size)
        model = plan.model_class(plan.architecture, plan.build_options(tp))
        if quant_config is not None:
            quant_config.check_used()
            quant_config.prepare_model(model)
        if file is not None:
            file.divide(model, plan.config.offload_config.planned_weight_bytes)
        return model


def fill_model(
    plan: RunnerPlan, platform: Platform, model: Any, file: WeightFile | None = None
) -> Mapping[str, Target]:
    """Load the weights or make random ones. Returns the target of each checkpoint tensor, empty for random weights."""
    adapter = None if plan.merge_lora is None else AdapterFolder(plan.merge_lora)
    try:
        if not plan.has_weights:
            if file is None:
                _check_dummy_weights_fit(model, platform.memory_free())
            with _told_of_memory():
                load_dummy_weights(model, plan.config.model_config.seed, pack_early=file is not None)
            return {}
        tensors = plan.source.tensors()
        return load_weights(
            model,
            tensors if adapter is None else MergedTensors(tensors, adapter, model),
            show_progress=plan.show_progress,
            quant_config=plan.config.quant_config,
            store_as=plan.store_as,
            pack_early=file is not None,
        )
    finally:
        if adapter is not None:
            adapter.close()
        plan.source.close()
        if file is not None:
            file.close()


@contextmanager
def _told_of_memory() -> Iterator[None]:
    """Turn PyTorch's failed allocations, which are plain RuntimeErrors, into ours."""
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise OutOfMemoryError("the model's weights cannot be allocated: there is not enough memory.") from error


def _check_dummy_weights_fit(model: Any, free: int) -> None:
    """Called before weights are written. Weights that are quantized on load are on the meta device and count as 0."""
    needed = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    if needed > free:
        raise OutOfMemoryError(f"the model's weights take {needed} bytes and {free} are free.")
