"""What is decided at start, and that each decision tells its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from embedded import open_llm

from llm import LLM, SamplingParams
from llm.base.library_settings import num_threads
from llm.config import env
from llm.config.compilation import CompilationMode
from llm.config.engine import DEFAULT_MAX_NUM_SEQS, EngineConfig, LLMArgs
from llm.errors import OutOfMemoryError, ValidationError
from llm.platforms import current_platform
from llm.runner import model_runner
from llm.runner.model_runner import ModelRunner
from llm.setup.memory import MemoryPlan, choose_snapshot_interval, plan_memory, plan_scheduler

MIB = 1 << 20


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as llm:
        yield llm


def parts(config: EngineConfig) -> dict[str, Any]:
    """Every decided value by name."""
    whole = (config.model_config, config.cache_config, config.scheduler_config, config.compilation_config)
    values = {
        field.name: getattr(part, field.name) for part in whole for field in dataclasses.fields(part) if field.repr
    }
    whole_engine = {"device": config.device, "invariant": config.invariant}
    values["offload_weights"] = config.offload_config.offload_weights
    return (
        values
        | whole_engine
        | {
            "num_threads": config.num_threads,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "speculative_config": config.speculative_config,
            "lora_config": config.lora_config,
        }
    )


def test_every_choice_has_its_reason(llm: LLM) -> None:
    named_by_the_user = {"model"}
    assert set(llm.config.reasons) == set(parts(llm.config)) - named_by_the_user
    assert all(reason.strip() for reason in llm.config.reasons.values())


@pytest.mark.parametrize(
    ("task", "said"),
    [
        *((None, ("auto", "auto")), ("auto", ("auto", "auto")), ("generate", ("generate", "none"))),
        *(("embed", ("pooling", "embed")), ("embedding", ("pooling", "embed")), ("classify", ("pooling", "classify"))),
        *(("score", ("pooling", "auto")), ("reward", ("pooling", "auto"))),
    ],
)
def test_task_says_runner_and_convert(task: str | None, said: tuple[str, str]) -> None:
    args = LLMArgs("x", task=task)
    assert (args.runner, args.convert) == said
    again = LLMArgs("x", task=task, runner=said[0], convert=said[1])
    assert again == args == dataclasses.replace(args)


def test_a_task_that_contradicts() -> None:
    assert LLMArgs("x", task="score", convert="classify").convert == "classify"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"task": "embed", "runner": "generate"}, "runner must be 'pooling', or left out, with task='embed'"),
        ({"task": "embed", "convert": "classify"}, "convert must be 'embed', or left out, with task='embed'"),
        ({"task": "generate", "convert": "embed"}, "convert must be 'none', or left out, with task='generate'"),
        ({"task": "transcription"}, "task must be 'auto' or 'generate' or 'embed' or"),
        ({"task": ["embed"]}, "task must be 'auto'"),
    ]
    for given, message in wrong:
        with pytest.raises(ValidationError, match=message):
            LLMArgs("x", **given)


def test_a_model_is_loaded_for_a_task() -> None:
    with open_llm(task="embed", max_model_len=64) as llm:
        assert llm.config.model_config.runner_type == "pooling"
        assert len(llm.embed("And", use_tqdm=False)[0].outputs.embedding) > 0
    with pytest.raises(ValidationError, match="runner must be 'pooling', or left out, with task='embed'"):
        LLM.plan(task="embed", runner="generate")


def test_print_shows_each_value_with_its_reason(llm: LLM) -> None:
    lines = dict(line.split(maxsplit=1) for line in repr(llm.config).splitlines())
    assert set(lines) == set(parts(llm.config))
    assert lines["max_num_seqs"] == "256  (default)"
    assert lines["dtype"].startswith("float32  (auto; ")
    assert lines["max_model_len"] == "2048  (the model's maximum)"
    assert lines["kv_cache_memory_bytes"].startswith("1.000 GiB  (all that ")
    assert max(len(line) for line in repr(llm.config).splitlines()) < 200


def test_what_is_asked_for_wins_over_every_default() -> None:
    asked: dict[str, Any] = {
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 50,
        "block_size": 4,
        "kv_cache_dtype": "float32",
        "enable_prefix_caching": False,
        "seed": 9,
        "max_logprobs": 2,
    }
    with open_llm(**asked) as llm:
        decided = parts(llm.config)
        asked["kv_cache_dtype"] = torch.float32
        assert {name: decided[name] for name in asked} == asked
        assert {llm.config.reasons[name] for name in asked} == {"asked for"}
        assert llm.config.cache_config.num_blocks == 3 * 25  # all that three sequences of 100 can use


def test_threads_of_a_call_and_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_threads` holds while the engine computes and nowhere else; more than there are processors are not taken."""
    seen: set[int] = set()
    prepare = ModelRunner.prepare_batch
    most, before = current_platform.num_threads(), torch.get_num_threads()

    def prepare_seen(runner: ModelRunner, step: Any) -> Any:
        seen.add(torch.get_num_threads())
        return prepare(runner, step)

    monkeypatch.setattr(ModelRunner, "prepare_batch", prepare_seen)
    for asked, used in ((1, 1), (most + 5, most), (None, 1)):
        seen.clear()
        with open_llm(num_threads=asked) as llm:
            llm.generate("In", SamplingParams(max_tokens=2), use_tqdm=False)
            line = next(line for line in repr(llm.config).splitlines() if line.startswith("num_threads"))
        assert seen == {used}
        assert line.split()[1] == str(used)
        assert ("asked for" in line) is (asked is not None)
        assert ("may use" in line) is (asked is not None and asked > most)
        assert torch.get_num_threads() == before
    with pytest.raises(ValidationError, match="num_threads must be an integer of at least 1"):
        open_llm(num_threads=0).__enter__()


def test_pytorch_loads_on_one_thread_and_other_threads_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads spin between short operations, and wait for each other where other programs take the cores."""
    seen: list[tuple[int, int, int]] = []
    fill, before = model_runner.fill_model, torch.get_num_threads()

    def fill_seen(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:  # a thread of the program that computes for the first time
            seen.append((torch.get_num_threads(), num_threads(), pool.submit(torch.get_num_threads).result()))
        return fill(*args)

    monkeypatch.setattr(model_runner, "fill_model", fill_seen)
    try:
        torch.set_num_threads(2)  # also where one core is all there is
        with LLM(speculative_config=None, enforce_eager=True):
            assert seen == [(1, 2, 2)]
        assert torch.get_num_threads() == num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_config_is_frozen(llm: LLM) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        llm.config.device = "cuda"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        llm.config.model_config.seed = 3  # type: ignore[misc]


def test_seed_none_draws_one_and_says_so() -> None:
    with open_llm(seed=None) as first, open_llm(seed=None) as second:
        assert first.config.model_config.seed != second.config.model_config.seed
        assert "seed=None" in first.config.reasons["seed"]


# Memory


def plan(**changes: Any) -> MemoryPlan:
    """1 KiB a token, so a block of 16 is 16 KiB; 4 sequences of 1024 can use 4 MiB."""
    given: dict[str, Any] = {
        "bytes_per_token": 1024,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_model_len": None,
        "longest": 1024,
        "requested_bytes": None,
        "free_bytes": 100 * MIB,
    }
    return plan_memory(**(given | changes))


def test_no_more_than_can_be_used() -> None:
    assert plan().kv_cache_memory_bytes == 4 * MIB
    assert "can use" in plan().reasons["kv_cache_memory_bytes"]
    assert plan(max_model_len=512).kv_cache_memory_bytes == 2 * MIB
    assert plan(requested_bytes=64 * MIB).kv_cache_memory_bytes == 4 * MIB


def test_no_more_than_half_of_what_is_free() -> None:
    decided = plan(free_bytes=4 * MIB)
    assert decided.kv_cache_memory_bytes == 2 * MIB
    assert decided.num_blocks == 2 * MIB // 16384
    assert "half of the 0.00 GiB that are free" in decided.reasons["kv_cache_memory_bytes"]
    assert decided.max_model_len == 1024  # two of these fit


def test_max_model_len_fits_itself_to_a_small_budget() -> None:
    decided = plan(requested_bytes=300 * 1024)
    assert decided.max_model_len == 300 // 16 * 16
    assert "1024" in decided.reasons["max_model_len"]
    assert plan().max_model_len == 1024
    assert plan(longest=1000, requested_bytes=MIB).max_model_len == 1000  # never beyond the model's maximum


def test_a_length_that_was_asked_for_is_never_shortened() -> None:
    with pytest.raises(OutOfMemoryError, match=r"max_model_len=288 would fit, or kv_cache_memory_bytes=1048576 would"):
        plan(max_model_len=1024, requested_bytes=300 * 1024)
    with pytest.raises(OutOfMemoryError, match=r"or kv_cache_memory_bytes=1048576 would be enough"):
        plan(max_model_len=1024, free_bytes=MIB + 5)  # half is too little, all of it is not
    with pytest.raises(OutOfMemoryError, match=r"max_model_len=16 would fit, or free memory\.$"):
        plan(max_model_len=1024, free_bytes=40 * 1024)
    with pytest.raises(ValidationError, match="at most 1024"):
        plan(max_model_len=1025)


def test_nothing_is_free() -> None:
    with pytest.raises(OutOfMemoryError, match=r"half of the 0\.00 GiB.*; free memory\.$"):
        plan(free_bytes=0)


def test_a_small_budget_still_serves_the_longest_sequence() -> None:
    with open_llm(kv_cache_memory_bytes=10 * 32768) as llm:
        assert llm.config.model_config.max_model_len == 160
        outputs = llm.generate([[5] * 100] * 2, SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [60, 60]


def test_recurrent_states_of_every_sequence_where_all_fits() -> None:
    decided = plan(bytes_per_request=1000)
    assert (decided.num_state_slots, decided.num_blocks) == (4, 4 * 64)
    assert decided.kv_cache_memory_bytes == 4 * MIB + 4000
    assert "1,000 bytes" in decided.reasons["num_state_slots"]
    assert plan().num_state_slots == 0 and "no layer" in plan().reasons["num_state_slots"]


def test_recurrent_states_take_half_where_not_all_fits() -> None:
    decided = plan(bytes_per_request=MIB // 2, requested_bytes=2 * MIB)
    assert (decided.num_state_slots, decided.num_blocks) == (2, 64)
    assert decided.max_model_len == 1024
    # The longest sequence comes first, when it was asked for.
    longest = plan(bytes_per_request=MIB // 2, requested_bytes=MIB + MIB // 2, max_model_len=1024)
    assert (longest.num_state_slots, longest.num_blocks) == (1, 64)
    with pytest.raises(OutOfMemoryError, match=f"kv_cache_memory_bytes={MIB + MIB // 2} would be enough"):
        plan(bytes_per_request=MIB // 2, requested_bytes=MIB + MIB // 2 - 1, max_model_len=1024)
    with pytest.raises(OutOfMemoryError, match=f"one block .* needs {MIB + 16384} bytes"):
        plan(bytes_per_request=MIB, requested_bytes=MIB)


def test_a_model_that_keeps_nothing_of_a_token_has_no_blocks() -> None:
    decided = plan(bytes_per_token=0, bytes_per_request=1000)
    assert (decided.num_blocks, decided.num_state_slots, decided.max_model_len) == (0, 4, 1024)
    assert decided.kv_cache_memory_bytes == 4000
    assert plan(bytes_per_token=0, bytes_per_request=1000, requested_bytes=2999).num_state_slots == 2
    with pytest.raises(OutOfMemoryError, match="any length needs 1000 bytes"):
        plan(bytes_per_token=0, bytes_per_request=1000, requested_bytes=999)
    stateless = plan(bytes_per_token=0)
    assert (stateless.num_blocks, stateless.num_state_slots, stateless.kv_cache_memory_bytes) == (0, 0, 0)


# Scheduling


def test_batch_sizes() -> None:
    config, reasons = plan_scheduler(LLMArgs("x"), 1024, MIB, batched_tokens=512)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (
        DEFAULT_MAX_NUM_SEQS,
        512,
    )
    assert set(reasons.values()) == {"default"}
    config, reasons = plan_scheduler(
        LLMArgs("x", max_num_seqs=2, max_num_batched_tokens=7), 1024, MIB, batched_tokens=512
    )
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (2, 7)
    assert (reasons["max_num_seqs"], reasons["max_num_batched_tokens"]) == ("asked for", "asked for")


def test_whole_prompts_need_a_step_that_holds_the_longest() -> None:
    whole = LLMArgs("x", enable_chunked_prefill=False)
    config, reasons = plan_scheduler(whole, 9000, MIB, batched_tokens=512)
    assert config.max_num_batched_tokens == 9000
    assert "enable_chunked_prefill" in reasons["max_num_batched_tokens"]
    assert plan_scheduler(whole, 100, MIB, batched_tokens=512)[0].max_num_batched_tokens == 512


def test_enforce_eager_wins_over_a_mode_that_compiles() -> None:
    asked = {"mode": 3, "backend": "inductor", "custom_ops": ["none", "+rms_norm"]}

    def opened(**arguments: Any) -> tuple[Any, str, str]:
        with open_llm(compilation_config=asked, max_model_len=64, **arguments) as llm:
            return llm.config.compilation_config, llm.config.reasons["mode"], str(llm.explain())

    for unsaid in ({}, {"enforce_eager": False}, {"enforce_eager": None}):
        config, reason, explained = opened(**unsaid)
        assert config.compiles and "enforce_eager" not in reason and "compiled by inductor" in explained
    config, reason, explained = opened(enforce_eager=True)
    assert config.mode is CompilationMode.NONE and not config.compiles and config.custom_ops == ("none", "+rms_norm")
    assert reason == "enforce_eager=True: nothing is compiled" and "compiled by" not in explained
    with pytest.raises(ValidationError, match="enforce_eager must be True or False"):
        open_llm(enforce_eager="yes").__enter__()


def test_memory_plan_leaves_room_for_snapshots_of_states() -> None:
    """In a budget that is too small for all sequences they get an eighth of it, never what one sequence needs."""
    decided = plan(bytes_per_request=1000, snapshot_interval=256)
    assert (decided.num_state_snapshots, decided.mamba_block_size) == (4 * 1024 // 256, 256)
    assert decided.kv_cache_memory_bytes == plan(bytes_per_request=1000).kv_cache_memory_bytes + 16 * 1000
    tight = plan(bytes_per_request=1000, requested_bytes=80_000, snapshot_interval=32)
    assert (tight.num_blocks, tight.num_state_slots, tight.num_state_snapshots) == (4, 4, 8)
    assert plan(bytes_per_request=1000, requested_bytes=17_384, snapshot_interval=16).num_blocks == 1
    assert plan(bytes_per_request=1000, snapshot_interval=2048).num_state_snapshots == 0, "no sequence is so long"
    # A copy that takes as much as 512 tokens of KV cache is worth 512 tokens, within bounds.
    assert [choose_snapshot_interval(100, size, 16) for size in (0, 51_200, 10**9)] == [128, 512, 1024]
    assert choose_snapshot_interval(100, 0, 48) == 144


def test_a_variable_that_the_table_does_not_have_is_no_variable() -> None:
    with pytest.raises(KeyError, match=r"LLM_OF_NOBODY is not in llm\.config\.env\.VARIABLES"):
        env.get("LLM_OF_NOBODY")
