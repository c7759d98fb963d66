"""A pooling call: vectors, classes and scores, from the arguments of `LLM.embed` and its like to their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np
import torch

from llm.base.checks import check_choice, refuse
from llm.calls.arguments import LoRARequests, give_adapters, requests_per_row
from llm.calls.chat import ChatPrompt
from llm.engine.boundary import QWEN3_VL_RERANKER, PoolingPlan
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState
from llm.engine.pooling_rows import BY_TOKEN, PoolingRows, Prefix, Scored, pair_prompts, pair_texts, scored_key
from llm.engine.preprocess import rendered
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
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)
from llm.pooling_params import PoolingParams
from llm.progress import UseTqdm

if TYPE_CHECKING:
    from llm.llm import LLM

# The question to a Qwen3 reranker, as the model's card has it.
_QWEN3_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n"
_NO_THOUGHTS = "<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_VL_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."

Params = PoolingParams | list[PoolingParams] | None
R = TypeVar("R", bound=PoolingRequestOutput[AnyOutput])
NO_PREFIX = Prefix()


@dataclass(frozen=True)
class PairPrompt:
    """In the place of a prompt of `encoding`: two texts, which a classifier of one class reads together; of a reranker
    that is asked in words also with images."""

    first: Scored
    second: Scored
    instruction: str | None = None


@dataclass(frozen=True)
class ScoredText:
    """In the place of a prompt of `encoding`: a text, or a prompt with images, whose vector is compared, without the
    model's own prompt."""

    text: Scored


class AboutPrompt(TypedDict):
    """The fields of an output beside `outputs`."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    index: int
    num_dropped_tokens: int


@dataclass(frozen=True)
class PoolingCall:
    """The arguments that all methods have in common, and what these do. Raises as `LLM.embed` says."""

    llm: LLM
    params: Params
    use_tqdm: UseTqdm
    lora_request: LoRARequests
    tokenization_kwargs: Mapping[str, object] | None

    def embed(self, prompts: object, prefix: Prefix = NO_PREFIX) -> PoolingRequestOutputs[EmbeddingRequestOutput]:
        return self._run("embed", lambda rows: self._texts(rows, prompts, prefix), _embedding)

    def classify(self, prompts: object) -> PoolingRequestOutputs[ClassificationRequestOutput]:
        return self._run("classify", lambda rows: self._texts(rows, prompts), _classification)

    def encode(
        self, prompts: object, pooling_task: str | None
    ) -> PoolingRequestOutputs[PoolingRequestOutput[PoolingOutput]]:
        by_token = self._is_by_token(self._plan(None), pooling_task)
        return self._run(None, lambda rows: self._texts(rows, prompts, by_token=by_token), _data)

    def encoding(
        self, prompt: object, pooling_task: str | None
    ) -> tuple[Row, Callable[[PromptState], PoolingRequestOutput[PoolingOutput]]]:
        """The row of one prompt of `encode`, and what makes its output; the lock is held."""
        plan = self._plan(None)
        maker = PoolingRows(self.llm._preprocessor, plan)
        if isinstance(prompt, PairPrompt):
            [row] = self._pairs(maker, self._scores(), [(prompt.first, prompt.second)], prompt.instruction)
        elif isinstance(prompt, ScoredText):
            [row] = self._texts(maker, [prompt.text], Prefix(None, ""))
        elif isinstance(prompt, ChatPrompt):
            preprocessor, options = self.llm._preprocessor, prompt.options
            asked = options.prompts(preprocessor, prompt.messages)
            given = preprocessor.with_processor_options(asked, options.mm_processor_kwargs)
            [row] = self._texts(maker, given, by_token=self._is_by_token(plan, pooling_task))
        else:
            [row] = self._texts(maker, [prompt], by_token=self._is_by_token(plan, pooling_task))
        return row, partial(_data, plan=plan)

    def reward(self, prompts: object) -> PoolingRequestOutputs[PoolingRequestOutput[PoolingOutput]]:
        return self._run("classify", lambda rows: self._texts(rows, prompts), _data)

    def score(
        self, data_1: object, data_2: object, instruction: str | None, chat_template: str | Path | None
    ) -> PoolingRequestOutputs[ScoringRequestOutput]:
        if self._plan(None).task == "embed":
            if chat_template is not None:
                refuse("chat_template", chat_template, "None for a model of vectors, which reads each text by itself")
            return self._cosines(pair_prompts(data_1, data_2))
        plan, pairs = self._scores(), pair_prompts(data_1, data_2)
        return self._run("classify", lambda rows: self._pairs(rows, plan, pairs, instruction, chat_template), _score)

    def _scores(self) -> PoolingPlan:
        """The plan of a classifier of one class; raises `ValidationError` for another model."""
        plan = self._plan("classify")
        if plan.size != 1:
            raise ValidationError(
                f"score needs a classifier of one class, and this model has {plan.size}; call classify.",
                parameter="convert",
                value=plan.size,
            )
        return plan

    def _pairs(
        self,
        rows: PoolingRows,
        plan: PoolingPlan,
        pairs: Sequence[tuple[Scored, Scored]],
        instruction: str | None,
        chat_template: str | Path | None = None,
    ) -> list[Row]:
        ask = partial(asked_text, plan.recipe, instruction)
        if chat_template is not None:
            ask = partial(self._rendered, chat_template, instruction)
        elif not plan.recipe:
            return rows.pairs(pair_texts(pairs), self.params, self.tokenization_kwargs)
        return rows.whole([rows.in_words(pair, ask) for pair in pairs], self.params, self.tokenization_kwargs)

    def _rendered(self, chat_template: str | Path, instruction: str | None, query: str, document: str) -> str:
        """vLLM's score template: messages of the roles "query" and "document", and of an instruction "system"."""
        said = [] if instruction is None else [("system", instruction)]
        messages = [{"role": role, "content": text} for role, text in (*said, ("query", query), ("document", document))]
        [text] = rendered(self.llm._preprocessor.tokenizer, messages, {"chat_template": chat_template}, {})
        return text

    def rerank(
        self,
        query: Scored,
        documents: Sequence[Scored],
        top_n: int | None,
        instruction: str | None,
        chat_template: str | Path | None,
    ) -> list[RerankResult]:
        pairs = pair_prompts(query, documents)
        outputs = self.score(query, documents, instruction, chat_template)
        found = [
            RerankResult(index, document, output.outputs.score)
            for index, ((_, document), output) in enumerate(zip(pairs, outputs, strict=True))
        ]
        return sorted(found, key=lambda result: -result.relevance_score)[:top_n]

    def _cosines(self, pairs: Sequence[tuple[Scored, Scored]]) -> PoolingRequestOutputs[ScoringRequestOutput]:
        """Every text is computed once with each adapter of its pairs, however many these are."""
        if isinstance(self.params, list):
            message = "pooling_params must be one PoolingParams to score vectors."
            raise ValidationError(message, parameter="pooling_params")
        given = PoolingParams() if self.params is None else self.params
        own = PoolingParams(given.truncate_prompt_tokens, given.dimensions, use_activation=True)
        requests = requests_per_row(self.lora_request, len(pairs))
        paths = ["" if request is None else request.lora_path for request in requests]
        wanted = {
            (scored_key(item), path): (item, request)
            for pair, path, request in zip(pairs, paths, requests, strict=True)
            for item in pair
        }
        call = replace(self, params=own, lora_request=[request for _, request in wanted.values()])
        outputs = call.embed([item for item, _ in wanted.values()], Prefix(None, ""))
        found = dict(zip(wanted, outputs, strict=True))
        vectors = {key: output.to_numpy().astype(np.float64) for key, output in found.items()}
        scores = PoolingRequestOutputs[ScoringRequestOutput]()
        for index, (pair, path) in enumerate(zip(pairs, paths, strict=True)):
            first, second = ((scored_key(item), path) for item in pair)
            ids = [*found[first].prompt_token_ids, *found[second].prompt_token_ids]
            cosine = float(np.add.reduce(vectors[first] * vectors[second]))
            scores.append(ScoringRequestOutput(found[second].request_id, ScoringOutput(cosine), ids, index=index))
        return scores

    def _texts(
        self, rows: PoolingRows, prompts: object, prefix: Prefix = NO_PREFIX, *, by_token: bool = False
    ) -> list[Row]:
        return rows.texts(prompts, self.params, self.tokenization_kwargs, prefix=prefix, by_token=by_token)

    def _plan(self, task: str | None) -> PoolingPlan:
        """The model's plan; raises `ValidationError` if it does not do `task`, or anything where that is None."""
        self.llm._open_engine()
        plan = self.llm._pooling
        if plan is None:
            raise ValidationError(
                "this model generates text; for vectors build it with runner='pooling' (or convert='embed'), for "
                "classes load a checkpoint with a classifier.",
                parameter="runner",
                value="generate",
            )
        if task is not None and plan.task != task:
            instead = "classes; call classify, score or encode" if plan.task == "classify" else "vectors; call embed"
            other = "embed" if task == "embed" else "classify"
            raise ValidationError(
                f"this model gives {instead}, or build it with convert={other!r}.",
                parameter="convert",
                value=plan.task,
            )
        if task == "classify" and plan.by_token:
            raise ValidationError(BY_TOKEN, parameter="pooling_task", value=task)
        return plan

    def _is_by_token(self, plan: PoolingPlan, pooling_task: str | None) -> bool:
        """Whether `encode` has a result per token; raises `ValidationError` for a task that the model does not do."""
        of_tokens = f"token_{plan.task}"
        task = plan.default_task or of_tokens if pooling_task is None else pooling_task
        check_choice("pooling_task", task, (of_tokens,) if plan.by_token else (plan.task, of_tokens))
        return task.startswith("token_")

    def _run(
        self,
        task: str | None,
        make_rows: Callable[[PoolingRows], list[Row]],
        output_of: Callable[[PromptState, PoolingPlan], R],
    ) -> PoolingRequestOutputs[R]:
        """Rows are made once the call holds the lock."""
        check_use_tqdm(self.use_tqdm)
        llm = self.llm
        with InterruptGuard() as guard, llm._exclusive():
            plan = self._plan(task)
            engine = llm._begin()
            rows = give_adapters(engine, make_rows(PoolingRows(llm._preprocessor, plan)), self.lora_request)
            states = [engine.add(row) for row in rows]

            def finished() -> list[R | None]:
                return [None if _pooled(state) is None else output_of(state, plan) for state in states]

            try:
                with closing(Progress(self.use_tqdm, len(states))) as progress:
                    for state in states:
                        progress.add(state)
                    engine.run(states, lambda: self._between_steps(engine, progress, guard))
            except GenerationInterrupted:
                outputs = finished()
                engine.abort(states)
                raise GenerationInterrupted(outputs) from None
            except BaseException:
                guard.end()
                engine.reset()
                raise
        return PoolingRequestOutputs(output for output in finished() if output is not None)

    def _between_steps(self, engine: Engine, progress: Progress, guard: InterruptGuard) -> None:
        self.llm._abort_dropped(engine)
        progress.update()
        if guard.requested:
            guard.end()
            raise GenerationInterrupted([])


def asked_text(recipe: str, instruction: str | None, query: str, document: str) -> str:
    """The question to a reranker, unless the texts have it already, as scripts for vLLM write them."""
    if query.startswith("<|im_start|>"):
        return query + document
    if recipe == QWEN3_VL_RERANKER:
        body = f"<Instruct>: {instruction or _QWEN3_VL_INSTRUCTION}<Query>:{query}\n<Document>:{document}"
        return f"{_QWEN3_START}{body}{_QWEN3_END}"
    body = f"<Instruct>: {instruction or _QWEN3_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return f"{_QWEN3_START}{body}{_QWEN3_END}{_NO_THOUGHTS}"


def _pooled(state: PromptState) -> np.ndarray | None:
    return state.completions[0].request.pooled


def _values(state: PromptState) -> np.ndarray:
    """What was pooled, float32."""
    pooled = _pooled(state)
    if pooled is None:
        raise RuntimeError("the prompt has not been computed")
    return pooled


def _about(state: PromptState) -> AboutPrompt:
    return {
        "request_id": state.request_id,
        "prompt_token_ids": state.row.token_ids,
        "num_cached_tokens": state.completions[0].request.num_cached_tokens or 0,
        "index": state.row.index,
        "num_dropped_tokens": state.row.num_dropped_tokens,
    }


def _embedding(state: PromptState, plan: PoolingPlan) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(outputs=EmbeddingOutput(_values(state).tolist()), **_about(state))


def _classification(state: PromptState, plan: PoolingPlan) -> ClassificationRequestOutput:
    outputs = ClassificationOutput(_values(state).tolist(), list(plan.labels))
    return ClassificationRequestOutput(outputs=outputs, **_about(state))


def _data(state: PromptState, plan: PoolingPlan) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput(outputs=PoolingOutput(torch.from_numpy(_values(state))), **_about(state))


def _score(state: PromptState, plan: PoolingPlan) -> ScoringRequestOutput:
    return ScoringRequestOutput(outputs=ScoringOutput(float(_values(state)[0])), **_about(state))
