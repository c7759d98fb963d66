"""The prompt cache on disk: a folder with what the prefix cache has, for another process to begin with.

`prefix_cache.json` says which model and settings it is of, how many blocks it has, and the SHA-256 of each file;
`entries.safetensors` has the hash and the tokens of each block; `part-N.safetensors` the rows of one tensor of the KV
cache or of the recurrent states. It is written under another name and renamed when the disk has it. It holds the tokens
of prompts, so only its owner can read it. The cache of a draft model is not in it: in the other process that model
computes a prompt again when it first drafts for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from llm.base.library_settings import library_defaults
from llm.base.system import partial_folder, sync
from llm.base.text import quote, show
from llm.base.types import JsonObject
from llm.engine.block_manager import Entry, cached_entries, restore_entries
from llm.engine.boundary import CachePart
from llm.engine.engine import Engine
from llm.errors import CheckpointError, LLMError, ValidationError
from llm.forward import SLOTS
from llm.jobs.identity import digest_of, fingerprint_of, model_identity
from llm.loading.checkpoint import Checkpoint
from llm.loading.model_files import read_json

if TYPE_CHECKING:
    from llm.llm import LLM

VERSION = 1
_MANIFEST = "prefix_cache.json"
_ENTRIES = "entries.safetensors"
_MANIFEST_BYTES = 16 << 20
_DIGEST_BYTES = 32
_TOKEN_BYTES = 8


@dataclass(frozen=True)
class Manifest:
    """A folder's `prefix_cache.json`, of the right version.

    Attributes:
        counts: blocks by group, and snapshots.
        sums: SHA-256 of each file, by name.
    """

    folder: Path
    identity: JsonObject
    counts: Mapping[str, int]
    sums: Mapping[str, str]


def save_cache_of(llm: LLM, path: str | Path) -> Path:
    """`LLM.save_prefix_cache`."""
    path = check_new(path)
    with llm._exclusive():
        engine = llm._begin()
        engine.needs_model_here("save_prefix_cache")
        _check_cacheable(engine, "path")
        if llm._may_have_changed:
            raise ValidationError(
                "a callable of apply_model may have changed the weights, so there is no telling which model the "
                "prompt cache is of; save it before apply_model.",
                parameter="path",
            )
        return save(engine, _identity_of(llm), path)


def load_cache_into(llm: LLM, folder: str | Path) -> None:
    """`LLM(prefix_cache=...)`, at the end of start-up. Closes the LLM if it fails."""
    try:
        engine, manifest = llm._open_engine(), read_manifest(folder)
        _check_cacheable(engine, "prefix_cache")
        check_identity(manifest, _identity_of(llm))
        load(engine, manifest)
    except BaseException:
        llm.close()
        raise


def _identity_of(llm: LLM) -> JsonObject:
    """What keys, values and states depend on besides the tokens and what is in their hashes."""
    config = llm._open_engine().config
    weights = fingerprint_of(llm)
    if llm._source is None:
        raise ValidationError("random weights have no prompt cache; load a checkpoint.", parameter="load_format")
    return {**model_identity(llm._args, config, weights), "block_size": config.cache_config.block_size}


def _check_cacheable(engine: Engine, parameter: str) -> None:
    """Raise `ValidationError` if prompts share nothing."""
    if not engine.config.cache_config.enable_prefix_caching:
        why = engine.config.reasons.get("enable_prefix_caching", "enable_prefix_caching=False")
        message = f"there is no prompt cache without prefix caching, which is off: {why}."
        raise ValidationError(message, parameter=parameter)


def check_new(path: str | Path) -> Path:
    """Raise `ValidationError` unless nothing is at `path`."""
    if not isinstance(path, str | Path):
        raise ValidationError(f"path must be that of a new folder, got {show(path)}.", parameter="path", value=path)
    path = Path(os.path.expanduser(path))
    if path.exists():
        raise ValidationError(f"{path} exists already; pass a new folder.", parameter="path", value=str(path))
    return path


@library_defaults()
def save(engine: Engine, identity: JsonObject, path: Path) -> Path:
    """Write the prefix cache into the new folder `path`.

    Raises:
        ValidationError: it is empty, or blocks are too small. LLMError: the folder cannot be written.
    """
    entries = {_name(group): found for group, found in cached_entries(engine.scheduler.blocks).items()}
    if not any(entries.values()):
        raise ValidationError(
            "the prefix cache is empty, there is nothing to save; generate from the prompts first.", parameter="path"
        )
    parts = engine.runner.cache_parts()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(path) as partial:
            sums = _write_files(engine, parts, entries, partial)
            counts = {name: len(found) for name, found in entries.items()}
            manifest = {"prefix_cache": VERSION, "identity": identity, "entries": counts, "sha256": sums}
            (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            sync(partial / _MANIFEST)
            sync(partial)
            partial.rename(path)
            sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise LLMError(f"the prompt cache could not be saved to {path}: {error}") from error
    return path


def read_manifest(folder: object) -> Manifest:
    """What can be checked before a model is loaded.

    Raises:
        ValidationError: no path was given. CheckpointError: there is no prompt cache, or it is damaged.
    """
    if not isinstance(folder, str | Path):
        raise ValidationError(
            f"prefix_cache must be a folder of LLM.save_prefix_cache, got {show(folder)}.",
            parameter="prefix_cache",
            value=folder,
        )
    path = Path(os.path.expanduser(folder))
    if not (path / _MANIFEST).exists():
        raise CheckpointError(f"{path} has no {_MANIFEST}; pass a folder that LLM.save_prefix_cache has written.")
    content = read_json(path / _MANIFEST, limit_bytes=_MANIFEST_BYTES)
    version = content.get("prefix_cache")
    if version != VERSION:
        of = f"{path} is a prompt cache of version {show(version)}"
        raise CheckpointError(f"{of}, and {VERSION} is read; save it again.")
    identity, counts, sums = (content.get(name) for name in ("identity", "entries", "sha256"))
    if not (
        isinstance(identity, dict)
        and isinstance(counts, dict)
        and isinstance(sums, dict)
        and all(type(count) is int and 0 <= count < 1 << 40 for count in counts.values())
        and all(isinstance(item, str) for item in sums.values())
    ):
        raise CheckpointError(f"{path / _MANIFEST} is damaged; delete the folder, and save the prompt cache again.")
    return Manifest(path, identity, counts, sums)


def check_identity(manifest: Manifest, identity: JsonObject) -> None:
    """Raise `CheckpointError` if a prompt cache is not of this model and these settings."""
    now = json.loads(json.dumps(identity))
    for name in sorted({*manifest.identity, *now}):
        before = manifest.identity.get(name)
        if before != now.get(name):
            raise CheckpointError(
                f"{manifest.folder} is the prompt cache of another model or setting: its {name} is {show(before)}, and "
                f"now it is {show(now.get(name))}; leave prefix_cache out, or open the model as it was."
            )


@library_defaults()
def load(engine: Engine, manifest: Manifest) -> int:
    """Fill the empty prefix cache, the blocks that were used last first; returns how many blocks and snapshots.

    Raises:
        CheckpointError: a file is damaged. All are checked before a block is written.
    """
    blocks, parts = engine.scheduler.blocks, engine.runner.cache_parts()
    groups = {_name(group): group for group in cached_entries(blocks)}
    if manifest.counts.keys() != groups.keys():
        raise _damaged(manifest.folder, f"its groups are {show(list(manifest.counts))}")
    counts = {groups[name]: count for name, count in manifest.counts.items()}
    expected = {f"part-{index:05d}.safetensors" for index, part in enumerate(parts) if counts.get(part.group)}
    if manifest.sums.keys() != {_ENTRIES, *expected}:
        raise _damaged(manifest.folder, f"its files are {show(list(manifest.sums))}")
    with _open_entries(manifest, groups, engine.config.cache_config.block_size) as file:
        entries = {group: _entries(file, name) for name, group in groups.items() if counts[group]}
    files = {}
    for index, part in enumerate(parts):
        count = counts.get(part.group, 0)
        if count:
            wanted = {"rows": ((count, *part.shape), part.dtype)}
            files[index] = _open(manifest, f"part-{index:05d}.safetensors", wanted)
    placed = {group: restore_entries(blocks, group, found) for group, found in entries.items()}
    for index, file in files.items():
        _write_part(engine, index, file, placed[parts[index].group])
    return sum(map(len, placed.values()))


def _write_part(engine: Engine, index: int, file: Checkpoint, placed: list[tuple[int, int]]) -> None:
    with file:
        if placed:
            rows = torch.tensor([row for row, _ in placed], dtype=torch.int64)
            engine.runner.write_cache(index, [block for _, block in placed], file.load("rows")[rows])


def _write_files(
    engine: Engine, parts: list[CachePart], entries: Mapping[str, list[Entry]], folder: Path
) -> dict[str, str]:
    """The SHA-256 of each file that was written."""
    tensors = {}
    for name, found in entries.items():
        if found:
            tensors[f"{name}.digests"] = _bytes([entry.digest for entry in found])
            tensors[f"{name}.tokens"] = _bytes([entry.tokens for entry in found])
    sums = {_ENTRIES: _write(folder / _ENTRIES, tensors)}
    for index, part in enumerate(parts):
        rows = [entry.row for entry in entries.get(_name(part.group), ())]
        if rows:
            file = folder / f"part-{index:05d}.safetensors"
            sums[file.name] = _write(file, {"rows": engine.runner.read_cache(index, rows)})
    return sums


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    save_file(dict(tensors), path)
    sync(path)
    return digest_of(path)


def _open_entries(manifest: Manifest, groups: Mapping[str, int], block_size: int) -> Checkpoint:
    wanted = {}
    for name in groups:
        count = manifest.counts[name]
        if count:
            wanted[f"{name}.digests"] = (count, _DIGEST_BYTES), torch.uint8
            wanted[f"{name}.tokens"] = (count, block_size * _TOKEN_BYTES), torch.uint8
    return _open(manifest, _ENTRIES, wanted)


def _open(manifest: Manifest, name: str, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Checkpoint:
    """A mapped file with just these tensors, and the right checksum; the header is checked before data is read."""
    path = manifest.folder / name
    file = Checkpoint.of_file(path)
    if {info.name: (info.shape, info.dtype) for info in file.tensors.values()} != dict(wanted):
        raise _damaged(manifest.folder, f"{name} has other tensors than this model's")
    if digest_of(path) != manifest.sums[name]:
        raise _damaged(manifest.folder, f"the bytes of {name} have changed")
    return file


def _entries(file: Checkpoint, name: str) -> list[Entry]:
    digests, tokens = (file.load(f"{name}.{what}").numpy() for what in ("digests", "tokens"))
    pairs = zip(digests, tokens, strict=True)
    return [Entry(row, digest.tobytes(), block.tobytes()) for row, (digest, block) in enumerate(pairs)]


def _name(group: int) -> str:
    return "snapshots" if group == SLOTS else f"blocks.{group}"


def _bytes(items: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(items)), dtype=torch.uint8).reshape(len(items), -1)


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the prompt cache {quote(str(folder))} is damaged: {what}; delete it, and save it again.")
