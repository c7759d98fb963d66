"""Where replicas compute: `data_parallel_size` and `devices` as a device, processors and threads for each.

The processors of a machine are shared out evenly, or by its NUMA nodes: a replica that runs on one node's processors
has its memory there, because Linux gives a page to the node that touches it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from llm.base import system
from llm.base.checks import check_choice, check_integer, refuse
from llm.config.engine import LLMArgs
from llm.platforms import Platform, select_platform
from llm.workers.on_ray import RayMachines, connected_ray

_EXECUTORS = ("uni", "mp", "ray")
_RIGHT = "'all', or a list of devices as 'cuda:0' or of sets of processors as {0, 1}, one for each replica"


@dataclass(frozen=True)
class Placement:
    """Where one replica computes.

    Attributes:
        device: as `LLM(device=)` takes it; of the first rank.
        cores: the processors that it may run on; None: all.
        threads: of each of its ranks, that compute; None: as `num_threads` says.
        ranks: processes that share the model.
        devices: of its ranks, where these are no processors; (): those from `device` on.
        is_on_ray: on a machine of Ray's cluster, which has a bundle for each rank.
    """

    device: str
    cores: tuple[int, ...] | None = None
    threads: int | None = None
    ranks: int = 1
    devices: tuple[str, ...] = ()
    is_on_ray: bool = False

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Of Ray's placement group."""
        if self.device == "cpu":
            return [{"CPU": self.threads or 1}] * self.ranks
        return [{"CPU": self.ranks, "GPU": self.ranks}]  # one, whose process sees the devices of all its ranks

    def __str__(self) -> str:
        ranks = "" if self.ranks == 1 else f", {self.ranks} ranks"
        return f"{self._where()}{ranks}" + (" by Ray" if self.is_on_ray else "")

    def _where(self) -> str:
        if self.cores is None:
            where = ", ".join(self.devices) or self.device
            return where if self.threads is None else f"{where}, {self._threads()}"
        return f"{self.device}, processors {shown(self.cores)}, {self._threads()}"

    def _threads(self) -> str:
        return "1 thread" if self.threads == 1 else f"{self.threads} threads"


def placements(args: LLMArgs, root: Path = Path("/")) -> list[Placement]:
    """The place of each replica; []: there are none, the model is in this process.

    Args:
        root: the parent of /sys; another folder in tests.

    Raises:
        ValidationError: `data_parallel_size` or `devices` is wrong, or the machine has not got that.
    """
    size, devices = args.data_parallel_size, args.devices
    check_integer("data_parallel_size", size, 1)
    if args.distributed_executor_backend is not None:
        check_choice("distributed_executor_backend", args.distributed_executor_backend, _EXECUTORS)
    if args.distributed_executor_backend == "ray":
        return _on_ray(args, size)
    if devices is None:
        return [] if size == 1 else _shared_out(args, size)
    if devices == "all":
        found = _all(args, root)
    elif isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        if args.tensor_parallel_size > 1 and all(isinstance(item, str) and item != "cpu" for item in devices):
            found = _grouped(args, devices)
            return found if len(found) > 1 else []  # the ranks of this process
        found = [_named(args, item) for item in devices]
    else:
        refuse("devices", devices, _RIGHT)
    if size not in (1, len(found)):
        refuse("data_parallel_size", size, f"left out, or {len(found)}, the number of devices")
    return found if len(found) > 1 or devices != "all" else []


def _on_ray(args: LLMArgs, size: int) -> list[Placement]:
    """Replicas on a cluster's machines; their threads are by default the processors of the smallest, shared out."""
    if args.devices is not None:
        refuse("devices", args.devices, "left out with distributed_executor_backend='ray': Ray chooses them")
    name, ranks = _accelerators(args)[0], args.tensor_parallel_size
    machines = RayMachines(connected_ray())
    if name:
        places = [Placement(f"{name}:0", None, args.num_threads, ranks, is_on_ray=True)] * size
    else:
        threads = args.num_threads or max(1, machines.cpus // machines.most_of(size) // ranks)
        places = [Placement("cpu", None, threads, ranks, is_on_ray=True)] * size
    machines.check_room(places[0].bundles, "distributed_executor_backend")
    return places


def _all(args: LLMArgs, root: Path) -> list[Placement]:
    """Every accelerator, or every NUMA node."""
    name, count = _accelerators(args)
    if name:
        ranks = args.tensor_parallel_size
        return _grouped(args, [f"{name}:{index}" for index in range(count // ranks * ranks)])
    return [_on_cores(args, cores) for cores in numa_nodes(system.cores(), root)]


def _shared_out(args: LLMArgs, size: int) -> list[Placement]:
    name, count = _accelerators(args)
    if name:
        ranks = args.tensor_parallel_size
        if size * ranks > count:
            of_ranks = "" if ranks == 1 else f" for groups of {ranks} ranks"
            refuse("data_parallel_size", size, f"at most {count // ranks}: there are {count} devices {name}{of_ranks}")
        return _grouped(args, [f"{name}:{index}" for index in range(size * ranks)])
    cores = sorted(system.cores())
    if size > len(cores):  # threads of several replicas take turns on a processor
        return [Placement("cpu", None, args.num_threads or 1, args.tensor_parallel_size)] * size
    bounds = [round(index * len(cores) / size) for index in range(size + 1)]
    return [_on_cores(args, cores[start:end]) for start, end in pairwise(bounds)]


def _grouped(args: LLMArgs, devices: Sequence[str]) -> list[Placement]:
    """A replica on each run of as many devices as it has ranks."""
    ranks = args.tensor_parallel_size
    if len(devices) % ranks:
        refuse("devices", args.devices, f"as many as ranks of replicas, a multiple of tensor_parallel_size={ranks}")
    groups = [tuple(devices[start : start + ranks]) for start in range(0, len(devices), ranks)]
    return [Placement(group[0], None, None, ranks, group if ranks > 1 else ()) for group in groups]


def _named(args: LLMArgs, item: object) -> Placement:
    if isinstance(item, str):
        platform, _ = select_platform(item)
        threads = args.num_threads if platform.name == "cpu" else None
        return Placement(item, None, threads, args.tensor_parallel_size)
    if not isinstance(item, Iterable):
        refuse("devices", item, _RIGHT)
    cores = sorted(item)
    there = system.cores()
    if not cores or not there.issuperset(cores):
        refuse("devices", item, f"sets of the processors {shown(sorted(there))}, which this process may use")
    return _on_cores(args, cores)


def _on_cores(args: LLMArgs, cores: Sequence[int]) -> Placement:
    ranks = args.tensor_parallel_size
    threads = args.num_threads or max(1, len(cores) // ranks)
    return Placement("cpu", tuple(cores), min(threads, len(cores)), ranks)


def _accelerators(args: LLMArgs) -> tuple[str, int]:
    """The name of the devices that are no CPU, and how many there are; "": the CPU computes."""
    platform, _ = select_platform(args.device)
    if platform.device_type == "cpu":
        return "", 0
    return platform.name, device_count(platform)


def device_count(platform: Platform) -> int:
    """How many devices of its kind there are, as far as is known."""
    module = getattr(platform, "torch_module", None)
    return int(module().device_count()) if module is not None else 1


def numa_nodes(cores: set[int], root: Path = Path("/")) -> list[list[int]]:
    """The processors of each NUMA node, of those that this process may use; one list where there are no nodes."""
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        own = sorted(cores & _listed((folder / "cpulist").read_text()))
        if own:
            found.append(own)
    return found or [sorted(cores)]


def of_nodes(threads: int | None, root: Path = Path("/")) -> str:
    """What a CPU's config says of the threads of an LLM without replicas: what several NUMA nodes could do."""
    nodes = len(numa_nodes(system.cores(), root))
    if nodes == 1 or threads is not None:
        return ""
    return f"; on all of {nodes} NUMA nodes: devices='all' has a replica on each, with its memory there"


def node_of(place: Placement, root: Path = Path("/")) -> int:
    """The NUMA node that has all of a place's processors, counted as `numa_nodes` does; -1: none has."""
    nodes = numa_nodes(system.cores(), root)
    own = set(system.cores() if place.cores is None else place.cores)
    return next((number for number, cores in enumerate(nodes) if own <= set(cores)), -1)


def _listed(text: str) -> set[int]:
    """The numbers of Linux's lists of processors: "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def shown(cores: Sequence[int]) -> str:
    """A list of processors as Linux writes it."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
