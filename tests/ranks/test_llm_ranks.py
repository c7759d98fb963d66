"""`LLM(tensor_parallel_size=2)`: the bits of one process, whatever is asked for; and how a group of ranks ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.adapters import LINEAR, write_adapter
from drafts import Recorder, drafting, fake
from embedded import PROMPTS, assert_idle, engine_of, interrupt, open_llm, run
from kernel_sets import needs_kernels
from models import images
from ranks.kept import kept_ranks
from ranks.matrix import answers, evened
from safetensors.torch import save_file
from tiny_models import TINY_MODELS, TinyModel, make_prompts, one_thread, reference_model, write_checkpoint
from workers.test_workers import is_gone

from llm import LLM, Capture, Intervention, RankError, SamplingParams, ValidationError, WorkerDiedError
from llm.errors import CheckpointError
from llm.inputs import LoRARequest
from llm.layers.communicators import SharedMemoryCommunicator
from llm.layers.linear import LinearBase
from llm.loading.adapters.targets import LayerTarget
from llm.sampling_params import StructuredOutputsParams

pytestmark = needs_kernels


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    with one_thread(), kept_ranks():
        yield


# One of each kind of layer, of cache, and of embedding.
FAMILIES = [
    "llama-biases-one-kv-head",
    "gemma2",
    "olmo2",
    "mixtral",
    "qwen2-moe",
    "minicpm3",
    "falcon-h1",
    "qwen3-next",
    "olmo-hybrid",
]


@pytest.mark.parametrize("name", [*FAMILIES, "llama+w4a16", "qwen2-bf16+w8a8"])
def test_two_ranks_have_the_bits_of_one(name: str, tmp_path: Path) -> None:
    name, _, scheme = name.partition("+")
    row, options = evened(TINY_MODELS[name]), {"quantization": scheme} if scheme else {}
    write_checkpoint(row, tmp_path)
    prompts = make_prompts(row)
    assert answers(tmp_path, row, prompts, tensor_parallel_size=2, **options) == answers(
        tmp_path, row, prompts, **options
    )


def test_recurrent_states_follow_accepted_drafts_and_shared_prefixes(tmp_path: Path) -> None:
    row = evened(TINY_MODELS["falcon-h1"])
    write_checkpoint(replace(row, config={**row.config, "max_position_embeddings": 512}), tmp_path)
    prompts = [[5, 6, 7, 8, 9, 10] * 40 + [last] for last in (11, 12)] + [[20, 21] * 30]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
    found, recorder = [], Recorder()
    for size in (1, 2):
        with open_llm(tmp_path, skip_tokenizer_init=True, tensor_parallel_size=size, max_num_seqs=2) as llm:
            outputs = []
            with drafting(llm, recorder if size == 1 else fake(llm, "partly", recorder.answers)) as proposer:
                for _ in range(2):
                    outputs += run(llm, [{"prompt_token_ids": ids} for ids in prompts], params)
            assert llm.stats().cached_tokens and (size == 1 or 0 < proposer.accepted < proposer.drafted)
            found.append([(item.outputs[0].token_ids, item.outputs[0].logprobs) for item in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["llama-biases-one-kv-head", "gemma2", "mixtral", "minicpm3", "falcon-h1"])
def test_activations_that_rank_0_has_whole(name: str, tmp_path: Path) -> None:
    row = evened(TINY_MODELS[name])
    write_checkpoint(row, tmp_path)
    params, found = SamplingParams(temperature=0.7, seed=1, max_tokens=4, logprobs=1), []
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 24, **row.engine}
    prompts, names = make_prompts(row), []
    for size in (2, 1):
        with open_llm(tmp_path, tensor_parallel_size=size, **options) as llm:
            names = names or [name for name, site in llm.sites().items() if site.can_capture]
            last = Intervention.scale("norm.output", 0.5)
            outputs = llm.generate(prompts, params, capture=Capture(names), interventions=last, use_tqdm=False)
            plain = run(llm, prompts, params)
        found.append([(item.outputs[0].token_ids, item.outputs[0].logprobs) for item in (*outputs, *plain)])
        found[-1] += [{name: item.activations[name].tobytes() for name in names} for item in outputs]
    assert len(names) > 6 and found[0] == found[1]


# Key heads that ranks share, and biases; experts; matrices that a checkpoint has together.
@pytest.mark.parametrize(
    ("name", "scheme", "format"),
    [
        ("llama-biases-one-kv-head", "w8a8", "compressed-tensors"),
        ("mixtral", "w4a16", "compressed-tensors"),
        ("phi3", "w8a16", "gptq"),
    ],
)
def test_ranks_save_what_one_process_does(name: str, scheme: str, format: str, tmp_path: Path) -> None:
    row, found = evened(TINY_MODELS[name]), []
    write_checkpoint(row, tmp_path / "model")
    for size in (1, 2):
        options = {"skip_tokenizer_init": True, "quantization": scheme, "tensor_parallel_size": size, **row.engine}
        with open_llm(tmp_path / "model", **options) as llm:
            saved = llm.save_quantized(tmp_path / str(size), format=format)
            with pytest.raises(ValidationError, match="exists already"):
                llm.save_quantized(saved, format=format)
        found.append({file.name: file.read_bytes() for file in saved.iterdir()})
    assert len(found[0]) >= 2 and found[0] == found[1]


def test_parts_in_another_order_are_saved_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    write_checkpoint(evened(TINY_MODELS["llama"]), tmp_path / "model")
    whole, found = LinearBase.rows_of_all, []
    with open_llm(tmp_path / "model", skip_tokenizer_init=True, quantization="w8a8", tensor_parallel_size=2) as llm:
        for name in ("right", "wrong"):
            found.append((llm.save_quantized(tmp_path / name) / "model.safetensors").read_bytes())
            monkeypatch.setattr(LinearBase, "rows_of_all", lambda self, parts: whole(self, parts[::-1]))
    assert found[0] != found[1]


def test_vectors_of_two_ranks(tmp_path: Path) -> None:
    vectors = []
    for size in (1, 2):
        with open_llm(task="embed", max_model_len=64, tensor_parallel_size=size) as llm:
            vectors.append([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
    assert vectors[0] == vectors[1]


# Key heads that ranks share, and a vocabulary that they do not divide.
ADAPTED = TinyModel("LlamaConfig", {"num_hidden_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": True})


def adapted(folder: Path, adapters: list[LoRARequest], size: int) -> list[Any]:
    prompts = [ids for ids in make_prompts(ADAPTED) for _ in range(3)]
    requests = [[None, *adapters][index % (len(adapters) + 1)] for index in range(len(prompts))]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2, "max_num_batched_tokens": 24}
    with open_llm(folder, tensor_parallel_size=size, **options) as llm:
        outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
        return [(item.outputs[0].token_ids, item.outputs[0].logprobs) for item in outputs]


def test_adapters_of_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rank 0 taking the rows of others as the negative control."""
    write_checkpoint(evened(ADAPTED), tmp_path / "model")
    model, adapters = reference_model(tmp_path / "model"), []
    for number, names in enumerate([(*LINEAR, "embed_tokens"), ("q_proj", "up_proj"), ("lm_head",)], 1):
        folder = write_adapter(model, tmp_path / str(number), names, rank=3 + number, seed=number)
        adapters.append(LoRARequest(str(number), number, str(folder)))
    expected = adapted(tmp_path / "model", adapters, 1)
    assert len({str(item) for item in expected}) == len(expected), "an adapter changes nothing"
    assert adapted(tmp_path / "model", adapters, 2) == expected
    own = LayerTarget.of_rank
    monkeypatch.setattr(LayerTarget, "of_rank", lambda self, rows: own(self, rows.flip(0)))
    assert adapted(tmp_path / "model", adapters, 2) != expected


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    write_checkpoint(evened(TINY_MODELS["mixtral"]), tmp_path / "model")
    tensors = {
        f"base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_{part}.weight": torch.zeros(shape)
        for part, shape in {"A": (2, 48), "B": (96, 2)}.items()
    }
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    own = LoRARequest("own", 1, str(tmp_path))
    with (
        open_llm(tmp_path / "model", skip_tokenizer_init=True, enable_lora=True, tensor_parallel_size=2) as llm,
        pytest.raises(CheckpointError, match="of an expert, which with tensor_parallel_size one rank has"),
    ):
        llm.generate([[5, 6]], lora_request=own, use_tqdm=False)


# Of three positions with features for further layers; with spans that see both ways.
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_pictures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    family = images.FAMILIES[name]
    monkeypatch.setitem(images.FAMILIES, name, replace(family, text={**family.text, "intermediate_size": 96}))
    images.write(name, tmp_path)
    found = []
    for size in (1, 2):
        with open_llm(tmp_path, max_num_batched_tokens=13, tensor_parallel_size=size) as llm:
            found.append([images.bits(item) for item in run(llm, images.asked(name), images.GREEDY)])
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def llm(_kept: None) -> Iterator[LLM]:
    with open_llm(**OPTIONS, tensor_parallel_size=2) as llm:
        yield llm


OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "speculative_config": {"method": "ngram"}}
ASKED: dict[str, tuple[Any, SamplingParams]] = {
    "sampled": (PROMPTS, SamplingParams(temperature=0.9, seed=1, max_tokens=9, logprobs=2, prompt_logprobs=0)),
    "several": (PROMPTS[0], SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=9)),
    "shared prefix": ([PROMPTS[1] * 8, PROMPTS[1] * 8 + " so"], SamplingParams(temperature=0, max_tokens=5)),
    "drafts": ("a b c d " * 12, SamplingParams(temperature=0, max_tokens=20, logprobs=1)),
    "structure": (
        PROMPTS[0],
        SamplingParams(seed=5, max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")),
    ),
    "penalties": (PROMPTS[2], SamplingParams(temperature=0, max_tokens=6, presence_penalty=1, logit_bias={9: 2.0})),
}


def told(llm: LLM, name: str) -> list[Any]:
    return [
        (output.prompt_logprobs, [(item.token_ids, item.text, item.logprobs) for item in output.outputs])
        for output in run(llm, *ASKED[name])
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    with open_llm(**OPTIONS) as alone:
        return {name: told(alone, name) for name in ASKED}


@pytest.mark.parametrize("name", ASKED)
def test_whatever_is_asked(llm: LLM, expected: dict[str, list[Any]], name: str) -> None:
    assert told(llm, name) == expected[name]
    assert_idle(llm)


def test_a_rank_that_gathers_in_another_order_is_caught(
    llm: LLM, expected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""

    def swapped(self: SharedMemoryCommunicator, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._memory.all_gather(x).chunk(2, -1)[::-1], -1)

    monkeypatch.setattr(SharedMemoryCommunicator, "all_gather", swapped)
    monkeypatch.setattr("llm.runner.recorded.RecordedSteps.is_watched", True)
    assert told(llm, "sampled") != expected["sampled"]


def test_a_step_that_fails_on_rank_0_is_left_by_all(
    llm: LLM, expected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a second Ctrl-C does: rank 1 waits in the step that rank 0 never finishes, and computes the next call."""
    interrupt(llm, monkeypatch)
    assert told(llm, "sampled") == expected["sampled"]
    assert_idle(llm)


def test_what_one_rank_cannot_do_is_refused(llm: LLM, tmp_path: Path) -> None:
    for ask in (
        lambda: llm.apply_model(lambda model: None),
        lambda: LLM(tensor_parallel_size=2, calibration=["text"], quantization="w4a16"),
        lambda: LLM(tensor_parallel_size=2, offload_weights=True),
        lambda: llm.generate(PROMPTS, use_tqdm=False, capture="layers.0.attention.heads"),
        lambda: llm.generate(PROMPTS, use_tqdm=False, capture="layers.0.mlp.activation"),
        lambda: llm.generate(PROMPTS, use_tqdm=False, interventions=Intervention.scale("layers.0.output", 2)),
        lambda: llm.sleep(),
        lambda: LLM(tensor_parallel_size=2, hf_overrides=lambda config: config),
    ):
        with pytest.raises(ValidationError, match="tensor_parallel_size"):
            ask()
    with pytest.raises(ValidationError, match=r"layers\.0\.self_attn\.qkv_proj.* by 3 ranks"):
        LLM(tensor_parallel_size=3)
    assert_idle(llm)


def test_a_rank_that_is_killed_ends_the_call_with_its_number() -> None:
    with open_llm(tensor_parallel_size=2) as llm:
        pid = engine_of(llm).runner.group._workers[0].pid
        stopper = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        stopper.start()
        with pytest.raises(WorkerDiedError, match=r"rank 1 died.*SIGKILL"):
            while True:
                run(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        stopper.join()
        with pytest.raises(WorkerDiedError, match="rank 1"):
            run(llm, PROMPTS)
        assert is_gone(pid)


def test_a_rank_that_hangs_is_ended() -> None:
    with open_llm(tensor_parallel_size=2) as llm:
        runner = engine_of(llm).runner
        runner.tp.communicator._memory._timeout_s = 1.0  # not by LLM_WORKER_TIMEOUT, which is also that of a start
        pid = runner.group._workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankError, match="rank 1 did not come to a step within 1 seconds, and was ended"):
            run(llm, PROMPTS)
        assert is_gone(pid)
