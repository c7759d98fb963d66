"""The model that drafts tokens for another: read its folder and plan it beside the other's plan."""

from __future__ import annotations

from dataclasses import replace

from llm.config.engine import EngineArgs
from llm.engine.boundary import RunnerPlan
from llm.errors import OutOfMemoryError, ValidationError
from llm.kernels.backend import Backend
from llm.platforms import Platform
from llm.runner.speculation.pace import MOST_ROWS
from llm.startup.plan import make_plan
from llm.startup.source import ReadModel, read_tokenizer
from llm.tokenizer import Tokenizer

# A row's tokens after the last full block are computed anew at each draft.
_BLOCK_SIZE = 4
# Of the target's KV cache.
_CACHE_SHARE = 8
_COMPARED_TOKENS = 2000


def draft_args(args: EngineArgs, plan: RunnerPlan) -> EngineArgs | None:
    """The arguments of the draft model that `plan`'s `speculative_config` names; None: it names none."""
    config = plan.config
    speculative = config.speculative_config
    if speculative is None or speculative.method != "draft_model" or speculative.model is None:
        return None
    return EngineArgs(
        speculative.model,
        dtype=args.dtype,
        quantization=speculative.quantization,
        max_num_seqs=min(MOST_ROWS, config.scheduler_config.max_num_seqs),
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=_BLOCK_SIZE,
        kv_cache_memory_bytes=max(1, config.cache_config.kv_cache_memory_bytes // _CACHE_SHARE),
        load_format=args.load_format,
        use_tqdm_on_load=args.use_tqdm_on_load,
        num_threads=args.num_threads,
        seed=config.model_config.seed,
        skip_tokenizer_init=True,
        device=args.device,
        offload_weights=False,
    )


def with_draft(
    plan: RunnerPlan,
    args: EngineArgs,
    draft: ReadModel,
    tokenizer: Tokenizer | None,
    platform: Platform,
    backend: Backend,
) -> RunnerPlan:
    """The plan with that of its draft model, which `args` describe.

    Raises:
        ValidationError: the model cannot draft for the plan's.
        OutOfMemoryError: memory has no room for it.
    """
    if tokenizer is not None:
        other = read_tokenizer(replace(args, skip_tokenizer_init=False), draft.source)
        _check_tokenizer(tokenizer, other, str(args.model))
    try:
        drafting = make_plan(args, draft, platform, plan.config.compilation_config, backend, ())
    except OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"speculative_config model={str(args.model)!r} does not fit beside the model ({str(error).rstrip('.')}); a "
            "draft model's weights are never read from a file, as every draft reads all of them."
        ) from error
    if drafting.config.cache_config.num_state_slots:
        raise ValidationError(
            f"speculative_config model={str(args.model)!r} has recurrent states, which it would compute again from a "
            "cached prefix for every draft; use a model with attention only.",
            parameter="speculative_config",
        )
    return replace(plan, draft=drafting)


def _check_tokenizer(tokenizer: Tokenizer, other: Tokenizer | None, model: str) -> None:
    """Compares the texts of tokens all over the vocabulary; tokens that only one of them has are allowed."""
    size = 0 if other is None else min(tokenizer.vocab_size, other.vocab_size)
    ids = range(0, size, max(1, size // _COMPARED_TOKENS))
    if other is None or any(tokenizer.decode([token], False) != other.decode([token], False) for token in ids):
        raise ValidationError(
            f"speculative_config model={model!r} has another tokenizer; a draft model must have the same tokens.",
            parameter="speculative_config",
            value=model,
        )
