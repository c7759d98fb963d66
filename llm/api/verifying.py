"""The methods of `LLM` that check a loaded model: beside transformers, and beside itself.

Owns the methods; `llm.tools.verify` has the checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from llm.api.reports import ReportHost
from llm.base.checks import known_names, refuse
from llm.base.types import JsonObject
from llm.config.engine import EngineArgs
from llm.errors import ValidationError
from llm.loading.resolve import resolve_folder
from llm.loading.source import FolderSource, ModelSource

if TYPE_CHECKING:
    from llm.api.facade import LLM
    from llm.quantize.compare import Comparison
    from llm.tools.verify import SelfCheck, Verification


class VerifyingHost(ReportHost, Protocol):
    """Attributes:
    _source: where the weights came from; None: they are random.
    """

    _source: ModelSource | None


class Verifying:
    @known_names("LLM.verify")
    def verify(self: VerifyingHost, texts: Sequence[str], *, against: str | Path | None = None) -> Verification:
        """transformers' float32 model beside this one, at every token of some texts; imports transformers.

        Where quantization, dtype or the KV cache's type round more than float32 does, the model is opened once more
        without them, so that the report tells what they explain. Memory holds transformers' model beside this one.

        Args:
            texts: a few hundred tokens are enough.
            against: folder of the unquantized model; needed if the checkpoint is quantized, or is a GGUF file.

        Raises:
            ValidationError: there is no folder that transformers can read, or no text.
            OutOfMemoryError: there is no room for transformers' model.
        """
        from llm.tools.verify import is_exact, verify

        self._open_engine()
        llm, args = cast("LLM", self), self._args
        plain = replace(
            args, quantization=None, calibration=None, requantize=None, dtype="auto", speculative_config=None
        )
        plain = replace(plain, kv_cache_dtype="float32", kv_cache_memory_bytes=None, model=against or args.model)
        if args.hf_overrides is not None:
            refuse("hf_overrides", args.hf_overrides, "None for verify(): transformers reads config.json as it is")
        if against is not None:
            folder = resolve_folder(against, args.revision)
        elif isinstance(self._source, FolderSource) and not self._is_quantized:
            folder = self._source.folder
        else:
            raise ValidationError(
                "verify() needs the unquantized model as transformers reads it; pass against='its folder'.",
                parameter="against",
                value=None,
            )
        same = against is None and is_exact(llm)
        return verify(llm, texts, folder, None if same else lambda: self._open_another(plain))

    @classmethod
    def compare(
        cls,
        model: str | Path,
        schemes: Sequence[str | None],
        texts: Sequence[str],
        *,
        speed: bool = True,
        **arguments: object,
    ) -> Comparison:
        """One model in several quantizations: bytes, perplexity with its interval, speed; a table, a DataFrame
        (`to_pandas()`) and a picture (`plot()`). One is loaded at a time.

        Args:
            schemes: names of `quantization=`, of a quantized checkpoint (a GGUF file) of `requantize=`; None or "none":
                as the checkpoint has it.
            texts: for perplexity; the more, the narrower its interval.
            speed: measure tokens per second on this machine now.
            **arguments: of `LLM`, for all of them.
        """
        from llm.quantize.compare import compare

        argument = "requantize" if _is_quantized(model, arguments) else "quantization"

        def open_scheme(scheme: str | None) -> LLM:
            given: JsonObject = {"use_tqdm_on_load": False, **arguments, argument: scheme}
            return cast("type[LLM]", cls)(model, **given)

        return compare(open_scheme, schemes, texts, speed)

    @known_names("LLM.selfcheck")
    def selfcheck(self: VerifyingHost) -> SelfCheck:
        """The same requests alone, batched, in another order, in chunks, preempted, and with prefix hits: are tokens
        and logprobs the same bits? Takes some hundred steps, and clears the prefix cache.

        Raises:
            ValidationError: a stream is suspended.
        """
        from llm.tools.verify import selfcheck

        with self._exclusive():
            engine = self._begin()
            if engine.scheduler.has_unfinished():
                raise ValidationError("selfcheck() needs an idle engine; end the stream first.", parameter="stream")
            try:
                return selfcheck(cast("LLM", self), engine)
            finally:
                engine.scheduler.blocks.reset_prefix_cache()


def _is_quantized(model: str | Path, arguments: Mapping[str, object]) -> bool:
    """The checkpoint is quantized already, as its headers say."""
    from llm.setup.source import read_model

    known = {item.name for item in fields(EngineArgs)} - {"quantization", "requantize", "calibration"}
    given: JsonObject = {name: value for name, value in arguments.items() if name in known}
    found = read_model(EngineArgs.from_user(model=model, **given))
    found.source.close()
    return found.quantization.found
