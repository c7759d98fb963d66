"""Attention in the towers: transformers' modules call the kernels that attend within sequences of any lengths.

transformers finds an implementation of attention by a name in a module's config. The name has "flash" in it, for then
its modules tell where packed sequences (windows, frames) begin, in place of computing each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from llm.kernels.backend import Operations
from llm.layers.qwen2_decoder import CustomQwen2Decoder
from llm.layers.vision import RelPosAttention, attend_sequences
from llm.models.transformers_backend.skeleton import Theirs
from llm.quantization.base import QuantizationConfig

NAME = "llm_flash_sequences"
_operations: ContextVar[Operations] = ContextVar("operations of the tower that computes")


def use_in(model: nn.Module) -> None:
    """Let the modules that would use PyTorch's fused attention use the kernels, inside `computing`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = NAME  # type: ignore[union-attr]
        if hasattr(module, "fullatt_block_indexes") and hasattr(module, "window_size"):
            module.register_forward_pre_hook(_give_windows, with_kwargs=True)


def _give_windows(module: Theirs, args: tuple[Theirs, ...], kwargs: dict[str, Theirs]) -> tuple[Theirs, Theirs]:
    """Qwen2.5-VL's tower and its kin are given the order of their windows: they make it on the host, and index with it
    what is on the device."""
    from transformers.vision_utils import get_vision_window_index

    grid = kwargs["grid_thw"]
    order, bounds = get_vision_window_index(grid, module.spatial_merge_size, module.window_size, module.patch_size)
    return args, {**kwargs, "window_index": order.to(grid.device), "cu_window_seqlens": bounds}


@contextmanager
def computing(ops: Operations) -> Iterator[None]:
    """The kernels for towers that compute inside this context."""
    token = _operations.set(ops)
    try:
        yield
    finally:
        _operations.reset(token)


def is_sams(module: nn.Module) -> bool:
    """Whether it is the attention of SAM's encoder in transformers, which models copy."""
    return hasattr(module, "get_decomposed_rel_pos") and hasattr(module, "qkv") and hasattr(module, "proj")


class SamAttention(RelPosAttention):
    """The operation in the place of transformers' module."""

    def __init__(
        self, theirs: Theirs, prefix: str, dtype: torch.dtype, quant_config: QuantizationConfig | None = None
    ) -> None:
        tables = (theirs.rel_pos_h, theirs.rel_pos_w) if theirs.use_rel_pos else None
        size = None if tables is None else ((len(tables[0]) + 1) // 2, (len(tables[1]) + 1) // 2)
        super().__init__(
            theirs.qkv.in_features,
            theirs.num_attention_heads,
            theirs.qkv.bias is not None,
            theirs.use_rel_pos,
            size,
            params_dtype=dtype,
            quant_config=quant_config,
            prefix=prefix,
        )

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, output_attentions: object = None
    ) -> tuple[torch.Tensor, None]:
        return super().forward(hidden_states), None


def is_decoder_of_ocr(module: nn.Module) -> bool:
    """Whether it is the encoder of DeepSeek-OCR 2 in transformers, in the form that the operation has."""
    if type(module).__name__ != "DeepseekOcr2VisionEncoder":
        return False
    theirs: Theirs = module
    config = theirs.config
    is_plain = config.rope_parameters["rope_type"] == "default" and not theirs.has_sliding_layers
    return is_plain and config.hidden_act == "silu"


class OcrDecoder(CustomQwen2Decoder):
    """The operation in the place of transformers' module."""

    def __init__(
        self, theirs: Theirs, prefix: str, dtype: torch.dtype, quant_config: QuantizationConfig | None = None
    ) -> None:
        config = theirs.config
        super().__init__(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.intermediate_size,
            config.rms_norm_eps,
            config.rope_parameters["rope_theta"],
            dtype,
            quant_config,
            prefix,
        )

    def forward(self, inputs_embeds: torch.Tensor, num_patches: int, **_: object) -> Theirs:  # type: ignore[override]
        kinds = torch.ones(inputs_embeds.shape[:2], dtype=torch.int64, device=inputs_embeds.device)
        kinds[:, :num_patches] = 0
        found = super().forward(inputs_embeds, kinds)
        return SimpleNamespace(last_hidden_state=found, hidden_states=None, attentions=None)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **unread: Theirs,
) -> tuple[torch.Tensor, None]:
    """query float [B, heads, N, size], key and value [B, kv heads, M, size] -> [B, N, heads, size], as transformers has
    it. `attention_mask`: bool, True where a token is seen, or float to add to scores; [B, 1 or heads, N, M]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None and is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    seen = _seen(attention_mask, query, key) if not is_causal else None
    plain = not is_causal and unread.get("softcap") is None and unread.get("position_bias") is None
    if not plain or seen is None or value.shape[-1] != key.shape[-1]:
        return _explicitly(query, key, value, attention_mask, scale, bool(is_causal), unread), None
    batch, length = query.shape[0], query.shape[2]
    queries, keys = [length] * batch, [key.shape[2]] * batch
    own, keyed, valued = (part.transpose(1, 2).flatten(0, 1).to(query.dtype) for part in (query, key, value))
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        queries, keys = (bounds.diff().tolist() for bounds in (cu_seq_lens_q, cu_seq_lens_k))
    elif attention_mask is not None:
        keys = seen.sum(-1).tolist()
        kept = seen.flatten()
        if queries == [key.shape[2]] * batch:  # what no token sees sees nothing
            queries, own = keys, own[kept]
        keyed, valued = keyed[kept], valued[kept]
        if any(few > many for few, many in zip(queries, keys, strict=True)):
            return _explicitly(query, key, value, attention_mask, scale, False, unread), None
    found = attend_sequences(_operations.get(), own, keyed, valued, queries, keys, scale)
    if len(found) < batch * length:
        found = found.new_zeros(batch * length, *found.shape[1:]).index_copy(0, seen.flatten().nonzero()[:, 0], found)
    return found.view(batch, length, *found.shape[1:]).to(query.dtype), None


def _seen(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """bool [B, M]: the keys that every query of a batch row sees; None: its queries see different ones."""
    if mask is None:
        return torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    if mask.dtype != torch.bool:
        least = torch.finfo(mask.dtype).min
        if not bool(((mask == 0) | (mask <= least)).all()):
            return None
        mask = mask == 0
    mask = mask.expand(query.shape[0], -1, -1, -1)
    seen = mask.any(1).any(1)
    rows = mask.any(-1, keepdim=True)
    return seen if bool((mask == (rows & seen[:, None, None])).all()) and bool(seen.any(-1).all()) else None


def _explicitly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    more: Theirs,
) -> torch.Tensor:
    """With all scores in memory, for what the kernels have no form of."""
    if more.get("position_bias") is not None:
        raise NotImplementedError("a bias of positions")
    groups = query.shape[1] // key.shape[1]
    key, value = (part.float().repeat_interleave(groups, 1) for part in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scale
    if more.get("softcap") is not None:
        scores = torch.tanh(scores / more["softcap"]) * more["softcap"]
    if is_causal:
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~lower, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (F.softmax(scores, -1) @ value).transpose(1, 2).to(query.dtype)
