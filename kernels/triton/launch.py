"""How kernels are launched: what the device is, and the options that every launch has.

Tiles are chosen by `Target`. `collecting` notes launches in the place of doing them: from them `tests/gpu/compile.py`
compiles every kernel in every form that the operations ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)


class Target(NamedTuple):
    """A device as the tables of tiles know it.

    Attributes:
        api: "cuda", "hip" or "xpu"; of the interpreter "cuda".
        arch: compute capability times ten, such as 90; of AMD's 0.
        name: such as "sm90" or "gfx942", and "interpreter".
        shared: bytes of shared memory that a program may have.
        registers: 32-bit registers that a thread may have.
    """

    api: str
    arch: int
    name: str
    shared: int
    registers: int = 255

    @property
    def least_rows(self) -> int:
        """Rows of the smallest first matrix of a product.

        Hopper and the first Blackwell have two kinds of matrix instructions, and tiles below 64 rows get the older one,
        which sums in another order. So they have no such tiles. The second matrix may have 16.
        """
        return 64 if self.api == "cuda" and self.arch in (90, 100, 103) else 16

    @property
    def is_small(self) -> bool:
        """Shared memory for no more than two stages of a tile of 128 x 128."""
        return self.shared < 160 * KIB or self.api == "hip"

    @property
    def is_rdna(self) -> bool:
        """AMD's graphics cards: 256 registers a thread, and matrix instructions that need more of them than others."""
        return self.api == "hip" and not self.name.startswith("gfx9")

    @property
    def options(self) -> dict[str, Any]:
        """Of every launch. A fused product and sum has other bits than the two, and what is fused depends on the tile.
        AMD's matrix instruction would be chosen by the tile's size."""
        fixed: dict[str, Any] = {"enable_fp_fusion": False}
        return fixed | ({"matrix_instr_nonkdim": 16} if self.api == "hip" else {})


KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("cuda", 80, "sm80", 163 * KIB),
        Target("cuda", 86, "sm86", 99 * KIB),
        Target("cuda", 89, "sm89", 99 * KIB),
        Target("cuda", 90, "sm90", 227 * KIB),
        Target("cuda", 100, "sm100", 227 * KIB),
        Target("cuda", 120, "sm120", 99 * KIB),
        Target("hip", 0, "gfx90a", 64 * KIB, 512),
        Target("hip", 0, "gfx942", 64 * KIB, 512),
        Target("hip", 0, "gfx950", 160 * KIB, 512),
        Target("hip", 0, "gfx1100", 64 * KIB, 256),
        Target("hip", 0, "gfx1201", 64 * KIB, 256),
    )
}
INTERPRETER = Target("cuda", 80, "interpreter", 99 * KIB)
# Multiprocessors that a launch of few tiles should fill; one number, so that bits are those of any card.
PROGRAMS = 256


@dataclass
class Collected:
    """Launches that were noted: `launches` has (kernel, arguments by name, options) of each."""

    target: Target
    launches: list[tuple[Any, dict[str, Any], dict[str, Any]]] = field(default_factory=list)


_collected: Collected | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **options: Any) -> None:
    """kernel[grid](*args, **options), the options being constants of the kernel and its warps and stages."""
    if _collected is not None:
        names = kernel.arg_names
        own = {name: options.pop(name) for name in list(options) if name in names}
        given = dict(zip(names, args, strict=False)) | own
        _collected.launches.append((kernel, given, options | _collected.target.options))
        return
    if 0 in grid:
        return
    kernel[grid](*args, **options, **target_of(device).options)


@contextmanager
def collecting(name: str) -> Iterator[Collected]:
    """Within, nothing is launched; operations may be given tensors of "meta". `name`: of the target."""
    global _collected
    before, _collected = _collected, Collected(TARGETS[name])
    try:
        yield _collected
    finally:
        _collected = before


def target_of(device: torch.device) -> Target:
    """What computes on `device`."""
    if _collected is not None:
        return _collected.target
    return INTERPRETER if INTERPRETED else _target(device)


@cache
def _target(device: torch.device) -> Target:
    found = triton.runtime.driver.active.get_current_target()
    shared = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    if found.backend == "cuda":
        return Target("cuda", int(found.arch), f"sm{found.arch}", shared)
    name = str(found.arch).split(":")[0]
    return Target(found.backend, 0, name, shared, 512 if name.startswith("gfx9") else 256)


def power_of_two(count: int, least: int = 16) -> int:
    """The least power of two that is at least both."""
    return max(least, 1 << max(0, count - 1).bit_length())


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension's values side by side; a copy only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()
