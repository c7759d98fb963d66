"""Our models are transformers' models: the same tokens, the same logprobs, alone and in a ragged batch.

Every row of `tiny_models.TINY_MODELS` is held against transformers in float32. transformers is fed the tokens that we
generated (teacher forcing): where its likeliest token is ours at every position, its greedy tokens are ours too.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    TINY_MODELS,
    TinyModel,
    make_prompts,
    one_thread,
    reference_logprobs,
    reference_model,
    tiny_checkpoint,
)

from llm import LLM, RequestOutput, SamplingParams
from llm.layers.moe import FusedMoE
from llm.loading.loader import weights_changed

TOLERANCE = 1e-4
TOP = 5
OUTPUT_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, logprobs=TOP, ignore_eos=True)


@dataclass
class Case:
    """One row of the table, loaded. The KV cache is float32, whatever the weights are stored as."""

    row: TinyModel
    folder: Path

    @cached_property
    def llm(self) -> LLM:
        return self.load()

    def load(self, **more: Any) -> LLM:
        arguments = {"kv_cache_dtype": "float32", "enable_prefix_caching": False, **self.row.engine, **more}
        return LLM(self.folder, skip_tokenizer_init=True, **arguments)

    @cached_property
    def prompts(self) -> list[list[int]]:
        return make_prompts(self.row)

    @cached_property
    def alone(self) -> list[RequestOutput]:
        return [output for prompt in self.prompts for output in self.generate([prompt])]

    def generate(self, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        return self.llm.generate(prompts, params, use_tqdm=False)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        engine: Any = self.llm._engine
        return dict(engine.runner.model.named_parameters())


@pytest.fixture(scope="module", params=TINY_MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(TINY_MODELS[request.param], tiny_checkpoint(request.param, tmp_path_factory))
    with one_thread():
        yield case
    if "llm" in vars(case):
        case.llm.close()


def deviation(folder: Path, outputs: Sequence[RequestOutput]) -> float:
    """The largest difference between our logprobs and transformers', infinite where the greedy tokens differ."""
    return max(_row_deviation(folder, output) for output in outputs)


def _row_deviation(folder: Path, output: RequestOutput) -> float:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    expected = reference_logprobs(folder, output.prompt_token_ids, completion.token_ids)
    if expected.argmax(dim=-1).tolist() != completion.token_ids:
        return math.inf
    worst = 0.0
    for line, token, ours in zip(expected, completion.token_ids, completion.logprobs, strict=True):
        assert token in ours and len(ours) == TOP
        top = line.topk(TOP).values.tolist()
        worst = max(worst, *(abs(line[index].item() - item.logprob) for index, item in ours.items()))
        # By rank as well: these are the five likeliest, not just any five.
        worst = max(worst, *(abs(top[item.rank - 1] - item.logprob) for item in ours.values() if item.rank))
    return worst


def test_alone(case: Case) -> None:
    """Its decode steps are recorded: PyTorch computes nothing between the kernels."""
    assert deviation(case.folder, case.alone) < TOLERANCE
    engine: Any = case.llm._engine
    if (recorded := engine.runner.recorded) is not None:
        assert recorded._steps and recorded.refusal is None


def test_in_a_ragged_batch(case: Case) -> None:
    assert deviation(case.folder, case.generate(case.prompts[::-1])) < TOLERANCE


def test_its_plan_is_plain_data(case: Case) -> None:
    """A runner in another process is sent it."""
    engine: Any = case.llm._engine
    plan = engine.runner.plan
    crossed = pickle.loads(pickle.dumps(plan))
    assert crossed.source.folder == plan.source.folder
    assert replace(crossed, source=plan.source) == plan


def test_the_row_is_decisive(case: Case) -> None:
    """Logprobs within the tolerance cannot flip a greedy token, and the tokens are not a few over and over."""
    completions = [output.outputs[0] for output in case.alone]
    for position in (position for completion in completions for position in completion.logprobs or []):
        first, second = sorted((item.logprob for item in position.values()), reverse=True)[:2]
        assert first - second > 2 * TOLERANCE, "a margin is thin: give the row another seed"
    tokens = [token for completion in completions for token in completion.token_ids]
    assert len(set(tokens)) > len(tokens) // 8, "degenerate: give the row another seed"


def test_every_parameter_counts(case: Case) -> None:
    """The negative control of this file: with any one parameter forgotten, the logprobs of a prompt are others."""
    engine: Any = case.llm._engine
    engine.runner.recorded = None  # a recorded step reads the memory that the weights had when it was recorded
    longest = max(case.prompts, key=len)
    whole = prompt_logprobs(case, longest)
    for name, parameter in case.parameters.items():
        kept = parameter.data
        parameter.data = torch.ones_like(kept) if _is_norm_weight(name, kept) else torch.zeros_like(kept)
        weights_changed(engine.runner.model)
        pairs = zip(whole, prompt_logprobs(case, longest), strict=True)
        parameter.data = kept
        weights_changed(engine.runner.model)
        assert max(abs(before - after) for before, after in pairs) > 2 * TOLERANCE, f"{name} does not matter"


def prompt_logprobs(case: Case, prompt: list[int]) -> list[float]:
    """Of each token of the prompt but the first. Rows of different lengths: such a step is not recorded, and a recorded
    one would read the weights that were there when it was recorded."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    lines = case.generate([prompt, prompt[1:]], params)[0].prompt_logprobs or []
    return [line[token].logprob for line, token in zip(lines[1:], prompt[1:], strict=True) if line]


@pytest.mark.parametrize(
    "case",
    [name for name, row in TINY_MODELS.items() if any("experts" in key and value for key, value in row.config.items())],
    indirect=True,
)
def test_tokens_go_to_the_experts_of_transformers(case: Case) -> None:
    """In every layer; transformers gives a token's experts in no order where they lie in groups."""
    engine: Any = case.llm._engine
    engine.runner.recorded = None
    prompt = max(case.prompts, key=len)
    layers = [item for item in engine.runner.model.modules() if isinstance(item, FusedMoE) and item.num_experts > 1]
    ours: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda layer, inputs, output: ours.append(layer.select(*inputs)[1]))
        for layer in layers
    ]
    case.generate([prompt], SamplingParams(max_tokens=1))
    theirs: list[torch.Tensor] = []
    reference = reference_model(case.folder)
    hooks += [
        module.register_forward_pre_hook(lambda module, inputs: theirs.append(_ids_of(module, inputs)))
        for module in reference.modules()
        if _is_stack(module)
    ]
    with torch.no_grad():
        reference(input_ids=torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(ours) == len(theirs) == len(layers) > 0
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own.sort(dim=-1).values, other.sort(dim=-1).values)
        assert len(own.unique()) > own.shape[-1] or own.shape[-1] == layers[0].num_experts, "all go the same way"


def _ids_of(module: Any, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Llama 4's module gets no ids but every token for every expert, as zeros where another one was chosen."""
    if len(inputs) > 1:
        return inputs[1]
    return inputs[0].unflatten(0, (module.num_experts, -1)).any(dim=-1).t().nonzero()[:, 1:]


def _is_stack(module: torch.nn.Module) -> bool:
    """transformers' module with the weights of all experts of a layer."""
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


@pytest.mark.parametrize("case", [name for name, row in TINY_MODELS.items() if row.control], indirect=True)
def test_what_is_special_counts(case: Case) -> None:
    with case.load(hf_overrides=case.row.control) as llm:
        outputs = llm.generate([max(case.prompts, key=len)], GREEDY, use_tqdm=False)
    assert deviation(case.folder, outputs) > TOLERANCE


@pytest.mark.parametrize(
    "case", [name for name, row in TINY_MODELS.items() if row.dtype != torch.float32], indirect=True
)
def test_cache_in_the_type_of_the_weights(case: Case) -> None:
    """By default keys and values are rounded to the checkpoint's type: not the same answer, but close to it."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP)
    with case.load(kv_cache_dtype="auto") as llm:
        assert llm.config.cache_config.kv_cache_dtype == case.row.dtype
        outputs = llm.generate(case.prompts, params, use_tqdm=False)
    assert TOLERANCE < deviation(case.folder, outputs) < 0.25


@pytest.mark.parametrize(
    "case", [name for name, row in TINY_MODELS.items() if row.dtype != torch.float32], indirect=True
)
def test_float32_is_float32_in_the_cache_too(case: Case) -> None:
    """`dtype="float32"` alone gives transformers' float32; the test above shows that a rounded cache would be seen."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP)
    with case.load(kv_cache_dtype="auto", dtype="float32") as llm:
        assert llm.config.reasons["kv_cache_dtype"] == "dtype=float32"
        outputs = llm.generate(case.prompts, params, use_tqdm=False)
    assert deviation(case.folder, outputs) < TOLERANCE


def _is_norm_weight(name: str, data: torch.Tensor) -> bool:
    return data.dim() == 1 and name.endswith("weight")


def test_matrices_may_be_stored_as_bfloat16(case: Case) -> None:
    """Vectors stay float32 beside them: every operation takes both."""
    with case.load(dtype="bfloat16") as llm:
        for output in llm.generate(
            case.prompts[:1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False
        ):
            assert len(output.outputs[0].token_ids) == 2


def test_weights_stay_as_stored(case: Case) -> None:
    """All but biases: those are few, and kept as they are computed with."""
    weights = {name: parameter for name, parameter in case.parameters.items() if not name.endswith(".bias")}
    assert {parameter.dtype for parameter in weights.values()} == {case.row.dtype}
