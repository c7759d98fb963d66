"""Tiny checkpoints with heads that draft, and what those heads draft, computed in transformers and plain PyTorch.

transformers drops the weights of such heads when it saves a model, so they are written here: a head's
layer is one of a model of transformers with a single layer, which is also what computes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from embedded import engine_of
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, VOCAB, config_of, randomise, reference_model

from llm import LLM
from llm.runner.batch import InputBatch
from llm.runner.speculation.proposer import ComputedStep
from llm.runner.speculation.speculator import Choice, Speculator

# A row of `TINY_MODELS` -> what makes a single layer of it the one that its heads have.
ONE_LAYER: dict[str, Mapping[str, Any]] = {
    "deepseek-v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4-moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "qwen3-5-moe": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
}
_QWEN = ("qwen3-5-moe",)
_OF_LAYER = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}


class MultiTokenReference:
    """The head of a row for multi-token prediction: its weights under Qwen's names, and what it drafts."""

    def __init__(self, row: str, target: Path) -> None:
        import transformers

        self.target, self.is_qwen = target, row in _QWEN
        one = TINY_MODELS[row]
        one = replace(one, config={**one.config, **ONE_LAYER[row]}, seed=one.seed + 100)
        self.layer = transformers.AutoModelForCausalLM.from_config(
            config_of(one), dtype=torch.float32, experts_implementation="eager"
        ).eval()
        randomise(self.layer, one.seed)
        size = self.layer.config.hidden_size
        generator = torch.Generator().manual_seed(one.seed)
        self.fc = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
        norms = [1 + 0.2 * torch.randn(size, generator=generator) for _ in range(2)]
        self.norms = dict(zip(("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"), norms, strict=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"fc.weight": self.fc, **self.norms}
        for name, tensor in self.layer.state_dict().items():
            if name.startswith(("model.layers.0.", "model.norm.")):
                found[name.removeprefix("model.")] = tensor
        return found

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow `tokens`, the likeliest of each step."""
        target = reference_model(self.target)
        hidden = target.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0, :-1]
        known, found = list(tokens), []
        for _ in range(count):
            embedded = target.model.embed_tokens(torch.tensor(known[1:]))
            parts = [self._norm(name, part) for name, part in zip(self.norms, (embedded, hidden), strict=True)]
            logits, carried = self._layer(torch.cat(parts, dim=-1) @ self.fc.T, target)
            found.append(int(logits.argmax()))
            known.append(found[-1])
            hidden = torch.cat((hidden, carried[None]))
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.layer.config.rms_norm_eps
        # Qwen's norms store what is added to 1.
        return normed(x, eps, self.norms[name] + float(self.is_qwen))

    def _layer(self, x: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits after the last position, its hidden state before the last norm)."""
        carried: list[torch.Tensor] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            carried.append((output[0] if isinstance(output, tuple) else output).reshape(len(x), -1)[-1])

        handle = self.layer.model.layers[0].register_forward_hook(keep)
        try:
            last = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1]
        finally:
            handle.remove()
        return target.lm_head(last), last if self.is_qwen else carried[0]


def normed(x: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def with_multi_token(row: str, folder: Path, to: Path) -> MultiTokenReference:
    """Copy the row's checkpoint and add a head.

    DeepSeek's and GLM's is one layer more, with copies of the embedding and the LM head.
    """
    head = MultiTokenReference(row, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if head.is_qwen:
        tensors |= {f"mtp.{name}": tensor.contiguous() for name, tensor in head.tensors().items()}
    else:
        prefix = f"model.layers.{config['num_hidden_layers']}."
        for name, tensor in head.tensors().items():
            tensors[prefix + _OF_LAYER.get(name, name.removeprefix("layers.0."))] = tensor.contiguous()
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        config["num_nextn_predict_layers"] = 1
    to.mkdir(parents=True)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return head


class Eagle3Reference:
    """An EAGLE-3 head in plain PyTorch, from the description of its layout.

    Args:
        target: the folder of the model that it drafts for.
        vocabulary: tokens of the head; fewer than the target's: each stands for one of those.
        own_embedding: it has one, and adds attention to the normed hidden state.
    """

    HEADS, KV_HEADS, SIZE, HIDDEN, EPS, FFN = 4, 2, 8, 48, 1e-5, 40

    def __init__(self, target: Path, vocabulary: int, *, own_embedding: bool) -> None:
        self.target, self.vocabulary, self.own = target, vocabulary, own_embedding
        generator = torch.Generator().manual_seed(7)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

        width, queries, keys = self.HIDDEN, self.HEADS * self.SIZE, self.KV_HEADS * self.SIZE
        self.weights = {
            "fc.weight": matrix(width, 3 * width),
            "midlayer.self_attn.q_proj.weight": matrix(queries, 2 * width),
            "midlayer.self_attn.k_proj.weight": matrix(keys, 2 * width),
            "midlayer.self_attn.v_proj.weight": matrix(keys, 2 * width),
            "midlayer.self_attn.o_proj.weight": matrix(width, queries),
            "midlayer.mlp.gate_proj.weight": matrix(self.FFN, width),
            "midlayer.mlp.up_proj.weight": matrix(self.FFN, width),
            "midlayer.mlp.down_proj.weight": matrix(width, self.FFN),
            "lm_head.weight": matrix(vocabulary, width),
        }
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.weights[f"midlayer.{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
        self.weights["norm.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
        tokens = torch.randperm(VOCAB, generator=generator)[:vocabulary].sort().values
        self.tokens = tokens if vocabulary < VOCAB else torch.arange(VOCAB)
        if own_embedding:
            self.weights["embed_tokens.weight"] = matrix(VOCAB, width)

    def write(self, folder: Path) -> Path:
        is_drafted = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, self.tokens, True)
        tensors = {**self.weights, "d2t": self.tokens - torch.arange(self.vocabulary), "t2d": is_drafted}
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.HIDDEN,
            "intermediate_size": self.FFN,
            "num_hidden_layers": 1,
            "num_attention_heads": self.HEADS,
            "num_key_value_heads": self.KV_HEADS,
            "head_dim": self.SIZE,
            "rms_norm_eps": self.EPS,
            "max_position_embeddings": 64,
            "vocab_size": VOCAB,
            "draft_vocab_size": self.vocabulary,
            "norm_before_residual": self.own,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow `tokens`, the likeliest of each step."""
        target, own = reference_model(self.target), self.weights
        states = target.model(
            input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True
        ).hidden_states
        layers = len(target.model.layers)
        taps = [states[layer][0, :-1] for layer in sorted((2, layers // 2, layers - 3))]
        hidden, known, found = torch.cat(taps, dim=-1) @ own["fc.weight"].T, list(tokens), []
        table = own["embed_tokens.weight"] if self.own else target.model.embed_tokens.weight
        for _ in range(count):
            last = self._layer(table[known[1:]], hidden)
            logits = normed(last, self.EPS, own["norm.weight"]) @ own["lm_head.weight"].T
            found.append(int(self.tokens[logits.argmax()]))
            known.append(found[-1])
            hidden = torch.cat((hidden, last[None]))
        return found

    def _layer(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The last position's output, [H]."""
        own = {name.removeprefix("midlayer."): tensor for name, tensor in self.weights.items()}
        states = normed(hidden, self.EPS, own["hidden_norm.weight"])
        x = torch.cat((normed(embedded, self.EPS, own["input_layernorm.weight"]), states), dim=-1)
        query, key, value = (
            (x @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, self.SIZE)).transpose(0, 1)
            for name in "qkv"
        )
        repeats = self.HEADS // self.KV_HEADS
        key, value = self._rotated(key).repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        attended = torch.nn.functional.scaled_dot_product_attention(self._rotated(query), key, value, is_causal=True)
        hidden = (states if self.own else hidden) + attended.transpose(0, 1).flatten(1) @ own[
            "self_attn.o_proj.weight"
        ].T
        y = normed(hidden, self.EPS, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T)
        return (hidden + (gate * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T)[-1]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.SIZE // 2
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
        )


class Eager(Speculator):
    """Drafts as many tokens as it is offered, whatever they cost, and keeps (known tokens, drafts).

    Attributes:
        made: of greedy rows.
        answers: prompt -> its answer, which is proposed instead of all drafts but the last: so that some are accepted.
    """

    def __init__(self, llm: LLM, most: int, answers: Mapping[tuple[int, ...], list[int]] | None = None) -> None:
        self.made: list[tuple[list[int], list[int]]] = []
        self.answers = answers or {}
        super().__init__(engine_of(llm).runner.proposer._sources, most)

    def propose(self, step: ComputedStep) -> Mapping[str, Sequence[int]]:
        drafts = super().propose(step)
        batch = step.batch
        for name, tokens in drafts.items():
            row = batch.index[name]
            if batch.params[row].greedy:
                self.made.append((batch.prompt_token_ids[row] + batch.output_token_ids[row], list(tokens)))
        return {name: self._helped(batch, batch.index[name], tokens) for name, tokens in drafts.items()}

    def _helped(self, batch: InputBatch, row: int, tokens: Sequence[int]) -> Sequence[int]:
        """Right tokens, and the last of those that were drafted."""
        done = len(batch.output_token_ids[row])
        right = self.answers.get(tuple(batch.prompt_token_ids[row]), [])[done : done + len(tokens) - 1]
        return [*right, *tokens[len(right) :]]

    def _counts(self, rows: int, choices: Mapping[int, Choice]) -> dict[int, int]:
        return {row: choice.most for row, choice in choices.items()}


@contextmanager
def eager(llm: LLM, most: int = 3, answers: Mapping[tuple[int, ...], list[int]] | None = None) -> Iterator[Eager]:
    runner = engine_of(llm).runner
    before, runner.proposer = runner.proposer, Eager(llm, most, answers)
    try:
        yield runner.proposer
    finally:
        runner.proposer = before
        before.reset()
