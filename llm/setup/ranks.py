"""Starting the other ranks of an `LLM`, and what each of them runs: the role of `llm.workers` behind
`tensor_parallel_size`.

A rank reads the model folder by itself and loads its part. What rank 0 has decided, such as the size of the caches, is
sent to it.
"""

from __future__ import annotations

import tempfile
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
from llm.layers.parallel import Rendezvous, communicator_cls, tensor_parallel
from llm.platforms import Platform, select_platform
from llm.plugins import load_general_plugins
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
        folder, seconds: of its `Rendezvous`.
        knows: what rank 0 has registered, by what it is.
    """

    args: LLMArgs
    size: int
    folder: Path
    seconds: float
    cache: CacheConfig
    scheduler: SchedulerConfig
    knows: dict[str, str]


# --- The ranks of an engine. ---

SCHEMA = Schema([RankArgs, LLMArgs, CacheConfig, SchedulerConfig, SpeculativeConfig])
# Arguments that concern rank 0 alone.
_OF_LEAD = (
    *("tokenizer", "chat_template", "generation_config", "override_generation_config", "reasoning_config"),
    *("logits_processors", "speculative_config", "profiler_config", "prefix_cache", "use_tqdm_on_load"),
    *("limit_mm_per_prompt", "allowed_local_media_path", "mm_processor_kwargs"),
)


def check_ranks(args: LLMArgs, platform: Platform) -> None:
    """Raise `ValidationError` for arguments that several ranks cannot follow; before anything is read."""
    if args.tensor_parallel_size == 1:
        return
    if not system.deletes_open_files():
        refuse("tensor_parallel_size", args.tensor_parallel_size, "1 on Windows; data_parallel_size works there")
    communicator_cls(platform)
    if platform.get_model_runner_cls() != Platform().get_model_runner_cls():
        why = f"1 on {platform.name}, whose model runner is its own"
        refuse("tensor_parallel_size", args.tensor_parallel_size, why)
    if callable(args.hf_overrides):
        refuse("hf_overrides", args.hf_overrides, "a dict with tensor_parallel_size: a function is not sent to ranks")
    if args.offload_weights:
        refuse("offload_weights", True, "None or False with tensor_parallel_size")
    if args.calibration is not None:
        refuse("calibration", args.calibration, "left out with tensor_parallel_size")


def start_ranks(args: LLMArgs, plan: RunnerPlan, platform: Platform) -> LeadRunner:
    """Rank 0, and the processes of the others, which begin to load.

    Raises:
        LLMError: the system starts no process.
    """
    size = plan.tp_size
    folder = tempfile.TemporaryDirectory(prefix="llm-ranks-", dir=_memory_folder())
    workers: list[WorkerProcess] = []
    try:
        seconds = env.get_seconds("LLM_WORKER_TIMEOUT", 300.0)
        rendezvous = Rendezvous(Path(folder.name), seconds)
        tp = tensor_parallel(platform, 0, size, rendezvous)
        sent = _rank_args(args, plan, platform, rendezvous)
        if tp.communicator is None:
            raise LLMError("a group of ranks has no communicator.")
        for rank in range(1, size):
            workers.append(WorkerProcess(__name__, rank, SCHEMA, name="rank", folder=folder.name))
            workers[-1].send("open", sent)
        return LeadRunner(platform, tp, RankGroup(workers, tp.communicator, folder.cleanup))
    except BaseException:
        for worker in workers:
            worker.close()
        folder.cleanup()
        raise


def _memory_folder() -> str | None:
    """Where files are in memory; None: where temporary files are."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _rank_args(args: LLMArgs, plan: RunnerPlan, platform: Platform, rendezvous: Rendezvous) -> RankArgs:
    config, defaults = plan.config, LLMArgs(args.model)
    of_lead = {name: getattr(defaults, name) for name in _OF_LEAD}
    drafts = SpeculativeConfig.of(args.speculative_config)
    heads = args.speculative_config if drafts is not None and drafts.method == "mtp" else None  # a part of the model
    own = replace(
        args,
        **{**of_lead, "use_tqdm_on_load": False, "skip_tokenizer_init": True, "speculative_config": heads},
        device=platform.name,
        max_model_len=config.model_config.max_model_len,
        num_threads=config.num_threads,
        seed=config.model_config.seed,
    )
    of_caches = config.cache_config, config.scheduler_config
    return RankArgs(own, plan.tp_size, rendezvous.folder, rendezvous.timeout_s, *of_caches, _known(plan))


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
        tp = tensor_parallel(platform, rank, given.size, Rendezvous(given.folder, given.seconds))
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
