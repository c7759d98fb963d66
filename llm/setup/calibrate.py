"""Calibration: running texts through a model to collect statistics of its layers' inputs.

Texts are cut into windows. `LayerStatistics` computes one unquantized layer after the other while the quantized model
is read (`llm.runner.layerwise`). `observe` runs a whole unquantized model, where layers cannot be computed so, or where
the texts' hidden states take more memory than it. With `calibration="auto"` the model writes the texts itself (LLM-QAT,
arXiv:2305.17888); they are kept in the cache folder, and depend on the model alone: the seeds are fixed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from llm.base.text import list_names
from llm.engine.boundary import PoolingPlan
from llm.engine.engine import Engine
from llm.engine.pooling_rows import PoolingRows, Prefix
from llm.engine.preprocess import Preprocessor
from llm.engine.rows import Row
from llm.errors import ValidationError
from llm.inputs import PromptType
from llm.loading.source import ModelSource
from llm.quantization.on_load import ActivationStatistics, HeldStatistics, InputStatistics
from llm.runner.layerwise import LayerwiseRunner
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
    windows = _windows(encoded, engine.config.model_config.max_model_len - 1)
    prompts: list[PromptType] = [{"prompt_token_ids": window} for window in windows]
    rows = preprocessor.rows(prompts, SamplingParams(temperature=0, max_tokens=1), SamplingParams)
    _run(engine, rows, between_steps)


def _pool_texts(engine: Engine, plan: PoolingPlan, texts: Sequence[str]) -> None:
    """`run_texts` of a model that gives vectors or scores."""
    if engine.tokenizer is None:
        raise ValidationError("calibration needs a tokenizer: skip_tokenizer_init=True.", parameter="calibration")
    limit, prompts = engine.config.model_config.max_model_len, list[PromptType]()
    for whole, plain in zip(engine.tokenizer.encode(texts), engine.tokenizer.encode_rendered(texts), strict=True):
        count = len(plain)
        start = next((at for at in range(len(whole) - count + 1) if whole[at : at + count] == plain), None)
        if start is None:  # special tokens lie within
            start, plain = 0, whole
        first, last = whole[:start], whole[start + len(plain) :]  # special tokens, which every window has
        for window in _windows([plain], max(1, limit - len(first) - len(last))):
            prompts.append({"prompt_token_ids": [*first, *window, *last]})
    rows = PoolingRows(Preprocessor(engine.config.model_config, engine.tokenizer), plan)
    _run(engine, rows.texts(prompts, None, None, prefix=Prefix()), lambda: None)


def _windows(encoded: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    return [list(ids[start : start + limit]) for ids in encoded for start in range(0, len(ids), limit)]


def _run(engine: Engine, rows: Sequence[Row], between_steps: Callable[[], None]) -> None:
    engine.reset_prefix_cache()  # cached tokens would not be computed
    engine.run([engine.add(row) for row in rows], between_steps)


def run_calibration(
    engine: Engine, texts: Sequence[str] | Sequence[Sequence[int]], pooling: PoolingPlan | None = None
) -> None:
    """Compute every token of texts, or of their token ids. `pooling`: of a model that gives vectors or scores, with
    texts alone."""
    if pooling is not None:
        _pool_texts(engine, pooling, cast(Sequence[str], texts))
    elif isinstance(texts[0], str):
        run_texts(engine, cast(Sequence[str], texts), "calibration")
    else:
        run_tokens(engine, cast(Sequence[Sequence[int]], texts))


def observe(
    engine: Engine, texts: Sequence[str] | Sequence[Sequence[int]], pooling: PoolingPlan | None = None
) -> HeldStatistics:
    """Statistics of the inputs of every linear layer, by its dotted path, over `texts` or their token ids.

    `pooling`: of a model that gives vectors or scores, with texts alone.
    """
    engine.runner.start_observing()
    try:
        run_calibration(engine, texts, pooling)
    finally:
        statistics = engine.runner.stop_observing()
    _tell_of_unreached({name: item.rows for name, item in statistics.items()})
    return HeldStatistics(statistics)


class LayerStatistics:
    """The same, computed layer by layer as they are asked for. See `InputStatistics`.

    Args:
        start: makes an engine whose `LayerwiseRunner` has seen the texts and no layer.
        engine: the first that it made. Another is made where a layer is asked for again, as after `LLM.wake_up`.
    """

    in_order = True

    def __init__(self, start: Callable[[], Engine], engine: Engine) -> None:
        self._start = start
        self._engine: Engine | None = engine
        self._paths = _layerwise(engine).paths
        self._held: dict[str, ActivationStatistics] = {}
        self._rows: dict[str, int] = {}

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def of(self, path: str) -> ActivationStatistics:
        if path in self._rows and path not in self._held:
            self.release()
        if self._engine is None:
            self._engine = self._start()
        while path not in self._held:
            self._held = {}
            self._held = _layerwise(self._engine).next_layer()
            self._rows |= {path: each.rows for path, each in self._held.items()}
        return self._held[path]

    def release(self) -> None:
        _tell_of_unreached(self._rows)
        self._held, self._rows = {}, {}
        if self._engine is not None:
            self._engine.close()
        self._engine = None


def _layerwise(engine: Engine) -> LayerwiseRunner:
    return cast(LayerwiseRunner, engine.runner)


def _started(
    build: Callable[[], Engine], texts: Sequence[str] | Sequence[Sequence[int]], pooling: PoolingPlan | None
) -> Engine:
    engine = build()
    if not _layerwise(engine).why_whole:
        run_calibration(engine, texts, pooling)
    return engine


def calibrate(
    build: Callable[[], Engine],
    build_layerwise: Callable[[], Engine] | None,
    texts: Sequence[str] | Sequence[Sequence[int]],
    pooling: PoolingPlan | None,
    weight_bytes: int,
) -> tuple[InputStatistics, str]:
    """Statistics of the layers' inputs, and what they were computed with.

    Args:
        build: makes an engine of the whole unquantized model.
        build_layerwise: makes one with a `LayerwiseRunner`; None: the platform has none.
        texts: or their token ids.
        weight_bytes: of the whole unquantized model.
    """

    why = "this platform computes all layers at once"
    if build_layerwise is not None:
        start = partial(_started, build_layerwise, texts, pooling)
        engine = start()
        why = _layerwise(engine).why_whole
        if not why and _layerwise(engine).kept_bytes > weight_bytes:
            why = "the hidden states of these texts take more memory"
        if not why:
            return LayerStatistics(start, engine), "one unquantized layer after the other"
        engine.close()
    engine = build()
    try:
        return observe(engine, texts, pooling), f"the whole unquantized model, as {why}"
    finally:
        engine.close()


def _tell_of_unreached(rows: Mapping[str, int]) -> None:
    """Experts that no token chose are quantized by what the others of their layer were given."""
    missed = [name for name, count in rows.items() if not count]
    if missed:
        logger.warning(
            "no token of the calibration texts reached %d of %d layers (%s): no router chose these experts. They use "
            "the statistics of the other experts of their layer; more, and more varied, texts reach more.",
            len(missed),
            len(rows),
            list_names(missed),
        )


# --- Texts that the model writes. ---

# Raise it when other texts are written.
_VERSION = 2
_TEXTS, _TOKENS = 32, 192
_LARGEST_FILE = 16 << 20


def own_texts(build: Callable[[], Engine], source: ModelSource, vocab_size: int) -> list[list[int]]:
    """Token ids of texts by the model that `build` makes, at a temperature of 1; from the cache if they are there."""
    place = _place(source, source.config())
    kept = _read(place, vocab_size)
    if kept is not None:
        return kept
    engine = build()
    try:
        written = _written(engine)
    finally:
        engine.close()
    if place is not None:
        _keep(place, written)
    return written


def _written(engine: Engine) -> list[list[int]]:
    limit = engine.config.model_config.max_model_len - 1
    first = _first_token(engine)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=min(_TOKENS, limit), ignore_eos=True, detokenize=False)
        for seed in range(_TEXTS)
    ]
    preprocessor = Preprocessor(engine.config.model_config, engine.tokenizer)
    rows = preprocessor.rows([{"prompt_token_ids": [first]} for _ in params], params, SamplingParams)
    states = [engine.add(row) for row in rows]
    engine.run(states, lambda: None)
    return [state.completions[0].request.token_ids[:limit] for state in states]


def _first_token(engine: Engine) -> int:
    """What texts begin with: the tokenizer's first token, else the one that ends the text before."""
    named = None if engine.tokenizer is None else getattr(engine.tokenizer, "bos_token_id", None)
    return named if named is not None else min(engine.eos_token_ids, default=0)


def _place(source: ModelSource, hf_config: Mapping[str, object]) -> Path | None:
    """The file of this model's texts: by its configuration and its files' names, sizes and times."""
    folder = _folder()
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps([_VERSION, hf_config], sort_keys=True, default=str).encode())
    for path in sorted(source.folder.glob("*.safetensors")):
        known = path.stat()
        digest.update(f"{path.name} {known.st_size} {known.st_mtime_ns} ".encode())
    return folder / f"{digest.hexdigest()}.json"


def _folder() -> Path | None:
    """Beside the compiled kernels; None without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "offline-llm" / "calibration" if os.path.isabs(base) else None


def _read(place: Path | None, vocabulary: int) -> list[list[int]] | None:
    """None where nothing was kept, or what is there is no such file."""
    if place is None or not place.is_file() or place.stat().st_size > _LARGEST_FILE:
        return None
    try:
        content = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    texts = content.get("token_ids") if isinstance(content, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, list) and text for text in texts):
        return None
    fit = all(type(token) is int and 0 <= token < vocabulary for text in texts for token in text)
    return texts if fit else None


def _keep(place: Path, texts: list[list[int]]) -> None:
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_text(json.dumps({"token_ids": texts}), "utf-8")
        partial.replace(place)
    except OSError as error:
        logger.warning("the texts of calibration='auto' are not kept, and are written again next time: %s", error)
