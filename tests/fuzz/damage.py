"""What a seed changes in a model: a value of a JSON file, the header of a safetensors file, a field of a GGUF file.

Odd values, and three ways to put them in. Sums and lengths around a value are not mended: a reader must
bear that, too. `folders.py` opens what comes out.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

INDEX = "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 2**31, 2**63, 10**30, 0.0, -1.5, 1e308, float("inf"), float("nan"),
    "", "x", "int", "group", "re:(.+)+!$", "re:[", "re:.*", "\udc80", "\x1b[2J", "a" * 5000,
    [], [None], [[]], ["x"], [0],
    [-1, 2**40], {}, {"x": 1}, {"": None},
)  # fmt: skip
# Of the fields of a tensor in a safetensors header.
ODD_DTYPES = ("F32", "F16", "BF16", "I8", "U8", "I32", "I64", "F8_E4M3", "BOOL")
TEMPLATES = (
    "{{ 10**10**8 }}",
    "{{ 'a' * 10**10 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ '%09999999999d' % 1 }}",
    "{{ messages.content.a.b }}",
    "{% for %}",
    "{{ raise_exception('no') }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'|center(10**10) }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages[0].content }}",
)
# What the first bytes of a tensor become: 0, -1, the largest, infinite, NaN, in one type or another.
_ODD_BYTES = tuple(bytes.fromhex(text) for text in ("00" * 8, "ff" * 8, "7f" * 8, "80" * 8, "0000807f", "007c", "c07f"))
# What an integer of a file becomes, cut to its width.
_ODD_INTEGERS = (0, 1, 2, 3, 7, 8, 9, 31, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def damaged(seed: int, base: Path, target: Path) -> None:
    """Write `base`, a folder or a GGUF file, as the new `target`, with one file changed as `seed` says."""
    draw = random.Random(seed)
    if base.is_file():
        shutil.copyfile(base, target)
        damage_gguf(target, draw)
        return
    target.mkdir()
    for file in base.iterdir():
        if file.suffix in {".json", ".safetensors"}:
            os.link(file, target / file.name)
    names = sorted(file.name for file in target.glob("*.json"))
    often = [name for name in names if name == INDEX or name.startswith("quant_model")] * 4
    weights = sorted(file.name for file in target.glob("*.safetensors"))
    name = draw.choice([*names, *often, "config.json", "config.json", TEMPLATE, *weights[:1]])
    if name == TEMPLATE:
        (target / name).write_text(draw.choice(TEMPLATES))
    elif name in weights:
        content = (target / name).read_bytes()
        (target / name).unlink()  # it is a link to the base's
        (target / name).write_bytes(damage_safetensors(content, draw))
    else:
        text = (target / name).read_text()
        (target / name).unlink()
        (target / name).write_text(damage_json(text, draw))


def _odd(draw: random.Random) -> Any:
    """A copy: a later change may be inside of it."""
    return copy.deepcopy(draw.choice(ODD))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below a JSON value; of long lists and objects only some."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
    for key in keys[:200]:
        yield value, key
        yield from places(value[key])


def damage_json(text: str, draw: random.Random) -> str:
    if draw.random() < 0.05:  # cut or damaged as text
        cut = draw.randrange(len(text))
        return draw.choice([text[:cut], text[:cut] + "\x00" + text[cut:], "[" * 10**5])
    value = json.loads(text)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        container, key = _place(value, draw)
        action = draw.random()
        if action < 0.15:
            del container[key]
        elif action < 0.25 and isinstance(container, dict):
            added = draw.choice(["x", "quantization_config", "rope_scaling", "text_config", key + "x"])
            container[added] = _odd(draw)
        else:
            container[key] = _odd(draw)
        if not any(True for _ in places(value)):
            break
    return json.dumps(value)


def _place(value: Any, draw: random.Random) -> tuple[Any, Any]:
    """Often inside the part that says how the weights are stored, which is small beside a list of layers."""
    inner = value.get("quantization_config") if isinstance(value, dict) else None
    if isinstance(inner, dict) and inner and draw.random() < 0.6:
        return draw.choice(list(places(inner)))
    return draw.choice(list(places(value)))


def damage_safetensors(content: bytes, draw: random.Random) -> bytes:
    """A value in the header, the length before it, the end of the file, or a value of a small tensor (a scale)."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    action = draw.random()
    if action < 0.1:
        return content[: draw.randrange(len(content))]
    if action < 0.2:
        return struct.pack("<Q", draw.choice(_ODD_INTEGERS)) + content[8:]
    name = draw.choice(sorted(header.keys() - {"__metadata__"}))
    action = draw.random()
    if action < 0.3:
        begin, end = draw.choice(_smallest(header))["data_offsets"]
        odd = draw.choice(_ODD_BYTES)[: end - begin]
        return content[: 8 + length] + data[:begin] + odd + data[begin + len(odd) :]
    action = draw.random()
    if action < 0.1:
        del header[name]
    elif action < 0.2:
        header[name + "x"] = header.pop(name)
    elif action < 0.4:
        header[name] = header[draw.choice(sorted(header))]
    elif action < 0.6:
        header[name]["dtype"] = draw.choice(ODD_DTYPES)
    elif action < 0.8:
        shape, shuffled = header[name]["shape"], draw.choice([[1], [0], [-1], [2**40], [2**63]])
        header[name]["shape"] = draw.choice([shape[::-1], shape + shuffled, shuffled, shape[1:], [*shape[:-1], 1]])
    else:
        container, key = draw.choice(list(places(header[name])))
        container[key] = _odd(draw)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _smallest(header: dict[str, Any]) -> list[dict[str, Any]]:
    """The descriptions of the smaller half of the tensors: scales, zero points, orders of groups."""
    own = [item for name, item in header.items() if name != "__metadata__"]
    return sorted(own, key=lambda item: item["data_offsets"][1] - item["data_offsets"][0])[: len(own) // 2 + 1]


def damage_gguf(path: Path, draw: random.Random) -> None:
    """A field of the metadata or of a tensor's description (a length, a type, a name, a value), or the file's end."""
    if draw.random() < 0.05:
        os.truncate(path, draw.randrange(path.stat().st_size))
        return
    reader = gguf.GGUFReader(path, mode="r+")
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        part = draw.choice(draw.choice(fields).parts)
        at = draw.randrange(part.size) if part.size else None
        if at is None:
            continue
        if part.dtype.kind == "f":
            part[at] = draw.choice([0.0, -1.0, 1e30, float("inf"), float("nan")])
        elif part.dtype == np.uint8 and draw.random() < 0.7:  # text, mostly: it stays text
            part[at] = draw.choice(b"aA0 .{%")
        else:
            part[at] = np.array(draw.choice(_ODD_INTEGERS) & 2**64 - 1, np.uint64).astype(part.dtype)
    reader.data.flush()
