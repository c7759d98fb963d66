"""The methods of `LLM` that compare two texts: `score` and `rerank`.

Owns the methods, as a base class of `LLM` without state, and the texts that published rerankers are asked with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llm.api.adapters import LoRARequests, requests_per_row
from llm.api.pooling import Params, Pooling, PoolingHost, about, plan_of, pool, values_of
from llm.base.bar import UseTqdm
from llm.base.checks import check_integer, known_names
from llm.engine.boundary import QWEN3_RERANKER, PoolingPlan
from llm.engine.output import PromptState
from llm.engine.pooling_rows import PoolingRows, pair_texts
from llm.engine.rows import Row
from llm.errors import ValidationError
from llm.outputs import PoolingRequestOutputs, RerankResult, ScoringOutput, ScoringRequestOutput
from llm.pooling_params import PoolingParams

# As the model's card has it.
_QWEN3_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Ranking:
    @known_names("LLM.score")
    def score(
        self: PoolingHost,
        data_1: object,
        data_2: object,
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        instruction: str | None = None,
    ) -> PoolingRequestOutputs[ScoringRequestOutput]:
        """How well two texts fit each other; `.to_numpy()` of the result is float32 [pairs].

        A classifier of one class reads both texts of a pair, of an embedder it is the cosine of two vectors.

        Args:
            data_1: a text, such as a query, for all of `data_2`; or as many.
            data_2: texts.
            instruction: of a Qwen3 reranker, what makes a document fit.

        Further arguments and errors are those of `embed`.
        """
        plan, pairs = plan_of(self, None), pair_texts(data_1, data_2)
        if plan.task == "embed":
            return _cosines(self, pairs, pooling_params, tokenization_kwargs, use_tqdm, lora_request)
        plan_of(self, plan.task)
        if plan.size != 1:
            raise ValidationError(
                f"score needs a classifier of one class, and this model has {plan.size}; call classify.",
                parameter="convert",
                value=plan.size,
            )

        def rows(maker: PoolingRows) -> list[Row]:
            if plan.recipe != QWEN3_RERANKER:
                return maker.pairs(pairs, pooling_params, tokenization_kwargs)
            return maker.whole([asked_text(*pair, instruction) for pair in pairs], pooling_params, tokenization_kwargs)

        return pool(self, "classify", rows, _score, use_tqdm, lora_request)

    @known_names("LLM.rerank")
    def rerank(
        self: PoolingHost,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        instruction: str | None = None,
    ) -> list[RerankResult]:
        """The documents by `score`, the best first; of equal ones the earlier.

        Args:
            top_n: how many of them; None: all.

        Further arguments and errors are those of `score`.
        """
        if top_n is not None:
            check_integer("top_n", top_n, 1)
        outputs = Ranking.score(
            self,
            query,
            documents,
            use_tqdm=use_tqdm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            instruction=instruction,
        )
        found = [
            RerankResult(index, document, output.outputs.score)
            for index, ((_, document), output) in enumerate(zip(pair_texts(query, documents), outputs, strict=True))
        ]
        return sorted(found, key=lambda result: -result.relevance_score)[:top_n]


def asked_text(query: str, document: str, instruction: str | None) -> str:
    """The question to a Qwen3 reranker, unless the texts have it already, as scripts for vLLM write them."""
    if query.startswith("<|im_start|>"):
        return query + document
    body = f"<Instruct>: {instruction or _QWEN3_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return f"{_QWEN3_START}{body}{_QWEN3_END}"


def _score(state: PromptState, plan: PoolingPlan) -> ScoringRequestOutput:
    return ScoringRequestOutput(outputs=ScoringOutput(float(values_of(state)[0])), **about(state))


def _cosines(
    llm: PoolingHost,
    pairs: Sequence[tuple[str, str]],
    params: Params,
    tokenization_kwargs: Mapping[str, object] | None,
    use_tqdm: UseTqdm,
    lora_request: LoRARequests,
) -> PoolingRequestOutputs[ScoringRequestOutput]:
    """Every text is computed once with each adapter of its pairs, however many these are."""
    if isinstance(params, list):
        raise ValidationError("pooling_params must be one PoolingParams to score vectors.", parameter="pooling_params")
    given = PoolingParams() if params is None else params
    own = PoolingParams(given.truncate_prompt_tokens, given.dimensions, use_activation=True)
    requests = requests_per_row(lora_request, len(pairs))
    paths = ["" if request is None else request.lora_path for request in requests]
    wanted = {
        (text, path): request for pair, path, request in zip(pairs, paths, requests, strict=True) for text in pair
    }
    outputs = Pooling.embed(
        llm,
        [text for text, _ in wanted],
        use_tqdm=use_tqdm,
        pooling_params=own,
        lora_request=list(wanted.values()),
        tokenization_kwargs=tokenization_kwargs,
        prompt="",
    )
    found = dict(zip(wanted, outputs, strict=True))
    vectors = {key: output.to_numpy().astype(np.float64) for key, output in found.items()}
    scores = PoolingRequestOutputs[ScoringRequestOutput]()
    for index, (pair, path) in enumerate(zip(pairs, paths, strict=True)):
        first, second = ((text, path) for text in pair)
        ids = [*found[first].prompt_token_ids, *found[second].prompt_token_ids]
        cosine = float(np.add.reduce(vectors[first] * vectors[second]))
        scores.append(ScoringRequestOutput(found[second].request_id, ScoringOutput(cosine), ids, index=index))
    return scores
