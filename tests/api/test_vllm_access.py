"""`apply_model`, `collective_rpc`, `from_engine_args` and the command line of vLLM's scripts."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import GREEDY, PROMPTS, assert_idle, open_llm, run, tokens

from llm import LLM, EngineArgs, ValidationError
from llm.config.arguments import ARGUMENTS
from llm.lora.request import LoRARequest
from llm.utils import FlexibleArgumentParser, random_uuid


@pytest.fixture
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64) as opened:
        yield opened
        assert_idle(opened)


def halve_first_norm(model: torch.nn.Module) -> str:
    name, weight = next((name, item) for name, item in model.named_parameters() if "norm" in name)
    weight.mul_(-0.5)
    return name


def test_apply_model_returns_what_the_function_says(llm: LLM) -> None:
    before = tokens(run(llm, PROMPTS))
    [count] = llm.apply_model(lambda model: len(list(model.parameters())))
    assert count > 10
    assert tokens(run(llm, PROMPTS)) == before


def test_a_changed_model_answers_at_once_and_from_no_cache(llm: LLM) -> None:
    """Long enough for the steps to be recorded before and after."""
    before = tokens(run(llm, PROMPTS))
    assert run(llm, PROMPTS[1] * 3)[0].num_cached_tokens >= 0
    [name] = llm.apply_model(halve_first_norm)
    changed = run(llm, PROMPTS)
    assert tokens(changed) != before and "norm" in name
    assert [output.num_cached_tokens for output in changed] == [0, 0, 0]
    with open_llm(max_model_len=64) as fresh:
        fresh.apply_model(halve_first_norm)
        assert tokens(changed) == tokens(run(fresh, PROMPTS))


def test_a_function_that_raises_leaves_the_llm_usable(llm: LLM) -> None:
    def fail(model: torch.nn.Module) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.apply_model(fail)
    assert len(run(llm, PROMPTS)) == 3


def test_collective_rpc_calls_the_one_worker(llm: LLM) -> None:
    def look(worker: Any, factor: int, *, plus: int) -> int:
        assert worker.model_runner.model is worker.get_model()
        assert worker.device == torch.device("cpu") and worker.vllm_config is llm.config
        return worker.rank * factor + plus

    assert llm.collective_rpc(look, args=(3,), kwargs={"plus": 4}) == [4]
    [model] = llm.collective_rpc("get_model")
    assert isinstance(model, torch.nn.Module)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "update_weights"}, "no method 'update_weights'"),
        ({"method": "__init__"}, "no method '__init__'"),
        ({"method": "rank"}, "no method 'rank'"),
        ({"method": 3}, "method must be a callable"),
        ({"method": "get_model", "timeout": 3.0}, "timeout must be None"),
    ],
)
def test_bad_remote_calls(llm: LLM, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        llm.collective_rpc(**arguments)
    with pytest.raises(ValidationError, match="func must be a callable"):
        llm.apply_model("x")  # type: ignore[arg-type]


def test_the_model_is_not_changed_under_a_stream(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(ValidationError, match="a stream is suspended"):
        llm.apply_model(halve_first_norm)
    stream.close()
    llm.apply_model(halve_first_norm)


@pytest.mark.parametrize("make", [LLM.from_engine_args, lambda args: LLM(**dataclasses.asdict(args))])
def test_a_record_of_arguments_makes_an_llm(make: Any) -> None:
    """Every default of vLLM's two hundred arguments asks for nothing."""
    with (
        open_llm(max_model_len=48, max_num_seqs=3, seed=5) as plain,
        make(EngineArgs(max_model_len=48, max_num_seqs=3, seed=5, gpu_memory_utilization=0.5)) as llm,
    ):
        assert str(llm.config.model_config) == str(plain.config.model_config)
        assert llm.config.scheduler_config == plain.config.scheduler_config


def test_a_record_has_every_argument_and_no_other() -> None:
    assert set(vars(EngineArgs())) == set(ARGUMENTS)
    with pytest.raises(TypeError, match=r"EngineArgs has no argument 'max_model_length'\. Did you mean"):
        EngineArgs(max_model_length=3)
    with pytest.raises(ValidationError, match=r"^pipeline_parallel_size=2 is refused: "):
        LLM.from_engine_args(EngineArgs(pipeline_parallel_size=2))


def test_the_command_line_of_vllms_examples() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--max-tokens", type=int)
    line = "--max_model_len 48 --no-enable-prefix-caching --max-tokens=7 --trust-remote-code --seed 3 --dtype float32"
    given = parser.parse_args([*line.split(), "--hf-overrides", '{"max_position_embeddings": 64}'])
    args = EngineArgs.from_cli_args(given)
    assert given.max_tokens == 7
    changed = {name: value for name, value in vars(args).items() if value != getattr(EngineArgs(), name)}
    assert changed == {
        "max_model_len": 48,
        "enable_prefix_caching": False,
        "trust_remote_code": True,
        "seed": 3,
        "dtype": "float32",
        "hf_overrides": {"max_position_embeddings": 64},
    }
    with LLM.from_engine_args(args) as llm:
        assert not llm.config.cache_config.enable_prefix_caching


def test_only_names_of_options_get_dashes() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--a-b")
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--a_b=c_d", "e_f"]) == parser.parse_args(["--a-b", "c_d", "e_f"])
    assert parser.parse_args(["--a_b=c_d"]).a_b == "c_d"


def test_what_scripts_for_vllm_import_and_do_not_use_is_there() -> None:
    assert LoRARequest("sql", 1, "/sql") == LoRARequest(lora_name="sql", lora_int_id=1, lora_path="/sql")
    assert len(random_uuid()) == 32 and random_uuid() != random_uuid()


def test_an_adapter_needs_them_enabled(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="enable_lora=True") as caught:
        llm.generate("x", GREEDY, lora_request=LoRARequest("sql", 1, "/adapters/sql"))
    assert caught.value.parameter == "lora_request"


def test_a_profile_is_a_trace_in_a_folder(tmp_path: Path) -> None:
    """As vLLM's example: configured, started, stopped."""
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces"), "torch_profiler_with_stack": False}
    config["torch_profiler_record_shapes"] = True
    with open_llm(max_model_len=64, profiler_config=config) as opened:
        expected = tokens(run(opened, PROMPTS))
        opened.start_profile("mine")
        with pytest.raises(ValidationError, match="is being recorded"):
            opened.start_profile()
        assert tokens(run(opened, PROMPTS)) == expected
        file = opened.stop_profile()
        assert [path.name for path in (tmp_path / "traces").iterdir()] == [file.name] and file.name.startswith("mine.")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert any(event["args"].get("Input Dims") for event in events if event.get("cat") == "cpu_op")
        with pytest.raises(ValidationError, match="call start_profile first"):
            opened.stop_profile()
        with pytest.raises(ValidationError, match="beginning of a file name"):
            opened.start_profile("../up")
    with open_llm(max_model_len=64) as opened, pytest.raises(ValidationError, match="needs a folder"):
        opened.start_profile()
    for wrong in ({"profiler": "cuda"}, {"profiler": "torch"}, {"torch_profiler_dir": "x"}, {"of_nobody": 1}, 3):
        with pytest.raises(ValidationError, match="profiler_config"):
            LLM(profiler_config=wrong)
