"""Rows of a Ray dataset, answered by workers on any number of machines.

The workers of `ray.data` have vLLM's `build_llm_processor` over them. The network is Ray's: nothing here opens a
socket. Ray is imported when a processor is applied, or by who calls.

An answer depends on its row alone, see `llm.jobs.worker`: however the data is split, and whoever dies, rows, errors and
seeds are to the bit those of one machine with the same kind of processor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from llm.base.checks import check_choice, refuse
from llm.base.optional import optional_package
from llm.base.types import JsonObject
from llm.engine.rows import ON_TOO_LONG
from llm.errors import OutOfMemoryError
from llm.jobs.identity import identity_of
from llm.jobs.journal import SharedJournal
from llm.jobs.requests import ANSWER_COLUMNS, JobAdapters
from llm.jobs.tables import Form, arrow_type
from llm.jobs.worker import PieceRows, RowWorker, plain_row
from llm.llm import EMBEDDED_MODEL, LLM
from llm.platforms import select_platform
from llm.sampling_params import SamplingParams
from llm.workers.on_ray import RayMachines, connected_ray

# Ray keeps 0.3 of the memory for its object store.
_MEMORY_OF_WORKERS = 0.6
_ERROR = "error"


class Table(Protocol):
    """An Arrow table."""

    def to_pylist(self) -> list[JsonObject]: ...
    def append_column(self, name: str, values: object) -> Table: ...


class Dataset(Protocol):
    """Ray's."""

    def map(self, fn: object, *, fn_kwargs: Mapping[str, object]) -> Dataset: ...
    def map_batches(self, fn: object, **options: object) -> Dataset: ...


Batch = Mapping[str, np.ndarray] | Table


class LLMWorker:
    """A callable class for `ds.map_batches(LLMWorker, concurrency=n, num_cpus=8, fn_constructor_kwargs={...})`.

    Adds the columns of `LLM.run`: generated_text, finish_reason, num_prompt_tokens, num_generated_tokens, error; of
    conversations content, reasoning and tool_calls too. Other columns stay. Batches are dicts of arrays, or Arrow
    tables with `batch_format="pyarrow"`.

    Args:
        model: of the `LLM`.
        sampling_params: of all rows, or a dict of fields; None: the model's defaults. A column `sampling_params` has
            dicts of the fields in which a row differs from it, if it is None from `SamplingParams()`.
        column: which has the prompts; None: "prompt", or else "messages", conversations. A conversation may have
            columns `tools`, `tool_choice`, `parallel_tool_calls` and `chat_template_kwargs`.
        template: makes the prompt from columns: "Translate: {text}".
        id_column: has the id from which a row's seed follows; of rows without one, it follows from the prompt.
        journal: a folder that all workers see: what is in it is not computed again, in this run or another.
        share: of the machine's memory; None: as the processors that Ray assigned are to the machine's.
        on_too_long: as for `LLM.generate`.
        engine: arguments of the `LLM`. `num_threads` is by default the number of processors that Ray assigned, shared
            out with `tensor_parallel_size`.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED_MODEL,
        *,
        sampling_params: SamplingParams | JsonObject | None = None,
        column: str | None = None,
        template: str | None = None,
        id_column: str = "id",
        journal: str | Path | None = None,
        share: float | None = None,
        on_too_long: str = "error",
        **engine: object,
    ) -> None:
        check_choice("on_too_long", on_too_long, ON_TOO_LONG)
        cpus = _assigned_cpus()
        share = min(1.0, cpus / (os.cpu_count() or 1)) if share is None else share
        self._llm = llm = LLM(model, **_planned(model, {"num_threads": _threads(int(cpus), engine), **engine}, share))
        given = SamplingParams(**sampling_params) if isinstance(sampling_params, Mapping) else sampling_params
        self._rows = rows = PieceRows(
            params=given or llm.get_default_sampling_params(),
            base=given or SamplingParams(),
            adapters=JobAdapters(),
            column=column,
            template=template,
            id_column=id_column,
            seed=llm.config.model_config.seed,
        )
        kept = None if journal is None else SharedJournal(journal, identity_of(llm))
        self._worker = RowWorker(llm, rows, on_too_long, kept)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the columns of the answers."""
        rows = _rows_of(batch)
        answers = self._worker.answers(rows)
        forms = self._rows.forms(rows[0]) if rows else ANSWER_COLUMNS
        return _with_columns(batch, {name: [row[name] for row in answers] for name in forms}, forms)


@dataclass(frozen=True)
class LLMProcessorConfig:
    """The settings of `build_llm_processor`, by the names of vLLM's `vLLMEngineProcessorConfig`.

    Attributes:
        model_source: a folder or hub name.
        engine_kwargs: arguments of `LLM`.
        concurrency: workers.
        batch_size: rows of a batch; twice `max_num_seqs` or more keeps a worker busy.
        worker_kwargs: other arguments of `LLMWorker`: `sampling_params`, `id_column`, `journal`.
        runtime_env: Ray's, of the workers.
    """

    model_source: str | Path = EMBEDDED_MODEL
    engine_kwargs: Mapping[str, object] = field(default_factory=dict)
    concurrency: int = 1
    batch_size: int = 256
    worker_kwargs: Mapping[str, object] = field(default_factory=dict)
    runtime_env: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                refuse(name, value, "an integer of at least 1")


vLLMEngineProcessorConfig = LLMProcessorConfig
Preprocess = Callable[[JsonObject], JsonObject]


class Processor:
    """What `build_llm_processor` returns: call it with a dataset."""

    def __init__(
        self, config: LLMProcessorConfig, preprocess: Preprocess | None = None, postprocess: Preprocess | None = None
    ) -> None:
        self.config = config
        self._preprocess = preprocess
        self._postprocess = postprocess

    def __call__(self, dataset: Dataset) -> Dataset:
        config, ray = self.config, connected_ray()
        optional_package("ray.data", "ray")
        machines = RayMachines(ray)
        cpus, here = machines.cpus, machines.most_of(config.concurrency)
        options: JsonObject = {} if config.runtime_env is None else {"runtime_env": dict(config.runtime_env)}
        arguments = {
            "share": 1.0 / here,
            **config.worker_kwargs,
            "num_threads": _threads(cpus // here, config.engine_kwargs),
            **config.engine_kwargs,
        }
        if self._preprocess is not None:
            dataset = dataset.map(_merged, fn_kwargs={"own": self._preprocess})
        dataset = dataset.map_batches(
            LLMWorker,
            fn_constructor_args=(config.model_source,),
            fn_constructor_kwargs=arguments,
            compute=ray.data.ActorPoolStrategy(size=config.concurrency),
            batch_size=config.batch_size,
            batch_format="pyarrow",
            # A processor is left for Ray's tasks that read and write; without one, none of them ever starts.
            num_cpus=max(0.25, cpus - 1) / here,
            **options,
        )
        if self._postprocess is None:
            return dataset
        return dataset.map(_unless_error, fn_kwargs={"own": self._postprocess})


def build_llm_processor(
    config: LLMProcessorConfig,
    preprocess: Preprocess | None = None,
    postprocess: Preprocess | None = None,
) -> Processor:
    """`processor = build_llm_processor(config, preprocess, postprocess)`, then `processor(ds)`, as for vLLM.

    Args:
        preprocess: from a row, the columns `prompt` or `messages`, and `sampling_params`; the row's own columns stay.
        postprocess: from an answered row, the row of the result. A row with an error is left as it is.
    """
    return Processor(config, preprocess, postprocess)


def _merged(row: JsonObject, own: Preprocess) -> JsonObject:
    return {**row, **own(row)}


def _unless_error(row: JsonObject, own: Preprocess) -> JsonObject:
    return row if row.get(_ERROR) is not None else {**own(row), _ERROR: None}


def _assigned_cpus() -> float:
    """The processors that Ray has assigned to this actor; outside of one, all."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return float(ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0))
    return float(os.cpu_count() or 1)


def _threads(cpus: int, engine: Mapping[str, object]) -> int:
    """Of each rank of a worker with so many processors."""
    return max(1, cpus // _ranks(engine))


def _ranks(engine: Mapping[str, object]) -> int:
    ranks = engine.get("tensor_parallel_size", 1)
    return ranks if isinstance(ranks, int) and ranks > 0 else 1  # the LLM refuses others


def _planned(model: str | Path, engine: JsonObject, share: float) -> JsonObject:
    """The LLM's arguments, with a KV cache within this worker's share of the memory.

    Raises:
        OutOfMemoryError: the share does not hold the weights.
    """
    if share >= 1.0 or engine.get("kv_cache_memory_bytes") is not None or engine.get("offload_weights"):
        return engine
    plan = LLM.plan(model, **engine)
    ranks = _ranks(engine)
    weights = sum(plan.bytes_by_rank) or plan.weight_bytes
    room = int(select_platform(str(engine.get("device", "auto")))[0].memory_total() * _MEMORY_OF_WORKERS * share)
    if room <= weights:
        raise OutOfMemoryError(
            f"a worker's share of this machine's memory is {room} bytes, and the weights take {weights}; use "
            "fewer workers per machine, or quantization= to make them smaller."
        )
    return {**engine, "kv_cache_memory_bytes": max(1, min(plan.kv_cache_bytes, (room - weights) // 2 // ranks))}


def _rows_of(batch: Batch) -> list[JsonObject]:
    if not isinstance(batch, Mapping):
        return [plain_row(row) for row in batch.to_pylist()]
    names = list(batch)
    count = len(batch[names[0]]) if names else 0
    return [plain_row({name: batch[name][index] for name in names}) for index in range(count)]


def _with_columns(batch: Batch, columns: Mapping[str, list[object]], forms: Mapping[str, Form]) -> Batch:
    if isinstance(batch, Mapping):
        return {**batch, **{name: _array(values) for name, values in columns.items()}}
    arrow = optional_package("pyarrow", "ray")
    for name, values in columns.items():
        batch = batch.append_column(name, arrow.array(values, arrow_type(arrow, forms[name])))
    return batch


def _array(values: list[object]) -> np.ndarray:
    """One column, also of lists."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return np.array(values, dtype=np.int64) if all(isinstance(value, int) for value in values) else array
