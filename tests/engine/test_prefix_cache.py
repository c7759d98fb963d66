"""The prompt cache on disk: what another process begins with, the same bits, and folders that are not to be trusted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.adapters import write_adapter
from embedded import engine_of
from kernel_sets import has_kernels
from safetensors.torch import load_file, save_file
from tiny_models import one_thread, reference_model, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError, ValidationError
from llm.lora.request import LoRARequest

pytestmark = pytest.mark.skipif(not has_kernels(), reason="PyTorch rounds by the batch's size")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
PREFIX = [3 + 7 * i % 250 for i in range(41)]
PROMPTS = [[*PREFIX, 9], [*PREFIX[:35], 8, 7], [200 - 3 * i for i in range(37)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    with one_thread():
        yield lambda name: tiny_checkpoint(name, tmp_path_factory)


@pytest.fixture(scope="module")
def llama(folders: Callable[[str], Path]) -> Path:
    return folders("llama")


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache") / "prompts"
    with load(llama) as llm:
        answers(llm)
        assert llm.save_prefix_cache(path) == path
    return path


def load(folder: Path, **more: Any) -> LLM:
    arguments = {"max_model_len": 96, "max_num_seqs": 3, "mamba_block_size": 16, **more}
    return LLM(folder, skip_tokenizer_init=True, **arguments)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS, **more: Any) -> list[Any]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, **more)
    engine_of(llm).scheduler.check_integrity()
    return [[(item.token_ids, item.cumulative_logprob, item.logprobs) for item in output.outputs] for output in outputs]


def hits(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[int]:
    return [output.num_cached_tokens or 0 for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"kv_cache_dtype": "bfloat16"}),
        ("qwen3", {"kv_cache_dtype": "int8"}),
        ("gemma3", {"block_size": 32, "mamba_block_size": 32}),
        ("deepseek-v3", {}),
        ("lfm2", {}),
        ("mamba2", {}),
    ],
)
def test_another_process_computes_what_is_left_and_answers_the_same(
    folders: Callable[[str], Path], tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    with load(folders(name), **more) as llm:
        before = answers(llm)
        again = hits(llm)
        llm.save_prefix_cache(tmp_path / "cache")
    with load(folders(name), prefix_cache=tmp_path / "cache", **more) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == again
        assert min(again) > 0
        llm.reset_prefix_cache()
        assert answers(llm) == before
    with load(folders(name), prefix_cache=tmp_path / "cache", **more) as llm:
        assert answers(llm) == before


def test_wrong_rows_would_be_seen(llama: Path, saved: Path, tmp_path: Path) -> None:
    """The negative control: the answers do come from what the folder has."""
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    rewrite(copy, "part-00000.safetensors", lambda tensors: {"rows": tensors["rows"].flip(0)})
    with load(llama) as llm:
        before = answers(llm)
    with load(llama, prefix_cache=copy) as llm:
        assert answers(llm) != before


def test_a_smaller_cache_keeps_the_last_ones(llama: Path, saved: Path) -> None:
    with load(llama) as llm:
        before = answers(llm)
    with load(llama, prefix_cache=saved, kv_cache_memory_bytes=75_000, max_model_len=48, max_num_seqs=1) as llm:
        blocks = engine_of(llm).scheduler.blocks
        count = json.loads((saved / "prefix_cache.json").read_text())["entries"]["blocks.0"]
        assert 0 < len(blocks.pools[0].by_hash) == blocks.pools[0].num_blocks - 1 < count
        assert answers(llm) == before


def test_salts_and_adapters_stay_apart(llama: Path, tmp_path: Path) -> None:
    adapter = LoRARequest("a", 1, str(write_adapter(reference_model(llama), tmp_path / "adapter")))
    salted: list[Any] = [{"prompt_token_ids": PROMPTS[0], "cache_salt": "mine"}]
    with load(llama, enable_lora=True) as llm:
        with_adapter = answers(llm, PROMPTS[:1], lora_request=adapter)
        llm.generate(salted, GREEDY, use_tqdm=False)
        llm.save_prefix_cache(tmp_path / "cache")
    with load(llama, enable_lora=True, prefix_cache=tmp_path / "cache") as llm:
        assert hits(llm, PROMPTS[:1]) == [0]
        outputs = llm.generate(salted, GREEDY, use_tqdm=False)
        assert outputs[0].num_cached_tokens == 32
        assert answers(llm, PROMPTS[:1], lora_request=adapter) == with_adapter
        assert llm.generate(PROMPTS[:1], GREEDY, lora_request=adapter, use_tqdm=False)[0].num_cached_tokens == 32


def test_it_is_of_one_model_and_its_settings(llama: Path, saved: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "model"))
    file = other / "model.safetensors"
    tensors = load_file(file)
    tensors[next(iter(tensors))].view(torch.int16)[0, 0] ^= 1
    save_file(tensors, file)
    for folder, more, what in (
        (other, {}, "its weights is"),
        (llama, {"kv_cache_dtype": "int8"}, "its kv_cache_dtype is"),
        (llama, {"block_size": 32, "mamba_block_size": None}, "its block_size is"),
        (llama, {"quantization": "w8a8"}, "its quantization is"),
    ):
        with pytest.raises(CheckpointError, match=f"of another model or setting: {what}"):
            load(folder, prefix_cache=saved, **more)
    with pytest.raises(ValidationError, match="there is no prompt cache without prefix caching"):
        load(llama, prefix_cache=saved, enable_prefix_caching=False)
    with pytest.raises(ValidationError, match="random weights have no prompt cache"):
        load(llama, prefix_cache=saved, load_format="dummy")


def test_what_cannot_be_saved(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(llama) as llm:
        with pytest.raises(ValidationError, match="the prefix cache is empty"):
            llm.save_prefix_cache(tmp_path / "none")
        answers(llm)
        with pytest.raises(ValidationError, match="exists already"):
            llm.save_prefix_cache(tmp_path)

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(LLMError, match="No space left on device"):
            llm.save_prefix_cache(tmp_path / "full")
        monkeypatch.undo()
        llm.apply_model(lambda model: None)
        with pytest.raises(ValidationError, match="may have changed the weights"):
            llm.save_prefix_cache(tmp_path / "changed")
    with load(llama, block_size=4) as llm:
        answers(llm)
        with pytest.raises(ValidationError, match="a multiple of 16"):
            llm.save_prefix_cache(tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def rewrite(folder: Path, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a file's tensors, and its checksum with them."""
    import hashlib

    save_file({key: tensor.contiguous() for key, tensor in change(load_file(folder / name)).items()}, folder / name)
    manifest = json.loads((folder / "prefix_cache.json").read_text())
    manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "prefix_cache.json").write_text(json.dumps(manifest))


def edit(folder: Path, **values: Any) -> None:
    manifest = json.loads((folder / "prefix_cache.json").read_text())
    (folder / "prefix_cache.json").write_text(json.dumps({**manifest, **values}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


PART = "part-00001.safetensors"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "the bytes of part-00001.safetensors have changed": lambda folder: flip(folder / PART),
    "the bytes of entries.safetensors have changed": lambda folder: flip(folder / "entries.safetensors"),
    "not a valid safetensors file": lambda folder: os.truncate(folder / PART, 200),
    "is missing": lambda folder: (folder / PART).unlink(),
    "has no prefix_cache.json": lambda folder: (folder / "prefix_cache.json").unlink(),
    "is not usable": lambda folder: (folder / "prefix_cache.json").write_text('{"prefix_cache": 1, '),
    "of version 2": lambda folder: edit(folder, prefix_cache=2),
    "prefix_cache.json is damaged": lambda folder: edit(folder, entries={"blocks.0": -1}),
    "entries.safetensors has other tensors": lambda folder: edit(folder, entries={"blocks.0": 1 << 39}),
    "its groups are": lambda folder: edit(folder, entries={"blocks.0": 5, "blocks.1": 5}),
    "its files are": lambda folder: edit(folder, sha256={"../../model.safetensors": ""}),
    "part-00001.safetensors has other tensors": lambda folder: rewrite(
        folder, PART, lambda tensors: {"rows": tensors["rows"][:-1]}
    ),
    "outside of its model folder": lambda folder: [
        (folder / PART).rename(folder.parent / PART),
        (folder / PART).symlink_to(folder.parent / PART),
    ],
}


@pytest.mark.parametrize("what", list(DAMAGE))
def test_a_damaged_folder_is_told(llama: Path, saved: Path, tmp_path: Path, what: str) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    DAMAGE[what](copy)
    with pytest.raises(CheckpointError, match=what):
        load(llama, prefix_cache=copy)


def test_two_entries_of_one_hash_are_one(llama: Path, saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))

    def same(tensors: dict[str, Any]) -> dict[str, Any]:
        digests = tensors["blocks.0.digests"]
        return {**tensors, "blocks.0.digests": digests[:1].expand_as(digests)}

    rewrite(copy, "entries.safetensors", same)
    with load(llama) as llm:
        before = answers(llm)
    with load(llama, prefix_cache=copy) as llm:
        assert len(engine_of(llm).scheduler.blocks.pools[0].by_hash) == 1
        assert answers(llm) == before
