"""Who drafts tokens for a model: another model or an EAGLE-3 head, read and planned beside the model's own plan."""

from __future__ import annotations

from dataclasses import replace

from llm.config.engine import LLMArgs, SpeculativeConfig
from llm.engine.boundary import DraftHeadPlan, RunnerPlan
from llm.errors import OutOfMemoryError, ValidationError
from llm.kernels.backend import Backend
from llm.models.decoder import DecoderConfig, DecoderForCausalLM
from llm.models.eagle3 import NUM_TAPS, Eagle3Config, Eagle3ForCausalLM
from llm.platforms import Platform
from llm.runner.speculation.speculator import MOST_ROWS
from llm.setup.model_folder import Implementation, ReadModel, read_model, read_tokenizer
from llm.setup.plan import make_plan
from llm.text.tokenizer import Tokenizer

# A row's tokens after the last full block are computed anew at each draft.
_BLOCK_SIZE = 4
# Of the target's KV cache.
_CACHE_SHARE = 8
_COMPARED_TOKENS = 2000


def draft_args(args: LLMArgs, plan: RunnerPlan) -> LLMArgs | None:
    """The arguments of the draft model that `plan`'s `speculative_config` names; None: it names none."""
    config = plan.config
    speculative = config.speculative_config
    if speculative is None or speculative.method != "draft_model" or speculative.model is None:
        return None
    return replace(
        _args_beside(args, speculative.model, speculative.quantization),
        max_num_seqs=min(MOST_ROWS, config.scheduler_config.max_num_seqs),
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=_BLOCK_SIZE,
        kv_cache_memory_bytes=max(1, config.cache_config.kv_cache_memory_bytes // _CACHE_SHARE),
        seed=config.model_config.seed,
    )


def _args_beside(args: LLMArgs, model: str, quantization: str | None) -> LLMArgs:
    """The arguments of a model beside that of `args`."""
    return LLMArgs(
        model,
        dtype=args.dtype,
        quantization=quantization,
        load_format=args.load_format,
        use_tqdm_on_load=args.use_tqdm_on_load,
        num_threads=args.num_threads,
        skip_tokenizer_init=True,
        device=args.device,
        offload_weights=False,
    )


def with_draft(
    plan: RunnerPlan,
    args: LLMArgs,
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


# --- EAGLE-3's head. ---

# Nothing is allocated by its plan: its keys and values are in the target's cache.
_CACHE_BYTES = 1 << 24
_EMBEDDINGS = ("embed_tokens.weight", "model.embed_tokens.weight")


def eagle3_args(args: LLMArgs) -> LLMArgs | None:
    """The arguments of the head that `speculative_config` names; None: it names none."""
    config = SpeculativeConfig.of(args.speculative_config)
    if config is None or config.method != "eagle3" or config.model is None:
        return None
    return replace(
        _args_beside(args, config.model, config.quantization),
        max_num_seqs=1,
        kv_cache_memory_bytes=_CACHE_BYTES,
        speculative_config=None,
        runner="generate",
    )


def read_eagle3(args: LLMArgs, target: ReadModel) -> ReadModel:
    """The head for `target`, which `args` describe.

    Raises:
        ValidationError: it does not fit the target.
    """
    head = read_model(args, Implementation(Eagle3ForCausalLM, "native", "asked for by speculative_config"))
    config = head.architecture
    if head.has_weights and not any(name in head.source.tensors().tensors for name in _EMBEDDINGS):
        config = replace(config, has_embedding=False)
    problem = _problem(config, target)
    if problem:
        raise ValidationError(
            f"speculative_config model={str(args.model)!r} cannot draft for {target.model_class.__name__}: {problem}.",
            parameter="speculative_config",
            value=str(args.model),
        )
    return replace(head, architecture=config)


def with_eagle3(plan: RunnerPlan, args: LLMArgs, head: ReadModel, platform: Platform, backend: Backend) -> RunnerPlan:
    """The plan with that of its head."""
    own = make_plan(args, head, platform, plan.config.compilation_config, backend, ())
    longest = replace(own.config.model_config, max_model_len=plan.config.model_config.max_model_len)
    own = replace(own, config=replace(own.config, model_config=longest))
    return replace(plan, head=DraftHeadPlan(own, head.architecture.tapped(len(plan.architecture.layers))))


def _problem(head: Eagle3Config, target: ReadModel) -> str:
    """Why the head cannot draft for the target; "": it can."""
    config = target.architecture
    if not isinstance(config, DecoderConfig) or target.model_class.forward is not DecoderForCausalLM.forward:
        return "its hidden states between layers are not given out"
    if head.vocab_size > config.vocab_size:
        return f"its vocabulary has {head.vocab_size} tokens, the model's {config.vocab_size}"
    if head.target_size != config.hidden_size:
        return f"it reads hidden states of {head.target_size} channels, the model's have {config.hidden_size}"
    if not head.has_embedding and head.hidden_size != config.hidden_size:
        return f"it has no embedding of its own, and {head.hidden_size} channels instead of {config.hidden_size}"
    taps = head.tapped(len(config.layers))
    if len(set(taps)) != NUM_TAPS or not all(0 <= layer < len(config.layers) for layer in taps):
        return f"it reads the input of layers {list(taps)}, the model has {len(config.layers)}"
    return ""
