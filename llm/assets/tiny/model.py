"""The architecture of the embedded model and its hyperparameters.

Module names follow Hugging Face's Llama, so that state_dict() gives the names of the file's tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the text and the machine."""

    vocab_size: int = 2304
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    seed: int = 1611
    threads: int = 2
    steps: int = 3000
    tokens_per_step: int = 4096
    short_length: int = 1024
    short_share: float = 0.7
    warmup: int = 100
    decay_share: float = 0.6
    muon_lr: float = 8e-3
    adam_lr: float = 4e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    chat_share: float = 0.08


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.head_dim = recipe.head_dim
        self.q_proj = nn.Linear(recipe.hidden_size, recipe.num_heads * recipe.head_dim, bias=False)
        self.k_proj = nn.Linear(recipe.hidden_size, recipe.num_kv_heads * recipe.head_dim, bias=False)
        self.v_proj = nn.Linear(recipe.hidden_size, recipe.num_kv_heads * recipe.head_dim, bias=False)
        self.o_proj = nn.Linear(recipe.num_heads * recipe.head_dim, recipe.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # [batch, length, heads * head_dim] -> [batch, heads, length, head_dim]
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.gate_proj = nn.Linear(recipe.hidden_size, recipe.intermediate_size, bias=False)
        self.up_proj = nn.Linear(recipe.hidden_size, recipe.intermediate_size, bias=False)
        self.down_proj = nn.Linear(recipe.intermediate_size, recipe.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.input_layernorm = RMSNorm(recipe.hidden_size, recipe.norm_eps)
        self.self_attn = Attention(recipe)
        self.post_attention_layernorm = RMSNorm(recipe.hidden_size, recipe.norm_eps)
        self.mlp = MLP(recipe)
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.embed_tokens = nn.Embedding(recipe.vocab_size, recipe.hidden_size)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(recipe.num_layers))
        self.norm = RMSNorm(recipe.hidden_size, recipe.norm_eps)
        angles = torch.outer(
            torch.arange(recipe.max_positions).float(),
            recipe.rope_theta ** (-torch.arange(0, recipe.head_dim, 2).float() / recipe.head_dim),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.model = Decoder(recipe)
        self._initialize(recipe)

    def _initialize(self, recipe: Recipe) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * recipe.num_layers) if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)
