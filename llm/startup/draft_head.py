"""The head of a checkpoint that drafts tokens for its own model: whether it is there, and building it."""

from __future__ import annotations

from dataclasses import replace

from llm.config.engine import EngineArgs, SpeculativeConfig
from llm.errors import ValidationError
from llm.loading.source import ModelSource
from llm.models.decoder import DecoderConfig


def with_draft_head(args: EngineArgs, architecture: object, source: ModelSource, has_weights: bool) -> object:
    """The architecture, with its head if `speculative_config` asks for it.

    Raises:
        ValidationError: it has none, or the checkpoint lacks its weights.
    """
    config = SpeculativeConfig.of(args.speculative_config)
    if config is None or config.method != "mtp":
        return architecture
    head = architecture.multi_token if isinstance(architecture, DecoderConfig) else None
    if head is None or not isinstance(architecture, DecoderConfig):
        problem = "config.json names no layer for multi-token prediction that is read"
    elif has_weights and not any(name.startswith(f"{head.prefix}.") for name in source.tensors().tensors):
        problem = f"the checkpoint has no tensors under {head.prefix}, where its layer for multi-token prediction is"
    else:
        return replace(architecture, draft_head=head)
    raise ValidationError(
        f"speculative_config method='mtp' cannot be used with {str(args.model)!r}: {problem}; leave it out, or use "
        "another method.",
        parameter="speculative_config",
        value="mtp",
    )
