"""From a model's name to its local folder or GGUF file: a path as it is, a hub name through the Hugging Face cache.

A GGUF file is named by its path, by a folder that holds GGUF files alone, and on the hub by `org/name:Q4_K_M`,
`org/name/file.gguf` or `org/name` of a model that has one GGUF file and no safetensors.

All network access of the package is here, which happens only for a hub name that the cache cannot serve.
huggingface_hub is imported only to resolve a hub name. Does not read the folder's files. What cannot be loaded is said
in the second halves of sentences; who refuses, and why, is beside each check.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.base.text import list_names, quote
from llm.errors import CheckpointError, LLMError, ValidationError
from llm.loading.adapters.folder import described
from llm.loading.checkpoint import find_index, read_weight_map
from llm.loading.gguf.source import part_names, parts_of

if TYPE_CHECKING:
    from tqdm import tqdm


# Weights, configuration, tokenizer, chat template: data only, never *.bin or *.py.
ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")
# Subfolders and consolidated.safetensors hold the same weights in other formats. A pattern's * also matches "/".
IGNORE_PATTERNS = ("*/*", "consolidated*.safetensors")

# A bar appears once a download takes as long.
_PROGRESS_DELAY_SECONDS = 1.0
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def resolve_folder(
    model: str | Path,
    revision: str | None = None,
    *,
    weights: bool = True,
    argument: str = "model",
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Return the local folder of a model.

    Args:
        model: a folder, or a hub name `org/name` (a `Path` is always a folder).
        revision: a branch, tag or commit of a hub model.
        weights: False: config.json and the tokenizer are enough.
        argument: the name of `model` in error messages.
        check: called with a folder of a hub model's small files before its weights are downloaded; may raise.

    Raises:
        CheckpointError: there is no such folder, or the hub model cannot be fetched.
        ValidationError: `model` is no path or name, or `revision` is given for a local folder.
    """
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValidationError(
            f"{argument} must be a folder or a hub name, not {model!r}", parameter=argument, value=model
        )
    path = Path(os.path.expanduser(model))
    # os.path's tests return False where Path's raise: a name too long, a NUL, no permission.
    if os.path.isdir(path):
        _refuse_revision(model, revision)
        return path
    if os.path.exists(path):
        holds = "config.json and the weights" if weights else "it"
        instead = of_file(path) or f"pass the folder that holds {holds}"
        raise CheckpointError(f"{argument} {str(model)!r} is a file; {instead}")
    if isinstance(model, str) and _HUB_NAME.fullmatch(model):
        return _from_hub(model, revision, weights, check)
    raise CheckpointError(
        f"{argument} {str(model)!r} does not exist; pass an existing folder, or a hub name of the form 'org/name'"
    )


def is_hub_name(model: str | Path) -> bool:
    """True for a name that `resolve_folder` looks for on the hub."""
    return isinstance(model, str) and not os.path.isdir(os.path.expanduser(model)) and bool(_HUB_NAME.fullmatch(model))


def _refuse_revision(model: str | Path, revision: str | None) -> None:
    if revision is not None:
        raise ValidationError(
            f"revision={revision!r} applies to hub models, but {str(model)!r} is a local folder; leave revision out",
            parameter="revision",
            value=revision,
        )


def cached_folder(name: str, revision: str | None, weights: bool = True) -> Path | None:
    """The cache's copy of a hub model, where a model can be loaded from it; never asks the hub."""
    cached = cached_snapshot(name, revision)
    return cached if cached is not None and not _missing_files(cached, weights) and has_tokenizer(cached) else None


def _from_hub(name: str, revision: str | None, weights: bool, check: Callable[[Path], None] | None) -> Path:
    cached = cached_folder(name, revision, weights)
    if cached is not None:
        return cached
    folder = _download(name, revision, weights, check)
    missing = _missing_files(folder, weights)
    if missing:
        raise CheckpointError(
            f"the copy of hub model {name!r} in {folder} lacks {' and '.join(missing)}; if the hub has it, connect to "
            "the network (and unset HF_HUB_OFFLINE) and try again, else convert the model to safetensors elsewhere"
        )
    return folder


def snapshot_of(
    name: str, revision: str | None, patterns: tuple[str, ...], is_complete: Callable[[Path], bool]
) -> Path:
    """The local copy of a hub model's files that match `patterns`, downloaded unless the cache's copy is complete.

    Raises:
        CheckpointError: the hub model cannot be fetched.
    """
    cached = cached_snapshot(name, revision)
    if cached is not None and is_complete(cached):
        return cached
    try:
        return _snapshot(name, revision, allow=patterns, ignore=())
    # The exceptions of the transport below huggingface_hub (requests, httpx, ...) change with its version.
    except Exception as error:
        raise CheckpointError(explain(name, revision, error)) from error


def hub_files(name: str, revision: str | None) -> dict[str, int]:
    """Path -> bytes of each file of a hub model; asks the hub. Raises `CheckpointError`."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        entries = HfApi().list_repo_tree(name, revision=revision, recursive=True)
        return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
    # The exceptions of the transport below huggingface_hub (requests, httpx, ...) change with its version.
    except Exception as error:
        raise CheckpointError(explain(name, revision, error)) from error


def weight_files(name: str, files: Collection[str]) -> list[str]:
    """The safetensors files among a hub model's `files`; raises `CheckpointError` where there are none."""
    found = sorted(file for file in files if file.endswith(".safetensors") and not _is_ignored(file))
    if found:
        return found
    others = [
        file for file in sorted(files) if file.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5"))
    ]
    if any(file.endswith(".gguf") for file in others):
        what = f"pass one of its GGUF files as {name + ':TYPE'!r} or {name + '/file.gguf'!r}"
    else:
        what = (
            "such files are never opened here (they can run code when they are read); convert them once, elsewhere, "
            "with transformers: AutoModelForCausalLM.from_pretrained(name).save_pretrained(folder)"
        )
    holds = f"only {list_names(others)}; {what}" if others else "and no other weights"
    raise CheckpointError(f"the hub model {name!r} has no *.safetensors file, {holds}")


def _is_ignored(file: str) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in IGNORE_PATTERNS)


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the cached snapshot of this revision, possibly incomplete, without network access."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(name, revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    except Exception as error:
        raise CheckpointError(explain(name, revision, error)) from error


def small_files_of(name: str, revision: str | None) -> Path:
    """The folder of a hub model's files but for its weights; asks the hub."""
    return _snapshot(name, revision, ignore=(*IGNORE_PATTERNS, "*.safetensors"))


def _download(name: str, revision: str | None, weights: bool, check: Callable[[Path], None] | None) -> Path:
    """Download files that the cache lacks; without network, use a cached copy that can be loaded."""
    try:
        if not weights:
            return small_files_of(name, revision)
        if check is not None:  # what cannot be loaded is refused before gigabytes are fetched
            folder = small_files_of(name, revision)
            weight_files(name, hub_files(name, revision))
            check(folder)
        return _snapshot(name, revision)
    except LLMError:
        raise
    # The exceptions of the transport below huggingface_hub (requests, httpx, ...) change with its version.
    except Exception as error:
        partial = getattr(error, "snapshot_path", None)
        if partial is None or _missing_files(Path(partial), weights):
            raise CheckpointError(explain(name, revision, error)) from error
        warnings.warn(f"using the cached copy of {name!r}, which is not complete: {_first_line(error)}", stacklevel=2)
        return Path(partial)


def _snapshot(
    name: str,
    revision: str | None,
    *,
    allow: tuple[str, ...] = ALLOW_PATTERNS,
    ignore: tuple[str, ...] = IGNORE_PATTERNS,
    local_files_only: bool = False,
) -> Path:
    import huggingface_hub

    bars: list[tqdm] = []
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(allow),
            tqdm_class=_progress_bar(name, bars),
            ignore_patterns=list(ignore),
            local_files_only=local_files_only,
        )
    finally:
        for bar in bars:
            bar.close()
    return Path(folder)


def _progress_bar(name: str, made: list[tqdm]) -> type[tqdm]:
    """One bar in bytes, of all files together; huggingface_hub makes one of files and two of bytes, and closes none.

    Without tqdm's monitor thread and multiprocessing lock, which would outlive the call. `made`: the bars are added.
    """
    from huggingface_hub.utils import tqdm as hub_tqdm

    class DownloadProgress(hub_tqdm):
        monitor_interval = 0
        _lock = threading.RLock()

        def __init__(self, *args: Any, **options: Any) -> None:
            is_shown = options.get("unit") == "B" and not str(options.get("name")).endswith(".transfer")
            options |= {"desc": f"Downloading {name}", "delay": _PROGRESS_DELAY_SECONDS, "disable": not is_shown}
            super().__init__(*args, **options)
            made.append(self)

        def set_description(self, *args: Any, **options: Any) -> None:
            """The model's name stays."""

        set_description_str = set_description

    return DownloadProgress


def _missing_files(folder: Path, weights: bool) -> list[str]:
    """Return the required files that the folder lacks."""
    index = find_index(folder) if weights else None
    shards = sorted(set(read_weight_map(index).values())) if index else []
    missing = [name for name in ("config.json", *shards) if not os.path.isfile(folder / name)]
    if weights and index is None and not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors weights")
    return missing


def has_tokenizer(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in _TOKENIZER_FILES)


def explain(name: str, revision: str | None, error: Exception) -> str:
    """One sentence for an error of the hub, most specific first."""
    from huggingface_hub import errors

    what = f"{name!r} is not a local folder, and the hub model of that name"
    if isinstance(error, errors.GatedRepoError):
        return f"{what} is gated: accept its terms on https://huggingface.co/{name}, log in with `hf auth login`, retry"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{what} does not exist or is private: check the spelling, or log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{what} has no revision {revision!r}: pass a branch, tag or commit of it"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return f"{what} is not (completely) in the cache {_no_network()}"
    return f"{what} could not be fetched ({_first_line(error)}): check the name and the network, or pass a local folder"


def _no_network() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "while HF_HUB_OFFLINE forbids the network: unset it once to download the model, or pass a local folder"
    return "and the hub cannot be reached: connect to the network and try again, or pass a local folder"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# Part of a format's name -> the schemes to quantize the float checkpoint by.
_SCHEMES = {
    "bnb": ("w8a16", "nf4"),
    "fp8": ("w8a16", "w8a8"),
    "int8": ("w8a16", "w8a8"),
    "mxfp8": ("w8a16",),
    "fp4": ("w4a16",),
    "modelopt": ("w8a16",),
    "torchao": ("w8a16", "w4a16"),
    "marlin": ("w4a16",),
    "hqq": ("w4a16",),
    "aqlm": ("w4a16",),
    "auto-round": ("w4a16",),
    "auto_round": ("w4a16",),
    "quark": ("w8a16",),
}


def schemes_instead(name: str) -> str:
    """ "'w4a16'" for "awq": the schemes that come nearest to a format that is not computed; "" if it is unknown."""
    for part, schemes in _SCHEMES.items():
        if part in name.lower():
            return " or ".join(map(repr, schemes))
    return ""


def of_file(path: Path) -> str:
    """What to do about a file where a folder is needed."""
    return "a GGUF file is read as the model alone" if path.suffix.lower() == ".gguf" else ""


def of_folder(folder: Path) -> str:
    """Why a folder has no config.json, and what to do."""
    if os.path.isfile(folder / "adapter_config.json"):
        return described(folder)
    if any(folder.glob("*.gguf")):
        return "it holds GGUF files: pass the path of one of them"
    return "is it a Hugging Face model folder?"


# --- GGUF files. ---

_HUB_TYPE = re.compile(r"(\w[\w.-]*/\w[\w.-]*):([\w.-]+)", re.ASCII)
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/((?:\w[\w. -]*/)*\w[\w. -]*\.gguf)", re.ASCII)
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf", re.ASCII)


def resolve_gguf(model: str | Path, revision: str | None = None) -> Path | None:
    """The GGUF file that `model` names, None where it names none.

    Raises:
        CheckpointError: a folder or a hub model holds no such file, or several.
        ValidationError: `revision` is given for a local file.
    """
    if not isinstance(model, (str, Path)):
        return None
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        if revision is not None:
            raise ValidationError(
                f"revision={revision!r} applies to hub models, but {str(model)!r} is a local file; leave revision out",
                parameter="revision",
                value=revision,
            )
        return path
    if os.path.isdir(path):
        return _only_file(path)
    folder, _, kind = str(model).rpartition(":")
    if folder and kind and os.path.isdir(os.path.expanduser(folder)):
        return _of_type(Path(os.path.expanduser(folder)), kind)
    return _on_hub(model, revision) if isinstance(model, str) and not os.path.exists(path) else None


def _only_file(folder: Path) -> Path | None:
    """Of a folder without config.json."""
    if os.path.exists(folder / "config.json"):
        return None
    files = _first_parts(folder)
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} holds several GGUF files ({list_names(file.name for file in files)}); pass the path of one."
        )
    return files[0] if files else None


def _of_type(folder: Path, kind: str) -> Path:
    """The file of a type such as Q4_K_M, which its name ends in."""
    files = _files_of_type(folder, kind)
    if len(files) != 1:
        found = "several GGUF files" if files else "no GGUF file"
        names = list_names(file.name for file in files or _first_parts(folder)) or "none"
        raise CheckpointError(f"{folder} holds {found} of the type {quote(kind)}; of these pass one: {names}.")
    return files[0]


def _files_of_type(folder: Path, kind: str) -> list[Path]:
    return [file for file in _first_parts(folder) if _is_of_type(file.name, kind)]


def _is_of_type(path: str, kind: str) -> bool:
    ending = re.compile(rf"[-._]{re.escape(kind)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return ending.search(f"-{path.rpartition('/')[2]}") is not None


def _first_parts(folder: Path) -> list[Path]:
    """GGUF files of the folder and those below it, of split models the first part; projectors of images left out."""
    found = sorted(file for pattern in ("*.gguf", "*/*.gguf") for file in folder.glob(pattern))
    return [file for file in found if _is_first(file.name) and file.is_file()]


def _is_first(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not name.startswith((".", "mmproj")) and not _LATER_PART.search(name)


def _on_hub(model: str, revision: str | None) -> Path | None:
    name, file, kind = _spelled(model)
    if not name or (not file and not kind and cached_folder(name, revision) is not None):
        return None
    cached = find_cached(model, revision)
    if cached is not None and (file or kind):
        return cached
    try:
        files = hub_files(name, revision)
    except CheckpointError:
        if file or kind:
            raise
        return cached  # the only one that there is without the hub; None: `resolve_folder` says what is wrong
    chosen = choose_on_hub(model, files)
    if chosen is None:
        return None
    patterns = tuple(map(glob.escape, chosen.parts))
    folder = snapshot_of(name, revision, patterns, lambda folder: _has_all(folder, chosen.parts))
    parts_of(folder / chosen.file)
    return folder / chosen.file


@dataclass(frozen=True)
class HubGguf:
    """A GGUF file on the hub: the model's name, the file, and all files of a split model."""

    name: str
    file: str
    parts: tuple[str, ...]


def choose_on_hub(model: str, files: Collection[str]) -> HubGguf | None:
    """The file that `org/name`, `org/name:TYPE` or `org/name/file.gguf` names; None: a model in another format.

    Args:
        files: all that the hub has of the model.

    Raises:
        CheckpointError: there is no such file, or there are several.
    """
    name, file, kind = _spelled(model)
    firsts = [path for path in sorted(files) if path.endswith(".gguf") and _is_first(path)]
    if file:
        found = [file] if file in files else []
    elif kind:
        found = [path for path in firsts if _is_of_type(path, kind)]
    elif not name or not firsts or any(path.endswith(".safetensors") and "/" not in path for path in files):
        return None
    else:
        found = firsts
    if len(found) != 1:
        of = f" of the type {quote(kind)}" if kind else f" {quote(file)}" if file else ""
        shown = found or firsts
        instead = f"; pass one of them, such as {f'{name}/{shown[0]}'!r}: {list_names(shown)}" if shown else ""
        what = "several GGUF files" if found else "no GGUF file"
        raise CheckpointError(f"the hub model {name!r} has {what}{of}{instead}.")
    return HubGguf(name, found[0], tuple(part.as_posix() for part in part_names(Path(found[0]))))


def _spelled(model: str) -> tuple[str, str, str]:
    """(hub name, file, type) of the three spellings; "" for what is not said, and three times for what is no name."""
    if by_file := _HUB_FILE.fullmatch(model):
        return by_file[1], by_file[2], ""
    if by_type := _HUB_TYPE.fullmatch(model):
        return by_type[1], "", by_type[2]
    return (model, "", "") if is_hub_name(model) else ("", "", "")


def hub_name_of(model: str) -> str:
    """The hub model of a spelling; "": it is none."""
    return _spelled(model)[0]


def find_cached(model: str, revision: str | None) -> Path | None:
    """The one file of the hub cache that a spelling means, with all its parts; never asks the hub."""
    name, file, kind = _spelled(model)
    folder = cached_snapshot(name, revision) if name else None
    if folder is None:
        return None
    found = [folder / file] if file else _files_of_type(folder, kind) if kind else _first_parts(folder)
    whole = len(found) == 1 and found[0].is_file() and all(part.is_file() for part in part_names(found[0]))
    return found[0] if whole else None


def _has_all(folder: Path, parts: Sequence[str]) -> bool:
    return all((folder / part).is_file() for part in parts)
