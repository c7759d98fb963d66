"""Running texts through an engine to collect statistics of its layers' inputs.

Texts are cut into windows. Calibration builds, runs and closes an unquantized model, which needs the memory of the
unquantized weights meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from llm.base.text import list_names
from llm.engine.engine import Engine
from llm.engine.preprocess import Preprocessor
from llm.inputs import PromptType
from llm.quantization.on_load import ActivationStatistics
from llm.sampling_params import SamplingParams

logger = logging.getLogger("llm")


def run_texts(
    engine: Engine, texts: Sequence[str], parameter: str, between_steps: Callable[[], None] = lambda: None
) -> None:
    """Compute every token of every text; a text longer than the context is cut into windows.

    Raises `ValidationError`, naming `parameter`, for an invalid text, or if there is no tokenizer.
    """
    preprocessor = Preprocessor(engine.config.model_config, engine.tokenizer)
    run_tokens(engine, preprocessor.token_ids(texts, parameter), between_steps)


def run_tokens(
    engine: Engine, encoded: Sequence[Sequence[int]], between_steps: Callable[[], None] = lambda: None
) -> None:
    """The same of token ids."""
    preprocessor = Preprocessor(engine.config.model_config, engine.tokenizer)
    limit = engine.config.model_config.max_model_len - 1
    windows = [ids[start : start + limit] for ids in encoded for start in range(0, len(ids), limit)]
    prompts: list[PromptType] = [{"prompt_token_ids": list(ids)} for ids in windows]
    rows = preprocessor.rows(prompts, SamplingParams(temperature=0, max_tokens=1), SamplingParams)
    engine.scheduler.blocks.reset_prefix_cache()  # cached tokens would not be computed
    engine.run([engine.add(row) for row in rows], between_steps)


def observe(engine: Engine, texts: Sequence[str] | Sequence[Sequence[int]]) -> dict[str, ActivationStatistics]:
    """Statistics of the inputs of every linear layer, by its dotted path, over `texts` or their token ids."""
    engine.runner.start_observing()
    try:
        if isinstance(texts[0], str):
            run_texts(engine, cast(Sequence[str], texts), "calibration")
        else:
            run_tokens(engine, cast(Sequence[Sequence[int]], texts))
    finally:
        statistics = engine.runner.stop_observing()
    _tell_of_unreached(statistics)
    return statistics


def calibrate(
    build: Callable[[], Engine], texts: Sequence[str], written_by: Callable[[Engine], Sequence[Sequence[int]]]
) -> dict[str, ActivationStatistics]:
    """`observe` on an engine from `build`, which is closed afterwards; without texts on those `written_by` it."""
    engine = build()
    try:
        return observe(engine, texts or written_by(engine))
    finally:
        engine.close()


def _tell_of_unreached(statistics: Mapping[str, ActivationStatistics]) -> None:
    """Experts that no token chose are quantized by what the others of their layer were given."""
    missed = [name for name, item in statistics.items() if not item.rows]
    if missed:
        logger.warning(
            "no token of the calibration texts reached %d of %d layers (%s): no router chose these experts. They use "
            "the statistics of the other experts of their layer; more, and more varied, texts reach more.",
            *(len(missed), len(statistics), list_names(missed)),
        )
