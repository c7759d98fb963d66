"""offline-llm on the Acme One: the smallest plugin that uses every part of the contract (see `llm.plugins`).

Neither of the two entry points imports torch: a platform that is not chosen should cost nothing.
"""

from __future__ import annotations

import os


def platform() -> str | None:
    """The class path of the platform, None where there is no Acme One (here: where ACME_ABSENT is set)."""
    return None if os.environ.get("ACME_ABSENT") else "acme.platform.AcmePlatform"


def register() -> None:
    """What this package brings to every platform: a model, by class path."""
    from llm.models.registry import register_model

    register_model("AcmeForCausalLM", "acme.model:AcmeForCausalLM")
