"""The names of a checkpoint's tensors in transformers' models.

Owns `WeightNames`: transformers renames tensors of older releases while it loads them, and adds or removes the name of
the base model where a checkpoint was saved from another class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

import torch

from llm.base.text import clip
from llm.errors import CheckpointError
from llm.models.transformers_backend.skeleton import Theirs


class WeightNames:
    """Checkpoint name -> name in `model`, which is a skeleton with its own modules."""

    def __init__(self, model: Theirs) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(model)
        self.converters = [item for item in mapping if isinstance(item, WeightConverter)]
        self._renamings: Theirs = [item for item in mapping if not isinstance(item, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._names = dict.fromkeys(model.state_dict(), True)
        self._model = model
        self._merged: set[str] = set()
        # Of our layers of experts: the parameters, which have their names already, and the paths of the layers, whose
        # stacked tensors of transformers are cut into these.
        self.own: frozenset[str] = frozenset()
        self.layers_of_experts: frozenset[str] = frozenset()
        self._left_out = [re.compile(pattern) for pattern in _left_out(model)]

    def rename(self, name: str) -> str:
        """The name of a tensor after `merge`."""
        return name if name in self._merged or name in self.own else self.source(name)[0]

    def merge(
        self, tensors: Iterator[tuple[str, torch.Tensor]], names: Iterable[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream with the tensors that transformers makes of several (the experts of a layer), or splits.

        Args:
            names: of all tensors of the checkpoint; a tensor is made once all that it needs have come.
        """
        from transformers.core_model_loading import dot_natural_key

        needed: dict[str, dict[str, str]] = {}
        stacked: dict[str, str] = {}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = self.source(name)
            if pattern is not None and target in self._names:
                needed.setdefault(target, {})[name] = pattern
            elif target.rpartition(".")[0] in self.layers_of_experts:
                stacked[name] = target
        targets = {name: target for target, sources in needed.items() for name in sources}
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            if name not in targets:
                yield stacked.get(name, name), tensor
                continue
            target = targets[name]
            found = waiting.setdefault(target, {})
            found[name] = tensor.clone()
            if len(found) == len(needed[target]):
                yield from self._converted(target, needed[target], waiting.pop(target))

    def _converted(
        self, target: str, patterns: Mapping[str, str], tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        found = next(item for item in self.converters if any(key in item.source_patterns for key in patterns.values()))
        converter: Theirs = deepcopy(found)
        for name, pattern in patterns.items():
            converter.add_tensor(target, name, pattern, tensors.pop(name))
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"tensors for {target} cannot be merged: {clip(str(error))}.") from error
        for name, tensor in made.items():
            self._merged.add(name)
            yield name, tensor[0] if isinstance(tensor, list) else tensor

    def source(self, name: str) -> tuple[str, str | None]:
        """(the model's name, the pattern of the converter that makes its tensor of several; None: there is none)."""
        from transformers.core_model_loading import rename_source_key

        own = {"base_model_prefix": self._prefix, "meta_state_dict": self._names}
        renamed, pattern = rename_source_key(name, self._renamings, self.converters, **own)
        if renamed not in self._names and name in self._names:
            renamed, pattern = rename_source_key(name, [], [], **own)
        return renamed, pattern

    def ignores(self, name: str) -> bool:
        """True for a tensor of a checkpoint that transformers leaves out as well."""
        return any(pattern.search(name) for pattern in self._left_out)


def _left_out(model: Theirs) -> list[str]:
    buffers = [name for name, _ in model.named_buffers()]
    found = list(model._keys_to_ignore_on_load_unexpected or ())
    # Buffers that older releases stored.
    for ending in ("rotary_emb.inv_freq", "position_ids", "attn.bias", "attn.masked_bias", "attention.bias"):
        if any(name.endswith(ending) for name in buffers) or "bias" in ending or "inv_freq" in ending:
            found.append(rf"(^|\.){re.escape(ending)}$")
    return found
