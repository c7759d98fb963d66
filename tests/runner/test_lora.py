"""Adapters switched per row: transformers' model with the sums in its weights, and bits that are a row's own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.adapters import LINEAR, add_adapter, write_adapter
from tiny_models import TinyModel, make_prompts, reference_model, write_checkpoint

from llm import LLM, SamplingParams
from llm.engine.scheduler import AdapterSlots
from llm.engine.step import Adapter
from llm.inputs import LoRARequest
from llm.outputs import RequestOutput

ROW = TinyModel("LlamaConfig", {"num_hidden_layers": 2, "tie_word_embeddings": True})
EVERYTHING = (*LINEAR, "embed_tokens")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
ROOT_OF_RANK = {"q_proj": 8 / 3**0.5, "up_proj": 8 / 3**0.5}
ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 4, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "model"
    write_checkpoint(ROW, folder)
    return folder


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> list[LoRARequest]:
    """One of every layer, one of two matrices with the other scale, one of the tied LM head alone."""
    model, root = reference_model(checkpoint), checkpoint.parent
    write_adapter(model, root / "all", EVERYTHING, rank=5, seed=1)
    write_adapter(model, root / "some", ("q_proj", "up_proj"), rank=3, alpha=8.0, seed=2, use_rslora=True)
    write_adapter(model, root / "head", ("lm_head",), rank=2, seed=3)
    return [LoRARequest(name, index + 1, str(root / name)) for index, name in enumerate(("all", "some", "head"))]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, enable_lora=True, max_loras=2, max_num_batched_tokens=24, **ENGINE) as llm:
        yield llm


def told(output: RequestOutput) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The tokens of an output and their logprobs."""
    own = output.outputs[0]
    pairs = zip(own.logprobs or (), own.token_ids, strict=True)
    return tuple(own.token_ids), tuple(item[token].logprob for item, token in pairs)


def with_adapter(checkpoint: Path, request: LoRARequest) -> torch.nn.Module:
    """transformers' model with the adapter in its weights; the tied LM head keeps what it was tied to."""
    model = reference_model.__wrapped__(checkpoint)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    add_adapter(model, Path(request.lora_path), ROOT_OF_RANK if request.lora_name == "some" else {})
    return model


def assert_is_of(model: torch.nn.Module, prompt: Sequence[int], output: RequestOutput) -> None:
    tokens, logprobs = told(output)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1)
    assert expected.argmax(-1).tolist() == list(tokens)
    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(own, torch.tensor(logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("index", range(3))
def test_an_answer_is_the_merged_models(llm: LLM, checkpoint: Path, adapters: list[LoRARequest], index: int) -> None:
    prompts, request = make_prompts(ROW)[1:4], adapters[index]
    model = with_adapter(checkpoint, request)
    plain = llm.generate(prompts, PARAMS, use_tqdm=False)
    outputs = llm.generate(prompts, PARAMS, lora_request=request, use_tqdm=False)
    for prompt, output, before in zip(prompts, outputs, plain, strict=True):
        assert_is_of(model, prompt, output)
        assert told(output) != told(before), "the adapter changes nothing"
        assert output.lora_request is request and before.lora_request is None


def test_a_rows_bits_are_those_of_it_alone(llm: LLM, checkpoint: Path, adapters: list[LoRARequest]) -> None:
    """Any mix: chunks of 24 tokens, blocks of 4, more adapters than places, recorded steps, preemption."""
    if not llm.config.invariant:
        pytest.skip("PyTorch's operations round by the batch")
    drawn = random.Random(0)
    prompts = [prompt for prompt in make_prompts(ROW) for _ in range(3)]
    requests = [drawn.choice([None, *adapters]) for _ in prompts]
    alone = [
        told(llm.generate([prompt], PARAMS, lora_request=request, use_tqdm=False)[0])
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    together = llm.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)
    assert [told(output) for output in together] == alone
    small = {"kv_cache_memory_bytes": 22 << 10, "max_model_len": 64, "max_num_batched_tokens": 7}
    with LLM(checkpoint, enable_lora=True, max_loras=1, **ENGINE, **small, enable_prefix_caching=False) as other:
        assert [
            told(output) for output in other.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)
        ] == alone
        assert other._engine.scheduler.num_preemptions > 0
        other._engine.scheduler.check_integrity()


def test_blocks_are_shared_by_rows_with_the_same_adapter_alone(llm: LLM, adapters: list[LoRARequest]) -> None:
    prompt = make_prompts(ROW)[4]
    llm.reset_prefix_cache()
    cached = []
    copy = LoRARequest("another name", 9, adapters[0].lora_path)
    for request in (None, adapters[0], adapters[1], copy, None):
        (output,) = llm.generate([prompt], PARAMS, lora_request=request, use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4] == (len(prompt) - 1) // 4 * 4


def test_salts_and_adapters_share_nothing_with_each_other(llm: LLM, adapters: list[LoRARequest]) -> None:
    """Two rows share blocks if both their adapter and their salt are the same."""
    prompt = make_prompts(ROW)[4]
    llm.reset_prefix_cache()
    for hits in (0, (len(prompt) - 1) // 4 * 4):
        for request in (None, adapters[0], adapters[1]):
            for salt in (None, "one", "two"):
                given: Any = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
                (output,) = llm.generate([given], PARAMS, lora_request=request, use_tqdm=False)
                assert output.num_cached_tokens == hits, f"{request} {salt}"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_slot_in_use_is_given_to_no_other_adapter(count: int) -> None:
    """Any order of requests that start and end, with more adapters than slots."""
    drawn, slots = random.Random(count), AdapterSlots(count)
    kinds = [Adapter(LoRARequest(str(index), index + 1, "."), f"digest {index}") for index in range(count + 2)]
    running: list[Adapter] = []
    held: dict[str, int] = {}  # the slots of the running requests, by digest
    refused = 0
    for _ in range(400):
        adapter = drawn.choice(kinds)
        if running and drawn.random() < 0.5:
            slots.release(running.pop(drawn.randrange(len(running))))
            held = {own.digest: held[own.digest] for own in running}
        elif slots.has_room(adapter):
            slot = slots.take(adapter)
            assert 1 <= slot <= count and held.get(adapter.digest, slot) == slot
            assert all(other != slot for digest, other in held.items() if digest != adapter.digest)
            held[adapter.digest] = slot
            running.append(adapter)
        else:
            refused += 1
            assert adapter.digest not in held and len(held) == count
        assert slots.users() == Counter(own.digest for own in running)
    assert refused


def test_adapters_on_transformers_code(checkpoint: Path, adapters: list[LoRARequest]) -> None:
    prompts = make_prompts(ROW)[1:3]
    with LLM(checkpoint, enable_lora=True, model_impl="transformers", **ENGINE) as llm:
        outputs = llm.generate(prompts, PARAMS, lora_request=[adapters[1], None], use_tqdm=False)
    assert_is_of(with_adapter(checkpoint, adapters[1]), prompts[0], outputs[0])
    assert_is_of(reference_model(checkpoint), prompts[1], outputs[1])


def test_steps_with_adapters_are_replayed(llm: LLM, adapters: list[LoRARequest]) -> None:
    runner = llm._engine.runner
    if not runner.backend.records:
        pytest.skip("nothing is recorded without kernels")
    prompts = make_prompts(ROW)[:2]
    llm.generate(prompts, PARAMS, lora_request=[adapters[0], adapters[1]], use_tqdm=False)
    before = runner.recorded
    llm.generate(prompts, PARAMS, lora_request=[adapters[1], None], use_tqdm=False)
    assert runner.recorded is before and any(has_adapters for _, has_adapters, _ in before._steps)
    assert runner.recorded.refusal is None
    assert any(step.head is not None for step in before._steps.values()), "no adapter changes the LM head"
    llm.generate(prompts, PARAMS, lora_request=adapters[2], use_tqdm=False)
    llm.generate(prompts, PARAMS, use_tqdm=False)
    assert all(step.head is None for step in runner.recorded._steps.values())


def test_texts_are_scored_with_the_adapter_of_their_row(
    llm: LLM, checkpoint: Path, adapters: list[LoRARequest]
) -> None:
    prompts, continuation = make_prompts(ROW)[1:4], [9, 10, 11]
    requests = [adapters[0], None, adapters[1]]
    scored = llm.loglikelihood(prompts, [continuation] * 3, lora_request=requests, use_tqdm=False)
    models = [with_adapter(checkpoint, adapters[0]), reference_model(checkpoint), with_adapter(checkpoint, adapters[1])]
    for prompt, model, output in zip(prompts, models, scored, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *continuation]])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.logprobs), expected, rtol=0, atol=1e-4)
    text = [*prompts[0], *continuation]
    (own, plain) = (llm.perplexity([text], lora_request=one, use_tqdm=False).logprob for one in (adapters[0], None))
    assert own != plain
