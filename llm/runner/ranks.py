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
from llm.engine.step import Adapter, RunnerOutput, SchedulerOutput
from llm.errors import LLMError, RankError, ValidationError
from llm.forward import AttentionMetadata, ForwardBatch, ImageTokens, RecurrentMetadata, StateNumbers
from llm.inputs import LoRARequest
from llm.inside.names import FINAL, Site
from llm.kernels.backend import Backend
from llm.layers.parallel import SINGLE, Communicator, TensorParallel
from llm.loading.saved_formats import HeldModule, held, joined
from llm.loading.source import ModelSource
from llm.loading.weight_map import WeightMap
from llm.platforms.interface import Platform
from llm.quantization.on_load import ActivationStatistics
from llm.runner.model_runner import ModelRunner, constructing
from llm.runner.speculation.head import PlacedHead
from llm.workers.connection import Connection
from llm.workers.process import WorkerProcess

R = TypeVar("R")
# Of a message: plain data, arrays, and tensors of the types that arrays lack.
Body = Mapping[str, Any]
_HALVES = (torch.bfloat16, torch.float16)


class RankGroup:
    """The processes of ranks 1 and up, as rank 0 sees them.

    Args:
        workers: in order of rank, while they load.
        communicator: rank 0's.
        met: called when the ranks need their rendezvous no longer.

    Attributes:
        at_restart: called when a step was given up and the ranks go on.
    """

    def __init__(self, workers: Sequence[WorkerProcess], communicator: Communicator, met: Callable[[], None]) -> None:
        self._workers = workers
        self._communicator = communicator
        self._met = met
        self._failure: LLMError | None = None  # after which no step is computed
        self.at_restart: Callable[[], None] = lambda: None
        for worker in workers:
            worker.call_at_end(communicator.abort)  # nobody waits in a step for one that is gone

    def await_opened(self) -> None:
        """Return when all ranks have loaded their part; raises `WorkerDiedError`."""
        for worker in self._workers:
            self._answer(worker, "opened")
        if not self._communicator.meets_again:
            self._met()

    def tell(self, kind: str, body: object) -> None:
        """Raises `WorkerDiedError`."""
        for worker in self._workers:
            worker.send(kind, body)

    def collect(self, kind: str) -> list[list[object]]:
        """Of each rank, in order, the bodies of what it sends until it says "end"; called in a `step`."""
        self.tell(kind, None)
        return [self._until_end(worker) for worker in self._workers]

    def _until_end(self, worker: WorkerProcess) -> list[object]:
        bodies: list[object] = []
        while (message := worker.receive()) is None or message.kind != "end":
            bodies += [] if message is None else [message.body]
        return bodies

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
            self._communicator.watch()
        except BaseException as error:
            self._leave(error)
            raise

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Around what reads the results of steps; raises as `step` does where one was given up on the device."""
        try:
            yield
        finally:
            if self._failure is None:
                try:
                    self._communicator.check()
                except RankError as error:
                    self._leave(error)
                    raise

    def close(self) -> None:
        """End the ranks."""
        self._communicator.abort()
        for worker in self._workers:
            worker.close()
        self._communicator.close()
        self._met()
        self.at_restart = lambda: None  # the runner goes with its last user: its memory is mapped as long

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
                while (message := worker.receive()) is None or message.kind != "settled":
                    continue  # of what it was asked before
        except LLMError as failure:
            self._failure = failure
            for worker in self._workers:
                worker.kill()
            raise failure from error
        self.at_restart()
        self._communicator.restart()

    def _answer(self, worker: WorkerProcess, kind: str) -> None:
        message = worker.receive()
        if message is None or message.kind != kind:
            raise LLMError(f"{worker.name} answered {message!r} in the place of {kind!r}.")


class RankRunner(ModelRunner):
    """One of several.

    Args:
        tp: its place.
    """

    def __init__(self, platform: Platform, tp: TensorParallel) -> None:
        super().__init__(platform)
        self.tp = tp

    @contextmanager
    def _recording(self, is_on: bool) -> Iterator[None]:
        """Whether steps are recorded and replayed meanwhile: on all ranks, or on none."""
        recorded = self.recorded
        if not is_on:
            self.recorded = None
        try:
            yield
        finally:
            self.recorded = recorded

    def held_modules(self) -> Iterator[HeldModule]:
        """What this rank has of every module with tensors of the checkpoint, on the host."""
        modules = dict(self.model.named_modules())
        with library_defaults(self.plan.config.num_threads), self.platform.inference_mode():
            for at in dict.fromkeys(target.parameter.rpartition(".")[0] for target in self.targets.values()):
                if at in modules:
                    yield held(at, modules[at]).cpu()

    def _forget_recorded(self) -> None:
        """Steps of a group of devices that is no longer."""
        communicator = self.tp.communicator
        if self.recorded is not None and communicator is not None and communicator.meets_again:
            self.recorded = self._new_recorded()


class LeadRunner(RankRunner):
    """Rank 0.

    Args:
        tp: its place.
        group: the others.
    """

    def __init__(self, platform: Platform, tp: TensorParallel, group: RankGroup) -> None:
        super().__init__(platform, tp)
        self.group = group
        group.at_restart = self._forget_recorded

    def load(self, plan: RunnerPlan) -> Loaded:
        try:
            loaded = super().load(plan)
            self.group.await_opened()
        except BaseException:
            self.group.close()
            raise
        return loaded

    def close(self) -> None:
        self.recorded = None  # a group of devices ends when no recorded step refers to it
        self.group.close()
        super().close()

    # --- Steps. ---

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        with self.group.checked():
            return super().execute(plan)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        is_replayed = self.recorded is not None and not self.recorded.is_watched
        # Where a replay cannot stop to be looked into, it may have padding that the others would not expect.
        is_replayed &= batch.inside is None or self.backend.stops
        with self.group.step():
            self.group.tell("forward", {**_on_host(_described(batch), self.backend), "is_replayed": is_replayed})
            with self._recording(is_replayed):
                hidden = super().forward(batch)
        for metadata in batch.metadata:
            if isinstance(metadata, RecurrentMetadata) and metadata.stored is not None:
                metadata.calls = [*metadata.calls, self._tell_accepted]
                break  # all states share it
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        slots = None if self.adapters is None else self.adapters.logit_rows.slots
        with self.group.step():
            said = {"shape": list(hidden.shape), "dtype": str(hidden.dtype), "slots": slots}
            self.group.tell("logits", _on_host(said, self.backend))
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

    def save(self, path: str | Path, format: str) -> Path:
        """See `LLM.save_quantized`: what one process would write, made of the parts of all ranks."""
        from llm.loading.save import check_place, save_quantized

        check_place(path, format)
        source = self._saved_from()
        with self.group.step():
            everything: list[list[object]] = [[*self.held_modules()], *self.group.collect("hold")]
        by_rank = [{item.path: item for item in rank if isinstance(item, HeldModule)} for rank in everything]
        with torch.device("meta"), constructing(self.plan, self.platform):
            whole = self.plan.model_class(self.plan.architecture, self.plan.build_options(SINGLE))
        own, modules = dict(self.model.named_modules()), dict(whole.named_modules())

        def hold(at: str) -> HeldModule:
            parts = [rank[at] for rank in by_rank if at in rank]
            return joined(parts, own[at], modules[at]) if at in own else parts[0]  # an expert is one rank's

        quant_config = self.plan.config.quant_config
        weight_map = WeightMap(whole, quant_config.parameter_name if quant_config else lambda name: name)
        targets = {name: weight_map.target(name) for name in self.targets}
        return save_quantized(whole, targets, source, self.plan.hf_config, path, format, hold)

    # --- What one rank cannot answer. ---

    def apply_model(self, function: Callable[[torch.nn.Module], R]) -> R:
        _refuse("apply_model", "a function is not sent to other processes")

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
            return replace(head, module=_SharedHead(self, head), embed=lambda input_ids: input_ids)
        # One with a checkpoint of its own is rank 0's alone.
        return head if self.head.embed_tokens is not None else replace(head, embed=self._embed)

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        with self.group.step():
            self.group.tell("embed", _on_host({"input_ids": input_ids}, self.backend))
            return self.model.embed(input_ids)


class _SharedHead:
    """A head that drafts, of which each rank has a part; it embeds the tokens itself, as the others do."""

    def __init__(self, lead: LeadRunner, head: PlacedHead) -> None:
        self._lead = lead
        self._head = head

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.module.combine(hidden)

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lead, head = self._lead, self._head
        with lead.group.step():
            lead.group.tell("draft", _on_host({**_described(batch), "hidden": hidden}, lead.backend))
            return head.module(head.embed(batch.input_ids), hidden, batch)


def _refuse(what: str, why: str) -> NoReturn:
    raise ValidationError(f"{what} needs tensor_parallel_size=1: {why}.", parameter="tensor_parallel_size", value=what)


def _on_host(body: Body, backend: Backend) -> dict[str, object]:
    """With arrays in the place of tensors, for which a device is waited for once; those of 16 bits stay tensors."""
    found: list[torch.Tensor] = []
    _each_tensor(dict(body), found.append)
    arrays = iter(backend.download(*(tensor for tensor in found if tensor.dtype not in _HALVES)))
    return {
        name: _each_tensor(value, lambda tensor: tensor.cpu() if tensor.dtype in _HALVES else next(arrays))
        for name, value in body.items()
    }


def _each_tensor(item: object, call: Callable[[torch.Tensor], object]) -> object:
    """Plain data with what is called in the place of each of its tensors, in order."""
    if isinstance(item, torch.Tensor):
        return call(item)
    if isinstance(item, dict):
        return {name: _each_tensor(value, call) for name, value in item.items()}
    return [_each_tensor(value, call) for value in item] if isinstance(item, list) else item


def _named(adapter: Adapter) -> dict[str, object]:
    request = adapter.request
    return {
        "name": request.lora_name,
        "number": request.lora_int_id,
        "path": request.lora_path,
        "digest": adapter.digest,
    }


def _described(batch: ForwardBatch) -> dict[str, object]:
    """A batch as plain data and tensors; states that share their metadata share it on the other side too."""
    if batch.inputs_embeds is not None or batch.extensions:
        _refuse("a step with embeddings or of a platform's own form", "they are not sent to other processes")
    known: dict[int, int] = {}
    groups: list[dict[str, object]] = []
    for metadata in batch.metadata:
        if id(metadata) not in known:
            known[id(metadata)] = len(groups)
            groups.append(_of_attention(metadata) if isinstance(metadata, AttentionMetadata) else _of_slots(metadata))
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "groups": groups,
        "group_of_state": [known[id(metadata)] for metadata in batch.metadata],
        "adapter_ids": batch.adapter_ids,
        "token_types": batch.token_types,
        "num_logits": len(batch.logits_indices),
        "images": None if batch.images is None else _of_images(batch.images),
    }


def _of_images(images: ImageTokens) -> dict[str, object]:
    """Features are rank 0's, whose vision tower makes them."""
    return {
        "indices": images.indices,
        "rows": images.rows,
        "deep": list(images.deep),
        "both_ways": images.both_ways,
        "metadata": [None if group is None else _of_attention(group) for group in images.metadata],
    }


def _of_attention(metadata: AttentionMetadata) -> dict[str, object]:
    return {
        "block_table": metadata.block_table,
        "slot_mapping": metadata.slot_mapping,
        "query_start_loc": metadata.query_start_loc,
        "seq_lens": metadata.seq_lens,
        "block_size": metadata.block_size,
    }


def _of_slots(metadata: RecurrentMetadata) -> dict[str, object]:
    return {
        "slots": metadata.slots,
        "query_start_loc": metadata.query_start_loc,
        "seq_lens": metadata.seq_lens,
        "stored": metadata.stored,
    }


class FollowingRunner(RankRunner):
    """A rank above 0: it has no batch of its own, and computes what rank 0 tells it to."""

    def __init__(self, platform: Platform, tp: TensorParallel) -> None:
        super().__init__(platform, tp)
        self._recurrent: RecurrentMetadata | None = None  # of the last forward

    def follow(self, connection: Connection) -> NoReturn:
        """Do what rank 0 says until it closes its end; raises `EOFError` then, and what computing raises."""
        try:
            while True:
                message = connection.receive()
                if message is None:
                    continue
                if message.kind == "settle":
                    self._forget_recorded()
                    connection.send("settled")
                    continue
                if message.kind == "hold":
                    for item in self.held_modules():
                        connection.send("held", item)
                    connection.send("end")
                    continue
                try:
                    self._do(message.kind, message.body)
                except RankError:
                    continue  # rank 0 says what comes next
        finally:
            self.recorded = None
            if self.tp.communicator is not None:
                self.tp.communicator.abort()  # no other rank is to wait for this one
                self.tp.communicator.close()

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
        with self._recording(body["is_replayed"]):
            self.forward(self._batch(body))

    def _logits_of_lead(self, body: Body) -> None:
        """Of hidden states that rank 0 has."""
        rows, width = body["shape"]
        dtype = getattr(torch, body["dtype"].removeprefix("torch."))
        own = torch.zeros(rows, width, dtype=dtype, device=self.platform.device)
        hidden = self.tp.all_gather(own)[:, :width].contiguous()
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

    def _embed_of(self, body: Body) -> None:
        self.model.embed(self._upload(body["input_ids"]))

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
            torch.empty(body["num_logits"], dtype=torch.int64),  # of which only the number is read
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

    def _upload(self, values: np.ndarray | torch.Tensor) -> torch.Tensor:
        return self.backend.upload(values) if isinstance(values, np.ndarray) else values.to(self.platform.device)
