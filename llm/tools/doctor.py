"""`python -m llm doctor`: this machine and installation as text to paste into a bug report, and what is wrong with it.

The text has no host name, no user name, no path outside the package, and no value of a variable that another program
reads.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import llm
from llm.base import conflict, system
from llm.config import env
from llm.config.engine import GIB
from llm.errors import LLMError, ValidationError
from llm.kernels.state import kernel_state, slower_targets
from llm.platforms.cpu import CpuPlatform
from llm.platforms.limits import cpu_quota
from llm.tools.bench.machine import CpuWatch

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "tqdm", "jinja2")
_EXTRAS = ("llguidance", "pandas", "pyarrow", "matplotlib", "ipywidgets", "datasets", "ray", "vllm")
_WATCH_SECONDS = 0.5
_CORES_ALLOWED = 0.25
_LITTLE_MEMORY = GIB


@dataclass(frozen=True)
class Finding:
    """A line of the report. `todo`: what to do about it; "": nothing is wrong."""

    name: str
    text: str
    todo: str = ""


def report() -> int:
    """Print everything; returns the exit status, 1 if something is wrong."""
    found = []
    for item in examine():
        found.append(item)
        print(f"{item.name:<14} {item.text}", flush=True)
    wrong = [item for item in found if item.todo]
    print("\n" + ("what to do:" if wrong else "nothing is wrong."))
    for item in wrong:
        print(f"  {item.name}: {item.todo}")
    return 1 if wrong else 0


def report_device(name: str) -> int:
    """Compare every kernel of a device with its definition and print what was found; returns the exit status, 1 if one
    is wrong.

    Raises:
        ValidationError: there is no such device. LLMError: it has no kernels that could be compared.
    """
    from llm.platforms import select_platform

    device = select_platform(name)[0].device
    if device.type != "cuda":
        raise LLMError(f"device={name!r} has no kernels in Triton; `python -m llm doctor` examines the CPU's.")
    if find_spec("triton") is None:
        raise LLMError("Triton is not installed: pip install 'offline-llm[gpu]' for the kernels of GPUs.")
    from llm.kernels.triton import check
    from llm.kernels.triton.backend import kernel_names

    print(f"{check.identity(device)}: each kernel is compared with its definition, which takes a minute", flush=True)
    found = check.found_by_several(check.tasks_of(kernel_names(), tuple(check.ALLOWED)), device)
    for operation in kernel_names():
        own = {task: text for task, text in found.items() if task.name == operation}
        wrong = [f"{task.dtype}, {text}" for task, text in own.items() if text]
        print(f"{operation:<22} " + ("; ".join(wrong) or f"agrees in {len(own)} cases"))
    count = sum(map(bool, found.values()))
    print(f"\n{count} cases are wrong: please report this." if count else "\nnothing is wrong.")
    return 1 if count else 0


def examine(root: Path = Path("/")) -> Iterator[Finding]:
    """Everything, in the order in which it is printed; `root` is "/" outside of tests."""
    yield Finding("offline-llm", f"{llm.__version__}, Python {platform.python_version()}, {_system()}")
    yield Finding("packages", _versions(_NEEDED))
    yield Finding("extras", _versions(_EXTRAS) or "none")
    yield from _other_package()
    yield from _processor(root)
    kernels = kernel_state()
    yield Finding("kernels", kernels.text, _private(kernels.todo))
    yield from _memory(root)
    yield _busy_cores()
    yield _variables()
    yield _answer()


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(", ")


def _versions(names: Sequence[str]) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _other_package() -> Iterator[Finding]:
    package = Path(llm.__file__).parent
    found = conflict.find(str(package.parent), sys.path)
    if found is not None:
        what = f"the unrelated PyPI package `llm` ({found.split(' in ')[0]}) is in this environment"
        todo = "run `python -m pip uninstall -y llm offline-llm`, then install offline-llm again"
        yield Finding("other llm", what, todo)


def _processor(root: Path) -> Iterator[Finding]:
    cpu = CpuPlatform(root)
    there, slower = ", ".join(kernel_state().targets), ", ".join(slower_targets())
    there += f"; slower here, used if LLM_CPU_ISA asks for it: {slower}" if slower else ""
    yield Finding("processor", f"{cpu.get_device_name()}; kernels for {there}")
    allowed, quota, threads = len(system.cores()), cpu_quota(root), torch.get_num_threads()
    limit = "no CPU quota" if quota is None else f"CPU quota {quota:g}"
    text = f"{os.cpu_count()} processors, {allowed} of them for this process, {limit}; threads of PyTorch: {threads}"
    most = cpu.num_threads()
    todo = f"LLM(num_threads={most}), or OMP_NUM_THREADS={most}, uses no more than there are" if threads > most else ""
    yield Finding("threads", text, todo)


def _memory(root: Path) -> Iterator[Finding]:
    cpu = CpuPlatform(root)
    total, free = cpu.memory_total(), cpu.memory_free()
    todo = "close other programs, or raise the memory limit of the container" if free < _LITTLE_MEMORY else ""
    yield Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, control groups included", todo)


def _busy_cores() -> Finding:
    with CpuWatch() as watch:
        time.sleep(_WATCH_SECONDS)
    used = watch.other_cores
    if used is None:
        return Finding("other programs", "unknown")
    todo = "measure nothing now, or give LLM(num_threads=) fewer threads: they wait for each other"
    return Finding("other programs", f"use {used:.1f} of these cores now", todo if used > _CORES_ALLOWED else "")


def _variables() -> Finding:
    """Our own variables with their values, of others only which are set."""
    own = [f"{name}={_private(os.environ[name])}" for name in env.VARIABLES if os.environ.get(name)]
    others = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "XDG_CACHE_HOME", "CXX")
    theirs = [f"{name} (set)" for name in others if os.environ.get(name)]
    vllms = [name for name in sorted(os.environ) if name.startswith("VLLM_")]
    todo = f"{', '.join(vllms)}: vLLM's variables are not read here; see `llm.config.env`" if vllms else ""
    try:
        env.check_values()
    except ValidationError as error:
        todo = str(error).removesuffix(".")
    return Finding("variables", ", ".join([*own, *theirs, *vllms]) or "none", todo)


def _answer() -> Finding:
    """The embedded model answers, unless the kernels would be compiled for it."""
    from llm.llm import LLM
    from llm.sampling_params import SamplingParams

    if not kernel_state().is_compiled:
        return Finding("embedded model", "not tried: its kernels are not compiled", "run `python -m llm kernels build`")
    try:
        with LLM(max_model_len=64, max_num_seqs=1, use_tqdm_on_load=False) as engine:
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            [output] = engine.generate(["In the beginning"], params, use_tqdm=False)
            count, invariant = len(output.outputs[0].token_ids), engine.config.invariant
    except LLMError as error:
        return Finding("embedded model", f"fails with {type(error).__name__}", _private(str(error)))
    return Finding("embedded model", f"answers {count} tokens; batch-invariant: {'yes' if invariant else 'no'}")


def _private(text: str) -> str:
    """Without the user's home, and other paths shortened to their last part."""
    home = os.path.expanduser("~")
    words = text.replace(home, "~").split(" ") if len(home) > 1 else text.split(" ")
    return " ".join(f".../{Path(word).name}" if word.lstrip("('\"").startswith("/") else word for word in words)
