"""`LLM.plan`: what a model would take, before any of its weights is read.

The plan is data and text, with a search for what would make a model fit. The decisions are those of start-up:
`llm.setup.plan` makes them for both. Of a hub model only the headers of the weights' files are read, by range requests:
the folder that stands in for it has its small files, and weight files of the right size that hold their header and a
hole. Who reads it reads a model folder, with all its checks.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from llm.base.checks import refuse
from llm.base.library_settings import library_defaults
from llm.base.text import quote
from llm.base.types import JsonObject
from llm.config.compilation import CompilationConfig
from llm.config.engine import GIB, LLMArgs
from llm.engine.boundary import Rates, RunnerPlan
from llm.engine.images import NO_TOWER, images_of
from llm.errors import CheckpointError, LLMError, OutOfMemoryError, ValidationError
from llm.kernels.select import backend_for
from llm.layers.parallel import TensorParallel
from llm.loading.checkpoint import HEADER_LIMIT_BYTES, find_index, read_weight_map
from llm.loading.gguf.container import read_header
from llm.loading.resolve import (
    cached_folder,
    choose_on_hub,
    explain,
    find_cached,
    hub_files,
    hub_name_of,
    is_hub_name,
    resolve_folder,
    weight_files,
)
from llm.loading.sentence_transformers import read_sentence_modules
from llm.loading.source import FolderSource
from llm.platforms import Platform, select_platform
from llm.plugins import load_general_plugins
from llm.quantization.on_load import OnlineConfig
from llm.replicas.placement import placements
from llm.replicas.start import memory_of_one, shared_by
from llm.setup.extensions import let_platform_update, without_broken_platforms
from llm.setup.memory import ModelSizes
from llm.setup.model_folder import ReadModel, check_supported, read_model
from llm.setup.plan import make_plan, weight_bytes_in_memory
from llm.setup.ranks import check_ranks, memory_of_rank, place_ranks

# Lengths that the table of sequences has, besides the longest.
_LENGTHS = (512, 2048, 8192, 32768)
# What is tried, in order, where a model does not fit: what changes an answer least comes first.
_SCHEMES = ("w8a8", "w4a16", "w4a8")


@dataclass(frozen=True)
class ModelPlan:
    """What `LLM(...)` with the same arguments would take and allow, now. `print` shows it.

    Attributes:
        weight_bytes: of the weights; `is_exact`: False for a checkpoint that is quantized already, then about.
        bytes_by_scheme: of the weights with each `quantization=`; {} for a checkpoint that is quantized already.
        kv_bytes_per_token, state_bytes_per_request: in all layers together.
        free_bytes: memory that is free now.
        fits: weights and KV cache are in memory; else `why_not` says why, and `change` has the arguments of the
            smallest change that was found to make it fit.
        kv_cache_bytes, num_blocks, block_size, num_state_slots, num_state_snapshots, max_model_len, max_num_seqs: as
            `LLM(...)` would choose them; 0 if it refuses the model.
        sequences: length -> how many sequences of it the KV cache holds at once, at most max_num_seqs.
        file_bytes: of weights that would be read from a file.
        decode_tokens_per_second, prefill_tokens_per_second: at most, of one stream, by the measured rates of this
            machine; None: not measured.
        notes: why the measured rates may be wrong.
        image, image_tokens: the size that was asked for, and the tokens that such an image has in a prompt.
        image_prompts: how many prompts with one such image and no other token the KV cache holds at once.
        replicas: where each is, if there are some; all other numbers are of one, `free_bytes` its share.
        shares_weights: replicas on the processors of one NUMA node have them in memory once.
        bytes_by_rank: of the weights of each rank of `tensor_parallel_size`; all other numbers are of rank 0, and
            `free_bytes` is its share of a CPU's memory. (): the model is not cut.
    """

    model: str
    architecture: str
    quantization: str | None
    weight_bytes: int
    is_exact: bool
    bytes_by_scheme: dict[str, int]
    kv_bytes_per_token: int
    state_bytes_per_request: int
    free_bytes: int
    fits: bool
    why_not: str = ""
    change: dict[str, object] = field(default_factory=dict)
    kv_cache_bytes: int = 0
    num_blocks: int = 0
    block_size: int = 0
    num_state_slots: int = 0
    num_state_snapshots: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    file_bytes: int = 0
    decode_tokens_per_second: float | None = None
    prefill_tokens_per_second: float | None = None
    notes: tuple[str, ...] = ()
    image: str = ""
    image_tokens: int = 0
    image_prompts: int = 0
    replicas: tuple[str, ...] = ()
    shares_weights: bool = False
    bytes_by_rank: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        about = "" if self.is_exact else "about "
        lines = [f"model              {self.model} ({self.architecture}), quantization={self.quantization}"]
        if self.replicas:
            lines.append(f"replicas           {len(self.replicas)}, each as follows: {'; '.join(self.replicas)}")
        if self.bytes_by_rank:
            count, whole = len(self.bytes_by_rank), _size(sum(self.bytes_by_rank))
            lines.append(f"ranks              {count}, each as follows; the weights of all take {about}{whole}")
        shared = ", in memory once for the replicas of a NUMA node" if self.shares_weights else ""
        lines.append(
            f"weights            {about}{_size(self.weight_bytes)}{shared}; free memory {_size(self.free_bytes)}"
        )
        if self.bytes_by_scheme:
            sizes = (f"{name} {_size(count)}" for name, count in self.bytes_by_scheme.items())
            lines += [f"  by quantization  {', '.join(sizes)}"]
        per_request = f", {self.state_bytes_per_request:,} bytes a sequence" if self.state_bytes_per_request else ""
        lines.append(f"KV cache           {self.kv_bytes_per_token:,} bytes a token{per_request}")
        if self.max_model_len:
            lines.append(f"  reserved         {_size(self.kv_cache_bytes)}: {self._reserved()}")
            held = (f"{count} of {length:,} tokens" for length, count in self.sequences.items())
            lines.append(f"  sequences        {' or '.join(held)}; max_num_seqs={self.max_num_seqs}")
        if self.image:
            prompts = f"; {self.image_prompts:,} prompts with one" if self.image_prompts else ""
            lines.append(f"image              {self.image} is {self.image_tokens:,} tokens{prompts}")
        return "\n".join([*lines, *self._speed(), *self._verdict()])

    def _reserved(self) -> str:
        blocks = f"{self.num_blocks} blocks of {self.block_size} tokens" if self.kv_bytes_per_token else ""
        states = f"{self.num_state_slots} recurrent states" if self.num_state_slots else ""
        copies = f"{self.num_state_snapshots} copies of states" if self.num_state_snapshots else ""
        return ", ".join(part for part in (blocks, states, copies) if part)

    def _speed(self) -> list[str]:
        if self.decode_tokens_per_second is None or self.prefill_tokens_per_second is None:
            return ["speed              not measured; calibrate=True (--calibrate) measures this machine for a second"]
        decode, prefill = self.decode_tokens_per_second, self.prefill_tokens_per_second
        found = f"speed              at most {decode:,.1f} tokens/s for one stream, prompts {prefill:,.0f} tokens/s"
        return [found, *(f"  note             {note}" for note in self.notes)]

    def _verdict(self) -> list[str]:
        if self.fits:
            return ["fits               yes"]
        change = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
        found = f"would fit with     {change}" if change else "would fit with     nothing that was tried"
        return [f"fits               no: {self.why_not}", found]


def with_image(found: ModelPlan, args: LLMArgs, size: str) -> ModelPlan:
    """The plan with what an image of this size ("1024x768", width first) takes.

    Raises:
        ValidationError: the size is none, or the model reads no images.
    """
    width, _, height = size.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        refuse("image", size, "a size such as '1024x768', width first")
    source = FolderSource(resolve_folder(args.model, args.revision, weights=False))
    images = images_of(source.folder, source.config(), args)
    if images is None:
        raise ValidationError(f"{NO_TOWER}.", parameter="image", value=size)
    tokens = images.tokens_of(int(width), int(height))
    blocks = -(-tokens // found.block_size) if found.block_size else 0
    held = min(found.num_blocks // blocks, found.max_num_seqs) if blocks and tokens < found.max_model_len else 0
    return replace(found, image=size, image_tokens=tokens, image_prompts=held)


def preview(args: LLMArgs, rates: Rates | None) -> ModelPlan:
    """The plan for these arguments; raises the errors of `LLM(...)`, but not those of memory."""
    with (
        library_defaults(),
        without_weights(args.model, args.revision, lambda path: check_supported(args, path)) as model,
    ):
        here = args if model is args.model else replace(args, model=model, revision=None)
        found = without_broken_platforms(lambda given: _preview(given, rates))(here)
        return replace(found, model=str(args.model)) if here is not args else found


def _preview(args: LLMArgs, rates: Rates | None) -> ModelPlan:
    places = placements(args)
    devices = place_ranks(args, places)
    platform = select_platform(devices[0])[0]
    load_general_plugins()
    free = memory_of_rank(platform, devices) or platform.memory_free()
    model = read_model(let_platform_update(platform, args))
    try:
        if places:
            free = memory_of_one(platform, places, free, weight_bytes_in_memory(args, model, platform))
        plan, why_not = _planned(args, model, platform, free)
        # Of a model that does not fit, the sizes are those that it would have in more memory.
        unlimited = replace(args, max_model_len=None, kv_cache_memory_bytes=None, offload_weights=None)
        sized = plan or _plan(unlimited, model, platform, 1 << 62)
        found = _sized(args, model, platform, sized, rates, free)
        found = replace(found, replicas=tuple(map(str, places)), shares_weights=bool(shared_by(platform, places)))
    finally:
        model.source.close()
    if plan is not None:
        found = _with_cache(found, plan)
    if not why_not:
        return found
    return replace(found, fits=False, why_not=why_not, change=_change(args, platform, free))


def _planned(args: LLMArgs, model: ReadModel, platform: Platform, free: int) -> tuple[RunnerPlan | None, str]:
    """(the plan of start-up, None where it refuses the model; why the model does not fit, or "")."""
    try:
        plan = _plan(args, model, platform, free)
    except OutOfMemoryError as error:
        return None, str(error)
    if plan.config.offload_config.offload_weights and not args.offload_weights:
        return plan, "weights would be read from a file, slowly"
    return plan, ""


def _plan(args: LLMArgs, model: ReadModel, platform: Platform, free: int) -> RunnerPlan:
    args, backend = let_platform_update(platform, args), platform.simple_compile_backend
    check_ranks(args, platform)
    compilation = CompilationConfig.of(
        args.compilation_config, default_backend=backend, enforce_eager=args.enforce_eager
    )
    tp = TensorParallel(0, args.tensor_parallel_size)
    return make_plan(args, model, platform, compilation, backend_for(platform), (), tp, free=free)


def _sized(
    args: LLMArgs, model: ReadModel, platform: Platform, plan: RunnerPlan, rates: Rates | None, free: int
) -> ModelPlan:
    config = model.quantization.config
    is_plain = config is None or isinstance(config, OnlineConfig)
    ranks = [TensorParallel(rank, plan.tp_size) for rank in range(plan.tp_size)]
    sizes = ModelSizes(plan, platform, ranks[0]) if is_plain else None
    if sizes is None:
        by_rank = [weight_bytes_in_memory(args, model, platform) // plan.tp_size] * plan.tp_size
    else:
        others = [ModelSizes(plan, platform, tp) for tp in ranks[1:]]
        by_rank = [each.weight_bytes(config) for each in (sizes, *others)]
    weights = by_rank[0]
    found = ModelPlan(
        model=str(args.model),
        architecture=plan.config.model_config.architecture,
        quantization=plan.config.model_config.quantization,
        weight_bytes=weights,
        is_exact=is_plain,
        bytes_by_scheme=sizes.by_scheme() if sizes else {},
        kv_bytes_per_token=sum(spec.bytes_per_token() for spec in plan.kv_cache_specs),
        state_bytes_per_request=sum(spec.bytes_per_request() for spec in plan.kv_cache_specs),
        free_bytes=free // plan.tp_size if platform.device_type == "cpu" else free,
        fits=True,
        bytes_by_rank=tuple(by_rank) if plan.tp_size > 1 else (),
    )
    if rates is None or sizes is None:
        return found
    cost = sizes.cost()  # of rank 0; the rates are of the machine, which computes all of them
    per_token = max(1.0, cost.bytes_per_step * sum(by_rank) / max(1, cost.weight_bytes))
    return replace(
        found,
        decode_tokens_per_second=rates.bytes_per_s / per_token,
        prefill_tokens_per_second=rates.operations_per_s / max(1, 2 * cost.linear_weights * plan.tp_size),
    )


def _with_cache(found: ModelPlan, plan: RunnerPlan) -> ModelPlan:
    cache, config = plan.config.cache_config, plan.config
    longest, most = config.model_config.max_model_len, config.scheduler_config.max_num_seqs
    lengths = [*(length for length in _LENGTHS if length < longest), longest]
    offload = config.offload_config
    return replace(
        found,
        kv_cache_bytes=cache.kv_cache_memory_bytes,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        num_state_slots=cache.num_state_slots,
        num_state_snapshots=cache.num_state_snapshots,
        max_model_len=longest,
        max_num_seqs=most,
        sequences={length: _held(found, plan, length) for length in lengths},
        file_bytes=max(0, found.weight_bytes - offload.resident_weight_bytes) if offload.offload_weights else 0,
    )


def _held(found: ModelPlan, plan: RunnerPlan, length: int) -> int:
    """How many sequences of this length the KV cache holds at once."""
    cache, most = plan.config.cache_config, plan.config.scheduler_config.max_num_seqs
    most = min(most, cache.num_state_slots) if cache.num_state_slots else most
    return min(most, cache.num_blocks // -(-length // cache.block_size)) if found.kv_bytes_per_token else most


def _change(args: LLMArgs, platform: Platform, free: int) -> dict[str, object]:
    """The arguments of the first change that makes the model fit; {}: none of those that are tried."""
    for change in _changes(args):
        changed = replace(args, **change)
        try:
            model = read_model(let_platform_update(platform, changed))
        except LLMError:  # a quantized checkpoint takes no quantization
            continue
        try:
            plan, why_not = _planned(changed, model, platform, free)
        finally:
            model.source.close()
        if plan is not None and not why_not:
            given = change.get("max_model_len", args.max_model_len)
            longest = plan.config.model_config.max_model_len
            return (
                change if given is not None or "max_model_len" not in change else {**change, "max_model_len": longest}
            )
    return {}


def _changes(args: LLMArgs) -> Iterator[JsonObject]:
    """Shorter sequences, then smaller weights, then both."""
    shorter: list[JsonObject] = [{}]
    if args.max_model_len is not None:
        shorter.append({"max_model_len": None})
    if args.kv_cache_memory_bytes is not None:
        shorter.append({"kv_cache_memory_bytes": None})
        shorter.append({"kv_cache_memory_bytes": None, "max_model_len": None})
    name = "quantization" if args.quantization is None else "requantize"
    smaller = [{}, *({name: scheme} for scheme in _SCHEMES)]
    return ({**weights, **lengths} for weights in smaller for lengths in shorter if weights or lengths)


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.1f} MiB"


# --- Models of the hub, without their weights. ---

# Of a safetensors file at first: most headers are shorter. Of a GGUF file, whose header holds the vocabulary.
_FIRST_BYTES, _FIRST_GGUF_BYTES = 1 << 17, 8 << 20
_MOST_GGUF_BYTES = 1 << 28
_REQUESTS_AT_ONCE = 8


@contextmanager
def without_weights(model: str | Path, revision: str | None, check: Callable[[Path], None]) -> Iterator[str | Path]:
    """`model` itself where it is local or in the cache, else a folder or file that stands in for it until the end.

    Args:
        check: called with a folder of the model's small files before headers are fetched; may raise.

    Raises:
        CheckpointError: the hub does not give it, or it has no weights that are read here.
    """
    name = hub_name_of(model) if isinstance(model, str) and not _exists(model) else ""
    if not name or _is_cached(str(model), revision):
        yield model
        return
    files = hub_files(name, revision)
    gguf = choose_on_hub(str(model), files)
    with tempfile.TemporaryDirectory(prefix="llm-plan-") as made:
        folder = Path(made)
        if gguf is not None:
            for part in gguf.parts:
                path = folder / Path(part).name
                if part not in files:
                    raise CheckpointError(f"the hub model {name!r} lacks the part {quote(part)} of a split model.")
                _fetch_gguf(name, revision, part, files[part], path)
            yield folder / Path(gguf.file).name
            return
        small = resolve_folder(name, revision, weights=False)
        weights = weight_files(name, files)
        check(small)
        read_sentence_modules(small, name, revision)  # which fetches their own folders
        shutil.copytree(small, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        for module in small.glob("*/*.safetensors"):
            shutil.copyfile(module, folder / module.relative_to(small))
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            list(
                pool.map(
                    lambda file: _fetch_safetensors(name, revision, file, files[file], folder / file),
                    _needed(folder, weights),
                )
            )
        yield folder


def _exists(model: str) -> bool:
    """A path, or a folder and a type of the files in it."""
    path = os.path.expanduser(model)
    return os.path.exists(path) or os.path.exists(path.rpartition(":")[0])


def _is_cached(model: str, revision: str | None) -> bool:
    if is_hub_name(model) and cached_folder(model, revision) is not None:
        return True
    return find_cached(model, revision) is not None


def _needed(folder: Path, weights: list[str]) -> list[str]:
    """The files that `Checkpoint` opens."""
    index = find_index(folder)
    if index is not None:
        return [file for file in sorted(set(read_weight_map(index).values())) if file in weights]
    return ["model.safetensors"] if "model.safetensors" in weights else weights


def _fetch_safetensors(name: str, revision: str | None, file: str, size: int, path: Path) -> None:
    head = read_range(name, revision, file, 0, min(size, _FIRST_BYTES))
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    if length > HEADER_LIMIT_BYTES:
        raise CheckpointError(f"the header of {file} has {length} bytes; at most {HEADER_LIMIT_BYTES} are read")
    if 8 + length > len(head):
        head += read_range(name, revision, file, len(head), min(size, 8 + length))
    _write(path, head[: 8 + length], size)


def _fetch_gguf(name: str, revision: str | None, file: str, size: int, path: Path) -> None:
    """As much of the file as its header takes, which only reading it tells."""
    head = b""
    while True:
        most = min(size, max(_FIRST_GGUF_BYTES, 4 * len(head)))
        head += read_range(name, revision, file, len(head), most)
        if most == size or most >= _MOST_GGUF_BYTES or _has_header(path, head):
            break
    _write(path, head, size)


def _has_header(path: Path, head: bytes) -> bool:
    """True if the header ends within these bytes: then a tensor is what is missing, or something else is wrong."""
    _write(path, head, len(head))
    try:
        read_header(path)
    except CheckpointError as error:
        return "ends inside its header" not in str(error) and " claims " not in str(error)
    return True


def _write(path: Path, head: bytes, size: int) -> None:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)


def read_range(name: str, revision: str | None, file: str, start: int, end: int) -> bytes:
    """Bytes start to end - 1 of a file on the hub; raises `CheckpointError`, also for a hub that sends whole files."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if start >= end:
        return b""
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
    try:
        with get_session().stream("GET", hf_hub_url(name, file, revision=revision), headers=headers) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise CheckpointError(
                    f"the hub sends no part of {file!r} alone; download the model first, then plan it"
                )
            data: bytes = response.read()
    except CheckpointError:
        raise
    # The exceptions of the transport below huggingface_hub (requests, httpx, ...) change with its version.
    except Exception as error:
        raise CheckpointError(explain(name, revision, error)) from error
    if len(data) != end - start:
        raise CheckpointError(f"the hub sent {len(data)} bytes of {file!r} in the place of {end - start}; try again")
    return data
