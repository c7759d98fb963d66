"""The adapters that are loaded into one model: their packed matrices per slot, and what each adds to its layers.

The scheduler decides which adapter has which slot (`AdapterSlots`), `llm.loading.adapters` reads the files, layers add
(`llm.layers.lora`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from llm.base.text import list_names
from llm.config.engine import LoRAConfig
from llm.engine.step import Adapter
from llm.errors import CheckpointError
from llm.kernels.backend import Backend
from llm.kernels.weight import LoraTerm, LoraTerms
from llm.layers.lora import AdapterRows, LayerAdapters
from llm.layers.moe import FusedMoE
from llm.loading.adapters.folder import AdapterFolder, Pair
from llm.loading.adapters.targets import LayerTarget, Targets, check_switchable
from llm.loading.resolve import resolve_folder

Stamp = tuple[tuple[int, int, int], ...]


@dataclass
class _Loaded:
    """What a slot holds: an adapter's digest, and its terms by layer."""

    digest: str
    terms: list[tuple[LayerAdapters, LoraTerm]]


class ModelAdapters:
    """Args:
    model: loaded and packed.

    Attributes:
        tokens, logit rows: what the layers read: the slots of a step's tokens, and of the rows whose logits are
            computed.
        change_experts, change_head: a loaded adapter changes experts, the LM head.
    """

    def __init__(self, model: nn.Module, config: LoRAConfig, backend: Backend) -> None:
        self.tokens, self.logit_rows = AdapterRows(), AdapterRows()
        self.change_experts = self.change_head = False
        self._targets = Targets(model)
        self._config = config
        self._backend = backend
        self._slots: dict[int, _Loaded] = {}
        self._widths: dict[LayerAdapters, tuple[int, bool]] = {}  # channels, whether it looks rows up
        self._checked: dict[str, tuple[Stamp, str]] = {}
        self._experts: dict[LayerAdapters, FusedMoE] = {}
        self._heads: list[LayerAdapters] = []
        self._unreached: dict[LayerAdapters, str] = {}  # the names of layers that no step with adapters has called

    def check(self, path: str) -> str:
        """The digest of the adapter in a folder; raises `CheckpointError` if it cannot be used with this model."""
        folder_path = resolve_folder(path, weights=False, argument="lora_path")
        stamp = _stamp(folder_path)
        known = self._checked.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        with AdapterFolder(folder_path) as folder:
            pairs = self._targets.computed(folder)
            check_switchable(folder, pairs, self._config.max_lora_rank)
            for pair in pairs:
                self._targets.find(folder, pair)
                folder.matrices(pair)  # values that are not finite are refused before any work starts
            digest = folder.digest()
        self._checked[path] = stamp, digest
        return digest

    def load(self, slot: int, adapter: Adapter) -> bool:
        """Put the adapter into the slot; False if it is there already."""
        if slot in self._slots and self._slots[slot].digest == adapter.digest:
            return False
        if self.check(adapter.request.lora_path) != adapter.digest:
            raise CheckpointError(f"the adapter {adapter.request.lora_path} was changed while a call was using it.")
        before = self._slots.pop(slot, _Loaded("", [])).terms
        with AdapterFolder(resolve_folder(adapter.request.lora_path, weights=False, argument="lora_path")) as folder:
            terms = [self._term(slot, folder, pair) for pair in self._targets.computed(folder)]
        self._slots[slot] = _Loaded(adapter.digest, terms)
        self._update({layer for layer, _ in (*before, *terms)})
        return True

    def compute(self, forward: Callable[[], torch.Tensor], slots: torch.Tensor | None) -> torch.Tensor:
        """`forward()` of tokens with adapters in these slots.

        Raises:
            CheckpointError: a layer that an adapter changes was not called: the model reads its weight in another way.
        """
        with self.tokens.of(slots):
            hidden = forward()
        if slots is not None and self._unreached:
            self._unreached = {layer: name for layer, name in self._unreached.items() if not layer.is_reached}
            if self._unreached:
                raise CheckpointError(
                    f"this model reads the weights of {list_names(self._unreached.values(), 3)} without calling the "
                    "layer, and no adapter can change it per row; merge the adapter with LLM(model, merge_lora=...)."
                )
        return hidden

    def close(self) -> None:
        """Free the matrices even while a layer is referenced."""
        for loaded in self._slots.values():
            for layer, term in loaded.terms:
                layer.terms = None
                for weight in (term.down, term.up):
                    weight.data.data = torch.empty(0, device=weight.data.device)
        self._slots.clear()

    def _term(self, slot: int, folder: AdapterFolder, pair: Pair) -> tuple[LayerAdapters, LoraTerm]:
        target = self._targets.find(folder, pair)
        down, up, bias = folder.matrices(pair)
        if target.arrange is not None:
            up, bias = target.arrange(up, 0), None if bias is None else target.arrange(bias, 0)
        up, bias = target.of_rank(up), None if bias is None else target.of_rank(bias)
        pack, device = self._backend.ops.pack, self._backend.device
        packed = pack(up.contiguous().to(device))
        if bias is not None:
            packed = replace(packed, bias=bias.to(device))
        down = down.t().contiguous() if pair.is_lookup else down
        term = LoraTerm(slot, target.first, pack(down.to(device)), packed, folder.config.scale_of(pair.key))
        return self._layer(target, pair.is_lookup, pair.name), term

    def _layer(self, target: LayerTarget, is_lookup: bool, name_of: str) -> LayerAdapters:
        """The layer's adapters, which it gets with the first that changes it."""
        name = "head_adapters" if target.is_head else "adapters"
        found: LayerAdapters | None = getattr(target.layer, name)
        if found is None:
            operation = self._backend.ops.lora_embedding if is_lookup else self._backend.ops.lora
            found = LayerAdapters(self.logit_rows if target.is_head else self.tokens, operation)
            setattr(target.layer, name, found)
            self._widths[found] = target.width, is_lookup
            if target.is_head:
                self._heads.append(found)
            if target.experts is not None:  # which tokens reach one is not known before
                self._experts[found] = target.experts
            elif not target.is_head:
                self._unreached[found] = name_of
        return found

    def _update(self, layers: set[LayerAdapters]) -> None:
        by_layer: dict[LayerAdapters, list[LoraTerm]] = {layer: [] for layer in layers}
        for loaded in self._slots.values():
            for layer, term in loaded.terms:
                if layer in by_layer:
                    by_layer[layer].append(term)
        for layer, terms in by_layer.items():
            layer.terms = LoraTerms(tuple(terms), *self._widths[layer]) if terms else None
        changed = {self._experts[layer] for layer in self._experts if layer.terms is not None}
        for experts in self._experts.values():
            experts.adapter_rows = self.tokens if experts in changed else None
        self.change_experts = bool(changed)
        self.change_head = any(head.terms is not None for head in self._heads)


def _stamp(folder: Path) -> Stamp:
    """What changes when the files do."""
    found = []
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        try:
            state = os.stat(folder / name)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)
