"""Weights that several processes of a machine have once: in a file in memory that has no name.

Each process loads the model as if it were alone. Where it has packed a tensor, the first writes it into the file, and
the others find it there: whose bytes are the same takes the file's pages for its own. So nothing is shared on trust,
and nothing is known here of formats. The file is gone with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable

import torch

from llm.base import system
from llm.base.construction import WeightPlace

_PAGE = 4096
# Smaller tensors are not shared: each takes whole pages.
_SMALL = 4 * _PAGE
# A page before each tensor: the bytes of the tensor, the bytes of its name, its name. Zeros: no tensor follows.
_HEAD = struct.Struct("<QI")
# Bytes between two returns of freed memory to the system.
_UNRELEASED = 64 << 20
# Of the file beyond twice the planned weights; pages that nobody writes take no memory.
_SPARE = 1 << 30


def shared_weights_file(weight_bytes: int) -> int:
    """The descriptor of a file for about so many bytes of weights, which the caller closes."""
    return system.unnamed_file("weights", _pages(2 * weight_bytes + _SPARE))


class SharedWeights(WeightPlace):
    """The weights of one process among those that have this file open.

    Args:
        descriptor: of the file.
        release: gives freed memory back to the system.

    Attributes:
        shared, own: bytes of weights that are in the file, and of those that are this process's alone.
    """

    packs_early = True

    def __init__(self, descriptor: int, release: Callable[[], None] = lambda: None) -> None:
        # Opened again: a lock is of an open file, and descriptors that were passed on are of the same one.
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size
        self._storage = _mapped(self._file, self._size)
        self._release = release
        self._unreleased = 0
        self._end = 0  # of what is known of the file
        self._places: dict[bytes, tuple[int, int]] = {}  # name -> where its bytes begin, how many they are
        self._kept: Counter[str] = Counter()
        self.shared = self.own = 0

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes <= _SMALL or not (tensor.is_contiguous() or tensor.t().is_contiguous()):
            self.own += tensor.nbytes
            return tensor
        self._kept[name] += 1
        key = f"{self._kept[name]} {name}".encode()
        data = (tensor if tensor.is_contiguous() else tensor.t()).reshape(-1).view(torch.uint8)
        start, nbytes = self._places.get(key) or self._placed(key, data)
        if nbytes != tensor.nbytes or not torch.equal(self._at(start, nbytes), data):
            self.own += tensor.nbytes
            return tensor
        self.shared += nbytes
        self._unreleased += nbytes
        if self._unreleased >= _UNRELEASED:
            self._unreleased = 0
            self._release()
        return torch.empty(0, dtype=tensor.dtype).set_(
            self._storage, start // tensor.itemsize, tensor.shape, tensor.stride()
        )

    def close(self) -> None:
        """Forget the file; the tensors stay valid."""
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)
            system.join_pages(self._storage.data_ptr(), self._end)
        self._release()

    def shared_bytes(self) -> int:
        return self.shared

    def _at(self, start: int, nbytes: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self._storage, start, (nbytes,), (1,))

    def _placed(self, key: bytes, data: torch.Tensor) -> tuple[int, int]:
        """Where the bytes of this name are, written by whoever was first; (0, 0): the file has no room for them."""
        system.lock(self._file, wait=True)
        try:
            self._read_on()
            if key in self._places:
                return self._places[key]
            start, end = self._end + _PAGE, self._end + _PAGE + _pages(data.nbytes)
            if end + _PAGE > self._size or _HEAD.size + len(key) > _PAGE:
                return 0, 0
            system.write_all(self._file, data.numpy(), start)
            # Last: of a process that dies before, nothing is seen, and the next one writes there.
            system.write_all(self._file, _HEAD.pack(data.nbytes, len(key)) + key, self._end)
            self._places[key], self._end = (start, data.nbytes), end
            return self._places[key]
        finally:
            system.unlock(self._file)

    def _read_on(self) -> None:
        """Learn what others have written since."""
        while True:
            head = os.pread(self._file, _PAGE, self._end)
            nbytes, length = _HEAD.unpack_from(head)
            if not nbytes:
                return
            self._places[head[_HEAD.size : _HEAD.size + length]] = self._end + _PAGE, nbytes
            self._end += _PAGE + _pages(nbytes)


def _pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def _mapped(descriptor: int, size: int) -> torch.UntypedStorage:
    """A private mapping: whoever writes to a weight changes a copy of its page. Huge pages may begin where it does."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 has the name
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    room = mmap.mmap(-1, size + system.HUGE_PAGE, **kind)
    offset = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % system.HUGE_PAGE
    place = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=offset).untyped_storage()
    system.map_over(place.data_ptr(), size, descriptor, kind["prot"], mmap.MAP_PRIVATE | no_reserve)
    return place
