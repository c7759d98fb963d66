"""Where the sites of a model are: each a `Hook` at a module, which reads its tokens' activations and puts back others.

Modules are called with the tokens of a step along the first dimension; transformers' have a batch dimension of 1 before
it. The residual stream between two layers is the sum of two tensors (`llm.models.decoder.layer`): what is put back is
one of them, and the other is zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from llm.inside.names import FINAL, LOGITS, Scoring, Site
from llm.layers.attention import Attention
from llm.layers.latent_attention import LatentAttention, MultiHeadLatentAttentionWrapper
from llm.layers.mamba import DecayingLayer, MambaBase
from llm.layers.moe import FusedMoE
from llm.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    PreAndPostNormLayer,
    PreNormLayer,
)
from llm.models.transformers_backend.model import TransformersForCausalLM

# Token indices int64 [M] -> their activations [M, ...].
Take = Callable[[torch.Tensor], torch.Tensor]
# What a module is called with, and returns: each has its own.
Value = Any
Forward = Callable[..., Value]
Arguments = tuple[Value, ...]
Named = dict[str, Value]


class Visit(Protocol):
    """Called where the model is at a site, with how many tokens it computes.

    Returns (token indices, activations) to put back, or None. `chosen`: of a router, the experts of tokens.
    """

    def __call__(
        self, site: Site, tokens: int, take: Take, chosen: Take | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None: ...


@dataclass(frozen=True, eq=False)
class Hook:
    """A site at a module; `run` is the module's forward with a visit."""

    site: Site
    module: nn.Module

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        raise NotImplementedError

    def _changed(self, x: torch.Tensor, visit: Visit) -> torch.Tensor:
        """`x` of the step's tokens, after the visit."""
        rows = _by_token(x, self.site)
        found = visit(self.site, len(rows), lambda tokens: rows[tokens])
        if found is None:
            return x
        return rows.index_copy(0, found[0], found[1].to(rows.dtype)).view(x.shape)


def _by_token(x: torch.Tensor, site: Site) -> torch.Tensor:
    """[N, *shape], a view."""
    return x.reshape(x.numel() // site.size, *site.shape)


class OutputOf(Hook):
    """What the module returns; of a tuple, the first."""

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return self._changed(output[0], visit), *output[1:]
        return self._changed(output, visit)


@dataclass(frozen=True, eq=False)
class InputOf(Hook):
    """An argument of the module, by its place or, if it is passed so, its name."""

    index: int = 0
    name: str = "hidden_states"

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        if self.index < len(args):
            changed = self._changed(args[self.index], visit)
            return forward(*args[: self.index], changed, *args[self.index + 1 :], **kwargs)
        return forward(*args, **{**kwargs, self.name: self._changed(kwargs[self.name], visit)})


@dataclass(frozen=True, eq=False)
class TwoInputsOf(Hook):
    """Two arguments of the module from place `index` on, side by side in the channels."""

    index: int = 0

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        heads = self.site.shape[:-1]
        pair = [item.view(len(item), *heads, item.shape[-1]) for item in args[self.index : self.index + 2]]
        found = visit(self.site, len(pair[0]), lambda tokens: torch.cat([item[tokens] for item in pair], dim=-1))
        if found is None:
            return forward(*args, **kwargs)
        parts = found[1].split([item.shape[-1] for item in pair], dim=-1)
        changed = [
            item.index_copy(0, found[0], part.to(item.dtype)).view(given.shape)
            for item, part, given in zip(pair, parts, args[self.index :], strict=False)
        ]
        return forward(*args[: self.index], *changed, *args[self.index + 2 :], **kwargs)


class StreamInto(Hook):
    """The sum of the first two arguments, of which the second may be None."""

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        return forward(*_stream(self.site, visit, *args[:2]), *args[2:], **kwargs)


class StreamOutOf(Hook):
    """The sum of the two tensors that the module returns, of which the second may be None."""

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        return _stream(self.site, visit, *forward(*args, **kwargs))


def _stream(
    site: Site, visit: Visit, hidden: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    def take(tokens: torch.Tensor) -> torch.Tensor:
        summed = hidden[tokens] if residual is None else hidden[tokens] + residual[tokens]
        return _by_token(summed, site)

    found = visit(site, len(hidden), take)
    if found is None:
        return hidden, residual
    hidden = hidden.index_copy(0, found[0], found[1].flatten(1).to(hidden.dtype))
    return hidden, None if residual is None else residual.index_fill(0, found[0], 0.0)


class RouterChoice(Hook):
    """The numbers of the experts that the router chose."""

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        experts: FusedMoE = self.module  # type: ignore[assignment]
        ids = experts.select(*_arguments(experts, args, kwargs))[1]
        visit(self.site, len(ids), lambda tokens: ids[tokens])
        return forward(*args, **kwargs)


class RouterWeights(Hook):
    """The weights of the experts that the router chose; changed ones make another sum of the same experts."""

    def run(self, forward: Forward, visit: Visit, args: Arguments, kwargs: Named) -> Value:
        experts: FusedMoE = self.module  # type: ignore[assignment]
        given = _arguments(experts, args, kwargs)
        weights, ids = experts.select(*given)
        output = forward(*args, **kwargs)
        found = visit(self.site, len(ids), lambda tokens: weights[tokens], lambda tokens: ids[tokens])
        if found is None:
            return output
        changed = weights.index_copy(0, found[0], found[1])
        rows, y = output.reshape(len(ids), -1), experts.combine(given[0], changed, ids)
        return rows.index_copy(0, found[0], y[found[0]].to(rows.dtype)).view(output.shape)


def _arguments(experts: FusedMoE, args: Arguments, kwargs: Named) -> tuple[torch.Tensor, ...]:
    """What `select` takes: the hidden states [N, H], and the router's logits or its choice."""
    hidden, *others = (*args, *kwargs.values())
    return hidden.reshape(-1, experts.hidden_size), *others


def find_hooks(model: nn.Module, cache_dtype: torch.dtype) -> dict[str, Hook]:
    """Name -> hook, in the order of computing; a model without layers that are known has none."""
    if isinstance(model, TransformersForCausalLM):
        found = _of_transformers(model)
    elif isinstance(model, DecoderForCausalLM):
        found = _of_decoder(model, cache_dtype)
    else:
        return {}
    return {hook.site.name: hook for hook in found}


def final_sites(model: nn.Module, vocab_size: int) -> list[Site]:
    """Sites behind the model's forward; logits are changed by logits processors."""
    found = [Site(LOGITS, (vocab_size,), can_change=False)]
    if isinstance(model, DecoderForCausalLM):  # its LM head may be narrower than its layers
        found.insert(0, Site(FINAL, (model.config.embedding_size or model.config.hidden_size,)))
    elif isinstance(model, TransformersForCausalLM):
        found.insert(0, Site(FINAL, (_their_width(model),)))
    return found


# --- Models of this package. ---


def _of_decoder(model: DecoderForCausalLM, cache_dtype: torch.dtype) -> Iterator[Hook]:
    hidden = model.config.hidden_size
    for index, layer in enumerate(model.model.layers):
        if isinstance(layer, DecoderLayer):
            yield from _of_layer(layer, f"layers.{index}", f"model.layers.{index}", hidden, cache_dtype)


def _of_layer(layer: DecoderLayer, name: str, path: str, hidden: int, cache_dtype: torch.dtype) -> Iterator[Hook]:
    stream = (hidden,) if layer.streams == 1 else (layer.streams, hidden)
    yield StreamInto(Site(f"{name}.input", stream, module=path), layer)
    parts = list(_parts(layer))
    for part, kind, child in parts:
        if kind == "attention":
            yield from _of_attention(child, f"{name}.attention", f"{path}.{part}", hidden, cache_dtype)
    for part, kind, child in parts:
        if kind == "mixer":
            yield from _around(child, f"{name}.mixer", f"{path}.{part}", hidden)
    yield from _middle(layer, name, path, hidden)
    for part, kind, child in parts:
        if kind == "mlp":
            yield from _of_mlp(child, f"{name}.mlp", f"{path}.{part}", hidden)
    yield from _of_experts(layer, f"{name}.experts", path)
    yield StreamOutOf(Site(f"{name}.output", stream, module=path), layer)


def _parts(layer: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(name, kind, module) of a layer's attention, recurrence and MLP. A block that several layers share is none."""
    for name, child in layer.named_children():
        if name == "shared_transformer":
            continue
        if any(isinstance(part, Attention | LatentAttention) for part in child.modules()):
            yield name, "attention", child
        elif isinstance(child, MambaBase | DecayingLayer):
            yield name, "mixer", child
        elif name in ("mlp", "mixer", "feed_forward"):
            yield name, "mlp", child


def _around(module: nn.Module, name: str, path: str, hidden: int) -> Iterator[Hook]:
    yield InputOf(Site(f"{name}.input", (hidden,), module=path), module)
    yield OutputOf(Site(f"{name}.output", (hidden,), module=path), module)


def _of_attention(module: nn.Module, name: str, path: str, hidden: int, cache_dtype: torch.dtype) -> Iterator[Hook]:
    yield InputOf(Site(f"{name}.input", (hidden,), module=path), module)
    attention = getattr(module, "attn", None)
    heads: tuple[int, ...] | None = None
    if isinstance(module, MultiHeadLatentAttentionWrapper):
        heads = module.num_heads, module.v_head_dim
        own = module.attn
        width, where = own.latent_size + own.rope_size, f"{path}.attn"
        yield TwoInputsOf(Site(f"{name}.query", (own.num_heads, width), in_parts=True, module=where), own)
        yield TwoInputsOf(Site(f"{name}.key", (1, width), module=where), own, 2)
        scoring = Scoring(1, own.scale, None, None, None, None, None, _kept_as(cache_dtype))
        yield Hook(
            Site(
                f"{name}.pattern", (own.num_heads, -1), can_change=False, in_parts=True, module=where, scoring=scoring
            ),
            own,
        )
    elif isinstance(attention, Attention):
        heads = attention.num_heads, attention.head_size
        if hasattr(module, "qkv_proj"):  # a layer that reads another's cache does not call it
            kv_heads = attention.num_kv_heads, attention.head_size
            for place, (part, shape) in enumerate((("query", heads), ("key", kv_heads), ("value", kv_heads))):
                yield InputOf(
                    Site(f"{name}.{part}", shape, in_parts=True, module=f"{path}.attn"), attention, place, part
                )
            yield Hook(_pattern(attention, f"{name}.pattern", f"{path}.attn", cache_dtype), attention)
    if heads is not None and hasattr(module, "o_proj"):
        yield InputOf(
            Site(f"{name}.heads", heads, in_parts=True, module=f"{path}.o_proj"), module.get_submodule("o_proj")
        )
    yield OutputOf(Site(f"{name}.output", (hidden,), module=path), module)


def _pattern(attention: Attention, name: str, path: str, cache_dtype: torch.dtype) -> Site:
    """It has no step of its own: queries and keys are read, and weighed when the request has ended."""
    params = attention.backend.params
    sinks, slopes = (
        None if one is None else one.detach().float().cpu().numpy() for one in (params.sinks, params.alibi_slopes)
    )
    scoring = Scoring(
        params.num_kv_heads,
        params.scale,
        params.sliding_window,
        params.soft_cap,
        params.attention_chunk,
        sinks,
        slopes,
        _kept_as(cache_dtype),
    )
    return Site(name, (attention.num_heads, -1), can_change=False, in_parts=True, module=path, scoring=scoring)


def _kept_as(cache_dtype: torch.dtype) -> str:
    return str(cache_dtype).removeprefix("torch.") if cache_dtype.itemsize > 1 else "float32"


def _middle(layer: DecoderLayer, name: str, path: str, hidden: int) -> Iterator[Hook]:
    """The stream between attention and MLP, if there is one."""
    if isinstance(layer, PreNormLayer):
        norm = "post_attention_layernorm"
    elif isinstance(layer, PreAndPostNormLayer) and layer.streams == 1:
        norm = "pre_feedforward_layernorm"
    else:
        return
    yield StreamInto(Site(f"{name}.middle", (hidden,), module=f"{path}.{norm}"), layer.get_submodule(norm))


def _of_mlp(module: nn.Module, name: str, path: str, hidden: int) -> Iterator[Hook]:
    yield InputOf(Site(f"{name}.input", (hidden,), module=path), module)
    down = getattr(module, "down_proj", None)
    if isinstance(down, nn.Module):
        size: int = down.input_size  # type: ignore[assignment]
        yield InputOf(Site(f"{name}.activation", (size,), in_parts=True, module=f"{path}.down_proj"), down)
    yield OutputOf(Site(f"{name}.output", (hidden,), module=path), module)


def _of_experts(layer: nn.Module, name: str, layer_path: str) -> Iterator[Hook]:
    """The experts of a layer; one that every token has, with a gate, is a layer of one expert and none of these."""
    for part, module in layer.named_modules():
        if not isinstance(module, FusedMoE) or module.num_experts == 1:
            continue
        path, chosen = f"{layer_path}.{part}", (module.top_k,)
        if module.router is not None or module.custom_routing_function is not None:
            yield InputOf(Site(f"{name}.logits", (module.num_experts,), module=path), module, 1, "router_logits")
        yield RouterChoice(Site(f"{name}.chosen", chosen, "int64", can_change=False, module=path), module)
        yield RouterWeights(Site(f"{name}.weights", chosen, module=path), module)
        yield OutputOf(Site(f"{name}.output", (module.hidden_size,), module=path), module)
        return


# --- Models on transformers' code. ---

_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "self_attn_block")
_MIXERS = ("linear_attn", "mamba", "mixer", "conv", "temporal_block", "recurrent", "short_conv", "ssm")
_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe")
_OUT = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_DOWN = ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "w2", "fc_out", "wo")


def _their_width(model: TransformersForCausalLM) -> int:
    width: int = model.their_config.hidden_size
    return width


def _of_transformers(model: TransformersForCausalLM) -> Iterator[Hook]:
    hidden = _their_width(model)
    paths = {module: path for path, module in model.named_modules()}
    for index, layer in enumerate(_layers(model)):
        name, path = f"layers.{index}", paths[layer]
        yield InputOf(Site(f"{name}.input", (hidden,), module=path), layer)
        for part, child in layer.named_children():
            where = f"{path}.{part}"
            if part in _ATTENTION:
                yield from _their_attention(model, child, f"{name}.attention", where, hidden)
            elif part in _MIXERS:
                yield from _around(child, f"{name}.mixer", where, hidden)
            elif part in _MLPS:
                yield from _their_mlp(child, f"{name}.mlp", where, hidden)
        yield from _of_experts(layer, f"{name}.experts", path)
        yield OutputOf(Site(f"{name}.output", (hidden,), module=path), layer)


def _layers(model: TransformersForCausalLM) -> Sequence[nn.Module]:
    """The longest list of modules of one class in the base model, which is outside of all others."""
    lists = [module for module in model.base.modules() if isinstance(module, nn.ModuleList)]
    inner = {part for one in lists for child in one for part in child.modules()}
    outer = [one for one in lists if one not in inner]
    return max(map(list, outer), key=len, default=[])


def _their_attention(
    model: TransformersForCausalLM, module: nn.Module, name: str, path: str, hidden: int
) -> Iterator[Hook]:
    yield InputOf(Site(f"{name}.input", (hidden,), module=path), module)
    last = _last_linear(module, _OUT)
    if last is not None:
        count = getattr(model.their_config, "num_attention_heads", None)
        size: int = last[1].input_size  # type: ignore[assignment]
        shape = (count, size // count) if isinstance(count, int) and count and not size % count else (size,)
        yield InputOf(Site(f"{name}.heads", shape, module=f"{path}.{last[0]}"), last[1])
    yield OutputOf(Site(f"{name}.output", (hidden,), module=path), module)


def _their_mlp(module: nn.Module, name: str, path: str, hidden: int) -> Iterator[Hook]:
    yield InputOf(Site(f"{name}.input", (hidden,), module=path), module)
    last = _last_linear(module, _DOWN)
    if last is not None:
        size: int = last[1].input_size  # type: ignore[assignment]
        yield InputOf(Site(f"{name}.activation", (size,), module=f"{path}.{last[0]}"), last[1])
    yield OutputOf(Site(f"{name}.output", (hidden,), module=path), module)


def _last_linear(module: nn.Module, names: Sequence[str]) -> tuple[str, nn.Module] | None:
    children = dict(module.named_children())
    return next(((name, children[name]) for name in names if hasattr(children.get(name), "input_size")), None)
