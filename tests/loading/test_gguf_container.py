"""The GGUF container: what the `gguf` package writes is read as it is, and no hostile file does more than raise."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints.gguf import finish, random_blocks, write_gguf
from gguf import GGMLQuantizationType as Type

from llm.errors import CheckpointError, LLMError
from llm.kernels.reference.gguf_blocks import BLOCKS, Block, Decoded, decode, type_name
from llm.llm import EMBEDDED_MODEL
from llm.loading.gguf.container import GgufFile, read_header
from llm.loading.gguf.source import GgufSource, parts_of
from llm.loading.quantization import resolve_quantization, without_quantization_keys
from llm.models.config_reader import ConfigReader
from llm.models.registry import resolve_model_cls

MUTATIONS = 400


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a value of each kind and a few tensors."""
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("uint8", 3), ("int8", -3), ("uint16", 3), ("int16", -3), ("uint32", 3), ("int32", -3)):
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    writer.add_uint64("test.uint64", 1 << 40)
    writer.add_int64("test.int64", -(1 << 40))
    writer.add_float32("test.float32", 0.5)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "caf\u00e9")
    writer.add_array("test.strings", ["a", "", "b c"])
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", gguf.quantize(np.ones((3, 64), np.float32), Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.add_tensor("c", random_blocks(Type.Q4_K, 2, 512, 1.0), raw_dtype=Type.Q4_K)
    finish(writer)
    return path


def test_values_and_tensors_are_the_packages(whole: Path) -> None:
    file, theirs = read_header(whole), gguf.GGUFReader(whole)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    ours = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    assert ours == expected
    assert [(t.name, t.type, list(t.shape[::-1]), t.start, t.nbytes) for t in file.tensors] == [
        (t.name, t.tensor_type.name, t.shape.tolist(), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.dtype is None])
def test_blocks_are_those_of_the_package_bit_for_bit(name: str) -> None:
    kind, block = Type[name], BLOCKS[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (block.values, block.bytes) and type_name(kind.value) == name
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 256, (5, 20 * block.bytes), dtype=np.uint8)
    found = decode(torch.from_numpy(raw), block)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, kind))
    assert same(value_of(found, block), expected)
    assert (found.minimum is not None) == block.has_minimum
    low, high = (0, 15) if block.has_minimum else (-8, 7)
    assert block.kind == "int8" or (found.q.min() >= low and found.q.max() <= high)
    # The control: another order of the values is another weight.
    assert not same(value_of(Decoded(found.q.flip(1), found.scale, found.minimum), block), expected)


def value_of(decoded: Decoded, block: Block) -> torch.Tensor:
    q = torch.tensor(block.table)[decoded.q.long() + 8] if block.table else decoded.q
    value = q.float() * decoded.scale.repeat_interleave(block.group, dim=1)
    return value if decoded.minimum is None else value - decoded.minimum.repeat_interleave(block.group, dim=1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def array(kind: int, count: int) -> bytes:
    return string("k") + struct.pack("<IIQ", 9, kind, count)


def tensor(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string("t") + dimensions + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
        (header(magic=b"GGML", rest=bytes(64)), "does not begin with 'GGUF'"),
        (header(version=1), "has version 1; versions 2 and 3"),
        (header(version=3 << 24), "is big-endian"),
        (header(tensors=2**60), "claims 1152921504606846976 tensors, where at most 1 are possible"),
        (header(keys=2**60), "claims 1152921504606846976 metadata keys"),
        (header(keys=1, rest=struct.pack("<Q", 2**62)), "a string of 4611686018427387904 bytes"),
        (header(keys=1, rest=struct.pack("<Q", 200)), "ends inside its header"),
        (header(keys=1, rest=struct.pack("<Q", 1) + b"\xff" + bytes(64)), "not UTF-8"),
        (header(keys=1, rest=array(4, 2**61)), "claims 2305843009213693952 values in 'k'"),
        (header(keys=1, rest=array(8, 2**61)), "claims 2305843009213693952 values in 'k'"),
        (header(keys=1, rest=array(9, 1) + array(9, 1)), "nests arrays in 'k'"),
        (header(keys=1, rest=string("k") + struct.pack("<I", 13) + bytes(8)), "unknown type 13 in 'k'"),
        (header(keys=2, rest=2 * (string("k") + struct.pack("<IB", 0, 1))), "key 'k' twice"),
        (header(tensors=1, rest=tensor(4) + bytes(64)), None),
        (header(tensors=1, rest=tensor(4)), "ends before its tensor 't'"),
        (header(tensors=1, rest=tensor(2**40, 2**40)), r"the shape \[1099511627776, 1099511627776\]"),
        (header(tensors=1, rest=tensor(0, 4) + bytes(64)), r"the shape \[4, 0\]"),
        (header(tensors=1, rest=tensor(33, kind=8) + bytes(64)), "sizes are positive, and columns a multiple of 32"),
        (header(tensors=1, rest=tensor(4, 1, 1, 1, 1) + bytes(64)), "5 dimensions"),
        (header(tensors=1, rest=tensor(256, kind=16) + bytes(99)), "'t' as IQ2_XXS, which is not computed; use a file"),
        (header(tensors=1, rest=tensor(4, kind=999) + bytes(64)), "as type 999, which is not computed"),
        (header(tensors=1, rest=tensor(4, offset=8) + bytes(96)), "overlaps another tensor or is not aligned"),
        (header(tensors=2, rest=2 * tensor(4) + bytes(96)), "overlaps another tensor"),
        (header(tensors=2, rest=tensor(4) + tensor(4, offset=32) + bytes(128)), "has 't' more than once"),
        (header(tensors=1, rest=tensor(4, offset=2**63) + bytes(64)), "ends before its tensor"),
        (
            header(keys=1, rest=string("general.alignment") + struct.pack("<II", 4, 24)),
            "general.alignment that is no power of two",
        ),
    ],
)
def test_what_a_file_claims_is_checked(tmp_path: Path, data: bytes, message: str | None) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    if message is None:
        assert [t.shape for t in read_header(path).tensors] == [(4,)]
    else:
        with pytest.raises(CheckpointError, match=message):
            read_header(path)


def test_mutated_files_are_read_or_refused(whole: Path, tmp_path: Path) -> None:
    """Bytes of the header overwritten, removed and doubled: no other error, and no memory that the file has not."""
    original, path = whole.read_bytes(), tmp_path / "mutated.gguf"
    refused = 0
    tracemalloc.start()
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(original, random.Random(seed)))
        try:
            assert isinstance(read_header(path), GgufFile)
        except CheckpointError as error:
            refused += 1
            assert len(str(error)) < 1500
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert MUTATIONS // 4 < refused < MUTATIONS


def mutated(data: bytes, generator: random.Random) -> bytes:
    end = read_length(data)
    changed = bytearray(data)
    for _ in range(generator.randint(1, 3)):
        place = generator.randrange(min(end, len(changed)))
        kind = generator.randrange(4)
        if kind == 0:
            changed[place] = generator.randrange(256)
        elif kind == 1:
            changed[place : place + 8] = struct.pack("<Q", generator.choice([0, 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1]))
        elif kind == 2:
            del changed[place : place + generator.randint(1, 40)]
        else:
            changed[place:place] = changed[place : place + generator.randint(1, 40)]
    return bytes(changed)


def read_length(data: bytes) -> int:
    """Of the header, about."""
    return data.index(b"c", data.index(b"test.numbers") + 12) + 30


def test_mutated_models_are_read_or_refused(tmp_path: Path) -> None:
    """From the file to the family's own config and to the last tensor."""
    path = tmp_path / "model.gguf"
    write_gguf(EMBEDDED_MODEL, path, lambda _: Type.Q8_0)
    original, end, refused = path.read_bytes(), read_header(path).tensors[0].start, 0
    for seed in range(MUTATIONS // 4):
        generator, changed = random.Random(seed), bytearray(original)
        for _ in range(generator.randint(1, 2)):
            place = generator.randrange(end)
            changed[place : place + 4] = struct.pack("<I", generator.choice([0, 1, 2, 2**31, 2**32 - 1]))
        path.write_bytes(changed)
        try:
            read_whole(path)
        except LLMError:
            refused += 1
    assert refused > MUTATIONS // 8


def read_whole(path: Path) -> None:
    source = GgufSource(path)
    raw = source.config()
    reader = ConfigReader(without_quantization_keys(raw, resolve_quantization(None, None, path.parent, raw)))
    resolve_model_cls([], reader.family).read_config(reader)
    for _ in source.tensors().stream():
        pass


def test_parts_of_a_split_model(tmp_path: Path) -> None:
    names = [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for name in (names[0], names[2]):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"beside it are missing 'm-00002-of-00003\.gguf'"):
        parts_of(tmp_path / names[0])
    (tmp_path / names[1]).touch()
    assert [part.name for part in parts_of(tmp_path / names[2])] == names
    assert parts_of(tmp_path / "whole.gguf") == [tmp_path / "whole.gguf"]
    with pytest.raises(CheckpointError, match=r"m-99999-of-99999\.gguf is missing"):
        parts_of(tmp_path / "m-00001-of-99999.gguf")
    with pytest.raises(CheckpointError, match="named part 4 of 3"):
        parts_of(tmp_path / "m-00004-of-00003.gguf")
