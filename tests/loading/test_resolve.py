"""Where a model is found: local folders as they are, hub names from the cache, the network only where it must be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm import LLM
from llm.errors import CheckpointError, LLMError, ValidationError
from llm.loading.resolve import ALLOW_PATTERNS, resolve_folder

NAME = "some-org/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
COMPLETE = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}"}


def write_cache(cache: Path, files: dict[str, str], ref: str = "main", commit: str = COMMIT) -> Path:
    """Lay out a snapshot as huggingface_hub does; return its folder."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    for number, (name, content) in enumerate(files.items()):
        blob = repository / "blobs" / f"{commit[:8]}{number:04x}"
        blob.write_text(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def write_tree(cache: Path, names: list[str]) -> None:
    """The listing of a snapshot's files that huggingface_hub 2 keeps, so that it knows what is missing."""
    trees: Any = pytest.importorskip("huggingface_hub._tree_cache")
    fields = {"size": 1, "blob_id": "0" * 40, "lfs_sha256": None, "lfs_size": None, "xet_hash": None}
    tree = {name: trees.TreeCacheEntry(**fields) for name in names}
    trees.write_tree_cache(str(cache / f"models--{NAME.replace('/', '--')}"), COMMIT, tree)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; a connection that anyone tries to open is an error of another kind than the hub's."""
    from huggingface_hub import constants

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    return tmp_path


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def refuse(model: str | Path, *words: str, revision: str | None = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_folder(model, revision)
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message


# Local


def test_a_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_folder(tmp_path, None) == tmp_path
    assert resolve_folder(str(tmp_path), None) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_folder("org/name", None) == Path("org/name")
    assert resolve_folder("~/org", None) == tmp_path / "org"


@pytest.mark.parametrize(
    "model", ["./nope", "/nope/nope", "nope", "a/b/c", "../nope", Path("org/name"), "org/na me", "~x/y"]
)
def test_what_is_neither_folder_nor_hub_name_is_refused(model: str | Path, offline: Path) -> None:
    refuse(model, repr(str(model)), "does not exist", "'org/name'")


@pytest.mark.parametrize("model", ["x" * 5000, "nul\0", "\x1b[31m"])
def test_what_no_file_can_be_called_is_refused(model: str) -> None:
    refuse(model, "does not exist")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"GGUF")
    refuse(tmp_path / "model.safetensors", "is a file", "pass the folder")


@pytest.mark.parametrize("model", ["", None, 7, b"org/name"])
def test_what_is_no_path_at_all_is_refused(model: Any) -> None:
    with pytest.raises(ValidationError, match="must be a folder or a hub name"):
        resolve_folder(model, None)


def test_a_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="leave revision out"):
        resolve_folder(tmp_path, "v1")


def test_a_local_folder_costs_no_import_of_the_hub(tmp_path: Path) -> None:
    script = (
        "import sys; from llm.loading.resolve import resolve_folder; resolve_folder(sys.argv[1]);"
        "print([name for name in ('huggingface_hub', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The cache


def test_a_complete_cache_serves_a_hub_name_without_the_network(cache: Path) -> None:
    snapshot = write_cache(cache, COMPLETE)
    assert resolve_folder(NAME, None) == snapshot


def test_the_cache_serves_the_revision_that_is_asked_for(offline: Path) -> None:
    main, other = write_cache(offline, COMPLETE), write_cache(offline, COMPLETE, ref="v2", commit="f" * 40)
    assert resolve_folder(NAME, "main") == main
    assert resolve_folder(NAME, "v2") == resolve_folder(NAME, "f" * 40) == other
    refuse(NAME, "not (completely) in the cache", revision="v3")


def test_a_name_that_is_not_in_the_cache_says_what_to_do_offline(offline: Path) -> None:
    refuse(NAME, repr(NAME), "not a local folder", "HF_HUB_OFFLINE", "unset it once")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_a_cache_without_the_essentials_is_refused_offline(offline: Path, lost: str) -> None:
    snapshot = write_cache(offline, {name: text for name, text in COMPLETE.items() if name != lost})
    refuse(NAME, "lacks", lost.removeprefix("model"), str(snapshot))


def test_a_cache_that_lacks_a_shard_is_refused_offline(offline: Path) -> None:
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    index = json.dumps({"weight_map": weight_map})
    write_cache(offline, {**COMPLETE, "m-1.safetensors": "", "model.safetensors.index.json": index})
    refuse(NAME, "lacks m-2.safetensors")


def test_random_weights_and_a_tokenizer_alone_need_no_weights_of_the_hub(offline: Path) -> None:
    files = {name: text for name, text in COMPLETE.items() if name != "model.safetensors"}
    snapshot = write_cache(offline, files)
    assert resolve_folder(NAME, weights=False) == snapshot
    refuse(NAME, "weights")


def test_a_cache_without_a_tokenizer_is_completed_online_and_used_offline(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    snapshot = write_cache(cache, {"config.json": "{}", "model.safetensors": ""})
    with pytest.raises((AssertionError, CheckpointError)):
        resolve_folder(NAME, None)  # the hub was asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_folder(NAME, None) == snapshot


def test_a_copy_that_is_known_to_be_partial_is_used_offline_with_a_warning(offline: Path) -> None:
    snapshot = write_cache(offline, COMPLETE)
    write_tree(offline, [*COMPLETE, "added_tokens.json", "README.md", "pytorch_model.bin"])
    with pytest.warns(UserWarning, match=r"not complete.*added_tokens\.json"):
        assert resolve_folder(NAME, None) == snapshot


def test_files_that_are_never_fetched_do_not_make_a_copy_partial(cache: Path) -> None:
    snapshot = write_cache(cache, COMPLETE)
    write_tree(
        cache, [*COMPLETE, "README.md", "pytorch_model.bin", "run.py", "original/x.json", "consolidated.safetensors"]
    )
    assert resolve_folder(NAME, None) == snapshot


# The network, played by a stand-in for snapshot_download


def play_hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], str]) -> list[dict[str, Any]]:
    """Leave the cache empty and let `answer` decide what a download gives; return the calls that reach the network."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("not cached")
        calls.append({"name": name, **options})
        return answer()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return calls


def hub_error(kind: str) -> Exception:
    from huggingface_hub import errors

    response: Any = SimpleNamespace(headers={}, request=None, status_code=403)
    if kind == "LocalEntryNotFoundError":
        return errors.LocalEntryNotFoundError("cannot connect")
    if kind == "OSError":
        return OSError(28, "No space left on device")
    error_class: Any = getattr(errors, kind)
    return error_class("403 Forbidden\nsecond line", response=response)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", ["is gated", f"https://huggingface.co/{NAME}", "hf auth login"]),
        ("RepositoryNotFoundError", ["does not exist or is private", "spelling"]),
        ("RevisionNotFoundError", ["no revision 'v9'"]),
        ("LocalEntryNotFoundError", ["hub cannot be reached", "pass a local folder"]),
        ("HfHubHTTPError", ["HfHubHTTPError: 403 Forbidden"]),
        ("OSError", ["No space left on device"]),
    ],
)
def test_every_way_the_hub_says_no_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: str, words: list[str]
) -> None:
    def fail() -> str:
        raise hub_error(kind)

    play_hub(monkeypatch, fail)
    refuse(NAME, repr(NAME), "is not a local folder", *words, revision="v9")


def test_a_download_asks_for_data_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in COMPLETE.items():
        (tmp_path / name).write_text(text)
    calls = play_hub(monkeypatch, lambda: str(tmp_path))
    assert resolve_folder(NAME, "v1") == tmp_path
    (call,) = calls
    assert (call["name"], call["revision"], call["allow_patterns"]) == (NAME, "v1", list(ALLOW_PATTERNS))
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in ALLOW_PATTERNS)
    assert call["tqdm_class"].monitor_interval == 0  # no thread stays behind


def test_a_model_without_safetensors_is_refused_after_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    play_hub(monkeypatch, lambda: str(tmp_path))
    refuse(NAME, "lacks *.safetensors weights", "convert")


@pytest.mark.parametrize("name", ["a--b/c", "a/b..c", "a/b.git"])
def test_a_name_that_the_hub_forbids_is_one_sentence(name: str, cache: Path) -> None:
    refuse(name, repr(name), "HFValidationError")


@pytest.mark.parametrize("tokenizer", ["nowhere", __file__, "", 3])
def test_a_tokenizer_that_is_not_there_is_called_the_tokenizer(tokenizer: Any) -> None:
    with pytest.raises(LLMError, match=r"^tokenizer "):
        LLM(tokenizer=tokenizer)
