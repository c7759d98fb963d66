"""Whether tokens are drafted for a model, and why."""

from __future__ import annotations

from collections.abc import Sequence

from llm.config.engine import EngineArgs
from llm.config.speculative import SpeculativeConfig
from llm.errors import ValidationError
from llm.forward import StateSpec, all_roll_back
from llm.kernels.backend import Backend


def choose_speculation(
    args: EngineArgs, specs: Sequence[StateSpec], backend: Backend, reasons: dict[str, str]
) -> SpeculativeConfig | None:
    """What drafts tokens. By default nothing does where drafts could change an answer."""
    config = SpeculativeConfig.of(args.speculative_config)
    reasons["speculative_config"] = args.why("speculative_config") + "; answers do not depend on it"
    if config is None:
        return None
    takes_back = all_roll_back(specs)
    if not takes_back and not config.is_default:
        raise ValidationError(
            "speculative_config cannot be used with this model: its code keeps recurrent states, from which it cannot "
            "take back a rejected draft; leave it out.",
            parameter="speculative_config",
        )
    if takes_back and (backend.invariant[0] or not config.is_default):
        return config
    why = "answers depend on the batch" if takes_back else "a rejected draft would stay in the recurrent states"
    reasons["speculative_config"] = f"default; {why}"
    return None
