"""Weights that memory has no room for: in a file, from which the system reads pages when they are used.

Which layers call `keep` is theirs to say; how many bytes stay in memory is planned by `llm.setup.plan`.

The file holds packed weights: the checkpoint's own rows are in another order than the kernels read, quantized or not.
Its pages are clean once they are written, so the system drops them where memory is short, and reads them again. Nothing
else has a name for the file, and it is gone with the last tensor that is in it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from llm.base import system
from llm.base.construction import WeightPlace
from llm.config import env
from llm.errors import OutOfMemoryError

# Bytes of one mapping; a larger tensor has its own.
_PART = 256 << 20
# What is written between two waits for the disk: so many bytes cannot be dropped.
_UNWRITTEN = 64 << 20
# What `fetch` asks for: in one call, and in all. The system reads no more than a device's own limit for one call.
_ADVISED = 128 << 10
_AT_ONCE = 64 << 20
_PAGE = 4096
_SMALL = 4 * _PAGE
_EXPERT = re.compile(r"\.experts\.\d+\.")
_IN_MEMORY = ("tmpfs", "ramfs")


class WeightFile(WeightPlace):
    """Keeps weights as they are while there is room for them in memory, and moves the others into a file.

    Experts have room only beside all other weights: a token reads few of them, and everything else.

    Args:
        folder: where the file is made.
        room: bytes of weights that may stay in memory.
        release: gives freed memory back to the system.

    Attributes:
        in_memory, in_file: bytes.
    """

    is_slow = packs_early = True

    def __init__(self, folder: Path, room: int, release: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.in_memory = self.in_file = 0
        self._room, self._expert_room = room, 0
        self._release = release
        self._storage: torch.UntypedStorage | None = None
        self._descriptor = -1
        self._used = self._unwritten = 0
        # Address of each part -> its bytes.
        self._parts: dict[int, int] = {}
        self._read_ahead = system.read_ahead()

    def divide(self, model: nn.Module, total: int) -> None:
        """Leave `model`'s experts the room beside its other weights; `total`: the planned bytes of all."""
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        every = sum(sizes.values())
        others = sum(size for name, size in sizes.items() if not _EXPERT.search(name))
        if every:
            room = min(self._room, total * others // every)
            self._room, self._expert_room = room, self._room - room

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself, or another with the same values in the file.

        `name`: the layer's path.

        Raises:
            OutOfMemoryError: the file cannot grow.
        """
        if tensor.nbytes <= _SMALL or not (tensor.is_contiguous() or tensor.t().is_contiguous()):
            return tensor
        is_expert = _EXPERT.search(f"{name}.") is not None
        if tensor.nbytes <= (self._expert_room if is_expert else self._room):
            self._expert_room -= tensor.nbytes * is_expert
            self._room -= tensor.nbytes * (not is_expert)
            self.in_memory += tensor.nbytes
            return tensor
        try:
            return self._move(tensor)
        except OSError as error:
            raise OutOfMemoryError(
                f"the weights cannot be written to a file in {self.folder} ({error.strerror}); free some of the disk, "
                "or set LLM_OFFLOAD_FOLDER to a folder on a larger one."
            ) from error

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the system begin to read exactly these: reading ahead from a page, it would read their neighbours too.

        What the kernel does not need at once stays unread: pages that come too early drive others out.
        """
        left = _AT_ONCE
        if self._read_ahead is None:
            return
        for tensor in tensors:
            start = tensor.data_ptr()
            if any(part <= start < part + size for part, size in self._parts.items()):
                for offset in range(0, min(left, tensor.nbytes), _ADVISED):
                    self._read_ahead(start + offset, min(_ADVISED, tensor.nbytes - offset))
                left -= tensor.nbytes

    def where(self) -> str:
        """Where the weights are, as a sentence."""
        return f"{self.in_memory:,} bytes are in memory, and {self.in_file:,} in a file and read when they are used"

    def close(self) -> None:
        """End writing. The tensors stay valid."""
        descriptor, self._descriptor, self._storage = self._descriptor, -1, None
        if descriptor >= 0:
            os.close(descriptor)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = (tensor if tensor.is_contiguous() else tensor.t()).reshape(-1)
        size = -(-tensor.nbytes // _PAGE) * _PAGE
        if self._storage is None or self._used + size > self._storage.nbytes():
            self._wait_for_disk()
            self.close()
            self._used = 0
            self._storage = self._new_part(max(_PART, size))
        start = self._used
        system.write_all(self._descriptor, flat.view(torch.uint8).numpy(), start)
        self._used += size
        self.in_file += tensor.nbytes
        self._unwritten += size
        if self._unwritten >= _UNWRITTEN:
            self._wait_for_disk()
        # Not a view, see `_untouched_zeros` in llm/kernels/backend.py.
        moved = torch.empty(0, dtype=tensor.dtype)
        return moved.set_(self._storage, start // tensor.itemsize, tensor.shape, tensor.stride())

    def _new_part(self, size: int) -> torch.UntypedStorage:
        """A private mapping of a new file: whoever writes to a weight changes a copy of its page."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor, path = tempfile.mkstemp(prefix="weights-", dir=self.folder)
        try:
            os.ftruncate(self._descriptor, size)
            part = torch.from_file(path, shared=False, size=size, dtype=torch.uint8).untyped_storage()
        finally:
            os.unlink(path)
        self._parts[part.data_ptr()] = size
        return part

    def _wait_for_disk(self) -> None:
        if self._descriptor >= 0:
            system.wait_for_disk(self._descriptor)
        self._unwritten = 0
        self._release()


def offload_folder() -> Path:
    """LLM_OFFLOAD_FOLDER, by default beside the compiled kernels; raises `OutOfMemoryError` without one."""
    named = env.get("LLM_OFFLOAD_FOLDER")
    if named is not None:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(caches):
        caches = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(caches):
        raise OutOfMemoryError("there is no folder for weights, as HOME is not set; set LLM_OFFLOAD_FOLDER to one.")
    return Path(caches) / "offline-llm" / "weights"


def check_folder(folder: Path, needed: int) -> None:
    """Raise `OutOfMemoryError` unless `needed` bytes fit on the disk of `folder`, which exists or can be made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if _file_system(existing) in _IN_MEMORY:
        raise OutOfMemoryError(
            f"the weights exceed memory, and {folder}, where a file would hold them, is memory itself (tmpfs); set "
            "LLM_OFFLOAD_FOLDER to a folder on a disk."
        )
    free = system.disk_free(existing)
    if needed > free:
        raise OutOfMemoryError(
            f"the weights exceed memory, and a file for {needed} bytes of them does not fit {folder}, where {free} are "
            "free; set LLM_OFFLOAD_FOLDER to a folder on a larger disk, or pass quantization= to make them smaller."
        )


def _file_system(path: Path) -> str:
    """The type of the file system that `path` is on; "" if unknown."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return ""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""
