"""Weights packed into panels of 16 output channels, the layout the kernels read; unpacking gives the same bits back.

A `PanelWeight` is passed to the kernels as one struct, a `WeightArray` as several in a row. kernels/README.md draws the
panels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from llm.base.library_settings import num_threads
from llm.kernels.backend import ArrivingRows
from llm.kernels.cpu.library import KINDS as FLOATS
from llm.kernels.cpu.library import Library, pointer
from llm.kernels.cpu.signatures import KERNELS, WeightStruct
from llm.kernels.weight import ACTIVATIONS, FLOAT_KINDS, KINDS, SCALED_KINDS, Weight, kind_of

LANES = 16
# Bytes of a huge page: large weights use them where the system allows it, for fewer TLB misses.
_LARGE_PAGE = 2 << 20
# PyTorch's operations on so many elements are not shared among threads.
_SERIAL_ELEMENTS = 1 << 15
# Kind -> (element type of its panels, how many consecutive k of an output channel are adjacent in memory).
_PANELS = {
    "float32": (torch.float32, 1),
    "bfloat16": (torch.bfloat16, 2),
    "float16": (torch.float16, 1),
    "int8": (torch.int8, 4),
    "int4": (torch.uint8, 8),
    "float8": (torch.float8_e4m3fn, 1),
}

_PACK = KERNELS["llm_pack"]
_UNPACK = KERNELS["llm_unpack"]
_LEVEL_SUMS = KERNELS["llm_level_sums"]


class _Description:
    """The C struct that describes a weight.

    Attributes:
        address: of the struct.
        parts: the weight's tensors.
        places: their addresses when the struct was written.
    """

    def __init__(self, weight: PanelWeight) -> None:
        self.parts = weight.parts
        self._struct = WeightStruct()
        self.address = ctypes.addressof(self._struct)
        self.write(weight)

    def write(self, weight: PanelWeight) -> None:
        """Check the size of everything the kernels will read, then fill the struct."""
        _check_memory("the packed weight", weight.data, *_size(weight.kind, weight.n, weight.k))
        if weight.kind == "int8" or weight.levels is not None:
            _check_memory("the sums of the rows", weight.sums, torch.int32, _padded(weight.n))
        if weight.bias is not None:
            _check_memory("the bias", weight.bias, torch.float32, weight.n)
        if weight.columns is not None:
            _check_memory("the columns", weight.columns, torch.int32, weight.k)
        if weight.levels is not None:
            _check_levels(weight, weight.levels)
        struct = self._struct
        if weight.table is not None:
            _check_memory("the table", weight.table, torch.float32, 16)
        struct.data, struct.sums, struct.bias = weight.data.data_ptr(), pointer(weight.sums), pointer(weight.bias)
        struct.columns, struct.table = pointer(weight.columns), pointer(weight.table)
        struct.levels = pointer(weight.levels)
        struct.kind, struct.activations = KINDS.index(weight.kind), ACTIVATIONS.index(weight.activations)
        struct.n, struct.k, struct.group_size = weight.n, weight.k, weight.group_size
        struct.rotation = weight.rotation
        struct.input_scale, struct.input_offset = weight.input_scale, weight.input_offset
        for name, values in (("scale", weight.scale), ("zero", weight.zero), ("minimum", weight.minimum)):
            setattr(struct, name, pointer(values))
            if values is not None:
                _check_groups(name, values, weight)
                setattr(struct, f"{name}_kind", FLOATS[values.dtype])
                setattr(struct, f"{name}_stride", values.stride(1) if values.shape[1] > 1 else weight.n)
        self.places = [part.data_ptr() for part in self.parts]


@dataclass(frozen=True, eq=False)
class PanelWeight(Weight):
    """A `Weight` in panels, with scales, zero points and minima group by group in memory.

    Attributes:
        library: the library whose kernels read it.
        sums: int32, the sum of each row, padded to panels; only for int8, and with levels.

    Raises:
        ValueError: the kernels do not support it.
    """

    # In memory `levels` lie panel by panel, [n / 16, groups, 16].
    library: Library = field(kw_only=True)
    sums: torch.Tensor | None = field(default=None, kw_only=True)
    _description: _Description | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activations == "int8" and self.kind == "int4" and self.groups > 1 and self.group_size % 8:
            raise ValueError(f"groups are of a multiple of 8 columns, got {self.group_size}")
        if self.bias is not None and not _is_plain(self.bias):
            object.__setattr__(self, "bias", self.bias.float().contiguous())
        object.__setattr__(self, "_description", None)

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors that it is made of."""
        parts = (self.data, self.sums, self.scale, self.zero, self.minimum, self.table, self.bias, self.columns)
        return [part for part in (*parts, self.levels) if part is not None]

    @property
    def address(self) -> int:
        """The address of the struct, valid while the weight lives; rewritten when a tensor's memory was replaced.

        Raises:
            ValueError: the memory of a tensor was freed, or replaced by memory of another size or type.
        """
        description = self._description
        if description is None:
            description = _Description(self)
            object.__setattr__(self, "_description", description)
        if [part.data_ptr() for part in description.parts] != description.places:
            description.write(self)
        return description.address

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.sums is None else self.sums.nbytes)

    def memory(self) -> dict[str, torch.Tensor | None]:
        return super().memory() | {"packed_sums": self.sums}

    def rows(self, start: int, end: int) -> torch.Tensor:
        start, end, _ = slice(start, end).indices(self.n)
        out = torch.empty(max(0, end - start), self.k, dtype=SCALED_KINDS.get(self.kind, self.data.dtype))
        self.library.call(_UNPACK, self.address, out.data_ptr(), start, start + len(out), num_threads())
        return out

    def scaled(
        self,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        group_size: int = 0,
        minimum: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        rotation: int = 0,
        levels: torch.Tensor | None = None,
    ) -> PanelWeight:
        zero, minimum = (None if part is None else _by_group(part) for part in (zero, minimum))
        if levels is None:
            return super().scaled(_by_group(scale), zero, group_size, minimum, columns, rotation)
        sums = torch.empty(_padded(self.n), dtype=torch.int32)
        found = super().scaled(_by_group(scale), zero, group_size, minimum, columns, rotation, _by_panel(levels))
        found = replace(found, sums=sums)
        multiplied = replace(found, activations="int8")
        self.library.call(_LEVEL_SUMS, multiplied.address, sums.data_ptr(), num_threads())
        return found

    def level_rows(self, start: int, end: int) -> torch.Tensor:
        levels = self.levels
        if levels is None:
            raise ValueError("the weight has one level of scales")
        first = start // LANES
        rows = levels[first : -(-end // LANES)].transpose(1, 2).flatten(0, 1)
        return rows[start - first * LANES : end - first * LANES]


class WeightArray:
    """The structs of several weights in one array, for a kernel that indexes them."""

    def __init__(self, weights: Sequence[PanelWeight]) -> None:
        self._weights = tuple(weights)
        self._structs = (WeightStruct * len(self._weights))()
        self._parts = [part for weight in self._weights for part in weight.parts]
        self._places: list[int] = []

    @property
    def address(self) -> int:
        """As `PanelWeight.address`, of the first."""
        places = [part.data_ptr() for part in self._parts]
        if places != self._places:
            for struct, weight in zip(self._structs, self._weights, strict=True):
                ctypes.memmove(ctypes.byref(struct), weight.address, ctypes.sizeof(struct))
            self._places = places
        return ctypes.addressof(self._structs)


def panels(weights: Sequence[Weight]) -> list[PanelWeight]:
    """The same; TypeError where one was packed by another backend."""
    found = [weight for weight in weights if isinstance(weight, PanelWeight)]
    if len(found) != len(weights):
        raise TypeError("the CPU kernels read weights in panels: pack them with this backend")
    return found


def pack(lib: Library, values: torch.Tensor, kind: str | None = None, reuse: bool = False) -> PanelWeight:
    """float32, bfloat16, float16, float8_e4m3fn, or int8 [N, K] with `kind` "int8" or "int4" -> a weight in panels.

    `reuse`: float values may be packed in place, which happens if N is a multiple of 16 (and K even, for bfloat16).
    """
    kind = kind_of(values, kind)
    n, k = values.shape
    values = values.contiguous()
    dtype, size = _size(kind, n, k)
    reuse = reuse and values.numel() == size and values.dtype == dtype and kind not in SCALED_KINDS
    data = values.view(-1) if reuse else allocate(lib, size, dtype)
    sums = torch.empty(_padded(n), dtype=torch.int32) if kind == "int8" else None
    number, threads = KINDS.index(kind), num_threads()
    lib.call(_PACK, number, values.data_ptr(), data.data_ptr(), pointer(sums), n, k, threads)
    if reuse:
        _move_to_large_pages(lib, data)
    return PanelWeight(data, kind, n, k, library=lib, sums=sums)


def is_packed_in_place(n: int, k: int, dtype: torch.dtype) -> bool:
    """Panels of floats of `dtype` need no padding."""
    kind = FLOAT_KINDS.get(dtype)
    return kind is not None and _size(kind, n, k) == (dtype, n * k)


def pack_into(lib: Library, values: torch.Tensor, rows: torch.Tensor) -> None:
    """Pack floats [n, K] into the memory of `rows`, which may be their own; `is_packed_in_place` holds."""
    number = KINDS.index(FLOAT_KINDS[values.dtype])
    lib.call(_PACK, number, values.data_ptr(), rows.data_ptr(), 0, *values.shape, num_threads())


def _size(kind: str, n: int, k: int) -> tuple[torch.dtype, int]:
    """(element type, number of elements) of a weight's panels."""
    dtype, depth = _PANELS[kind]
    return dtype, _padded(n) * _padded(k, depth) // (2 if kind == "int4" else 1)


def allocate(lib: Library, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for panels; if it is at least one huge page, it is aligned to huge pages."""
    data = torch.empty(size, dtype=dtype)
    if data.nbytes >= _LARGE_PAGE:
        room = torch.empty(data.nbytes + _LARGE_PAGE, dtype=torch.uint8)
        start = -room.data_ptr() % _LARGE_PAGE
        data = room[start : start + data.nbytes].view(dtype)
        lib.ask_large_pages(data.data_ptr(), data.nbytes)
    return data


def _move_to_large_pages(lib: Library, data: torch.Tensor) -> None:
    """For memory that was written before `allocate` asked for huge pages: it is in small pages already."""
    if data.nbytes >= _LARGE_PAGE:
        lib.ask_large_pages(data.data_ptr(), data.nbytes, written=True)


def _by_group(values: torch.Tensor) -> torch.Tensor:
    """[N, G] stored group by group, in the first 16-bit type that is exact, else float32.

    Kernels read the values of 16 rows of one group at once. Checkpoints usually have 16-bit scales. In parts that
    PyTorch does not share among threads of its own: those wait for each other where another program runs.
    """
    rows, groups = values.shape
    # The first row, which is seldom exact by chance, saves a pass over all.
    step = max(1, _SERIAL_ELEMENTS // max(1, groups))
    parts = [slice(0, 1), *(slice(start, start + step) for start in range(0, rows, step))]
    exact = (kind for kind in (torch.bfloat16, torch.float16) if all(_is_exact(values[part], kind) for part in parts))
    out = torch.empty(groups, rows, dtype=next(exact, torch.float32))
    for part in parts[1:]:
        out[:, part] = values[part].t()
    return out.view(rows, 1) if groups == 1 else out.t()  # a stride of 1, which `view(dtype)` asks for


def _by_panel(levels: torch.Tensor) -> torch.Tensor:
    """[N, G] stored panel by panel: the values of 16 rows of one group side by side."""
    rows, groups = levels.shape
    out = torch.ones(_padded(rows) // LANES, groups, LANES, dtype=torch.uint8)
    whole = rows // LANES
    out[:whole] = levels[: whole * LANES].view(whole, LANES, groups).transpose(1, 2)
    if whole < len(out):
        out[whole, :, : rows % LANES] = levels[whole * LANES :].t()
    return out


def _is_exact(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(dtype).float(), values.float())


def _check_memory(what: str, tensor: torch.Tensor | None, dtype: torch.dtype, size: int) -> None:
    if tensor is None or tensor.dtype != dtype or tensor.numel() != size or not tensor.is_contiguous():
        found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{what} must be {size} contiguous elements of {dtype}, got {found}; was its memory freed?")


def _check_levels(weight: PanelWeight, levels: torch.Tensor) -> None:
    if weight.activations != "int8":
        raise ValueError("a weight with two levels of scales is multiplied with int8 activations")
    _check_memory("the levels", levels, torch.uint8, _padded(weight.n) * weight.groups)


def _check_groups(name: str, values: torch.Tensor, weight: Weight) -> None:
    shape = [weight.n, weight.groups if weight.levels is None else 1]
    if values.dtype not in FLOATS:
        raise ValueError(f"{name} is float32, bfloat16 or float16, got {values.dtype}")
    if list(values.shape) != shape or (values.stride(0) != 1 and weight.n > 1):
        raise ValueError(
            f"{name} must be {shape}, group by group in memory, got {list(values.shape)} with strides "
            f"{list(values.stride())}; `Weight.scaled` brings it into that form"
        )


def _is_plain(bias: torch.Tensor) -> bool:
    return bias.dtype == torch.float32 and bias.is_contiguous()


def _padded(count: int, multiple: int = LANES) -> int:
    return -(-count // multiple) * multiple


class RowPanels(ArrivingRows):
    """A float weight [N, K] of which any 16 rows, from a multiple of 16 on, take the same memory packed or not."""

    def __init__(self, lib: Library, n: int, k: int, dtype: torch.dtype) -> None:
        self._library = lib
        self.data = allocate(lib, n * k, dtype).view(n, k)
        self._packed = bytearray(n // LANES)

    def take(self, start: int, values: torch.Tensor) -> bool:
        first, count = start // LANES, len(values) // LANES
        whole = start % LANES == 0 and len(values) % LANES == 0 and values.is_contiguous()
        if not whole or values.dtype != self.data.dtype or values.shape[1:] != self.data.shape[1:]:
            self._unpack(first, -(-(start + len(values)) // LANES))
            return False
        pack_into(self._library, values, self._rows(first, first + count))
        self._packed[first : first + count] = b"\1" * count
        return True

    def release(self) -> None:
        self._unpack(0, len(self._packed))

    def finish(self) -> PanelWeight:
        for first in range(len(self._packed)):
            if not self._packed[first]:
                end = self._packed.find(1, first)
                end = len(self._packed) if end < 0 else end
                pack_into(self._library, self._rows(first, end), self._rows(first, end))
                self._packed[first:end] = b"\1" * (end - first)
        return self._weight(self.data)

    def _unpack(self, first: int, end: int) -> None:
        """Panels first to end - 1 in plain rows again."""
        for panel in range(first, end):
            if self._packed[panel]:
                rows = self._rows(panel, panel + 1)
                rows.copy_(self._weight(rows).unpack())
                self._packed[panel] = 0

    def _rows(self, first: int, end: int) -> torch.Tensor:
        return self.data[first * LANES : end * LANES]

    def _weight(self, rows: torch.Tensor) -> PanelWeight:
        return PanelWeight(rows.view(-1), FLOAT_KINDS[rows.dtype], *rows.shape, library=self._library)


def arriving_rows(lib: Library, n: int, k: int, dtype: torch.dtype) -> RowPanels | None:
    """None where packed rows take more memory, or the weight is empty."""
    return RowPanels(lib, n, k, dtype) if n * k and is_packed_in_place(n, k, dtype) else None
