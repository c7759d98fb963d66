"""Encoders made of a decoder's parts: tokens see those after them, and hidden states are the result.

Beside the layers there are token types and the classifier. A family maps its config.json onto the parts and gives its
tensors' names. What follows pooling is computed for a few vectors at a time, in float64, row by row: a row's bits
depend on nothing else.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from llm.base.watch import Patchable
from llm.forward import ForwardBatch
from llm.kernels.select import backend_of_construction
from llm.layers.embedding import VocabParallelEmbedding
from llm.layers.linear import ReplicatedLinear
from llm.models import decoder as d


@dataclass(frozen=True)
class ClassifierConfig:
    """out(norm(activation(dense(x)))) of a hidden state; out(x) alone without an activation.

    Attributes:
        activation: a key of `ACTIVATE`; "": there is no `dense`.
        bias: of `dense`; `out` has one.
        norm: None: there is none.
    """

    activation: str
    bias: bool = True
    norm: d.NormConfig | None = None


@dataclass(frozen=True)
class EncoderConfig(d.DecoderConfig):
    """An encoder.

    Attributes:
        token_types: rows of the token type table; 0: there is none.
        classifier: what a checkpoint with classes has after pooling.
        token_classifier: what one has that classifies every token.
        pooling_type: of a classifier, and of an embedder that does not say.
    """

    token_types: int = 0
    classifier: ClassifierConfig = ClassifierConfig("tanh")
    token_classifier: ClassifierConfig = ClassifierConfig("")
    pooling_type: str = "CLS"


class EncoderModel(d.DecoderForCausalLM):
    """The base class of encoders.

    Class attributes, beside those of `CausalLM`:
        heads: leading path segments of a checkpoint's tensors of the classifier -> ours: "head.dense", "head.norm",
            "head.out".
        token_heads: the same where every token is classified.
        other_heads: leading path segments of tensors that are never used.
    """

    heads: ClassVar[Mapping[str, str]] = {}
    token_heads: ClassVar[Mapping[str, str]] = {"classifier": "head.out"}
    other_heads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: EncoderConfig, options: d.BuildOptions) -> None:
        super().__init__(config, options)
        context = d.BuildContext(options, config.hidden_size)
        self._ops = backend_of_construction().ops
        self.token_types: VocabParallelEmbedding | None = None
        if config.token_types:
            self.token_types = VocabParallelEmbedding(
                config.token_types, config.hidden_size, prefix="token_types", **context.table
            )

    def _build_score(self, classes: int, context: d.BuildContext) -> None:
        by_token = self.config.classes_by_token
        used = (self.token_heads if by_token else self.heads) if classes else {}
        self.left_out = (*self.other_heads, *(name for name in self.heads if name not in used))
        self.further_renames = tuple(used.items())
        if classes and isinstance(self.config, EncoderConfig):
            config = self.config.token_classifier if by_token else self.config.classifier
            self.head = _Classifier(classes, config, context)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def embed_batch(self, batch: ForwardBatch) -> torch.Tensor:
        model, positions = self.model, self.config.learned_positions
        hidden = self.embed(batch.input_ids) if batch.inputs_embeds is None else batch.inputs_embeds
        terms = []
        if self.token_types is not None:
            types = torch.zeros_like(batch.input_ids) if batch.token_types is None else batch.token_types
            terms.append(self.token_types(types))
        if model.embed_positions is not None and positions is not None:
            terms.append(model.embed_positions(batch.positions + positions.offset))
        last = terms.pop() if terms and model.embed_norm is not None else None
        for term in terms:
            hidden = self._ops.add(hidden, term)
        return hidden if model.embed_norm is None else d.add_norm(model.embed_norm, hidden, last)[0]


class _Classifier(Patchable):
    def __init__(self, classes: int, config: ClassifierConfig, context: d.BuildContext) -> None:
        super().__init__()
        size, dtype = context.hidden_size, context.options.params_dtype
        self.dense: ReplicatedLinear | None = None
        if config.activation:
            self.dense = ReplicatedLinear(
                size, size, bias=config.bias, params_dtype=dtype, prefix="head.dense", return_bias=False
            )
        self.norm = None if config.norm is None else config.norm.build(size, context)
        self.out = ReplicatedLinear(size, classes, bias=True, params_dtype=dtype, prefix="head.out", return_bias=False)
        self.activation = ACTIVATE.get(config.activation)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, H] -> [R, classes]."""
        if self.dense is not None and self.activation is not None:
            wide = self.activation(self.dense(hidden).cpu().double().numpy())
            hidden = torch.from_numpy(wide).float().to(hidden.device)
        return self.out(hidden if self.norm is None else self.norm(hidden))


def layer_renames(
    prefixes: tuple[str, ...], layers: str, of_layer: Mapping[str, str], around: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """`renames` of checkpoints whose names may have one of `prefixes`; `layers`: the path before a layer's number.

    Norms of the first checkpoints are called gamma and beta.
    """
    inside = {f"{layers}.*.{old}": f"model.layers.*.{new}" for old, new in of_layer.items()} | dict(around)
    old_names = {
        f"{old}.{was}": f"{new}.{now}"
        for old, new in inside.items()
        if "norm" in new
        for was, now in (("gamma", "weight"), ("beta", "bias"))
    }
    return tuple((prefix + old, new) for prefix in prefixes for old, new in (old_names | inside).items())


_LEAST_NORM = 1e-12


def normalised(values: np.ndarray) -> np.ndarray:
    """float64 [R, C] with rows of length 1; a row of zeros stays."""
    norms = np.sqrt([math.fsum(row * row) for row in values])
    return values / np.maximum(norms, _LEAST_NORM)[:, None]


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / np.array([math.fsum(row) for row in powers])[:, None]


def _gelu(values: np.ndarray) -> np.ndarray:
    erf = np.array([math.erf(value) for value in (values / math.sqrt(2)).ravel()]).reshape(values.shape)
    return 0.5 * values * (1 + erf)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(values, -700, 700)))


# Of float64 [R, C].
ACTIVATE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda values: values,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "relu": lambda values: np.maximum(values, 0.0),
    "gelu": _gelu,
    "silu": lambda values: values * _sigmoid(values),
}
