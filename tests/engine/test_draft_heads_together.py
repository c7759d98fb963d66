"""A head that drafts, beside adapters, a prefix cache from disk and weights that were quantized and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints.adapters import write_adapter
from checkpoints.draft_heads import Eagle3Reference, eager, with_multi_token
from kernel_sets import needs_kernels
from ranks.kept import kept_ranks
from ranks.matrix import evened
from test_draft_heads import GREEDY, Drafted, made, said
from tiny_models import TINY_MODELS, VOCAB, one_thread, reference_model, write_checkpoint

from llm import LLM
from llm.config import SpeculativeConfig
from llm.inputs import LoRARequest

SIZES = {"max_model_len": 64, "block_size": 4}
PROMPT = list(range(3, 23))


@pytest.fixture(scope="module", params=[("deepseek-v3", 0), ("llama", 100)], ids=["mtp", "eagle3"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    name, eagle3 = request.param
    with one_thread():
        return made(name, tmp_path_factory.mktemp("together"), tmp_path_factory, eagle3)


def answers(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[int]]:
    prompts = [[*PROMPT, index] for index in range(len(adapters))]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].token_ids for output in outputs]


def test_rows_with_adapters_say_what_they_say_without_drafts(drafted: Drafted, tmp_path: Path) -> None:
    names = ("o_proj", "down_proj", "gate_proj")
    write_adapter(reference_model(drafted.plain.folder), tmp_path / "adapter", names, rank=3, seed=1)
    own = LoRARequest("own", 1, str(tmp_path / "adapter"))
    with one_thread(), drafted.plain.load({**SIZES, "enable_lora": True, "speculative_config": None}) as llm:
        plain = answers(llm, [own, None, own])
        assert plain[0] != answers(llm, [None])[0]
    with one_thread(), drafted.case.load({**SIZES, "enable_lora": True}) as llm, eager(llm) as proposer:
        assert answers(llm, [own, None, own]) == plain
        assert proposer.made


def test_a_prefix_cache_from_disk_gives_the_same_answers_and_drafts(drafted: Drafted, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_model_len": 64, "block_size": 16, "enable_prefix_caching": True}
    with one_thread(), drafted.case.load(settings) as llm:
        plain = said(llm, [PROMPT])
        llm.save_prefix_cache(tmp_path / "cache")
    with (
        one_thread(),
        drafted.case.load({**settings, "prefix_cache": tmp_path / "cache"}) as llm,
        eager(llm) as proposer,
    ):
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens
        assert [output.outputs[0].token_ids] == plain
        for tokens, drafts in proposer.made:
            assert drafted.head.drafts(tokens, len(drafts)) == drafts
        assert proposer.made


def test_quantized_weights_are_saved_with_their_head(drafted: Drafted, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SIZES, "quantization": "w8a16"}
    with one_thread(), drafted.case.load(settings) as llm, eager(llm) as proposer:
        plain, drafts = said(llm, [PROMPT]), list(proposer.made)
        llm.save_quantized(tmp_path / "saved")
    config = drafted.case.row.engine["speculative_config"]
    arguments = {**drafted.case.row.engine, **SIZES, "speculative_config": config}
    with one_thread(), LLM(tmp_path / "saved", skip_tokenizer_init=True, **arguments) as llm, eager(llm) as proposer:
        assert said(llm, [PROMPT]) == plain
        assert proposer.made == drafts


@needs_kernels
@pytest.mark.parametrize(
    ("name", "eagle3"), [("deepseek-v3", 0), ("qwen3-5-moe", 0), ("qwen3", VOCAB), ("llama-biases-one-kv-head", 100)]
)
def test_ranks_draft_and_answer_as_one_process(
    name: str, eagle3: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`eagle3`: tokens of a head of EAGLE-3, of all of them with an embedding of its own; 0: multi-token prediction."""
    monkeypatch.setitem(TINY_MODELS, name, evened(TINY_MODELS[name]))
    write_checkpoint(TINY_MODELS[name], tmp_path / "plain")
    target, drafts = tmp_path / "plain", {"method": "mtp"}
    if eagle3:
        head = Eagle3Reference(target, eagle3, own_embedding=eagle3 == VOCAB).write(tmp_path / "eagle3")
        drafts = {"method": "eagle3", "model": str(head)}
    else:
        target = tmp_path / "head"
        with_multi_token(name, tmp_path / "plain", target)
    prompts = [[*PROMPT, index] for index in range(3)]
    options = {**TINY_MODELS[name].engine, **SIZES, "num_threads": 1, "skip_tokenizer_init": True}
    options["speculative_config"] = SpeculativeConfig(num_speculative_tokens=3, **drafts)
    found: list[Any] = []
    with one_thread(), kept_ranks():
        for size in (1, 2):
            with LLM(target, tensor_parallel_size=size, **options) as llm:
                answers = {tuple(ids): tokens for ids, tokens in zip(prompts, said(llm, prompts), strict=True)}
                with eager(llm, answers=answers) as proposer:
                    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                    found.append([(item.outputs[0].token_ids, item.outputs[0].logprobs) for item in outputs])
                    found[-1].append(proposer.made)
                    assert proposer.made and llm.stats().accepted_tokens
    assert found[0] == found[1]
