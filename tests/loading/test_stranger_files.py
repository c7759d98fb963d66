"""Folders written by strangers: links, pipes, devices, and what tokenizers do with a hostile definition."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from embedded import copy_model, open_llm, python

from llm.base.system import partial_folder
from llm.base.text import show
from llm.errors import CheckpointError, LLMError
from llm.llm import EMBEDDED_MODEL
from llm.text.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Opens the tokenizer as `llm` does and renders a chat, with 3 GB of memory.
OPEN = """
import resource, sys, torch
from pathlib import Path
from llm.errors import CheckpointError
from llm.text.tokenizer import Tokenizer
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # much, with CUDA's libraries
resource.setrlimit(resource.RLIMIT_AS, (mapped + (3 << 30), mapped + (3 << 30)))
for folder in sys.argv[1:]:
    try:
        tokenizer = Tokenizer(Path(folder))
        print("rendered", tokenizer.render_chat([{"role": "user", "content": "hello"}]))
    except CheckpointError as error:
        print("refused:", error)
"""


def opened(*folders: Path) -> list[str]:
    """What a process with limits says of each folder."""
    done = python("-c", OPEN, *map(str, folders))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(folders) and all(len(line) < 600 for line in lines), lines
    return lines


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def outside(path: Path) -> None:
    secret = next(parent for parent in path.parents if parent.name == "model").parent / "secret"
    secret.write_text("a secret")
    path.symlink_to(secret)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


NAMES = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/t.jinja")


def test_what_is_no_file_of_the_folder_is_refused(tmp_path: Path) -> None:
    cases = [(name, make) for name in NAMES for make in (pipe, device, outside, sparse)]
    folders = []
    for index, (name, make) in enumerate(cases):
        folders.append(copy_model(tmp_path / str(index) / "model"))
        path = folders[-1] / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)
    linked = copy_model(tmp_path / "linked")
    folders.append(linked)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "t.jinja").write_text("a secret")
    (linked / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    for (name, make), said in zip([*cases, ("t.jinja", outside)], opened(*folders), strict=True):
        assert said.startswith("refused:") and Path(name).name in said and "a secret" not in said, (make, said)


def test_a_snapshot_of_the_hub_cache_links_to_its_blobs(tmp_path: Path) -> None:
    """Control: the links that a cache is made of."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(copy_model(tmp_path / "model"), repository / "blobs")
    (repository / "blobs" / "t").write_text(TEMPLATE)
    for file in (repository / "blobs").iterdir():
        (snapshot / (file.name if file.name != "t" else "chat_template.jinja")).symlink_to(f"../../blobs/{file.name}")
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "more.jinja").symlink_to("../../../blobs/t")
    assert opened(snapshot) == ["rendered hello"]


def definition(folder: Path, **changes: Any) -> Path:
    copy_model(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def test_a_definition_that_panics_is_refused(tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(CheckpointError, match=r"tokenizer of .* fails: Precompiled"):
        Tokenizer(definition(tmp_path, normalizer=normalizer))


def test_a_rule_that_never_ends_ends_in_one_sentence(tmp_path: Path) -> None:
    tokenizer = Tokenizer(definition(tmp_path, pre_tokenizer=ENDLESS))
    assert tokenizer.encode(["bb"])
    with pytest.raises(CheckpointError, match=r"fails: .*retry-limit"):
        tokenizer.encode(["a" * 64 + "!"])


def test_the_engine_goes_on_after_a_tokenizer_failed(tmp_path: Path) -> None:
    with open_llm(definition(tmp_path, pre_tokenizer=ENDLESS)) as llm:
        with pytest.raises(LLMError, match="retry-limit"):
            llm.generate("a" * 64 + "!", use_tqdm=False)
        assert llm.generate("bb", use_tqdm=False)[0].finished


def test_an_id_that_a_library_would_count_up_to_is_refused(tmp_path: Path) -> None:
    model = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["model"]
    model["vocab"][next(reversed(model["vocab"]))] = 2**31
    with pytest.raises(CheckpointError, match="id 2147483648"):
        Tokenizer(definition(tmp_path, model=model)).to_json()
    assert Tokenizer(EMBEDDED_MODEL).to_json()


def test_a_save_copies_no_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "model")
    outside(folder / "notes.txt")
    with open_llm(folder, quantization="w8a8") as llm:
        with pytest.raises(CheckpointError, match=r"notes\.txt is a link"):
            llm.save_quantized(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        (folder / "notes.txt").unlink()
        llm.save_quantized(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").exists()


def test_leftovers_of_killed_saves_go_and_saves_at_work_stay(tmp_path: Path) -> None:
    dead = tmp_path / ".other.partial-abcdefgh"
    dead.mkdir()
    (dead / "half").write_text("of a model")
    others = [tmp_path / ".mine.partial", tmp_path / "a.partial-abcdefgh"]
    for folder in others:
        folder.mkdir()
    with partial_folder(tmp_path / "first") as first, partial_folder(tmp_path / "second") as second:
        assert not dead.exists() and first.exists() and second.exists()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_what_messages_show_is_short_and_printable() -> None:
    loop: list[object] = []
    loop.append(loop)
    for value in ("x" * 10**6, "\x1b[31m\n", 10**9999, [0] * 10**6, {"k": "\udc80"}, loop, range(10**9)):
        assert len(show(value)) < 500 and show(value).isprintable()
    assert show([1, "a"]) == "[1, 'a']"
