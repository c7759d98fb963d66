"""`LLMEngine`: requests that come one by one and are computed step by step get `LLM.generate`'s answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from embedded import PROMPTS, assert_idle, open_llm, run
from kernel_sets import needs_kernels

from llm import LLM, EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams, ValidationError
from llm.inputs import LoRARequest

CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
# Two completions and seeds; a plain one. The first has a stop string, over several tokens of what it would answer.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 9, "logprobs": 2},
    {"temperature": 0, "max_tokens": 12, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, max_num_seqs=3) as opened:
        [free] = run(opened, PROMPTS[0], SamplingParams(**PARAMS[0]))
        PARAMS[0]["stop"] = ["nowhere", free.outputs[0].text[12:26]]
        yield opened
        assert_idle(opened)


def drive(engine: LLMEngine, kind: RequestOutputKind) -> dict[str, list[RequestOutput]]:
    """As vLLM's examples: a new request before each step while there are any."""
    left = list(enumerate(zip(PROMPTS, PARAMS, strict=True)))
    told: dict[str, list[RequestOutput]] = {}
    while left or engine.has_unfinished_requests():
        if left:
            index, (prompt, params) = left.pop(0)
            assert engine.add_request(str(index), prompt, SamplingParams(**params, output_kind=kind)) == str(index)
        for output in engine.step():
            told.setdefault(output.request_id, []).append(output)
    assert engine.step() == [] and engine.get_num_unfinished_requests() == 0
    return told


@needs_kernels
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_requests_are_answered_as_by_generate(llm: LLM, kind: RequestOutputKind) -> None:
    expected = [run(llm, prompt, SamplingParams(**own))[0] for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
    assert expected[0].outputs[0].stop_reason == PARAMS[0]["stop"][1]
    told = drive(LLMEngine(llm), kind)
    for index, whole in enumerate(expected):
        outputs = told[str(index)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (len(outputs) == 1) == (kind is FINAL)
        for place, completion in enumerate(whole.outputs):
            parts = [output.outputs[place] for output in outputs]
            if kind is DELTA:
                assert "".join(part.text for part in parts) == completion.text
                assert [token for part in parts for token in part.token_ids] == completion.token_ids
                if completion.logprobs is not None:
                    assert [item for part in parts for item in part.logprobs or []] == completion.logprobs
            else:
                assert all(completion.text.startswith(part.text) for part in parts)
                assert all(completion.token_ids[: len(part.token_ids)] == part.token_ids for part in parts)
                assert (parts[-1].text, parts[-1].token_ids) == (completion.text, completion.token_ids)
                assert parts[-1].logprobs == completion.logprobs
            assert (
                parts[-1].finish_reason == completion.finish_reason and parts[-1].stop_reason == completion.stop_reason
            )


def test_requests_are_aborted_and_their_ids_are_free_again(llm: LLM) -> None:
    engine = LLMEngine(llm)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for name in "ab":
        engine.add_request(name, PROMPTS[0], params)
    engine.step()
    engine.abort_request(["a", "nobody"])
    assert engine.get_num_unfinished_requests() == 1
    engine.add_request("a", PROMPTS[1], SamplingParams(temperature=0, max_tokens=1))
    names = set()
    while engine.has_unfinished_requests():
        names |= {output.request_id for output in engine.step() if output.finished}
    assert names == {"a", "b"}


def test_other_calls_work_between_steps(llm: LLM) -> None:
    engine = LLMEngine(llm)
    engine.add_request("0", PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    engine.step()
    between = run(llm, PROMPTS[1], SamplingParams(temperature=0, max_tokens=4))
    assert between[0].finished and engine.has_unfinished_requests()
    while engine.has_unfinished_requests():
        outputs = engine.step()
    alone = run(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_mistakes_are_told_and_add_nothing(llm: LLM) -> None:
    engine = LLMEngine(llm)
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(ValidationError, match="request_id must be the id of no unfinished request, got 'a'"):
        engine.add_request("a", PROMPTS[0])
    with pytest.raises(ValidationError, match="request_id must be a text, got 3"):
        engine.add_request(3, PROMPTS[0])  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="takes one prompt, got 3"):
        engine.add_request("b", PROMPTS)
    with pytest.raises(ValidationError, match="priority must be an integer"):
        engine.add_request("b", PROMPTS[0], priority="high")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LLMEngine\.add_request has no argument 'inputs'"):
        engine.add_request("b", inputs=PROMPTS[0])  # type: ignore[call-arg]
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()


def test_from_engine_args() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(max_model_len=48, num_threads=1))
    with engine.llm:
        assert engine.llm.config.model_config.max_model_len == 48 and engine.get_tokenizer().encode("a")  # type: ignore[attr-defined]


def test_scripts_read_configs_and_reach_the_model(llm: LLM) -> None:
    """What public scripts for vLLM read of `llm.llm_engine` and `llm.model_config`."""
    engine = llm.llm_engine
    config = engine.model_config
    assert engine is llm.llm_engine and engine.vllm_config is llm.config and config is llm.model_config
    assert (config.max_model_len, config.get_vocab_size(), config.get_num_layers()) == (64, 2304, 4)
    assert config.embedding_size == config.get_hidden_size() == config.hf_config.hidden_size
    assert config.get_head_size() * config.hf_text_config.num_attention_heads == config.get_hidden_size()
    assert config.served_model_name == config.model and config.architectures == ("LlamaForCausalLM",)
    assert config.pooler_config is None and not engine.vllm_config.scheduler_config.async_scheduling
    cache = engine.vllm_config.cache_config
    assert cache.num_gpu_blocks == cache.num_blocks and engine.vllm_config.parallel_config.tensor_parallel_size == 1
    model: Any = engine.model_executor.driver_worker.model_runner.model
    assert model is llm.apply_model(lambda model: model)[0]
    assert engine.tokenizer.encode("In the") == llm.get_tokenizer().encode("In the")  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="enable_lora"):
        engine.add_lora(LoRARequest("a", 1, "/nowhere"))
