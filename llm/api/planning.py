"""The method of `LLM` that says what a model would take before it is loaded.

Owns the method; `llm.setup.preview` has the plan.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llm.base.checks import check_flag
from llm.config.arguments import check_arguments
from llm.config.engine import EMBEDDED_MODEL, EngineArgs

if TYPE_CHECKING:
    from llm.setup.preview import ModelPlan

_CALIBRATION_SECONDS = 0.5


class Planning:
    @classmethod
    def plan(cls, model: str | Path = EMBEDDED_MODEL, *, calibrate: bool = False, **arguments: object) -> ModelPlan:
        """What `LLM(model, **arguments)` would take and allow on this machine now; no weight is read.

        Weights in bytes for each quantization, bytes of the KV cache, how many sequences of which length fit, and if
        the model does not fit the smallest change that makes it. A draft model is not counted.

        Args:
            calibrate: measure this machine for a second, for the highest speed to expect, and remember it; without,
                the speed follows from what was measured last, if anything was.
            **arguments: of `LLM`.

        Raises:
            ValidationError, CheckpointError, UnsupportedModelError: as `LLM(...)` would.
        """
        from llm.setup.preview import preview
        from llm.tools.bench import calibrate as stored
        from llm.tools.bench.calibrate import calibrate as measure

        check_flag("calibrate", calibrate)
        known = {item.name for item in fields(EngineArgs)}
        check_arguments({name: value for name, value in arguments.items() if name not in (*known, "verbose")})
        given = {name: value for name, value in arguments.items() if name in known}
        args = EngineArgs.from_user(model=model, **given)
        measured = measure(_CALIBRATION_SECONDS) if calibrate else stored.stored()
        if measured is None:
            return preview(args)
        if calibrate:
            stored.keep(measured)
        return replace(preview(args, measured.rates), notes=tuple(measured.warnings()))
