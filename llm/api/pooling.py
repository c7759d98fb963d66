"""The methods of `LLM` for models whose hidden states are pooled: vectors, classes and scores.

Owns the methods, as a base class of `LLM` without state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Protocol, TypedDict, TypeVar

import numpy as np
import torch

from llm.api.adapters import LoRARequests, give_adapters
from llm.api.host import Host
from llm.base.bar import UseTqdm
from llm.base.checks import check_choice, known_names
from llm.engine.boundary import PoolingPlan
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState
from llm.engine.pooling_rows import BY_TOKEN, PoolingRows, Prefix
from llm.engine.progress import Progress, check_use_tqdm
from llm.engine.rows import Row
from llm.errors import GenerationInterrupted, ValidationError
from llm.outputs import (
    AnyOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PoolingRequestOutputs,
)
from llm.pooling_params import PoolingParams


class AboutPrompt(TypedDict):
    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    index: int
    num_dropped_tokens: int


R = TypeVar("R", bound=PoolingRequestOutput[AnyOutput])
Params = PoolingParams | list[PoolingParams] | None
MakeRows = Callable[[PoolingRows], list[Row]]
NO_PREFIX = Prefix()


class PoolingHost(Host, Protocol):
    """What the methods use of `LLM`."""

    _pooling: PoolingPlan | None

    def _abort_dropped(self, engine: Engine) -> None: ...


class Pooling:
    @known_names("LLM.embed")
    def embed(
        self: PoolingHost,
        prompts: object,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> PoolingRequestOutputs[EmbeddingRequestOutput]:
        """The vector of each prompt; `.to_numpy()` of the result is float32 [prompts, size].

        Args:
            prompts: as for `generate`.
            use_tqdm: a progress bar in tokens; False prints nothing; a callable makes the bar.
            pooling_params: `dimensions`, `use_activation`, `truncate_prompt_tokens`; one, or one per prompt.
            lora_request: as for `generate`.
            tokenization_kwargs: as for `generate`.
            prompt_name: the name of the model's prompt that precedes each text, such as "query"; None: its default.
            prompt: that prompt itself.

        Raises:
            ValidationError: names every bad prompt, before any work starts; or the model has no vectors.
            GenerationInterrupted: Ctrl-C; with the outputs so far.
        """
        rows = rows_of(prompts, pooling_params, tokenization_kwargs, Prefix(prompt_name, prompt))
        return pool(self, "embed", rows, _embedding, use_tqdm, lora_request)

    @known_names("LLM.classify")
    def classify(
        self: PoolingHost,
        prompts: object,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> PoolingRequestOutputs[ClassificationRequestOutput]:
        """The probability of each class, per prompt. Arguments and errors are those of `embed`."""
        rows = rows_of(prompts, pooling_params, tokenization_kwargs)
        return pool(self, "classify", rows, _classification, use_tqdm, lora_request)

    @known_names("LLM.encode")
    def encode(
        self: PoolingHost,
        prompts: object,
        pooling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> PoolingRequestOutputs[PoolingRequestOutput[PoolingOutput]]:
        """`outputs.data` of each prompt, a float32 tensor.

        Args:
            pooling_task: "token_embed" or "token_classify": [tokens, size], a vector or the classes of every token;
                "embed" or "classify": [size]. None: the task of `pooler_config`, or else of every token.

        Further arguments and errors are those of `embed`.
        """
        plan = plan_of(self, None)
        by_token = task_of(plan, pooling_task).startswith("token_")
        rows = rows_of(prompts, pooling_params, tokenization_kwargs, by_token=by_token)
        return pool(self, None, rows, _data, use_tqdm, lora_request)

    @known_names("LLM.reward")
    def reward(
        self: PoolingHost,
        prompts: object,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> PoolingRequestOutputs[PoolingRequestOutput[PoolingOutput]]:
        """The reward of each prompt, a conversation with its answer: `outputs.data` are the logits, [classes].

        Arguments and errors are those of `embed`.
        """
        rows = rows_of(prompts, PoolingParams(use_activation=False), tokenization_kwargs)
        return pool(self, "classify", rows, _data, use_tqdm, lora_request)


def rows_of(
    prompts: object, params: Params, tokenization_kwargs: object, prefix: Prefix = NO_PREFIX, *, by_token: bool = False
) -> MakeRows:
    """A row per prompt of a call, made once it holds the lock."""

    def make(maker: PoolingRows) -> list[Row]:
        return maker.texts(prompts, params, tokenization_kwargs, prefix=prefix, by_token=by_token)

    return make


def encoding(
    llm: PoolingHost, prompt: object, params: PoolingParams | None, tokenization_kwargs: object
) -> tuple[Row, Callable[[PromptState], PoolingRequestOutput[PoolingOutput]]]:
    """The row of one prompt of `encode`, and what makes its output; the lock is held."""
    plan = plan_of(llm, None)
    by_token = task_of(plan, None if params is None else params.task).startswith("token_")
    make = rows_of([prompt], params, tokenization_kwargs, by_token=by_token)
    [row] = make(PoolingRows(llm._preprocessor, plan))
    return row, partial(_data, plan=plan)


def task_of(plan: PoolingPlan, asked: str | None) -> str:
    """The task of `encode`; raises `ValidationError` for one that the model does not do."""
    of_tokens = f"token_{plan.task}"
    task = plan.default_task or of_tokens if asked is None else asked
    check_choice("pooling_task", task, (of_tokens,) if plan.by_token else (plan.task, of_tokens))
    return task


def plan_of(llm: PoolingHost, task: str | None) -> PoolingPlan:
    """The model's plan; raises `ValidationError` if it does not do `task`, or anything where that is None."""
    llm._open_engine()
    plan = llm._pooling
    if plan is None:
        raise ValidationError(
            "this model generates text; for vectors build it with runner='pooling' (or convert='embed'), for classes "
            "load a checkpoint with a classifier.",
            parameter="runner",
            value="generate",
        )
    if task is not None and plan.task != task:
        instead = "classes; call classify, score or encode" if plan.task == "classify" else "vectors; call embed"
        other = "embed" if task == "embed" else "classify"
        raise ValidationError(
            f"this model gives {instead}, or build it with convert={other!r}.", parameter="convert", value=plan.task
        )
    if task == "classify" and plan.by_token:
        raise ValidationError(BY_TOKEN, parameter="pooling_task", value=task)
    return plan


def pool(
    llm: PoolingHost,
    task: str | None,
    make_rows: MakeRows,
    output_of: Callable[[PromptState, PoolingPlan], R],
    use_tqdm: UseTqdm,
    lora_request: LoRARequests = None,
) -> PoolingRequestOutputs[R]:
    """Run a call; raises as `LLM.embed` says."""
    check_use_tqdm(use_tqdm)
    with InterruptGuard() as guard, llm._exclusive():
        plan = plan_of(llm, task)
        engine = llm._begin()
        rows = give_adapters(engine, make_rows(PoolingRows(llm._preprocessor, plan)), lora_request)
        states = [engine.add(row) for row in rows]

        def finished() -> list[R | None]:
            return [None if _pooled(state) is None else output_of(state, plan) for state in states]

        try:
            with closing(Progress(use_tqdm, len(states))) as progress:
                for state in states:
                    progress.add(state)
                engine.run(states, lambda: _between_steps(llm, engine, progress, guard))
        except GenerationInterrupted:
            outputs = finished()
            engine.abort(states)
            raise GenerationInterrupted(outputs) from None
        except BaseException:
            guard.end()
            engine.reset()
            raise
    return PoolingRequestOutputs(output for output in finished() if output is not None)


def _between_steps(llm: PoolingHost, engine: Engine, progress: Progress, guard: InterruptGuard) -> None:
    llm._abort_dropped(engine)
    progress.update()
    if guard.requested:
        guard.end()
        raise GenerationInterrupted([])


def _pooled(state: PromptState) -> np.ndarray | None:
    return state.completions[0].request.pooled


def values_of(state: PromptState) -> np.ndarray:
    """What was pooled, float32."""
    pooled = _pooled(state)
    if pooled is None:
        raise RuntimeError("the prompt has not been computed")
    return pooled


def about(state: PromptState) -> AboutPrompt:
    """The fields of an output beside `outputs`."""
    return {
        "request_id": state.request_id,
        "prompt_token_ids": state.row.token_ids,
        "num_cached_tokens": state.completions[0].request.num_cached_tokens or 0,
        "index": state.row.index,
        "num_dropped_tokens": state.row.num_dropped_tokens,
    }


def _embedding(state: PromptState, plan: PoolingPlan) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(outputs=EmbeddingOutput(values_of(state).tolist()), **about(state))


def _classification(state: PromptState, plan: PoolingPlan) -> ClassificationRequestOutput:
    outputs = ClassificationOutput(values_of(state).tolist(), list(plan.labels))
    return ClassificationRequestOutput(outputs=outputs, **about(state))


def _data(state: PromptState, plan: PoolingPlan) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput(outputs=PoolingOutput(torch.from_numpy(values_of(state))), **about(state))
