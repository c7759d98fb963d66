"""A mistake of the user gives one sentence that names it, and the engine stays usable."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import GREEDY, PROMPTS, assert_idle, copy_model, open_llm, run, tokens
from safetensors.torch import load_file, save_file

from llm import (
    LLM,
    BeamSearchParams,
    EngineClosedError,
    LLMError,
    SamplingParams,
    StructuredOutputsParams,
    ValidationError,
)
from llm.base.suggestions import CONSTRUCTOR, METHODS, SAMPLING
from llm.config import EngineConfig
from llm.config.arguments import ARGUMENTS, CALLS
from llm.errors import ArgumentError, CheckpointError, OutOfMemoryError, UnsupportedModelError
from llm.sampling_params import RepetitionDetectionParams

SECRET = "the launch code is 7731"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, max_logprobs=5) as llm:
        yield llm


def complaints(error: BaseException, *names: str) -> list[str]:
    """What is wrong with a message: it should be one sentence that holds `names` and no word of a prompt."""
    text = str(error)
    problems = [f"it does not mention {name}" for name in names if name not in text]
    if not 20 <= len(text) <= 400:
        problems.append(f"it has {len(text)} characters")
    # A suggestion, or the list of what is known, may follow.
    if re.search(r"[.!?]\s+(?!Did you mean|Known: |It takes )[A-Z]", text) or "\n" in text:
        problems.append("it is not one sentence")
    if re.search(r"Traceback|File \"|line \d+, in|object at 0x|<class|torch\.Size", text):
        problems.append("it shows the inside of the program")
    if any(word in text for word in SECRET.split() if len(word) > 3):
        problems.append("it repeats the prompt")
    return [f"{problem}: {text}" for problem in problems]


def test_the_check_of_messages_can_fail() -> None:
    assert complaints(ValueError("max_tokens must be at least 1, got 0."), "max_tokens", "0") == []
    for message, problem in {
        "max_tokens must be an integer.": "mention",
        "no": "characters",
        "It is not there. Look elsewhere, perhaps.": "one sentence",
        "it is not there, line 3, in <module>": "inside",
        f"the prompt {SECRET!r} is too long, which it is": "repeats",
    }.items():
        assert problem in "".join(complaints(ValueError(message), *(["0"] if problem == "mention" else [])))


# Prompts and parameters

ROOM = 64
VOCAB = 2304
MANY = [5] * 100


@pytest.mark.parametrize(
    "prompts, names",
    [
        ([[]], ["prompt", "empty"]),
        ({"prompt_token_ids": []}, ["prompt", "empty"]),
        ([[1, -7]], ["token", "-7", str(VOCAB - 1)]),
        ([[1, VOCAB]], ["token", str(VOCAB)]),
        ([MANY], ["prompt", "100", "max_model_len", str(ROOM)]),
        ([[5] * ROOM], ["prompt", "64", "max_model_len"]),
        (f"{SECRET} " * 60, ["prompt", "max_model_len", str(ROOM)]),
        ({"prompt": f"{SECRET} " * 60}, ["max_model_len", str(ROOM)]),
        (None, ["prompts", "NoneType"]),
        (7, ["prompts", "int"]),
        (b"bytes", ["prompts", "bytes"]),
        ({1, 2}, ["prompts", "set"]),
        ([None], ["prompt", "NoneType"]),
        ([[1, "2"]], ["prompt", "str"]),
        ([{"role": "user", "content": SECRET}], ["prompt", "LLM.chat"]),
        (torch.ones(2, 3, dtype=torch.int64), ["prompts", "Tensor"]),
        (iter(["a"]), ["prompts", "iterator"]),
        ([[1.5]], ["prompt", "float"]),
        ([[True]], ["prompt", "bool"]),
        ([{}], ["prompt", "'prompt_token_ids'"]),
        ([{"prompt": None}], ["prompt", "'prompt_token_ids'"]),
        ([{"prompt": SECRET, "multi_modal_data": 1}], ["prompt", "multi_modal_data"]),
        ([{"prompt": 3}], ["prompt", "int"]),
        ([{"prompt_token_ids": "12"}], ["prompt_token_ids", "str"]),
        ([f"{SECRET} \ud800"], ["prompt", "U+D800"]),
    ],
)
def test_bad_prompts(llm: LLM, prompts: Any, names: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        run(llm, prompts)
    assert complaints(caught.value, *names) == []
    assert caught.value.parameter == "prompts"
    assert_idle(llm)
    assert len(run(llm, PROMPTS)) == 3


@pytest.mark.parametrize(
    "params, parameter, names",
    [
        (3, "sampling_params", ["int"]),
        ([GREEDY], "sampling_params", ["1", "3"]),
        ([GREEDY] * 4, "sampling_params", ["4", "3"]),
        ([GREEDY, None, GREEDY], "sampling_params", ["list"]),
        (SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids", [str(VOCAB)]),
        (SamplingParams(logprobs=6), "logprobs", ["6", "5"]),
        (SamplingParams(logprobs=-1), "logprobs", ["-1", "5"]),
        (SamplingParams(min_tokens=63), "min_tokens", ["63"]),
    ],
)
def test_bad_params(llm: LLM, params: Any, parameter: str, names: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        run(llm, PROMPTS, params)
    assert complaints(caught.value, parameter, *names) == []
    assert caught.value.parameter == parameter
    assert_idle(llm)


def test_params_changed_after_construction_are_checked_again(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(ValidationError, match=r"temperature must be a number from 0 to 2, got -1\.0"):
        run(llm, PROMPTS[0], params)


def test_one_error_tells_of_all_bad_rows(llm: LLM) -> None:
    good = [PROMPTS[0]] * 3
    with pytest.raises(ValidationError) as caught:
        run(llm, [good[0], [], good[1], None, [VOCAB], good[2], MANY])
    assert complaints(caught.value, "prompt 1: ", "empty", "(also bad: 3, 4, 6)") == []
    with pytest.raises(ValidationError, match=r"^prompt 2: a prompt must be .*got NoneType\.$"):
        run(llm, [*good[:2], None])
    with pytest.raises(ValidationError) as caught:
        run(llm, [[]] * 50)
    assert complaints(caught.value, "prompt 0: ", "also bad: 1, 2, ", "10, ...") == []
    params = [GREEDY, SamplingParams(stop_token_ids=[VOCAB]), GREEDY]
    with pytest.raises(ValidationError, match="prompt 1: stop_token_ids"):
        run(llm, PROMPTS, params)
    assert_idle(llm)


@pytest.mark.parametrize(
    "call, parameter",
    [
        (lambda llm: llm.generate("x", use_tqdm=1), "use_tqdm"),
        (lambda llm: llm.generate("x", use_tqdm=None), "use_tqdm"),
        (lambda llm: llm.generate(["x", "y"], [GREEDY]), "sampling_params"),
        (lambda llm: llm.generate("x", lora_request="adapter"), "lora_request"),
        (lambda llm: llm.generate("x", priority=[1, 2]), "priority"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], lora_request=1), "lora_request"),
        (lambda llm: llm.perplexity(["In the beginning", ""]), "texts: number 1"),
        (lambda llm: llm.loglikelihood("In the", ""), "continuations: number 0"),
        (lambda llm: llm.loglikelihood(["a", "b"], ["c"]), "1 continuations for 2 prompts"),
        (lambda llm: llm.chat([[]]), "messages"),
        (lambda llm: llm.chat(SECRET), "messages"),
        (lambda llm: llm.chat([{"content": SECRET}]), "messages"),
        (lambda llm: llm.chat([[{"role": "user", "content": SECRET}], SECRET]), "messages"),
        (lambda llm: llm.chat([{"role": "user"}]), "messages"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"tokenize": True}), "tokenize"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"tools": 1}), "tools"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template="{{ 1 / 0 }}"), "messages"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template="{% if %}"), "messages"),
    ],
)
def test_bad_arguments_of_a_call(llm: LLM, call: Callable[[LLM], Any], parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        call(llm)
    assert complaints(caught.value, parameter) == []
    assert_idle(llm)


@pytest.mark.parametrize(
    "method, argument, names",
    [
        *((method, "max_tokens", ["SamplingParams(max_tokens=...)"]) for method in ("generate", "chat", "stream")),
        ("generate", "use_tqmd", ["'use_tqdm'"]),
        ("generate", "prompt_token_ids", ["prompts"]),
        ("chat", "mesages", ["'messages'"]),
        ("stream", "use_tqdm", ["no bar"]),
        ("render_chat", "tool", ["'tools'"]),
        ("beam_search", "beam_width", ["params"]),
        ("loglikelihood", "continuation", ["'continuations'"]),
        ("perplexity", "strides", ["'stride'"]),
        ("quantization_report", "promts", ["'prompts'"]),
        ("save_quantized", "fmt", ["'format'"]),
    ],
)
def test_an_unknown_argument_of_a_call_is_named(llm: LLM, method: str, argument: str, names: list[str]) -> None:
    """Before anything else is looked at, and as the TypeError that Python would raise."""
    with pytest.raises(TypeError) as caught:
        getattr(llm, method)("x", **{argument: 3})
    assert isinstance(caught.value, ValidationError)
    assert (caught.value.parameter, caught.value.value) == (argument, 3)
    assert complaints(caught.value, f"LLM.{method} has no argument {argument!r}", *names) == []
    assert_idle(llm)


def test_without_prompts_generate_says_what_is_missing(llm: LLM) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompts'"):
        llm.generate()
    with pytest.raises(ArgumentError, match="prompts"):
        llm.generate(prompt_token_ids=[[1, 2]])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind, argument, names",
    [
        (SamplingParams, "tempature", ["'temperature'"]),
        (SamplingParams, "max_new_tokens", ["'max_tokens'"]),
        (SamplingParams, "num_beams", ["LLM.beam_search"]),
        (SamplingParams, "guided_decoding", ["structured_outputs"]),
        (BeamSearchParams, "beam_size", ["'beam_width'"]),
        (StructuredOutputsParams, "schema", ["json"]),
        (RepetitionDetectionParams, "min_counts", ["'min_count'"]),
    ],
)
def test_an_unknown_field_is_named(kind: Any, argument: str, names: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{argument: 3})
    assert isinstance(caught.value, ValidationError)
    assert (caught.value.parameter, caught.value.value) == (argument, 3)
    assert complaints(caught.value, f"{kind.__name__} has no argument {argument!r}", *names) == []


@pytest.mark.parametrize("name, said", [("generat", "'generate'"), ("xyzzy_of_others", "'xyzzy_of_others'")])
def test_what_an_llm_does_not_have_is_told_in_a_sentence(llm: LLM, name: str, said: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(llm, name)
    assert complaints(caught.value, f"LLM has no {name!r}", said) == []
    assert not hasattr(llm, name)


def test_the_older_name_of_structured_outputs_is_told() -> None:
    with pytest.raises(ImportError, match="StructuredOutputsParams"):
        from llm.sampling_params import GuidedDecodingParams  # noqa: F401


def test_what_is_done_instead_is_about_names_that_do_not_exist() -> None:
    assert not set(SAMPLING) & set(inspect.signature(SamplingParams).parameters)
    assert not set(CALLS) & set(inspect.signature(LLM.generate).parameters)
    assert not set(METHODS) & set(dir(LLM))
    assert not set(CONSTRUCTOR) & set(ARGUMENTS)


def test_text_needs_a_tokenizer() -> None:
    with open_llm(skip_tokenizer_init=True, max_model_len=64) as bare:
        calls: list[Callable[[], Any]] = [
            lambda: run(bare, SECRET),
            lambda: bare.chat([{"role": "user", "content": SECRET}]),
            bare.get_tokenizer,
        ]
        for call in calls:
            with pytest.raises(ValidationError) as caught:
                call()
            assert complaints(caught.value, "skip_tokenizer_init", "tokenizer") == []
        with pytest.raises(ValidationError) as caught:
            run(bare, [[1, 2]], SamplingParams(stop="x"))
        assert complaints(caught.value, "stop", "skip_tokenizer_init") == []
        assert len(run(bare, [[1, 2]])) == 1


# Constructor


@pytest.mark.parametrize(
    "argument, value, names",
    [
        ("max_modl_len", 3, ["max_model_len"]),
        ("quantisation", "int8", ["quantization"]),
        ("quantization", "int8", ["int8", "'w8a8'"]),
        ("torch_dtype", "auto", ["dtype"]),
        ("modle", "x", ["'model'"]),
        ("n_ctx", 100, ["max_model_len"]),
        ("load_in_8bit", True, ["quantization"]),
        ("max_model_len", 0, ["0"]),
        ("max_model_len", "long", ["long"]),
        ("max_model_len", 4096, ["4096", "2048"]),
        ("max_num_seqs", -1, ["-1"]),
        ("max_num_batched_tokens", 1.5, ["1.5"]),
        ("block_size", True, ["True"]),
        ("kv_cache_memory_bytes", 0, ["0"]),
        ("kv_cache_dtype", "int3", ["int3", "bfloat16"]),
        ("dtype", "float8", ["float8", "float32"]),
        ("seed", -1, ["-1"]),
        ("seed", 1.5, ["1.5"]),
        ("device", "cuda", ["cuda", "cpu"]),
        ("load_format", "pt", ["pt", "safetensors"]),
        ("generation_config", "/folder", ["/folder", "vllm"]),
        ("quantization", "gptq", ["gptq"]),
        ("max_logprobs", -2, ["-2"]),
        ("hf_overrides", "x", ["x"]),
        ("enable_prefix_caching", "no", ["no"]),
        ("skip_tokenizer_init", 1, ["1"]),
        ("verbose", "x", ["x"]),
        ("compilation_config", 4, ["4", "VLLM_COMPILE"]),
        ("logits_processors", ["x"], ["x"]),
        ("pipeline_parallel_size", 2, ["2"]),
        ("model", None, ["None"]),
        ("model", 3, ["3"]),
        ("model", "", [""]),
        ("tokenizer", 3, ["3"]),
        ("revision", "main", ["main"]),
    ],
)
def test_bad_arguments_of_the_constructor(argument: str, value: Any, names: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        LLM(**{argument: value})
    assert complaints(caught.value, argument, *names) == []


def test_chunks_too_small_for_whole_prompts() -> None:
    with pytest.raises(ValidationError) as caught:
        LLM(max_model_len=64, max_num_batched_tokens=32, enable_chunked_prefill=False)
    assert complaints(caught.value, "max_num_batched_tokens", "32", "64", "enable_chunked_prefill") == []
    with open_llm(max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False) as llm:
        assert len(run(llm, PROMPTS)) == 3


# Memory


def test_a_budget_below_one_sequence_says_what_would_fit() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(max_model_len=1000, kv_cache_memory_bytes=1_000_000)
    assert complaints(caught.value, "max_model_len=1000", "1000000") == []
    [length] = re.findall(r"max_model_len=(\d+) would fit", str(caught.value))
    [size] = re.findall(r"kv_cache_memory_bytes=(\d+) would be enough", str(caught.value))
    for arguments in (
        {"max_model_len": int(length), "kv_cache_memory_bytes": 1_000_000},
        {"max_model_len": 1000, "kv_cache_memory_bytes": int(size)},
    ):
        with open_llm(**arguments) as llm:
            prompt = [5] * (arguments["max_model_len"] - 3)
            [output] = run(llm, [prompt], SamplingParams(temperature=0, ignore_eos=True))
            assert len(output.outputs[0].token_ids) == 3  # the longest sequence was computed
    for arguments in (
        {"max_model_len": int(length) + 1, "kv_cache_memory_bytes": 1_000_000},
        {"max_model_len": 1000, "kv_cache_memory_bytes": int(size) - 1},
    ):
        with pytest.raises(OutOfMemoryError):
            LLM(**arguments)


def test_a_budget_below_one_block() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(kv_cache_memory_bytes=1000)
    assert complaints(caught.value, "1000", "16 tokens") == []
    [size] = re.findall(r"kv_cache_memory_bytes=(\d+) would be enough", str(caught.value))
    with open_llm(kv_cache_memory_bytes=int(size)) as llm:
        assert llm.config.model_config.max_model_len == 16


def test_more_rows_than_memory_are_not_blamed_on_the_cache() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(max_num_seqs=10**9)
    assert complaints(caught.value, "max_num_seqs=1000000000", "8192000000000") == []
    with pytest.raises(OutOfMemoryError, match="lower block_size"):
        LLM(block_size=10**9)


# The first is refused by PyTorch, the second would be granted and fail when it is written.
@pytest.mark.parametrize("sizes", [{"vocab_size": 10**10}, {"num_hidden_layers": 12}])
def test_a_shape_larger_than_memory(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    monkeypatch.setattr("llm.platforms.cpu.CpuPlatform.memory_free", lambda self: 8_000_000)
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(load_format="dummy", hf_overrides=sizes, max_num_seqs=1, max_model_len=16)
    assert complaints(caught.value, "the model's weights") == []


def test_weights_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm.platforms.cpu.CpuPlatform.memory_free", lambda self: 1_000_000)
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(offload_weights=False)
    assert complaints(caught.value, "weights", "1000000", "quantization") == []


def test_a_budget_that_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("llm.runner.model_runner.allocate_kv_caches", allocate)
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(kv_cache_memory_bytes=1 << 24)
    assert complaints(caught.value, "kv_cache_memory_bytes", str(1 << 24)) == []


# Model folders

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "dtype": "float32",
}
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "lm_head.weight": (40, 16),
    "model.norm.weight": (16,),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.post_attention_layernorm.weight": (16,),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model in Hugging Face's layout, in two shards."""
    tensors = {name: torch.full(shape, 0.01) for name, shape in SHAPES.items()}
    names = list(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the second shard, without an index that would tell of the change first."""
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = load_file(folder / "b.safetensors")
    change(tensors)
    save_file(tensors, folder / "b.safetensors")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def open_bare(folder: Path) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, max_model_len=32)


def test_the_folder_is_good_before_it_is_broken(folder: Path) -> None:
    with open_bare(folder) as llm:
        assert len(run(llm, [[1, 2, 3]])) == 1
    change_tensors(folder, lambda tensors: None)
    open_bare(folder).close()


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "kind, break_it, names",
    [
        (CheckpointError, lambda f: (f / "config.json").unlink(), ["config.json"]),
        (CheckpointError, lambda f: (f / "config.json").write_text("{"), ["config.json"]),
        (CheckpointError, lambda f: (f / "b.safetensors").unlink(), ["b.safetensors", "missing"]),
        (CheckpointError, lambda f: truncate(f / "b.safetensors"), ["b.safetensors"]),
        (CheckpointError, lambda f: change_tensors(f, lambda t: t.pop(DOWN)), [DOWN.removesuffix(".weight")]),
        (CheckpointError, lambda f: change_tensors(f, lambda t: t.update(extra=torch.ones(1))), ["extra"]),
        (
            CheckpointError,
            lambda f: change_tensors(f, lambda t: t.update({DOWN: torch.ones(16, 25)})),
            [DOWN, "[16, 25]", "[16, 24]"],
        ),
        (CheckpointError, lambda f: [path.unlink() for path in f.glob("*.safetensors*")], ["safetensors"]),
        (CheckpointError, lambda f: (f / "generation_config.json").write_text('{"top_p": 7}'), ["top_p", "7"]),
        (UnsupportedModelError, lambda f: change_config(f, sliding_windows=3), ["sliding_windows"]),
        (UnsupportedModelError, lambda f: change_config(f, hidden_act="tanh"), ["config.json", "tanh"]),
        (UnsupportedModelError, lambda f: change_config(f, hidden_size="big"), ["hidden_size", "big"]),
        (UnsupportedModelError, lambda f: change_config(f, vocab_size=None), ["vocab_size"]),
        (
            UnsupportedModelError,
            lambda f: change_config(f, architectures=["LamaForCausalLM"], model_type="lama"),
            ["LamaForCausalLM", "llama"],
        ),
        (UnsupportedModelError, lambda f: change_config(f, quantization_config={"bits": 4}), ["quantization_config"]),
    ],
)
def test_bad_model_folders(
    folder: Path, kind: type[LLMError], break_it: Callable[[Path], Any], names: list[str]
) -> None:
    break_it(folder)
    with pytest.raises(kind) as caught:
        open_bare(folder)
    assert [fault for fault in complaints(caught.value, *names) if "characters" not in fault] == []


def test_no_such_folder() -> None:
    with pytest.raises(CheckpointError) as caught:
        LLM("no/such/folder")
    assert complaints(caught.value, "no/such/folder") == []


def test_no_tokenizer_in_the_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        LLM(folder, max_model_len=32)
    assert complaints(caught.value, "tokenizer.json", "skip_tokenizer_init") == []


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = copy_model(tmp_path / "model", tokenizer_config={"chat_template": None})
    with open_llm(model, max_model_len=64) as llm:
        with pytest.raises(ValidationError) as caught:
            llm.chat([{"role": "user", "content": SECRET}])
        assert complaints(caught.value, "chat_template") == []
        assert len(run(llm, PROMPTS)) == 3


# After close


def test_a_closed_engine_says_so_and_closes_again(llm: LLM) -> None:
    with open_llm(max_model_len=64) as closed:
        run(closed, PROMPTS)
        closed.close()
        calls: list[Callable[[], Any]] = [
            lambda: run(closed, PROMPTS),
            lambda: closed.chat([{"role": "user", "content": "x"}]),
            lambda: closed.render_chat([{"role": "user", "content": "x"}]),
            lambda: next(closed.stream("x")),
            closed.stats,
            closed.get_tokenizer,
            closed.reset_prefix_cache,
            closed.__enter__,
        ]
        for call in calls:
            with pytest.raises(EngineClosedError, match=r"^this LLM is closed; make a new one\.$"):
                call()
        closed.close()
    assert isinstance(closed.config, EngineConfig)
    assert isinstance(closed.get_default_sampling_params(), SamplingParams)
    assert len(tokens(run(llm, PROMPTS))) == 3
