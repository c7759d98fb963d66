"""The outputs of `LLM.embed`, `classify`, `score`, `rerank`, `encode` and `reward`: plain data, under vLLM's names.

Owns the output types and their ways out. An output of a pooling call never references the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from llm.base.optional import optional_package

if TYPE_CHECKING:
    import pandas
    import torch


@dataclass
class PoolingOutput:
    """What was made of one prompt's hidden states. `data`: float32 [size], or [tokens, size]."""

    data: torch.Tensor


@dataclass
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The classes of one prompt.

    Attributes:
        probs: the probability of each class; logits with `use_activation=False`.
        labels: the classes' names.
    """

    probs: list[float]
    labels: list[str] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @property
    def label(self) -> str | None:
        """The name of the likeliest class, None if the model names none."""
        best = max(range(len(self.probs)), key=self.probs.__getitem__)
        return self.labels[best] if self.labels else None


@dataclass
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


@dataclass
class RerankResult:
    """A document of `LLM.rerank`; `index`: its place among the documents."""

    index: int
    document: str
    relevance_score: float


AnyOutput = PoolingOutput | EmbeddingOutput | ClassificationOutput | ScoringOutput
D = TypeVar("D", bound=AnyOutput, covariant=True)


@dataclass
class PoolingRequestOutput(Generic[D]):
    """The result of one prompt, or of one pair of texts.

    Attributes:
        request_id: unique within the engine.
        outputs: what was computed.
        prompt_token_ids: the ids that were computed, special tokens included.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        finished: True.
        index: its place among the prompts of the call.
        num_dropped_tokens: how many tokens `truncate_prompt_tokens` cut.
    """

    request_id: str
    outputs: D
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    index: int = 0
    num_dropped_tokens: int = 0

    def to_numpy(self) -> np.ndarray:
        """float32: the vector, the probabilities, the tokens' vectors, or the score as an array without dimensions."""
        return _array(self.outputs)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The vector of one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair of texts."""


R = TypeVar("R", bound="PoolingRequestOutput[AnyOutput]")


class PoolingRequestOutputs(list[R]):
    """The outputs of a call: a list, with `to_numpy()` and `to_pandas()`."""

    def to_numpy(self) -> np.ndarray:
        """float32 [prompts, size], or [prompts] of scores.

        Raises:
            ValueError: vectors of tokens, whose numbers differ; take each output's own `to_numpy()`.
        """
        arrays = [output.to_numpy() for output in self]
        if len({array.shape for array in arrays}) > 1:
            raise ValueError("the outputs have different shapes; take each output's own to_numpy().")
        return np.stack(arrays) if arrays else np.zeros((0, 0), dtype=np.float32)

    def to_pandas(self) -> pandas.DataFrame:
        """A row per prompt: `index`, `num_prompt_tokens`, and `embedding`, `score` or the classes by name."""
        frames = optional_package("pandas", "pandas")
        columns: dict[str, list[object]] = {
            "index": [output.index for output in self],
            "num_prompt_tokens": [len(output.prompt_token_ids) for output in self],
        }
        for output in self:
            for name, value in _columns(output.outputs).items():
                columns.setdefault(name, []).append(value)
        return frames.DataFrame(columns)


def _array(output: AnyOutput) -> np.ndarray:
    if isinstance(output, PoolingOutput):
        return output.data.numpy()
    if isinstance(output, EmbeddingOutput):
        return np.array(output.embedding, dtype=np.float32)
    if isinstance(output, ClassificationOutput):
        return np.array(output.probs, dtype=np.float32)
    return np.array(output.score, dtype=np.float32)


def _columns(output: AnyOutput) -> dict[str, object]:
    if isinstance(output, EmbeddingOutput):
        return {"embedding": np.array(output.embedding, dtype=np.float32)}
    if isinstance(output, ScoringOutput):
        return {"score": output.score}
    if isinstance(output, ClassificationOutput):
        names: Sequence[str] = output.labels or [f"LABEL_{index}" for index in range(len(output.probs))]
        return {"label": output.label, **dict(zip(names, output.probs, strict=True))}
    return {"data": output.data.numpy()}
