"""Running texts through an engine for the sake of what its layers see.

Owns the windows a text is cut into, and calibration: an unquantized model is built, run and closed here, and while
this lasts it needs the memory of the unquantized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm.engine.engine import Engine
from llm.engine.preprocess import Preprocessor
from llm.quantization.storage.on_load import ActivationStatistics
from llm.sampling_params import SamplingParams


def run_texts(
    engine: Engine, texts: Sequence[str], parameter: str, between_steps: Callable[[], None] = lambda: None
) -> None:
    """Compute every token of every text, each text by itself; one longer than the model's window in windows.

    Raises `ValidationError`, naming `parameter`, for a text that is none, or without a tokenizer.
    """
    preprocessor = Preprocessor(engine.config.model_config, engine.tokenizer)
    limit = engine.config.model_config.max_model_len - 1
    encoded = preprocessor.token_ids(texts, parameter)
    windows = [ids[start : start + limit] for ids in encoded for start in range(0, len(ids), limit)]
    prompts = [{"prompt_token_ids": ids} for ids in windows]
    rows = preprocessor.rows(prompts, SamplingParams(temperature=0, max_tokens=1), SamplingParams)
    engine.scheduler.blocks.reset_prefix_cache()  # a token that is found there is not computed
    engine.run([engine.add(row) for row in rows], between_steps)


def observe(engine: Engine, texts: Sequence[str]) -> dict[str, ActivationStatistics]:
    """Statistics of the inputs of every linear layer, by its dotted path, over `texts`."""
    engine.runner.start_observing()
    try:
        run_texts(engine, texts, "calibration")
    finally:
        statistics = engine.runner.stop_observing()
    return statistics


def calibrate(build: Callable[[], Engine], texts: Sequence[str]) -> dict[str, ActivationStatistics]:
    """As `observe`, on an engine that `build` makes and that is closed afterwards."""
    engine = build()
    try:
        return observe(engine, texts)
    finally:
        engine.close()
