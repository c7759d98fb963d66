"""What goes into each layer of the unquantized model when it reads some texts.

Owns the hooks and their arithmetic. The model is built, run and closed here: while this lasts it needs the memory of
the unquantized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm.engine.preprocess import Preprocessor
from llm.quantization.storage.on_load import ActivationStatistics
from llm.sampling_params import SamplingParams

# Channels whose correlations are kept: a matrix of all of them would outgrow the model.
_RUN = 512


class _Observer:
    """Sums over everything one layer is given."""

    def __init__(self, columns: int) -> None:
        self._moments = [
            torch.zeros(width, width, dtype=torch.float64)
            for width in (min(_RUN, columns - start) for start in range(0, columns, _RUN))
        ]
        self._rows = 0
        self._low = self._high = 0.0

    def __call__(self, module: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        for run, moment in zip(x.double().split(_RUN, dim=1), self._moments, strict=True):
            moment.addmm_(run.t(), run)
        self._rows += x.shape[0]
        self._low = min(self._low, float(x.min()))
        self._high = max(self._high, float(x.max()))

    def statistics(self) -> ActivationStatistics:
        moments = [_shrunk(moment / max(1, self._rows), self._rows) for moment in self._moments]
        return ActivationStatistics(self._low, self._high, moments)


def _shrunk(moment: torch.Tensor, rows: int) -> torch.Tensor:
    """A second moment moved towards the one that knows nothing, as far as there are few rows for its size.

    Without it a few sentences of calibration make a model three times worse than none.
    """
    size = len(moment)
    known = rows / (rows + size)
    unknown = (1 - known) * moment.diagonal().mean() * torch.eye(size, dtype=moment.dtype)
    return (known * moment + unknown).float()


def observe(engine: Any, texts: Sequence[str]) -> dict[str, ActivationStatistics]:
    """Statistics of the inputs of every linear layer, by its dotted path, over `texts`."""
    layers = {name: module for name, module in engine.runner.model.named_modules() if is_linear(module)}
    observers = {name: _Observer(module.input_size) for name, module in layers.items()}
    handles = [module.register_forward_pre_hook(observers[name]) for name, module in layers.items()]
    try:
        run_texts(engine, texts, "calibration")
    finally:
        for handle in handles:
            handle.remove()
    return {name: observer.statistics() for name, observer in observers.items()}


def run_texts(engine: Any, texts: Sequence[str], parameter: str) -> None:
    """Compute every text, each by itself; one longer than the model's window in windows.

    Raises `ValidationError`, naming `parameter`, for a text that is none, or without a tokenizer.
    """
    preprocessor = Preprocessor(engine.config.model_config, engine.tokenizer)
    limit = engine.config.model_config.max_model_len - 1
    encoded = preprocessor.token_ids(texts, parameter)
    windows = [ids[start : start + limit] for ids in encoded for start in range(0, len(ids), limit)]
    prompts = [{"prompt_token_ids": ids} for ids in windows]
    rows = preprocessor.rows(prompts, SamplingParams(temperature=0, max_tokens=1), SamplingParams)
    engine.run([engine.add(row) for row in rows], lambda: None)


def is_linear(module: Any) -> bool:
    return getattr(module, "quant_kind", "") == "linear"


def calibrate(build: Callable[[], Any], texts: Sequence[str]) -> dict[str, ActivationStatistics]:
    """As `observe`, on an engine that `build` makes and that is closed afterwards."""
    engine = build().engine
    try:
        return observe(engine, texts)
    finally:
        engine.close()
