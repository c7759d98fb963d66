"""Tiny checkpoints with heads that draft, and what those heads draft, computed in transformers and plain PyTorch.

Owns no tests. transformers drops the weights of such heads when it saves a model, so they are written here: a head's
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
from tiny_models import TINY_MODELS, config_of, randomise, reference_model

from llm import LLM
from llm.engine.batch import InputBatch
from llm.engine.proposer import ComputedStep
from llm.engine.speculation.pace import Choice
from llm.engine.speculation.speculator import Speculator

# A row of `TINY_MODELS` -> what makes a single layer of it the one that its heads have.
ONE_LAYER: dict[str, Mapping[str, Any]] = {
    "deepseek-v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4-moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
}
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

        self.target = target
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
            normed = [self._norm(name, part) for name, part in zip(self.norms, (embedded, hidden), strict=True)]
            logits, carried = self._layer(torch.cat(normed, dim=-1) @ self.fc.T, target)
            found.append(int(logits.argmax()))
            known.append(found[-1])
            hidden = torch.cat((hidden, carried[None]))
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.layer.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.norms[name]

    def _layer(self, x: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits after the last position, its hidden state before the last norm)."""
        carried: list[torch.Tensor] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            carried.append((output[0] if isinstance(output, tuple) else output).reshape(len(x), -1)[-1])

        handle = self.layer.model.layers[0].register_forward_hook(keep)
        try:
            normed = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1]
        finally:
            handle.remove()
        return target.lm_head(normed), carried[0]


def with_multi_token(row: str, folder: Path, to: Path) -> MultiTokenReference:
    """Copy the row's checkpoint and add a head, as one layer more with copies of the embedding and the LM head."""
    head = MultiTokenReference(row, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{config['num_hidden_layers']}."
    for name, tensor in head.tensors().items():
        tensors[prefix + _OF_LAYER.get(name, name.removeprefix("layers.0."))] = tensor.contiguous()
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    to.mkdir(parents=True)
    (to / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(tensors, to / "model.safetensors")
    return head


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
