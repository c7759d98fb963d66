"""The same workloads by `transformers.generate`, in this process and on the same weights.

Owns the rival and the comparison: the ratio of speeds, and the agreement of the outputs. bfloat16 weights have the same
values on both sides, and both compute in float32 (transformers on a float32 copy that it makes at load).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from llm.base.optional import quiet
from llm.engine.stats import EngineStats
from llm.tools.bench.measure import Figure, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = 1234
# Wide enough that a model with random weights does not repeat one token.
_WEIGHT_STD = 0.04
_BIAS_STD = 0.02


class Transformers:
    """`transformers.generate` as a contestant."""

    name = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.float().eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @classmethod
    def load(cls, folder: Path) -> Transformers:
        from transformers import AutoModelForCausalLM

        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
        return cls(model)

    @classmethod
    def from_config(cls, folder: Path, weight_dtype: torch.dtype) -> Transformers:
        """Random weights for the config.json in `folder`, written there as a checkpoint of `weight_dtype`."""
        config = (folder / "config.json").read_text(encoding="utf-8")
        with quiet():
            model = _random_model(folder)
            nn.Module.to(model, weight_dtype)  # in place; transformers' own `to` has no usable type
            model.save_pretrained(folder)
        # transformers writes the file with its defaults spelled out; restore the published one.
        (folder / "config.json").write_text(config, encoding="utf-8")
        # Reload: in the saved model the rope frequencies were rounded to `weight_dtype` along with the weights.
        return cls.load(folder)

    @staticmethod
    def describe(quantization: str | None) -> str:
        """A sentence on the comparison; `quantization`: of this engine's weights."""
        weights = "the same weights, computing in float32 as we do"
        if quantization is not None:
            weights = f"the checkpoint's weights, computing in float32 (ours are quantized: {quantization})"
        how = "one static batch padded on the left, scaled-dot-product attention if it has that, greedy"
        return f"transformers.generate in this process, on {weights}: {how}"

    def generate(self, prompts: Tokens, max_tokens: int) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            outputs = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, use_cache=True
            )
        return outputs[:, longest:].tolist()

    def stats(self) -> EngineStats:
        return EngineStats()


@dataclass(frozen=True)
class Agreement:
    """How far the outputs of two engines agree.

    Attributes:
        equal_tokens: share of positions with the same token. Where two tokens are nearly equally likely, rounding
            decides, and the outputs differ from there on.
        equal_rows: number of prompts whose outputs are equal to the end.
        distinct_tokens: number of different tokens in our output; with one or two, agreement means little.
    """

    equal_tokens: float
    equal_rows: int
    rows: int
    distinct_tokens: int


def agreement(ours: Sequence[Tokens], theirs: Sequence[Tokens]) -> Agreement:
    """Compare the outputs of several runs; a position that one output lacks counts as different."""
    pairs = [pair for mine, other in zip(ours, theirs, strict=True) for pair in zip(mine, other, strict=True)]
    positions = sum(max(len(mine), len(other)) for mine, other in pairs)
    equal = sum(a == b for mine, other in pairs for a, b in zip(mine, other, strict=False))
    return Agreement(
        equal / positions,
        sum(mine == other for mine, other in pairs),
        len(pairs),
        len({token for mine, _ in pairs for token in mine}),
    )


def advantage(ours: Figure, theirs: Figure) -> float:
    """The ratio of medians, above 1 where ours is better."""
    ratio = ours.median / theirs.median
    return ratio if ours.higher_is_better else 1 / ratio


def _random_model(folder: Path) -> PreTrainedModel:
    """A float32 model with deterministic random weights; the global random state is restored."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.initializer_range = _WEIGHT_STD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, _BIAS_STD)
    return model
