"""The config of a whole decoder: its layers, and everything around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm.errors import UnsupportedModelError
from llm.forward import StateSpec
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters
from llm.models.decoder.layer import LayerConfig
from llm.models.decoder.multi_token import MultiTokenConfig
from llm.models.decoder.part import NormConfig


@dataclass(frozen=True)
class LearnedPositions:
    """A table of position embeddings; position 0 is row `offset`."""

    rows: int
    offset: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only language model.

    Attributes:
        max_position_embeddings: the longest sequence, rope scaling included.
        layers: one entry per layer.
        final_norm: between the last layer and the LM head; None: no such norm.
        classes: rows of `score`, the matrix of a classifier in place of the LM head; 0: there is neither, and hidden
            states are the result; None: an LM head.
        score_tokens: tokens (no, yes) whose rows of the LM head make `score`, of one class: the logit of yes less that
            of no; None: the checkpoint has `score`.
        classes_by_token: `score` is of every token's hidden state, with a bias; some files call it `classifier`.
        embedding_size: width of the embedding and of the LM head's input, between which and hidden_size a matrix each
            maps; None: hidden_size.
        embedding_norm: of what enters the first layer; None: no such norm.
        learned_positions: None: no position embeddings.
        embedding_multiplier, logits_divisor: constants that multiply the embedding and divide the logits.
        layers_left_out: how many layers for multi-token prediction a checkpoint may have behind these.
        multi_token: what the first of them is; None: the family has none.
        draft_head: the same if it is built, to draft tokens; None: it is not loaded.
        logits_soft_cap: logits become cap * tanh(logits / cap).
        tie_word_embeddings: the embedding is also the LM head.
        lm_head_bias: the LM head has a bias; not with tied embeddings.
    """

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    final_norm: NormConfig | None
    embedding_norm: NormConfig | None = None
    learned_positions: LearnedPositions | None = None
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0
    layers_left_out: int = 0
    multi_token: MultiTokenConfig | None = None
    draft_head: MultiTokenConfig | None = None
    logits_soft_cap: float | None = None
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    embedding_size: int | None = None
    classes: int | None = None
    classes_by_token: bool = False
    score_tokens: tuple[int, int] | None = None

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> list[StateSpec]:
        """All states of all layers on one rank, in the order in which the parts number them."""
        specs = [spec for layer in self.layers for spec in layer.states(dtype, tp)]
        if self.draft_head is not None:
            specs += self.draft_head.states(dtype, tp)
        if self.is_causal:
            return specs
        if len(set(specs)) > 1:
            raise UnsupportedModelError("config.json: layers that see following tokens have different heads.")
        return specs[:1]

    @property
    def is_causal(self) -> bool:
        """False if tokens see those after them."""
        return all(getattr(part, "causal", True) for layer in self.layers for part in layer.parts.values())

    @property
    def experts(self) -> int:
        """How many experts all layers have together."""
        return sum(part.experts for layer in self.layers for part in layer.parts.values())

    @property
    def ropes(self) -> set[RopeParameters]:
        """The rope parameters of all parts with a rotary embedding."""
        return {part.rope for layer in self.layers for part in layer.parts.values() if part.rope is not None}
