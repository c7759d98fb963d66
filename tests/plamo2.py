"""PLaMo 2 in float64, written from its published description: transformers has no code for it.

Plain PyTorch, one token after another, with nothing of the engine's. `register()` makes transformers' auto classes know
it, so that the rows of `tiny_models.py` are written and held against as those of other families are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class Plamo2Config(PretrainedConfig):  # type: ignore[misc]
    model_type = "plamo2"

    def __init__(self, **given: Any) -> None:
        for key in [key for key in given if key not in ("bos_token_id", "eos_token_id", "pad_token_id")]:
            setattr(self, key, given.pop(key))
        super().__init__(**given)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class Norm(nn.Module):
    """A checkpoint has weight - offset."""

    def __init__(self, config: Plamo2Config, offset: float) -> None:
        super().__init__()
        self.weight, self.offset, self.eps = nn.Parameter(torch.zeros(config.hidden_size)), offset, config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self.weight + self.offset, self.eps)


class Mamba(nn.Module):
    def __init__(self, config: Plamo2Config) -> None:
        super().__init__()
        self.heads, self.size, self.states = config.mamba_num_heads, config.hidden_size_per_head, config.mamba_d_state
        self.eps, self.taps, width = config.rms_norm_eps, config.mamba_d_conv, self.heads * self.size
        rank = max(64, config.hidden_size // 16)
        self.sizes = [self.states, self.states, rank]
        self.in_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.conv1d = nn.Conv1d(width, width, self.taps, groups=width, bias=False)
        self.bcdt_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(rank, self.heads, bias=False)
        self.dt_bias, self.D = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(torch.ones(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.B_norm_weight, self.C_norm_weight = (nn.Parameter(torch.ones(self.states)) for _ in range(2))
        self.dt_norm_weight = nn.Parameter(torch.ones(rank))
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = len(hidden)
        gate, x = self.in_proj(hidden).view(length, self.heads, 2, self.size).unbind(2)
        x = F.silu(self.conv1d(F.pad(x.flatten(1).t(), (self.taps - 1, 0))[None])[0].t())
        b, c, dt = self.bcdt_proj(x).split(self.sizes, -1)
        b, c = normed(b, self.B_norm_weight, self.eps), normed(c, self.C_norm_weight, self.eps)
        dt = F.softplus(self.dt_proj(normed(dt, self.dt_norm_weight, self.eps)) + self.dt_bias)
        x, outputs = x.view(length, self.heads, self.size), []
        state = torch.zeros(self.heads, self.size, self.states, dtype=x.dtype)
        for token in range(length):
            decay = torch.exp(-torch.exp(self.A_log) * dt[token])[:, None, None]
            state = decay * state + torch.einsum("hp,n->hpn", dt[token][:, None] * x[token], b[token])
            outputs.append(state @ c[token] + self.D[:, None] * x[token])
        return self.out_proj((torch.stack(outputs) * F.silu(gate)).flatten(1))


class Attention(nn.Module):
    def __init__(self, config: Plamo2Config, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.eps = config.hidden_size_per_head, config.rms_norm_eps
        is_full = index in config.full_attention_idx
        self.window = None if is_full else config.attention_window_size
        self.theta = config.rope_theta if is_full else config.rope_local_theta
        self.qkv_proj = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.q_weight = nn.Parameter(torch.ones(self.heads, self.size))
        self.k_weight = nn.Parameter(torch.ones(self.kv_heads, self.size))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.size // 2
        angles = self.theta ** (-torch.arange(half, dtype=x.dtype) / half)
        turns = torch.arange(len(x), dtype=x.dtype)[:, None, None] * angles
        first, second = x.split(half, -1)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.qkv_proj(hidden).view(len(hidden), -1, self.size)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = normed(q, self.q_weight, self.eps), normed(k, self.k_weight, self.eps)
        q, k = self.rotated(q), self.rotated(k)
        k, v = (item.repeat_interleave(self.heads // self.kv_heads, 1) for item in (k, v))
        ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (ago >= 0) & (ago <= (len(q) if self.window is None else self.window))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.size**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: Plamo2Config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Plamo2Config, index: int) -> None:
        super().__init__()
        middle, count = config.mamba_step // 2, config.num_hidden_layers
        attends = index == count - 1 if count <= middle else index % config.mamba_step == middle
        self.mixer, self.mlp = Attention(config, index) if attends else Mamba(config), MLP(config)
        self.pre_mixer_norm, self.post_mixer_norm = Norm(config, 1), Norm(config, 1 / 5)
        self.pre_mlp_norm, self.post_mlp_norm = Norm(config, 1), Norm(config, 1 / 5**1.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.post_mixer_norm(self.mixer(self.pre_mixer_norm(hidden)))
        return hidden + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(hidden)))


class Decoder(nn.Module):
    def __init__(self, config: Plamo2Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))


class Model(nn.Module):
    def __init__(self, config: Plamo2Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers, self.norm = Decoder(config), Norm(config, 1)


class Plamo2ForCausalLM(PreTrainedModel):  # type: ignore[misc]
    config_class = Plamo2Config
    computes_in = torch.float64

    def __init__(self, config: Plamo2Config) -> None:
        super().__init__(config)
        self.model = Model(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """As they are built."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        self.to(self.computes_in)
        (ids,) = input_ids
        hidden = self.model.embed_tokens(ids)
        for layer in self.model.layers.layers:
            hidden = layer(hidden)
        return CausalLMOutput(logits=(self.model.norm(hidden) @ self.model.embed_tokens.weight.t())[None])


@cache
def register() -> None:
    AutoConfig.register("plamo2", Plamo2Config)
    AutoModelForCausalLM.register(Plamo2Config, Plamo2ForCausalLM)
