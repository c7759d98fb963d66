"""The methods of `LLM` that explain the model, report on quantization and save the quantized model.

Owns the methods; the runner has the data about the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from llm.api.host import Host
from llm.base.checks import known_names
from llm.config.engine import EngineArgs
from llm.engine.engine import Engine
from llm.engine.stats import LLMStats
from llm.explain import Explanation
from llm.inputs import PromptType
from llm.outputs import Metric

if TYPE_CHECKING:
    from llm.api.expert_load import ExpertLoad
    from llm.api.facade import LLM
    from llm.quantize.report import QuantizationReport


class ReportHost(Host, Protocol):
    """Attributes:
    _args: what the engine was built from.
    startup: seconds per phase of start-up.
    _is_quantized: the checkpoint is quantized, so the unquantized model is not available.
    """

    _args: EngineArgs
    _is_quantized: bool
    _engine: Engine | None
    startup: Mapping[str, float]

    def _open_another(self, args: EngineArgs) -> LLM: ...


class Reports:
    def explain(self: Host) -> Explanation:
        """The implementation of every operation, pluggable layer and quant method of the model, and why; prints as text
        and shows as HTML in a notebook."""
        return self._open_engine().runner.describe()

    def stats(self: Host) -> LLMStats:
        """Requests, tokens, prefix hits, accepted drafts, preemptions and seconds since the start, and memory now."""
        return self._open_engine().all_stats()

    def _repr_html_(self: ReportHost) -> str:
        """For notebooks: the model, what it takes of the memory, and the phases of start-up."""
        from llm.api.notebook import llm_as_html

        if self._engine is None:
            return "<p>LLM(closed)</p>"
        return llm_as_html(self._engine.config, self._engine.all_stats(), self.startup)

    def get_metrics(self: Host) -> list[Metric]:
        """vLLM's metrics of this LLM: gauges of now, counters and histograms of the requests that have ended."""
        engine = self._open_engine()
        config = engine.config
        return engine.ended.snapshot(engine.scheduler, config.model_config.model)

    @known_names("LLM.quantization_report")
    def quantization_report(
        self: ReportHost,
        texts: Sequence[str] = (),
        *,
        prompts: Sequence[PromptType] | None = None,
        against: str | Path | None = None,
        speed: bool = True,
    ) -> QuantizationReport:
        """The effect of quantization per layer, and on the whole model compared with the unquantized one.

        The unquantized model is loaded in addition to this one while it is measured. Speed is that of this machine now.

        Args:
            texts: for perplexity, agreement, and the noise of each layer's outputs.
            prompts: for greedy agreement over 64 tokens; None: 64 pieces of the texts.
            against: folder of the unquantized model; needed if the checkpoint is quantized. With `requantize` the model
                is compared with the checkpoint as it is.
            speed: measure tokens per second of both models.
        """
        from llm.quantize.report import make_report

        engine = self._open_engine()
        plain = replace(self._args, quantization=None, calibration=None, requantize=None)
        if against is not None:
            plain = replace(plain, model=against)
        has_plain = against is not None or not self._is_quantized or self._args.requantize is not None
        open_plain = (lambda: self._open_another(plain)) if has_plain else None
        return make_report(cast("LLM", self), engine, open_plain, texts, prompts, speed)

    @known_names("LLM.expert_load")
    def expert_load(self: Host, texts: Sequence[str]) -> ExpertLoad:
        """How many tokens of the texts each expert of each layer computes; a heat map in a notebook.

        Raises:
            ValidationError: the model has no experts, or there is no text.
        """
        from llm.api.expert_load import measure_load

        with self._exclusive():
            return measure_load(self._begin(), texts)

    @known_names("LLM.save_quantized")
    def save_quantized(self: Host, path: str | Path, format: str = "compressed-tensors") -> Path:
        """Write the quantized model to a new folder that vLLM, transformers (with compressed-tensors) and we can load;
        or to a GGUF file, for llama.cpp and us.

        vLLM 0.32 has no CPU kernel for 8-bit weights with float activations. For vLLM on a CPU, save "w8a8", "w4a8", or
        "w4a16" in groups of 128 with `lm_head=None`.

        Args:
            path: of the folder (with "gguf" of the file, which ends in .gguf), which must not exist; it appears only
                when it is complete.
            format: "compressed-tensors", "modelslim", "gptq" (w4a16 and w8a16), "bitsandbytes" (nf4) or "gguf" (q8_0,
                q4_0, q4_k, and mxfp4 with lm_head="q8_0").

        Raises:
            ValidationError: the model is not quantized, `path` exists, or the format is unknown.
            LLMError: the format cannot store a layer's scheme, or the disk is full.
        """
        with self._exclusive():
            return self._begin().runner.save(path, format)
