"""Activations and norms of a few vectors at a time, in float64, row by row: a row's bits depend on nothing else.

Owns what follows pooling; the layers' own activations are in `llm.layers.activation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

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
