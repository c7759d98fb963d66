"""Opening a model folder's weights: what is accepted is exact, what is malformed is refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llm.base.text import list_names
from llm.errors import CheckpointError
from llm.loading.checkpoint import DTYPES, HEADER_LIMIT_BYTES, Checkpoint
from llm.loading.model_files import check_model_file, read_json

INDEX = "model.safetensors.index.json"


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file by hand: 8 bytes of header length (which may lie), the header, the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def folder_with(folder: Path, content: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(content)
    return folder


def write_shards(folder: Path, shards: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> Path:
    """Shards that hold one small tensor per name, and an index that agrees unless `weight_map` says otherwise."""
    for file_name, names in shards.items():
        save_file({name: torch.full((2, 3), float(len(name))) for name in names}, folder / file_name)
    true_map = {name: file_name for file_name, names in shards.items() for name in names}
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": true_map if weight_map is None else weight_map})
    )
    return folder


def refuse(folder: Path, *words: str) -> str:
    """Open the folder, which must fail with one printable sentence that holds the words; return it."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return check_sentence(str(caught.value), *words)


def check_sentence(message: str, *words: str) -> str:
    assert message.isprintable()
    assert len(message) < 1000
    for word in words:
        assert word in message
    return message


# What loads


def test_tensors_come_back_as_they_were_saved(tmp_path: Path) -> None:
    saved = {
        "float": torch.randn(3, 5),
        "bf16": torch.randn(7, 2).bfloat16(),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "int": torch.arange(6, dtype=torch.int64).reshape(1, 2, 3),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    save_file(saved, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        loaded = dict(checkpoint.stream())
    assert loaded.keys() == saved.keys() == checkpoint.tensors.keys()
    for name, tensor in saved.items():
        info = checkpoint.tensors[name]
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].float(), tensor.float())
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in saved.values())


@pytest.mark.parametrize("name", DTYPES)
def test_every_listed_dtype_is_the_librarys(tmp_path: Path, name: str) -> None:
    size = DTYPES[name].itemsize
    checkpoint = Checkpoint.open(
        folder_with(tmp_path, file_bytes({"x": entry(name, [3], 0, 3 * size)}, bytes(3 * size)))
    )
    assert checkpoint.load("x").dtype == checkpoint.tensors["x"].dtype == DTYPES[name]


def test_order_is_that_of_the_bytes_not_of_the_header(tmp_path: Path) -> None:
    header = {"second": entry("U8", [1], 2, 3), "first": entry("U8", [2], 0, 2), "third": entry("U8", [1], 3, 4)}
    checkpoint = Checkpoint.open(folder_with(tmp_path, file_bytes(header, b"abcd")))
    assert list(checkpoint.tensors) == ["first", "second", "third"]
    assert [bytes(tensor.tolist()) for _, tensor in checkpoint.stream()] == [b"ab", b"c", b"d"]


def test_a_misaligned_tensor_is_copied_to_an_aligned_place(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = {"byte": entry("U8", [1], 0, 1), "x": entry("F32", [2], 1, 9)}
    checkpoint = Checkpoint.open(folder_with(tmp_path, file_bytes(header, b"\7" + values.numpy().tobytes())))
    assert torch.equal(checkpoint.load("x"), values)
    assert checkpoint.load("x").data_ptr() % 4 == 0


def test_shards_are_read_by_their_index_and_other_files_are_left_alone(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-2.safetensors": ["c"], "m-1.safetensors": ["b", "a"]})
    (tmp_path / "consolidated.safetensors").write_bytes(b"not read")
    checkpoint = Checkpoint.open(tmp_path)
    assert [info.file.name for info in checkpoint.tensors.values()] == ["m-1.safetensors"] * 2 + ["m-2.safetensors"]
    assert {name for name, _ in checkpoint.stream()} == {"a", "b", "c"}


def test_an_index_under_another_name_is_honoured_and_two_are_ambiguous(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-1.safetensors": ["a"]})
    (tmp_path / INDEX).rename(tmp_path / "weights.safetensors.index.json")
    assert list(Checkpoint.open(tmp_path).tensors) == ["a"]
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    refuse(tmp_path, "several index files", "other.safetensors.index.json")


def test_without_an_index_all_files_are_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    assert list(Checkpoint.open(tmp_path).tensors) == ["a"]
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    (tmp_path / "._two.safetensors").write_bytes(b"left by a file manager")
    assert list(Checkpoint.open(tmp_path).tensors) == ["a", "b"]
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(Checkpoint.open(tmp_path).tensors) == ["c"]


def test_after_close_tensors_live_on_and_nothing_more_is_loaded(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    kept = checkpoint.load("a")
    checkpoint.close()
    assert kept.tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.load("a")


def test_an_unknown_name_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        Checkpoint.open(tmp_path).load("b")


# What loading costs


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def mapped_files(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {os.path.basename(line) for line in lines if str(folder) in line}


def test_loading_costs_no_private_memory(tmp_path: Path) -> None:
    size = 64 << 20
    header = {f"t{i}": entry("U8", [size // 4], i * size // 4, (i + 1) * size // 4) for i in range(4)}
    folder_with(tmp_path, file_bytes(header))
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size + size)
    checkpoint = Checkpoint.open(tmp_path)
    before = private_bytes()
    tensors = [checkpoint.load(name) for name in checkpoint.tensors]
    for tensor in tensors:
        assert int(tensor[::4096].max()) == 0  # touches every page
    assert private_bytes() - before < size // 16
    # The control: a copy does show. In one piece, beyond what malloc may have kept of earlier tests.
    copy = torch.cat(tensors)
    assert private_bytes() - before > size // 2
    del copy


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    Checkpoint.open(tmp_path).load("a").fill_(1)
    assert Checkpoint.open(tmp_path).load("a").sum() == 0


def test_streaming_maps_one_file_at_a_time(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-1.safetensors": ["a", "b"], "m-2.safetensors": ["c"]})
    checkpoint = Checkpoint.open(tmp_path)
    assert mapped_files(tmp_path) == set()
    stream = checkpoint.stream()
    for name, tensor in stream:
        assert mapped_files(tmp_path) == {checkpoint.tensors[name].file.name}
        del tensor
    assert mapped_files(tmp_path) == set()


def test_leaving_a_stream_early_lets_go_of_its_file(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-1.safetensors": ["a", "b"]})
    checkpoint = Checkpoint.open(tmp_path)
    stream: Any = checkpoint.stream()
    next(stream)
    assert mapped_files(tmp_path) == {"m-1.safetensors"}
    stream.close()
    assert mapped_files(tmp_path) == set()


# Malformed files

FLOATS = entry("F32", [2], 0, 8)
ZEROS = bytes(8)
DUPLICATE = b'{"a":%s,"a":%s}' % (json.dumps(FLOATS).encode(), json.dumps(FLOATS).encode())

MALFORMED = {
    "empty": b"",
    "seven bytes": b"1234567",
    "cut in the header": file_bytes({"a": FLOATS}, ZEROS)[:30],
    "cut in the data": file_bytes({"a": FLOATS}, ZEROS)[:-1],
    "bytes too many": file_bytes({"a": FLOATS}, ZEROS + b"x"),
    "length past the file": file_bytes({"a": FLOATS}, ZEROS, length=10**6),
    "length over the cap": file_bytes({"a": FLOATS}, ZEROS, length=HEADER_LIMIT_BYTES + 1),
    "length overflows": file_bytes({"a": FLOATS}, ZEROS, length=2**64 - 1),
    "length too short": file_bytes({"a": FLOATS}, ZEROS, length=9),
    "length zero": file_bytes({"a": FLOATS}, ZEROS, length=0),
    "no JSON": file_bytes(b"\x80\x02not json"),
    "no object": file_bytes([1, 2]),
    "nested too deeply": file_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "overlap": file_bytes({"a": FLOATS, "b": entry("F32", [2], 4, 12)}, bytes(12)),
    "same bytes twice": file_bytes({"a": FLOATS, "b": FLOATS}, ZEROS),
    "hole": file_bytes({"a": FLOATS, "b": entry("F32", [2], 12, 20)}, bytes(20)),
    "hole at the start": file_bytes({"a": entry("F32", [2], 4, 12)}, bytes(12)),
    "begin after end": file_bytes({"a": entry("F32", [2], 8, 0)}, ZEROS),
    "negative offset": file_bytes({"a": entry("F32", [2], -8, 0)}, ZEROS),
    "past the file": file_bytes({"a": entry("F32", [4], 0, 16)}, ZEROS),
    "shape and bytes differ": file_bytes({"a": entry("F32", [3], 0, 8)}, ZEROS),
    "unknown dtype": file_bytes({"a": entry("F33", [2], 0, 8)}, ZEROS),
    "packed dtype": file_bytes({"a": entry("F4", [16], 0, 8)}, ZEROS),
    "negative shape": file_bytes({"a": entry("F32", [-2, -1], 0, 8)}, ZEROS),
    "fractional shape": file_bytes({"a": entry("F32", [2.0], 0, 8)}, ZEROS),
    "shape product overflows": file_bytes({"a": entry("F32", [2**32, 2**32 + 2], 0, 8)}, ZEROS),
    "shape over 64 bits": file_bytes({"a": entry("F32", [2**64 + 2], 0, 8)}, ZEROS),
    "overflow behind a zero": file_bytes({"a": entry("F32", [0, 2**62], 0, 0)}),
    "dimension over 63 bits": file_bytes({"a": entry("U8", [0, 2**63], 0, 0)}),
    "tensor named twice": file_bytes(DUPLICATE, ZEROS),
    "key twice in a tensor": file_bytes(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', ZEROS),
    "metadata not text": file_bytes({"__metadata__": {"format": 1}}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    refuse(folder_with(tmp_path, MALFORMED[case]), "model.safetensors")


def test_the_handmade_files_are_refused_for_their_fault_alone(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder_with(tmp_path, file_bytes({"a": FLOATS}, ZEROS)))
    assert checkpoint.load("a").tolist() == [0, 0]


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    refuse(folder_with(tmp_path, pointer), "git lfs pull")


def test_names_from_a_file_cannot_reach_the_terminal_raw(tmp_path: Path) -> None:
    name = "\x1b[31m\n" + "x" * 5000
    twice = json.dumps({name: FLOATS}).encode()[:-1] + b"," + json.dumps({name: FLOATS}).encode()[1:]
    refuse(folder_with(tmp_path, file_bytes(twice, ZEROS)), "?[31m?", "twice")


VALID = file_bytes(
    {
        "__metadata__": {"format": "pt"},
        "model.embed.weight": entry("BF16", [4, 3], 0, 24),
        "model.norm.weight": entry("F32", [3], 24, 36),
        "scale": entry("I64", [], 36, 44),
    },
    bytes(range(44)),
)
HEADER_END = len(VALID) - 44


def open_or_refuse(folder: Path, content: bytes) -> list[torch.Tensor] | None:
    """The loaded tensors, or None when the file is refused; anything else is a defect."""
    try:
        with Checkpoint.open(folder_with(folder, content)) as checkpoint:
            return [tensor.clone() for _, tensor in checkpoint.stream()]
    except CheckpointError as error:
        check_sentence(str(error), "model.safetensors")
        return None


FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_header_is_refused_or_covers_the_same_bytes(tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    content = bytearray(VALID)
    for position, value in damage:
        content[position] = value
    tensors = open_or_refuse(tmp_path, bytes(content))
    if tensors is not None:  # a changed name or dtype of the same size; the bytes are all there, in order
        assert b"".join(bytes(t.reshape(-1).view(torch.uint8).tolist()) for t in tensors) == VALID[HEADER_END:]


@FUZZ
@given(st.integers(0, len(VALID) - 1))
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    assert open_or_refuse(tmp_path, VALID[:length]) is None


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    open_or_refuse(tmp_path, content)
    open_or_refuse(tmp_path, file_bytes(content))


# Indexes and shards


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-1.safetensors": ["a"], "m-2.safetensors": ["b"]})
    (tmp_path / "m-2.safetensors").unlink()
    assert "m-1" not in refuse(tmp_path, "missing", "'m-2.safetensors'")


def test_a_shard_name_that_no_file_can_have_is_missing(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-1.safetensors": ["a"]}, {"a": "x" * 5000 + ".safetensors"})
    refuse(tmp_path, "missing", "'xxxx")


def test_a_promised_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": ["a"]}
    refuse(write_shards(tmp_path, shards, {"a": "m-1.safetensors", "b": "m-1.safetensors"}), "lack", "'b'")


def test_a_tensor_in_another_shard_than_promised_is_named(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": ["a"], "m-2.safetensors": ["b", "c"]}
    swapped = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    refuse(write_shards(tmp_path, shards, swapped), "lack", "'b'")


def test_tensors_that_the_index_does_not_list_are_counted(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": [f"t{i:02}" for i in range(30)]}
    message = refuse(write_shards(tmp_path, shards, {"t00": "m-1.safetensors"}), "does not list", "(29 in all)")
    assert message.count("'t") == 8


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    refuse(tmp_path, "'a' twice", "one.safetensors and two.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        *("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "a\\x.safetensors", "x\0.safetensors"),
        *("..", "", "pytorch_model.bin", 7, None, ["x.safetensors"]),
    ],
)
def test_an_index_may_name_plain_safetensors_files_only(tmp_path: Path, name: Any) -> None:
    write_shards(tmp_path, {"m-1.safetensors": ["a"]}, {"a": "m-1.safetensors", "b": name})
    refuse(tmp_path, "plain *.safetensors names")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    refuse(tmp_path, INDEX)


# Folders without usable weights


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, "no weights")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    refuse(tmp_path, repr(name), "never opens", "from_pretrained(folder).save_pretrained(new_folder)")


def test_gguf_is_refused_with_its_own_way_out(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refuse(tmp_path, "only 'm.gguf'; pass the path of a GGUF file itself")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nope", "nope")


def test_a_folder_or_a_pipe_named_like_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    refuse(tmp_path, "not a regular file")
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would hang
    refuse(tmp_path, "not a regular file")


# Links


def test_links_within_the_folder_are_followed_and_others_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "real.data")
    (folder / "model.safetensors").symlink_to("real.data")
    assert list(Checkpoint.open(folder).tensors) == ["a"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../outside.safetensors")
    refuse(folder, "outside of its model folder")


def test_dangling_and_looping_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    refuse(tmp_path, "model.safetensors is missing")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    refuse(tmp_path, "cannot be read")


def cached_link(cache: Path, target: str) -> Path:
    """A hub cache with one snapshot whose only file links to `target`, a path in the cache; the file of the link."""
    (cache / target).parent.mkdir(parents=True)
    (cache / target).write_text("{}")
    snapshot = cache / "models--org--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(os.path.relpath(cache / target, snapshot))
    return snapshot / "config.json"


def test_a_hub_cache_may_link_to_the_blobs_of_its_repository(tmp_path: Path) -> None:
    assert read_json(cached_link(tmp_path, "models--org--name/blobs/ff"), limit_bytes=10) == {}


@pytest.mark.parametrize("target", ["models--org--other/blobs/ff", "models--org--name/refs/main", "blobs/ff/ffff"])
def test_a_hub_cache_may_link_nowhere_else(tmp_path: Path, target: str) -> None:
    with pytest.raises(CheckpointError, match="outside of its model folder"):
        check_model_file(cached_link(tmp_path, target))


def test_a_hub_cache_may_share_blobs_in_the_store_that_it_marks(tmp_path: Path) -> None:
    link = cached_link(tmp_path, "blobs/ff/ffff")
    (tmp_path / "blobs" / ".huggingface-shared-blobs").write_text("1")
    check_model_file(link)


def test_a_snapshot_folder_outside_a_hub_cache_has_no_blobs(tmp_path: Path) -> None:
    link = cached_link(tmp_path, "models--org--name/blobs/ff")
    link.parent.parent.parent.rename(tmp_path / "anything")
    with pytest.raises(CheckpointError, match="outside of its model folder"):
        check_model_file(tmp_path / "anything" / "snapshots" / "0123abc" / "config.json")


# JSON


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1, {"b": "\u00e9"}]}', encoding="utf-8")
    assert read_json(tmp_path / "config.json", limit_bytes=1000) == {"a": [1, {"b": "\u00e9"}]}


def test_reading_a_small_file_reserves_no_more_than_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tracemalloc.start()
    assert read_json(tmp_path / "config.json", limit_bytes=1 << 30) == {}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1, "a": 1}', "the key 'a' comes twice"),
        (b'{"x": {"a": 1, "b": 2, "a": 3}}', "the key 'a' comes twice"),
        (b"[1]", "must hold a JSON object, not a list"),
        (b"null", "must hold a JSON object"),
        (b'{"a": }', "not usable"),
        (b"", "not usable"),
        (b'{"\xff": 1}', "not usable"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": ' + b"[" * 400_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not usable"),
        (b'{"a": "' + b"x" * 500_000 + b'"}', "larger than 500000 bytes"),
    ],
)
def test_unusable_json_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json(tmp_path / "config.json", limit_bytes=500_000)
    check_sentence(str(caught.value), "config.json", words)


def test_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_json(tmp_path / "config.json", limit_bytes=10)


def test_a_list_of_names_is_capped_and_counted() -> None:
    assert list_names(["a", "b"]) == "'a', 'b'"
    assert list_names(f"{i}" for i in range(10)) == "'0', '1', '2', '3', '4', '5', '6', '7' and 2 more (10 in all)"
