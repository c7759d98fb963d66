"""Starting the other ranks of an `LLM`, and what each of them runs: the role of `llm.workers` behind
`tensor_parallel_size`.

A rank reads the model folder by itself and loads its part. What rank 0 has decided, such as the size of the caches, is
sent to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llm.base import system
from llm.base.checks import refuse
from llm.base.custom_op import op_registry_oot
from llm.config import env
from llm.config.compilation import CompilationConfig
from llm.config.engine import CacheConfig, LLMArgs, SchedulerConfig, SpeculativeConfig
from llm.engine.boundary import RunnerPlan
from llm.errors import LLMError, ValidationError
from llm.kernels.select import backend_for
from llm.layers.communicators import communicator_cls
from llm.layers.parallel import Communicator, Rendezvous, TensorParallel
from llm.loading.saved_formats import HeldModule
from llm.platforms import Platform, select_platform
from llm.plugins import load_general_plugins
from llm.quantization.quantizer import IntegerWeight
from llm.replicas.placement import Placement, device_count
from llm.runner.ranks import FollowingRunner, LeadRunner, RankGroup
from llm.setup.extensions import let_platform_update
from llm.setup.memory import ANY_MEMORY, merged_adapter
from llm.setup.model_folder import read_model
from llm.setup.plan import make_plan
from llm.workers.connection import Connection
from llm.workers.messages import Schema
from llm.workers.process import WorkerProcess


@dataclass(frozen=True)
class RankArgs:
    """The first message to a rank.

    Attributes:
        args: with what rank 0 has decided.
        size: of the group.
        shares_device: some ranks of it are on one device.
        folder, seconds: of its `Rendezvous`.
        knows: what rank 0 has registered, by what it is.
    """

    args: LLMArgs
    size: int
    shares_device: bool
    folder: Path
    seconds: float
    cache: CacheConfig
    scheduler: SchedulerConfig
    knows: dict[str, str]


# --- The ranks of an engine. ---

SCHEMA = Schema([RankArgs, LLMArgs, CacheConfig, SchedulerConfig, SpeculativeConfig, HeldModule, IntegerWeight])
# Arguments that concern rank 0 alone.
_OF_LEAD = (
    *("tokenizer", "chat_template", "generation_config", "override_generation_config", "reasoning_config"),
    *("logits_processors", "speculative_config", "profiler_config", "prefix_cache", "use_tqdm_on_load"),
    *("limit_mm_per_prompt", "allowed_local_media_path", "mm_processor_kwargs"),
)


def place_ranks(args: LLMArgs, places: Sequence[Placement]) -> tuple[str, ...]:
    """The device of each rank of this process, as `LLM(device=)` takes it: those that the user gave, or that of
    `device` and the next ones. With replicas there are none here.

    Raises:
        ValidationError: there are not so many devices, or they are of several kinds.
    """
    size, devices = args.tensor_parallel_size, args.devices
    if size == 1 or places:
        return (args.device,)
    if isinstance(devices, Sequence) and devices != "all":
        if len({select_platform(str(device))[0].name for device in devices}) > 1:
            refuse("devices", devices, "of one kind with tensor_parallel_size: others have other bits")
        return tuple(map(str, devices))
    platform, _ = select_platform(args.device)
    if platform.device_type == "cpu":
        return (platform.name,) * size
    count, first = device_count(platform), platform.index
    if first + size > count:
        raise ValidationError(
            f"tensor_parallel_size={size} needs as many devices, from {platform.name}:{first} on, and there are "
            f"{count}; devices={[f'{platform.name}:{first}'] * size} puts all ranks on one.",
            parameter="tensor_parallel_size",
            value=size,
        )
    return tuple(f"{platform.name}:{first + rank}" for rank in range(size))


def memory_of_rank(platform: Platform, devices: Sequence[str]) -> int | None:
    """Bytes that a rank plans with where several are on one device; None: those that are free there."""
    sharing = _most_on_one(devices)
    return None if sharing == 1 or platform.device_type == "cpu" else platform.memory_free() // sharing


def _most_on_one(devices: Sequence[str]) -> int:
    return max(map(devices.count, devices))


def check_ranks(args: LLMArgs, platform: Platform) -> None:
    """Raise `ValidationError` for arguments that several ranks cannot follow; before anything is read."""
    if args.tensor_parallel_size == 1:
        return
    if not system.deletes_open_files():
        refuse("tensor_parallel_size", args.tensor_parallel_size, "1 on Windows; data_parallel_size works there")
    if platform.get_model_runner_cls() != Platform().get_model_runner_cls():
        why = f"1 on {platform.name}, whose model runner is its own"
        refuse("tensor_parallel_size", args.tensor_parallel_size, why)
    if callable(args.hf_overrides):
        refuse("hf_overrides", args.hf_overrides, "a dict with tensor_parallel_size: a function is not sent to ranks")
    if args.offload_weights:
        refuse("offload_weights", True, "None or False with tensor_parallel_size")
    if args.calibration is not None:
        refuse("calibration", args.calibration, "left out with tensor_parallel_size")


def _communicator_cls(platform: Platform, devices: Sequence[str]) -> type[Communicator]:
    return communicator_cls(platform, shares_device=_most_on_one(devices) > 1)


def reasons_of_ranks(platform: Platform, devices: Sequence[str]) -> dict[str, str]:
    """For the config."""
    if len(devices) == 1:
        return {}
    where = "" if platform.device_type == "cpu" else f"on {', '.join(devices)}; "
    return {"tensor_parallel_size": f"{where}they gather through {_communicator_cls(platform, devices).medium}"}


def start_ranks(args: LLMArgs, plan: RunnerPlan, platform: Platform, devices: Sequence[str]) -> LeadRunner:
    """Rank 0, and the processes of the others, which begin to load.

    Args:
        devices: of `place_ranks`.

    Raises:
        LLMError: the system starts no process.
    """
    size = plan.tp_size
    folder = tempfile.TemporaryDirectory(prefix="llm-ranks-", dir=_memory_folder())
    workers: list[WorkerProcess] = []
    try:
        seconds = env.get_seconds("LLM_WORKER_TIMEOUT", 300.0)
        rendezvous = Rendezvous(Path(folder.name), seconds)
        communicator = _communicator_cls(platform, devices)(0, size, rendezvous, platform)
        for rank in range(1, size):
            workers.append(WorkerProcess(__name__, rank, SCHEMA, name="rank", folder=folder.name))
            workers[-1].send("open", _rank_args(args, plan, devices, rank, rendezvous))
        tp = TensorParallel(0, size, communicator)
        return LeadRunner(platform, tp, RankGroup(workers, communicator, folder.cleanup))
    except BaseException:
        for worker in workers:
            worker.close()
        folder.cleanup()
        raise


def _memory_folder() -> str | None:
    """Where files are in memory; None: where temporary files are."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _rank_args(args: LLMArgs, plan: RunnerPlan, devices: Sequence[str], rank: int, rendezvous: Rendezvous) -> RankArgs:
    config, defaults = plan.config, LLMArgs(args.model)
    of_lead = {name: getattr(defaults, name) for name in _OF_LEAD}
    drafts = SpeculativeConfig.of(args.speculative_config)
    heads = args.speculative_config if drafts is not None and drafts.method == "mtp" else None  # a part of the model
    own = replace(
        args,
        **{**of_lead, "use_tqdm_on_load": False, "skip_tokenizer_init": True, "speculative_config": heads},
        device=devices[rank],
        max_model_len=config.model_config.max_model_len,
        num_threads=config.num_threads,
        seed=config.model_config.seed,
    )
    of_caches = config.cache_config, config.scheduler_config
    shares_device = _most_on_one(devices) > 1
    place = plan.tp_size, shares_device, rendezvous.folder, rendezvous.timeout_s
    return RankArgs(own, *place, *of_caches, _known(plan))


def _known(plan: RunnerPlan) -> dict[str, str]:
    """What this process has registered that the model is made of; a rank must have the same, but for a head that rank 0
    has alone."""
    specs = list(plan.kv_cache_specs)
    if plan.head is not None:
        del specs[-len(plan.head.plan.kv_cache_specs) :]
    return {
        "model class": f"{plan.model_class.__module__}.{plan.model_class.__qualname__}",
        "replaced operations": ", ".join(sorted(op_registry_oot)) or "none",
        "states": ", ".join(map(str, specs)),
    }


def serve(connection: Connection, rank: int) -> None:
    """A rank above 0: raises `EOFError` when rank 0 has closed its end."""
    message = connection.receive()
    if message is None or not isinstance(message.body, RankArgs):
        raise LLMError(f"a rank is opened first, got {message!r}.")
    opened = _opened(message.body, rank)
    connection.send("opened")
    opened.follow(connection)


def _opened(given: RankArgs, rank: int) -> FollowingRunner:
    """The runner with its part of the model."""
    load_general_plugins()
    platform, _ = select_platform(given.args.device)
    args = let_platform_update(platform, given.args)
    compilation = CompilationConfig.of(
        args.compilation_config, default_backend=platform.simple_compile_backend, enforce_eager=args.enforce_eager
    ).with_base_mode()
    model = read_model(args)
    try:
        rendezvous = Rendezvous(given.folder, given.seconds)
        communicator = communicator_cls(platform, given.shares_device)(rank, given.size, rendezvous, platform)
        tp = TensorParallel(rank, given.size, communicator)
        plan = make_plan(args, model, platform, compilation, backend_for(platform), (), tp, free=ANY_MEMORY)
        for name, own in _known(plan).items():
            if own != given.knows[name]:
                raise ValidationError(
                    f"rank {rank} has other {name} than rank 0, {own} and not {given.knows[name]}: put what the "
                    "program registers into a plugin, which every process loads."
                )
        config = replace(plan.config, cache_config=given.cache, scheduler_config=given.scheduler)
        runner = FollowingRunner(platform, tp)
        runner.load(replace(plan, config=config, merge_lora=merged_adapter(args, model)))
    finally:
        model.source.close()
    return runner
