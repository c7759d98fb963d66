"""Whether the operations of transformers' code that stay PyTorch's round independently of the batch.

Owns the list of PyTorch's operations whose bits depend on their own inputs alone: moves of data, and arithmetic with
one correctly rounded result. Sums depend on how they are split over threads and vectors, and functions such as exp on
whether an element is in a vector's last, partial step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llm.models.transformers_backend.theirs import Theirs

_FIXED = frozenset(
    """
    view _unsafe_view reshape transpose permute unsqueeze squeeze expand clone copy_ _to_copy select slice split
    split_with_sizes index index_select gather embedding cat stack alias detach lift_fresh unbind t arange full zeros
    ones empty zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full scalar_tensor fill_
    add sub mul neg div rsub abs clamp clamp_min clamp_max maximum minimum where masked_fill floor round relu sqrt
    eq ne lt le gt ge bitwise_not bitwise_and bitwise_or logical_not logical_and logical_or constant_pad_nd repeat
    chunk flip roll tril triu _local_scalar_dense item is_nonzero remainder fmod sign all any view_as_real
    view_as_complex narrow contiguous add_ mul_ sub_ div_ _reshape_alias as_strided diff new_empty_strided unfold
    empty_strided
    """.split()
)


class Uses:
    """Which other operations a forward pass uses.

    Args:
        model: runs on stand-ins for its weights.
        own: paths of the modules that our kernels compute.
    """

    def __init__(self, model: nn.Module, *own: Iterable[str]) -> None:
        self._own = [model.get_submodule(name) for names in own for name in names]
        self._inside = 0
        self._found: dict[str, None] = {}

    def reason(self) -> str | None:
        """Why answers may depend on the batch; None: they do not."""
        if not self._found:
            return None
        return f"transformers' code calls PyTorch's {', '.join(self._found)}, whose rounding may depend on the batch"

    @contextmanager
    def watching(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Record what is computed outside of our modules and of the attention `layers`."""
        handles = []
        for module in {id(module): module for module in (*self._own, *layers)}.values():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with _Watch(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, *_: object) -> None:
        self._inside += 1

    def _leave(self, *_: object) -> None:
        self._inside -= 1

    def note(self, func: Theirs, args: tuple[Theirs, ...]) -> None:
        name = func.overloadpacket.__name__
        if self._inside or name in _FIXED or (name == "pow" and args[1] in (2, 2.0)) or _is_outer(name, args):
            return
        self._found[name] = None


def _is_outer(name: str, args: tuple[Theirs, ...]) -> bool:
    """A product of a column with a row: each result is one product."""
    return name in ("mm", "bmm") and args[0].shape[-1] == 1


class _Watch(TorchDispatchMode):
    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in `llm.kernels.cpu.program`: True would make torch import its compiler.
        return False

    def __torch_dispatch__(self, func: Theirs, types: Theirs, args: Theirs = (), kwargs: Theirs = None) -> Theirs:
        self._uses.note(func, args)
        return func(*args, **(kwargs or {}))
