"""How a platform computes: the object from which layers, quantization methods, sampler and runner get operations.

`llm.kernels.select` gives a platform's backend. An operation has one name and one signature, that of its definition in
plain PyTorch (`kernels/reference`); a backend has a kernel for it or uses the definition.

A new backend is a folder beside `cpu/` with a subclass of `Backend`, and one line: the `Platform.get_backend_cls` that
names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from llm.kernels.reference.activation import OPERATIONS as ACTIVATIONS
from llm.kernels.weight import Weight
from llm.platforms.interface import Platform

CPU = torch.device("cpu")

# Operation -> the module of kernels/reference that defines it.
OPERATIONS: dict[str, str] = {
    "pack": "linear",
    "linear": "linear",
    "embedding": "linear",
    "quantize_per_token": "linear",
    "quantize_static": "linear",
    "quantize_weight": "quantize_weight",
    "quantize_weight_as": "quantize_weight",
    "column_squares": "quantize_weight",
    "decode_blocks": "gguf_blocks",
    "rms_norm": "elementwise",
    "add_rms_norm": "elementwise",
    "layer_norm": "elementwise",
    "add_layer_norm": "elementwise",
    "rotary_embedding": "elementwise",
    "kv_cache_shapes": "attention",
    "write_kv_cache": "attention",
    "paged_attention": "attention",
    "heads_linear": "attention",
    "write_latent_cache": "attention",
    "latent_attention": "attention",
    **dict.fromkeys(ACTIVATIONS, "activation"),
    "select_rows": "elementwise",
    "ids_below": "elementwise",
    "multiply": "elementwise",
    "add": "elementwise",
    "scale": "elementwise",
    "select_experts": "experts",
    "mix_two_experts": "experts",
    "experts": "experts",
    "causal_conv1d": "recurrent",
    "gated_delta_rule": "recurrent",
    "selective_scan": "recurrent",
    "mamba2_scan": "recurrent",
    "gated_rms_norm": "elementwise",
    "lora": "linear",
    "lora_embedding": "linear",
    "log_softmax": "vocabulary",
    "argmax": "vocabulary",
    "top_k": "vocabulary",
    "gather_logprobs": "vocabulary",
    "block_sums": "vocabulary",
    "draw_nucleus": "vocabulary",
    "cut_below_largest": "vocabulary",
    "divide_rows": "vocabulary",
}

# Operations that share a layout of memory: a backend that lacks one of them uses the definitions of all.
_LAYOUTS = (("kv_cache_shapes", "write_kv_cache", "paged_attention"),)
# Operations that compute nothing, or each element from those beside it in the row: PyTorch's bits, too, do not depend
# on the batch.
_EXACT = {
    *("pack", "embedding", "quantize_weight", "quantize_weight_as", "column_squares", "decode_blocks"),
    *("kv_cache_shapes", "write_kv_cache", "write_latent_cache"),
    *("select_rows", "ids_below", "multiply", "add", "scale", "divide_rows", "argmax"),
}

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

Operation = Callable[..., Any]
PartResults = tuple[torch.Tensor | None, ...]
PartFunction = Callable[..., PartResults]


class StepSize(NamedTuple):
    """A size in which a backend records steps.

    Attributes:
        tokens, rows: the most that a step of this size has: its inputs have memory for so many. What a smaller one has
            less is padding: token 0 and empty rows, in block 0 of every cache and slot 0 of every state, which no
            request has.
        tokens_per_row: the tokens of every row, if all rows have as many and all need logits (decode steps, with drafts
            or without); 0: rows may have any number of tokens.
        bound_to: what else a recording holds for, such as the number of threads.
        is_whole: padding is computed like the rest; False, of rows with any number of tokens: it is left out. With
            `tokens_per_row` it is always computed.
    """

    tokens: int
    rows: int
    tokens_per_row: int = 0
    bound_to: Hashable = None
    is_whole: bool = False


class NotRecordable(Exception):
    """A computation cannot be recorded; the message says why."""


class RecordedPart(Protocol):
    """One call of a function in a recording, so that a replay may stop before it and go on behind it.

    Attributes:
        first, last: it is what the recording does from place `first` to before place `last`.
    """

    first: int
    last: int

    def arguments(self, tokens: int) -> list[object]:
        """What the function was called with; its tensors are the recording's memory, with a row for each token."""

    def results(self, tokens: int) -> PartResults:
        """What it returned, likewise."""


class Recording(Protocol):
    """A recorded computation.

    Attributes:
        results: those of the computation that was recorded.
        refusal: why it cannot be replayed; "": it can.
        parts: by the key that `Backend.record_part` was given, in order; none: it is replayed as a whole.
    """

    results: Sequence[torch.Tensor]
    refusal: str
    parts: Mapping[Hashable, RecordedPart]

    def run(self, tokens: int = 0, first: int = 0, last: int | None = None) -> Sequence[torch.Tensor] | None:
        """Replay on what the inputs hold now; returns the results, which the next run overwrites.

        Args:
            tokens: how many of the inputs count, and how many the results have; 0: as many as were recorded.
            first, last: between these places alone, those of `parts`; None: to the end.

        None: an input was refused, and the results are undefined.
        """


class ArrivingRows:
    """A float weight that is packed while its rows arrive from a file.

    Attributes:
        data: [N, K], in plain rows but for those that were taken.
    """

    data: torch.Tensor

    def take(self, start: int, values: torch.Tensor) -> bool:
        """Pack `values` as the rows from `start` on. False: they cannot be, and are to be copied into `data`."""
        raise NotImplementedError

    def release(self) -> None:
        """Turn `data` into plain rows."""
        raise NotImplementedError

    def finish(self) -> Weight:
        """The weight, in the memory of `data`."""
        raise NotImplementedError


class Staging:
    """Page-locked memory of the host, through which arrays go to a device and come back while both go on.

    A part is taken for one array and is in use until somebody has waited for what the device was asked until then:
    `taken` gives the parts that are in use, and `give_back` says that they no longer are. Parts are kept, in sizes that
    are powers of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device; the array may change as soon as this returns."""
        part = self._taken(torch.from_numpy(array))
        part.numpy()[...] = array
        return part.to(self._device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Page-locked memory, which has the tensor's values once somebody has waited for the device."""
        part = self._taken(tensor)
        part.copy_(tensor, non_blocking=True)
        return part

    def taken(self) -> list[torch.Tensor]:
        """The parts that were taken since the last call."""
        used, self._used = self._used, []
        return used

    def give_back(self, parts: Sequence[torch.Tensor]) -> None:
        """The device has done everything that was asked of it when these were `taken`."""
        for part in parts:
            self._free.setdefault(len(part), []).append(part)

    def _taken(self, like: torch.Tensor) -> torch.Tensor:
        size = 1 << max(8, (like.nbytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            part = free.pop()
        else:
            with torch.inference_mode(False):  # or it could not be written outside of a step
                part = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._used.append(part)
        return part[: like.nbytes].view(like.dtype).view(like.shape)


class SharedMemory(Protocol):
    """See `llm.layers.parallel.Communicator`, whose methods these are."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...
    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor: ...
    def abort(self) -> None: ...
    def restart(self) -> None: ...


class Operations:
    """Every operation as an attribute: `ops.rms_norm(x, weight, eps)`."""

    def __init__(self, functions: Mapping[str, Operation]) -> None:
        vars(self).update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Operation: ...


def definition(name: str) -> Operation:
    """The operation `name` in plain PyTorch; KeyError for a name that is not in `OPERATIONS`."""
    return getattr(importlib.import_module(f"llm.kernels.reference.{OPERATIONS[name]}"), name)


class Backend:
    """The operations of one platform, and their guarantees.

    Args:
        kernels: operation -> this backend's kernel. PyTorch's definitions compute the others (`lacks`), so that a new
            operation can be tried before it has kernels. Of packed weights they see what `Weight.rows` gives.
        reason: why this backend was chosen.
        device: where its tensors are.
        pins: copies to `device` go through page-locked memory.
        synchronize: waits until the device has done everything; None: PyTorch's for the device.

    Attributes:
        name: its name in `llm.explain()`.
        variant: which of several builds this is, e.g. an instruction set; "": there is one.
        ops: all operations.
        records: True if `record` is supported.
        most_recordings: of decode steps, to keep; the least recently used is dropped first.
        stops: its replays can stop between the parts of a recording.
        records_kernels_only: what others compute than this backend's kernels would be left out of a recording without
            notice, so steps are recorded only where nothing else computes (`EngineConfig.invariant`).
        rounds_bf16_inputs: the kinds of weights (`llm.kernels.weight.KINDS`) whose GEMMs are faster on activations
            rounded to bfloat16; activations are rounded where the model allows it (`Construction.may_round`).
        bf16_gain: how many times as fast that makes prompts and batches with bfloat16 weights, as measured.
        offloads: packed weights may be in the mapping of a file (`Construction.keep`).
        activations: the types of activations that its kernels take.
        exact: operations of which PyTorch's bits, too, do not depend on the batch on this device.
    """

    name: ClassVar[str] = ""
    variant: str = ""
    records: bool = False
    most_recordings: int = 8
    stops: bool = False
    records_kernels_only: bool = True
    rounds_bf16_inputs: frozenset[str] = frozenset()
    bf16_gain: float = 1.0
    offloads: bool = False
    exact: ClassVar[Collection[str]] = _EXACT
    activations: ClassVar[tuple[torch.dtype, ...]] = _FLOATS

    def __init__(
        self,
        kernels: Mapping[str, Operation],
        reason: str,
        device: torch.device = CPU,
        pins: bool = False,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.reason = reason
        self.device = device
        self.pins = pins
        self._synchronize = synchronize
        self._staging = Staging(device)
        halves = [names for names in _LAYOUTS if not kernels.keys() >= set(names)]
        self._own = frozenset(kernels).difference(*halves)
        self.ops = Operations({name: kernels[name] if name in self._own else definition(name) for name in OPERATIONS})

    @classmethod
    def of(cls, platform: Platform) -> Backend:
        """The backend of `platform`. Called for every layer, so it should return the same object each time.

        May return an instance of another class if this one cannot compute here; its `reason` says why.
        """
        raise NotImplementedError

    # --- Operations and guarantees. ---

    def op(self, name: str) -> Operation:
        """The operation `name`; KeyError for a name that is not in `OPERATIONS`."""
        return vars(self.ops)[name]

    def computes(self, *names: str) -> bool:
        """True if this backend has a kernel for each of these operations."""
        return self._own.issuperset(names)

    @property
    def lacks(self) -> list[str]:
        """The operations that PyTorch's definitions compute, in the order of `OPERATIONS`."""
        return [name for name in OPERATIONS if name not in self._own]

    def takes(self, name: str) -> tuple[torch.dtype, ...]:
        """The types of activations that `op(name)` takes, and gives; the definitions take all."""
        return self.activations if name in self._own else _FLOATS

    def source(self, name: str) -> str:
        """What computes `op(name)`, for `llm.explain()`: "cpu kernel avx512_vnni" or "PyTorch"."""
        return f"{self.name} kernel {self.variant}".rstrip() if name in self._own else "PyTorch"

    @property
    def invariant(self) -> tuple[bool, str]:
        """(True if no operation's bits depend on the batch, why or why not)."""
        missing = [name for name in self.lacks if name not in self.exact]
        if missing:
            return False, f"PyTorch computes {', '.join(missing)}: rounding depends on the batch"
        return True, f"{f'{self.name} kernels {self.variant}'.rstrip()} reduce in one fixed order"

    # --- Memory. ---

    @property
    def shares_host_memory(self) -> bool:
        """True if `upload` gives a tensor in the array's own memory."""
        return self.device.type == "cpu"

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised float32 tensor for a result."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def arriving_rows(self, n: int, k: int, dtype: torch.dtype) -> ArrivingRows | None:
        """Memory for a float weight [n, k] that `pack` packs in place; None: `pack` decides when all of it is there."""
        return None

    def kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros for one tensor of a layer's state, such as its keys; a page is committed when first written."""
        if self.device.type == "cpu":
            return _untouched_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """The array as a tensor on this backend's device, a copy unless `shares_host_memory`. The device takes it from
        page-locked memory while the host goes on."""
        if self.shares_host_memory:
            return torch.from_numpy(array)
        return self._staging.upload(array) if self.pins else torch.from_numpy(array).to(self.device)

    def download(self, *tensors: torch.Tensor) -> list[np.ndarray]:
        """Tensors of this backend's device as arrays, for all of which the host waits once; the tensors' own memory if
        `shares_host_memory`."""
        return self.start_download(*tensors)()

    def start_download(self, *tensors: torch.Tensor) -> Callable[[], list[np.ndarray]]:
        """The same in two parts: what this returns waits, for what the device was asked until now, and is called once.
        Until then the device may be asked for more, and may overwrite the tensors by that."""
        if self.shares_host_memory or not self.pins:
            arrays = [tensor.cpu().numpy() for tensor in tensors]
            return lambda: arrays
        parts = [self._staging.download(tensor) for tensor in tensors]
        used, wait = self._staging.taken(), self._mark()

        def read() -> list[np.ndarray]:
            wait()
            arrays = [part.numpy().copy() for part in parts]
            self._staging.give_back(used)
            return arrays

        return read

    def synchronize(self) -> None:
        """Wait until the device has done everything that was asked of it."""
        if self._synchronize is not None:
            self._synchronize()
        elif self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._staging.give_back(self._staging.taken())

    def _mark(self) -> Callable[[], None]:
        """What waits until the device has done what it was asked before this."""
        if self._synchronize is not None:
            return self._synchronize
        event = torch.Event(self.device.type)
        event.record()
        return event.synchronize

    def shared_memory(self, rank: int, ranks: int, file: Path, timeout_s: float) -> SharedMemory | None:
        """What ranks gather through, which are processes of one machine; None: this backend has none.

        Args:
            file: that all of them map. Rank 0 makes it; it may be deleted once all have called this.
            timeout_s: how long a rank waits for another.
        """
        return None

    def clear(self) -> None:
        """Free the memory pool and end the worker threads; the next call creates both again."""

    # --- Recording. ---

    def step_sizes(self, tokens: int, rows: int, tokens_per_row: int) -> Sequence[tuple[StepSize, int | None]]:
        """The sizes that serve a step, the best first; none: it is computed operation by operation.

        With each, how many steps of it are computed before one is recorded; None: this step is not to be recorded, only
        replayed if there is a recording.

        Args:
            tokens, rows: of the step.
            tokens_per_row: as of `StepSize`.
        """
        return ()

    def record(
        self,
        compute: Callable[[int], Sequence[torch.Tensor]],
        tokens: int = 0,
        size: StepSize | None = None,
        fill: Callable[[int], None] | None = None,
    ) -> Recording:
        """Compute, and record what is computed.

        The recording reads and writes the memory that `compute` read and wrote, and keeps what it made. What `compute`
        changes in place, recurrent states for example, has been changed once afterwards, also where nothing could be
        recorded. An error of `compute` is raised.

        Args:
            compute: computes the first n tokens of its inputs, and returns tensors with a row for each.
            tokens: how many tokens the inputs hold now.
            size: of the step; None: it is always replayed as it is.
            fill: puts the first n tokens of the step into the inputs again, and padding behind them. A backend that
                has to compute before it can record does so after `fill(0)`.

        Raises:
            NotRecordable: nothing that is kept was changed; the caller computes the step. No other is tried.
        """
        raise NotImplementedError(f"the {self.name} backend records nothing")

    def record_part(self, key: Hashable, function: PartFunction, arguments: Sequence[object]) -> PartResults:
        """`function(*arguments)`, called by what is being recorded: one of the recording's `parts`, if it can be one.

        It can if the backend's replays can stop, if it returns a tuple, and if all tensors among its arguments and
        results are made by what is recorded, and have a row for each token. It is called once.
        """
        return function(*arguments)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros from calloc: `torch.zeros` would write, and so commit, every page at once."""
    count = int(np.prod(shape)) * dtype.itemsize
    storage = torch.from_numpy(np.zeros(count, dtype=np.uint8)).untyped_storage()
    # Not a view: a view keeps its base alive, and `ModelRunner.close` could not free memory that is still referenced.
    return torch.empty(0, dtype=dtype).set_(storage).resize_(shape)
