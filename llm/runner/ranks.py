"""One model over several ranks, which are processes: rank 0 is in the engine's, the others follow it.

Rank 0 is a whole runner. It has the batch, the sampler, the processors and what drafts, and asks of the others what a
model needs: the forward of a batch, the logits of hidden states, copies of states, adapters. A rank has its slices of
the weights and its heads of the caches; hidden states are the same on all of them.

A step in which something raises is left by all ranks (`RankGroup.step`). What raised on another rank than 0 ends that
rank, and with it the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from llm.base.library_settings import library_defaults
from llm.engine.boundary import CachePart, Captured, Loaded, RunnerPlan
from llm.engine.step import Adapter, SchedulerOutput
from llm.errors import LLMError, RankError, ValidationError
from llm.forward import AttentionMetadata, ForwardBatch, ImageTokens, RecurrentMetadata, StateNumbers
from llm.inputs import LoRARequest
from llm.inside.names import FINAL, Site
from llm.layers.parallel import Communicator, TensorParallel
from llm.loading.source import ModelSource
from llm.platforms.interface import Platform
from llm.quantization.on_load import ActivationStatistics
from llm.runner.model_runner import ModelRunner
from llm.runner.speculation.head import PlacedHead
from llm.workers.connection import Connection
from llm.workers.process import WorkerProcess

R = TypeVar("R")
# Of a message: plain data, arrays.
Body = Mapping[str, Any]


class RankGroup:
    """The processes of ranks 1 and up, as rank 0 sees them.

    Args:
        workers: in order of rank, while they load.
        communicator: rank 0's.
        met: called once when all ranks have joined.
    """

    def __init__(self, workers: Sequence[WorkerProcess], communicator: Communicator, met: Callable[[], None]) -> None:
        self._workers = workers
        self._communicator = communicator
        self._met = met
        self._failure: LLMError | None = None  # after which no step is computed
        for worker in workers:
            worker.call_at_end(communicator.abort)  # nobody waits in a step for one that is gone

    def await_opened(self) -> None:
        """Return when all ranks have loaded their part; raises `WorkerDiedError`."""
        for worker in self._workers:
            self._answer(worker, "opened")
        self._met()

    def tell(self, kind: str, body: object) -> None:
        """Raises `WorkerDiedError`."""
        for worker in self._workers:
            worker.send(kind, body)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What all ranks do together. Whatever is raised in it, no rank is left in the middle.

        Raises:
            WorkerDiedError, RankError: a rank is lost; with it the group, whose next steps raise it again.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise

    def close(self) -> None:
        """End the ranks."""
        self._communicator.abort()
        for worker in self._workers:
            worker.close()
        self._met()

    def _leave(self, error: BaseException) -> None:
        self._communicator.abort()
        try:
            for worker in self._workers:  # those that died say why
                worker.receive(0)
            if isinstance(error, RankError) and error.late:
                self._workers[error.late - 1].kill()
                raise RankError(f"{str(error).rstrip('.')}, and was ended.", error.late)
            for worker in self._workers:
                worker.send("settle")
                self._answer(worker, "settled")
        except LLMError as failure:
            self._failure = failure
            for worker in self._workers:
                worker.kill()
            raise failure from error
        self._communicator.restart()

    def _answer(self, worker: WorkerProcess, kind: str) -> None:
        message = worker.receive()
        if message is None or message.kind != kind:
            raise LLMError(f"{worker.name} answered {message!r} in the place of {kind!r}.")


class LeadRunner(ModelRunner):
    """Rank 0.

    Args:
        tp: its place.
        group: the others.
    """

    def __init__(self, platform: Platform, tp: TensorParallel, group: RankGroup) -> None:
        super().__init__(platform)
        self.tp = tp
        self.group = group

    def load(self, plan: RunnerPlan) -> Loaded:
        try:
            loaded = super().load(plan)
            self.group.await_opened()
        except BaseException:
            self.group.close()
            raise
        return loaded

    def close(self) -> None:
        self.group.close()
        super().close()

    # --- Steps. ---

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        is_replayed = self.recorded is not None and not self.recorded.is_watched
        with self.group.step():
            self.group.tell("forward", {**_described(batch), "is_replayed": is_replayed})
            hidden = super().forward(batch)
        for metadata in batch.metadata:
            if isinstance(metadata, RecurrentMetadata) and metadata.stored is not None:
                metadata.calls = [*metadata.calls, self._tell_accepted]
                break  # all states share it
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        slots = None if self.adapters is None else self.adapters.logit_rows.slots
        with self.group.step():
            self.group.tell("logits", {"shape": list(hidden.shape), "slots": _array(slots)})
            self.tp.all_gather(hidden)
            return super().compute_logits(hidden)

    def _tell_accepted(self, further: RecurrentMetadata) -> torch.Tensor:
        """Called for the accepted drafts, as a recurrent layer is."""
        with self.group.step():
            self.group.tell("store_accepted", further.query_lens_list)
        return further.slots

    def _copy_states(self, slots: Iterable[tuple[int, int]]) -> None:
        pairs = [list(pair) for pair in slots]
        if pairs:
            with self.group.step():
                self.group.tell("copy_states", pairs)
                super()._copy_states((source, target) for source, target in pairs)

    def _load_adapters(self, plan: SchedulerOutput) -> None:
        asked = [(row.adapter_slot, row.adapter) for row in plan.new_rows if row.adapter is not None]
        if asked:
            with self.group.step():
                self.group.tell("load_adapters", [[slot, _named(adapter)] for slot, adapter in asked])
                super()._load_adapters(plan)

    # --- What one rank cannot answer. ---

    def apply_model(self, function: Callable[[torch.nn.Module], R]) -> R:
        _refuse("apply_model", "a function is not sent to other processes")

    def save(self, path: str | Path, format: str) -> Path:
        _refuse("save_quantized", "each rank has a part of every weight")

    def weight_names(self) -> list[str]:
        _refuse("llm.weights", "each rank has a part of every weight")

    def read_weight(self, name: str) -> torch.Tensor:
        _refuse("llm.weights", "each rank has a part of every weight")

    def replace_weights(self, source: ModelSource) -> None:
        _refuse("replacing weights", "each rank has a part of every weight")

    def sleep(self, level: int) -> None:
        _refuse("sleep", "the other ranks are not told")

    def start_observing(self) -> None:
        _refuse("calibration", "each rank has a part of the inputs")

    def stop_observing(self) -> dict[str, ActivationStatistics]:
        _refuse("calibration", "each rank has a part of the inputs")

    def start_capturing(self, names: Sequence[str], limit_bytes: int) -> list[str]:
        _refuse("the report of outputs", "each rank has a part of them")

    def layer_noise(self, captured: Captured) -> dict[str, tuple[float, float]]:
        _refuse("the report of outputs", "each rank has a part of them")

    def sites(self) -> dict[str, Site]:
        """Those of which rank 0 has all can be captured; behind the layers it is alone, and can change them too."""
        found = {}
        for name, site in super().sites().items():
            if site.in_parts:
                note = "with tensor_parallel_size each rank has a part of it"
                site = replace(site, can_capture=False, can_change=False, note=note)
            elif name != FINAL and site.can_change:
                site = replace(
                    site, can_change=False, note="with tensor_parallel_size only rank 0 would have the change"
                )
            found[name] = site
        return found

    def cache_parts(self) -> list[CachePart]:
        _refuse("a prompt cache on disk", "each rank has a part of the keys and values")

    def _draft_runner(self) -> ModelRunner:
        """A draft model is rank 0's alone."""
        return ModelRunner(self.platform)

    def _placed(self, head: PlacedHead) -> PlacedHead:
        if self.head is None:
            return replace(head, module=_SharedHead(self.group, head), embed=lambda input_ids: input_ids)
        # One with a checkpoint of its own is rank 0's alone.
        return head if self.head.embed_tokens is not None else replace(head, embed=self._embed)

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        with self.group.step():
            self.group.tell("embed", _array(input_ids))
            return self.model.embed(input_ids)


class _SharedHead:
    """A head that drafts, of which each rank has a part; it embeds the tokens itself, as the others do."""

    def __init__(self, group: RankGroup, head: PlacedHead) -> None:
        self._group = group
        self._head = head

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.module.combine(hidden)

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group, head = self._group, self._head
        with group.step():
            group.tell("draft", {**_described(batch), "hidden": _array(hidden)})
            return head.module(head.embed(batch.input_ids), hidden, batch)


def _refuse(what: str, why: str) -> NoReturn:
    raise ValidationError(f"{what} needs tensor_parallel_size=1: {why}.", parameter="tensor_parallel_size", value=what)


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.cpu().numpy()


def _named(adapter: Adapter) -> dict[str, object]:
    request = adapter.request
    return {
        "name": request.lora_name,
        "number": request.lora_int_id,
        "path": request.lora_path,
        "digest": adapter.digest,
    }


def _described(batch: ForwardBatch) -> dict[str, object]:
    """A batch as plain data; states that share their metadata share it on the other side too."""
    if batch.inputs_embeds is not None or batch.extensions:
        _refuse("a step with embeddings or of a platform's own form", "they are not sent to other processes")
    known: dict[int, int] = {}
    groups: list[dict[str, object]] = []
    for metadata in batch.metadata:
        if id(metadata) not in known:
            known[id(metadata)] = len(groups)
            groups.append(_of_attention(metadata) if isinstance(metadata, AttentionMetadata) else _of_slots(metadata))
    return {
        "input_ids": _array(batch.input_ids),
        "positions": _array(batch.positions),
        "groups": groups,
        "group_of_state": [known[id(metadata)] for metadata in batch.metadata],
        "adapter_ids": _array(batch.adapter_ids),
        "token_types": _array(batch.token_types),
        "images": None if batch.images is None else _of_images(batch.images),
    }


def _of_images(images: ImageTokens) -> dict[str, object]:
    """Features are rank 0's, whose vision tower makes them."""
    return {
        "indices": _array(images.indices),
        "rows": _array(images.rows),
        "deep": [_array(rows) for rows in images.deep],
        "both_ways": _array(images.both_ways),
        "metadata": [None if group is None else _of_attention(group) for group in images.metadata],
    }


def _of_attention(metadata: AttentionMetadata) -> dict[str, object]:
    return {
        "block_table": _array(metadata.block_table),
        "slot_mapping": _array(metadata.slot_mapping),
        "query_start_loc": _array(metadata.query_start_loc),
        "seq_lens": _array(metadata.seq_lens),
        "block_size": metadata.block_size,
    }


def _of_slots(metadata: RecurrentMetadata) -> dict[str, object]:
    return {
        "slots": _array(metadata.slots),
        "query_start_loc": _array(metadata.query_start_loc),
        "seq_lens": _array(metadata.seq_lens),
        "stored": _array(metadata.stored),
    }


class FollowingRunner(ModelRunner):
    """A rank above 0: it has no batch of its own, and computes what rank 0 tells it to."""

    def __init__(self, platform: Platform, tp: TensorParallel) -> None:
        super().__init__(platform)
        self.tp = tp
        self._recurrent: RecurrentMetadata | None = None  # of the last forward

    def follow(self, connection: Connection) -> NoReturn:
        """Do what rank 0 says until it closes its end; raises `EOFError` then, and what computing raises."""
        try:
            while True:
                message = connection.receive()
                if message is None:
                    continue
                if message.kind == "settle":
                    connection.send("settled")
                    continue
                try:
                    self._do(message.kind, message.body)
                except RankError:
                    continue  # rank 0 says what comes next
        except BaseException:
            if self.tp.communicator is not None:
                self.tp.communicator.abort()  # no other rank is to wait for this one
            raise

    def _do(self, kind: str, body: object) -> None:
        with library_defaults(self.plan.config.num_threads), self.platform.inference_mode():
            commands: dict[str, Callable[..., None]] = {
                "forward": self._forward_of,
                "logits": self._logits_of_lead,
                "store_accepted": self._store_accepted,
                "copy_states": self._copy_states,
                "load_adapters": self._load_adapters_of,
                "draft": self._draft,
                "embed": self._embed_of,
            }
            commands[kind](body)

    def _forward_of(self, body: Body) -> None:
        batch = self._batch(body)
        recorded = self.recorded
        if not body["is_replayed"]:
            self.recorded = None
        try:
            self.forward(batch)
        finally:
            self.recorded = recorded

    def _logits_of_lead(self, body: Body) -> None:
        """Of hidden states that rank 0 has."""
        rows, width = body["shape"]
        hidden = self.tp.all_gather(torch.zeros(rows, width))[:, :width].contiguous()
        if self.adapters is None:
            self.compute_logits(hidden)
            return
        slots = None if body["slots"] is None else self._upload(body["slots"])
        with self.adapters.logit_rows.of(slots):
            self.compute_logits(hidden)

    def _draft(self, body: Body) -> None:
        """The head for multi-token prediction; whose states say nothing of the last forward."""
        recurrent, batch = self._recurrent, self._batch(body)
        self._recurrent = recurrent
        self.model.mtp(self.model.embed(batch.input_ids), self._upload(body["hidden"]), batch)

    def _embed_of(self, input_ids: np.ndarray) -> None:
        self.model.embed(self._upload(input_ids))

    def _store_accepted(self, accepted: list[int]) -> None:
        if self._recurrent is None:
            raise LLMError("drafts were accepted in a step without recurrent states.")
        self._recurrent.store_accepted(np.array(accepted, dtype=np.int32), self._upload)

    def _load_adapters_of(self, asked: list[tuple[int, Body]]) -> None:
        for slot, named in asked:
            request = LoRARequest(named["name"], named["number"], named["path"])
            self._load_adapter(slot, Adapter(request, named["digest"]))

    def _batch(self, body: Body) -> ForwardBatch:
        groups = [self._metadata(group) for group in body["groups"]]
        recurrent = [group for group in groups if isinstance(group, RecurrentMetadata)]
        self._recurrent = recurrent[0] if recurrent else None
        return ForwardBatch(
            self._upload(body["input_ids"]),
            self._upload(body["positions"]),
            [groups[index] for index in body["group_of_state"]],
            self.states,
            torch.empty(0, dtype=torch.int64),
            adapter_ids=None if body["adapter_ids"] is None else self._upload(body["adapter_ids"]),
            token_types=None if body["token_types"] is None else self._upload(body["token_types"]),
            images=None if body["images"] is None else self._images(body["images"]),
        )

    def _images(self, body: Body) -> ImageTokens:
        return ImageTokens(
            self._upload(body["indices"]),
            self._upload(body["rows"]),
            tuple(map(self._upload, body["deep"])),
            None if body["both_ways"] is None else self._upload(body["both_ways"]),
            [None if group is None else self._attention(group) for group in body["metadata"]],
        )

    def _attention(self, group: Body) -> AttentionMetadata:
        starts, lengths = group["query_start_loc"], group["seq_lens"]
        return AttentionMetadata(
            self._upload(group["block_table"]),
            self._upload(group["slot_mapping"]),
            self._upload(starts),
            self._upload(lengths),
            group["block_size"],
            np.diff(starts).tolist(),
            lengths.tolist(),
        )

    def _metadata(self, group: Body) -> AttentionMetadata | RecurrentMetadata:
        if "block_table" in group:
            return self._attention(group)
        starts, lengths = group["query_start_loc"], group["seq_lens"]
        counts = np.diff(starts).tolist()
        slots, stored = group["slots"], group["stored"]
        metadata = RecurrentMetadata(
            self._upload(slots),
            self._upload(starts),
            self._upload(lengths),
            counts,
            lengths.tolist(),
            stored=None if stored is None else self._upload(stored),
        )
        if not self.backend.shares_host_memory:
            listed = None if stored is None else stored.tolist()
            metadata.host = StateNumbers(slots.tolist(), starts.tolist(), metadata.seq_lens_list, None, listed)
        return metadata

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return self.backend.upload(array)
