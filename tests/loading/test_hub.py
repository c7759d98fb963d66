"""Models of the hub, from a small server on the loopback address: what is asked for, fetched, and refused."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import open_llm, run, tokens
from hub_server import Hub, hub_server, use_hub
from safetensors.torch import load_file, save_file

from llm import LLM
from llm.errors import CheckpointError, LLMError, UnsupportedModelError
from llm.llm import EMBEDDED_MODEL
from llm.loading import resolve
from llm.loading.resolve import resolve_folder

NAME = "org/Model"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as served:
        use_hub(served, tmp_path / "cache", monkeypatch)
        yield served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    for name in FILES:
        shutil.copy(EMBEDDED_MODEL / name, made / name)
    (made / "README.md").write_text("a card")
    return made


@pytest.fixture(scope="module")
def sharded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(folder, made)
    whole = load_file(made / "model.safetensors")
    (made / "model.safetensors").unlink()
    names = list(whole)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: whole[name] for name in own}, made / file)
    weight_map = {name: file for file, own in parts.items() for name in own}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return made


def refuse(model: str, *words: str, kind: type[LLMError] = CheckpointError, **more: Any) -> None:
    with pytest.raises(kind) as caught:
        LLM(model, **more)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def planned(model: str | Path) -> dict[str, object]:
    """But for the memory that is free, which changes."""
    found = LLM.plan(model, kv_cache_memory_bytes=1 << 26).to_dict()
    return {key: value for key, value in found.items() if key != "free_bytes"}


def test_a_model_is_fetched_once_and_then_needs_no_hub(hub: Hub, folder: Path) -> None:
    hub.add(NAME, folder)
    with open_llm(folder) as local:
        expected = tokens(run(local, "In the beginning"))
    with open_llm(NAME) as llm:
        assert tokens(run(llm, "In the beginning")) == expected
    assert {path for path, *_ in hub.sent} == set(FILES)  # no README
    assert hub.bytes_of("model.safetensors") == (folder / "model.safetensors").stat().st_size
    hub.asked.clear()
    hub.repositories.clear()
    with open_llm(NAME) as llm:
        assert tokens(run(llm, "In the beginning")) == expected
    assert hub.asked == []


def test_a_sharded_model_is_fetched_whole(hub: Hub, sharded: Path, folder: Path) -> None:
    hub.add(NAME, sharded)
    found = resolve_folder(NAME)
    assert len(list(found.glob("*.safetensors"))) == 2
    with open_llm(NAME) as llm, open_llm(folder) as local:
        assert tokens(run(llm, "The king")) == tokens(run(local, "The king"))


@pytest.mark.parametrize("layout", ["one file", "shards"])
def test_a_plan_fetches_headers_alone(hub: Hub, layout: str, folder: Path, sharded: Path) -> None:
    here = folder if layout == "one file" else sharded
    repository = hub.add(NAME, here)
    expected = planned(here)
    found = planned(NAME)
    assert found == expected | {"model": NAME}
    whole = sum(len(data) for path, data in repository.files.items() if path.endswith(".safetensors"))
    assert 0 < hub.bytes_of(".safetensors") < whole / 4
    with pytest.raises(CheckpointError, match="sends no part"):
        hub.sends_ranges = False
        LLM.plan(NAME)
    hub.sends_ranges = True
    resolve_folder(NAME)
    hub.sent.clear()
    assert planned(NAME) == found and hub.sent == []  # of what the cache has


def test_what_is_not_computed_is_refused_before_weights_are_fetched(hub: Hub, folder: Path) -> None:
    repository = hub.add(NAME, folder)
    config = json.loads(repository.files["config.json"])
    repository.files["config.json"] = json.dumps(config | {"model_type": "no_such", "architectures": ["X"]}).encode()
    refuse(NAME, "no_such", kind=UnsupportedModelError)
    with pytest.raises(UnsupportedModelError, match="no_such"):
        LLM.plan(NAME)
    assert hub.bytes_of(".safetensors") == 0
    repository.files["config.json"] = json.dumps(config | {"hidden_size": "wide"}).encode()
    refuse(NAME, "hidden_size", kind=UnsupportedModelError)
    assert hub.bytes_of(".safetensors") == 0


def test_a_model_without_safetensors_is_refused_with_what_it_has(hub: Hub, folder: Path) -> None:
    repository = hub.add(NAME, folder)
    repository.files["pytorch_model.bin"] = repository.files.pop("model.safetensors")
    for open_it in (LLM, LLM.plan):
        with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file, only 'pytorch_model\.bin'.*convert"):
            open_it(NAME)
    assert hub.bytes_of(".bin") == 0


def test_the_hub_refuses(hub: Hub, folder: Path) -> None:
    hub.add(NAME, folder, refuses="GatedRepo")
    for open_it in (LLM, LLM.plan):
        with pytest.raises(CheckpointError, match=r"is gated: accept its terms"):
            open_it(NAME)
        with pytest.raises(CheckpointError, match=r"does not exist or is private"):
            open_it("org/other")
        with pytest.raises(CheckpointError, match=r"has no revision 'v9'"):
            open_it(NAME, revision="v9")


def test_a_revision_is_fetched(hub: Hub, folder: Path) -> None:
    repository = hub.add(NAME, folder, revisions=("main", "v1"))
    assert resolve_folder(NAME, "v1").name == repository.commit
    assert any("/v1" in path for path in hub.asked)


def resolve_in_child() -> None:
    resolve_folder(NAME)


def test_a_killed_download_is_resumed(hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are whole are not fetched again; huggingface_hub starts the other one from its start."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    repository = hub.add(NAME, folder)
    size = len(repository.files["model.safetensors"])
    hub.stalls_after = size // 2
    process = multiprocessing.get_context("fork").Process(target=resolve_in_child)
    process.start()
    end = time.monotonic() + 600
    while len(list((tmp_path / "cache").glob("*/snapshots/*/*"))) < len(FILES) - 1 or not any(
        path.stat().st_size >= size // 4 for path in (tmp_path / "cache").rglob("*.incomplete")
    ):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.kill()
    process.join()
    hub.stalls_after = None
    hub.sent.clear()
    whole = resolve_folder(NAME) / "model.safetensors"
    assert whole.read_bytes() == repository.files["model.safetensors"]
    assert ("model.safetensors", 0, size) in hub.sent
    assert "config.json" not in {path for path, *_ in hub.sent}


def test_progress_is_told_in_bytes(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME, folder)
    monkeypatch.setattr(resolve, "_PROGRESS_DELAY_SECONDS", 0.0)
    resolve_folder(NAME)
    shown = capsys.readouterr().err
    assert f"Downloading {NAME}" in shown and re.search(r"MB? */ *6\.\d+MB", shown) and "files" not in shown, shown[
        -400:
    ]


# GGUF


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Model-Q8_0.gguf"
    with open_llm(EMBEDDED_MODEL, quantization="q8_0") as llm:
        llm.save_quantized(path, "gguf")
    return path


def test_the_only_gguf_file_of_a_model_is_that_model(hub: Hub, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = hub.add(NAME, file.parent)
    repository.files |= {"README.md": b"a card", "mmproj-F16.gguf": b"of images"}
    plan = planned(NAME)
    assert plan == planned(file) | {"model": NAME}
    with open_llm(file) as local:
        expected = tokens(run(local, "In the beginning"))
    with open_llm(NAME) as llm:
        assert tokens(run(llm, "In the beginning")) == expected
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (NAME, f"{NAME}:Q8_0", f"{NAME}/{file.name}"):
        with open_llm(name) as llm:
            assert tokens(run(llm, "In the beginning")) == expected
    refuse(f"{NAME}:Q4_0", "not (completely) in the cache", "HF_HUB_OFFLINE")


def test_one_of_several_gguf_files_must_be_named(hub: Hub, file: Path) -> None:
    data = file.read_bytes()
    hub.add(NAME, file.parent).files |= {"Model-Q3_K_M.gguf": data, "Model-Q4_K_M.gguf": data}
    every = "'Model-Q3_K_M.gguf', 'Model-Q4_K_M.gguf', 'Model-Q8_0.gguf'"
    refuse(NAME, "has several GGUF files", every, f"'{NAME}/Model-Q3_K_M.gguf'")
    refuse(f"{NAME}:Q3_K", "has no GGUF file of the type 'Q3_K'", every)
    refuse(f"{NAME}/Model-Q2_K.gguf", "has no GGUF file 'Model-Q2_K.gguf'", every)
    assert hub.sent == []
    with open_llm(f"{NAME}:q4_k_m"):
        assert {path for path, *_ in hub.sent} == {"Model-Q4_K_M.gguf"}
    refuse(f"{NAME}:Q3_K", every)  # all that the hub has, not what the cache has
    refuse(NAME, "has several GGUF files", every)


def test_safetensors_are_taken_where_there_are_both(hub: Hub, folder: Path, file: Path) -> None:
    hub.add(NAME, folder).files["Model-Q8_0.gguf"] = file.read_bytes()
    with open_llm(NAME) as llm:
        assert llm.config.quant_config is None
    assert hub.bytes_of(".gguf") == 0
