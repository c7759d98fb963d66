"""Starting replicas: what each of them loads, and the engine over them.

The lengths and sizes are decided once, here, for the share of the memory that a replica has; replicas on accelerators
have each a memory of their own, and find the size of their KV cache themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from time import perf_counter

from llm.base import system
from llm.config.engine import GIB, EngineConfig, LLMArgs
from llm.engine.boundary import RunnerPlan
from llm.engine.engine import Engine
from llm.errors import LLMError, ValidationError, WorkerDiedError
from llm.kernels.select import backend_for
from llm.loading.shared_weights import shared_weights_file
from llm.platforms import Platform
from llm.replicas.engine import ReplicatedEngine
from llm.replicas.placement import Placement, node_of
from llm.replicas.processes import WAIT_SECONDS, Replicas
from llm.replicas.runner import importable_name
from llm.replicas.schema import SCHEMA, ReplicaArgs, ReplicaLoaded
from llm.text.tokenizer import Tokenizer
from llm.workers.on_ray import RayMachines, connected_ray

# Reasons that are known only where the model is loaded.
_FOUND = ("invariant", "quantization", "resident_weight_bytes", "speculative_config")
_REFUSED = {
    "prefix_cache": "a folder is read into the KV cache of one process; leave it out, or use data_parallel_size=1",
    "profiler_config": "a profile is of this process; leave it out, or use data_parallel_size=1",
}


def check_replicated(args: LLMArgs) -> None:
    """Raise `ValidationError` for an argument that replicas cannot have."""
    for name, why in _REFUSED.items():
        if getattr(args, name) is not None:
            raise ValidationError(f"{name} cannot be used with replicas: {why}.", parameter=name)


def memory_of_one(platform: Platform, places: Sequence[Placement], free: int, weights: int) -> int:
    """Bytes that a replica plans with, of so many that are free here: replicas on accelerators have a memory each, and
    those of Ray that of their machines.

    Args:
        weights: bytes of the weights, which those that share them have once.
    """
    if platform.device_type != "cpu":
        return free
    if places[0].is_on_ray:
        machines = RayMachines(connected_ray())
        return machines.memory // machines.most_of(len(places))
    nodes = shared_by(platform, places)
    return weights + (free - weights * len(set(nodes))) // len(places) if nodes else free // len(places)


def shared_by(platform: Platform, places: Sequence[Placement]) -> list[int]:
    """A number for each place: those that have the same share their weights. []: none do.

    Replicas on different NUMA nodes do not: one would read its weights from another's memory. Weights that no kernel
    packs are not shared, nor those of replicas with ranks, which have parts of them, or of Ray.
    """
    if any(place.is_on_ray or place.ranks > 1 for place in places):
        return []
    if platform.device_type != "cpu" or not system.has_unnamed_files() or not backend_for(platform).computes("pack"):
        return []
    return [node_of(place) for place in places]


def start_replicas(
    args: LLMArgs,
    plan: RunnerPlan,
    platform: Platform,
    places: Sequence[Placement],
    weights: int,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
) -> tuple[Engine, RunnerPlan, dict[str, float]]:
    """The engine over replicas that have loaded the model, the plan with what they have found, and seconds per phase.

    Args:
        weights: about how many bytes of them there are; 0: unknown.

    Raises:
        LLMError: one of the replicas cannot load the model; none is left then.
    """
    began = perf_counter()
    decided = [_args_of(args, plan, place) for place in places]
    nodes = [] if plan.config.offload_config.offload_weights else shared_by(platform, places)
    files = {node: shared_weights_file(weights or platform.memory_total()) for node in set(nodes)}
    sent = [ReplicaArgs(own, files[nodes[index]] if nodes else None) for index, own in enumerate(decided)]
    replicas = Replicas(tuple(files.values()))
    try:
        for place, own in zip(places, sent, strict=True):
            replicas.start(place, own)
        loaded = _all_loaded(replicas)
        replicas.restart_dead(loaded)
    except BaseException:
        replicas.close()
        raise
    plan = replace(plan, config=_config_of(plan.config, loaded, places))
    engine = ReplicatedEngine(plan.config, replicas, tokenizer, eos_token_ids)
    return engine, plan, {"start replicas": perf_counter() - began, **loaded[0].seconds}


def _all_loaded(replicas: Replicas) -> list[ReplicaLoaded]:
    found: dict[int, ReplicaLoaded] = {}
    while len(found) < replicas.count:
        waiting = [number for number in range(replicas.count) if number not in found]
        taken = replicas.take(WAIT_SECONDS, waiting)
        if taken is None:
            continue
        number, message = taken
        if isinstance(message, WorkerDiedError):
            raise LLMError(f"the model cannot be loaded by every replica: {message}") from message
        if not isinstance(message.body, ReplicaLoaded):
            raise RuntimeError(f"replica {number} sent {message.kind!r} before it was loaded")
        found[number] = message.body
    return [found[number] for number in sorted(found)]


def _args_of(args: LLMArgs, plan: RunnerPlan, place: Placement) -> LLMArgs:
    """The arguments of the replica at a place; raises `ValidationError` for one that is not plain data."""
    config = plan.config
    decided = replace(
        args,
        device=place.device,
        num_threads=place.threads or args.num_threads,
        max_model_len=config.model_config.max_model_len,
        seed=config.model_config.seed,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes
        if plan.measures_cache
        else config.cache_config.kv_cache_memory_bytes or None,
        logits_processors=[importable_name(kind) for kind in plan.logits_processors] or None,
        use_tqdm_on_load=False,
        data_parallel_size=1,
        devices=list(place.devices) or None,
        distributed_executor_backend=None,
    )
    for item in fields(decided):
        value = getattr(decided, item.name)
        try:
            SCHEMA.encode("argument", value)
        except ValidationError:
            raise ValidationError(
                f"{item.name}={value!r} cannot be sent to replicas: give it as plain data, or use "
                "data_parallel_size=1.",
                parameter=item.name,
                value=value,
            ) from None
    return decided


def _config_of(config: EngineConfig, loaded: Sequence[ReplicaLoaded], places: Sequence[Placement]) -> EngineConfig:
    """The config of one replica, and where all of them are."""
    first = loaded[0]
    fewest = min(loaded, key=lambda item: item.num_blocks)
    cache = replace(
        config.cache_config, num_blocks=fewest.num_blocks, kv_cache_memory_bytes=fewest.kv_cache_memory_bytes
    )
    reasons = {**config.reasons, **{name: first.reasons[name] for name in _FOUND if name in first.reasons}}
    for name in ("num_threads", "kv_cache_memory_bytes", "max_num_seqs"):
        reasons[name] = f"of each of {len(places)} replicas; {reasons.get(name, 'default')}"
    reasons["replicas"] = "; ".join(f"{number}: {place}" for number, place in enumerate(places))
    if first.shared_bytes:
        reasons["replicas"] += f"; {first.shared_bytes:,} bytes of weights are in memory once for all on a NUMA node"
    reasons["kv_cache_memory_bytes"] += f"; {len(places) * fewest.kv_cache_memory_bytes / GIB:.3f} GiB in all"
    varied = next((item for item in loaded if not item.invariant), None)
    if varied is not None:
        reasons["invariant"] = varied.reasons["invariant"]
    return replace(
        config,
        cache_config=cache,
        invariant=varied is None,
        reasons=reasons,
        num_threads=places[0].threads or config.num_threads,
        speculative_config=config.speculative_config if first.drafts else None,
        replicas=len(places),
    )
