"""The arguments of `LLM` as options of commands: one table. vLLM's helpers for scripts, as `llm.utils` has them."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from llm.base.types import JsonObject
from llm.errors import ValidationError


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(text) for text in given], namespace)


def _dashed(text: str) -> str:
    """A long option with dashes for underscores in its name; its value is unchanged."""
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Run the garbage collector. Nothing else is left to do: `LLM.close` or `del llm` has freed the memory."""
    gc.collect()


# --- The flags of commands. ---

# Arguments of `LLM` that commands show: how a text is read, what it is called, what it does. All others are taken too.
ENGINE_FLAGS: Mapping[str, tuple[str, str, str]] = {
    "quantization": ("value", "NAME", "w8a8, w8a16, w4a8, w4a16: quantize while loading"),
    "requantize": ("value", "NAME", "the same of a checkpoint that is quantized already, such as a GGUF file"),
    "dtype": ("text", "TYPE", "of weights that are not quantized: auto, float32, bfloat16"),
    "tokenizer": ("text", "NAME", "folder or hub name of another tokenizer"),
    "revision": ("text", "NAME", "branch, tag or commit on the hub"),
    "load_format": ("text", "NAME", "dummy: random weights"),
    "hf_overrides": ("value", "JSON", "keys of config.json to replace"),
    "chat_template": ("text", "FILE", "in place of the model's"),
    "max_model_len": ("int", "N", "most tokens of prompt and output together"),
    "max_num_seqs": ("int", "N", "most requests computed in one step"),
    "max_num_batched_tokens": ("int", "N", "most tokens computed in one step"),
    "kv_cache_dtype": ("text", "TYPE", "auto, float32, bfloat16, float16, int8, fp8"),
    "kv_cache_memory_bytes": ("int", "N", "bytes of the KV cache"),
    "enable_prefix_caching": ("flag", "", "prompts share what they begin with"),
    "scheduling_policy": ("text", "NAME", "fcfs or priority"),
    "tensor_parallel_size": ("int", "N", "processes, each with a part of every layer"),
    "data_parallel_size": ("int", "N", "processes, each with the whole model"),
    "distributed_executor_backend": ("text", "NAME", "ray: on the machines of a Ray cluster"),
    "num_threads": ("int", "N", "threads to compute with"),
    "device": ("text", "NAME", "cpu, cuda, ...; auto: the best there is"),
    "seed": ("int", "N", "of requests that have none"),
    "generation_config": ("text", "NAME", "auto: the model's; vllm: none"),
    "speculative_config": ("value", "JSON", "drafts: auto, a name, or JSON"),
    "max_logprobs": ("int", "N", "most logprobs that a request may ask for"),
    "runner": ("text", "NAME", "auto, generate or pooling"),
    "convert": ("text", "NAME", "embed or classify: what a model that generates gives instead"),
    "enable_lora": ("flag", "", "requests may have adapters"),
    "max_loras": ("int", "N", "most adapters in one step"),
    "max_lora_rank": ("int", "N", "the largest rank of an adapter"),
    "logits_processors": ("several", "MODULE:CLASS", "logits processors to load, one or several"),
    "compilation_config": (
        "value",
        "JSON",
        'which operations run their kernels: {"custom_ops": ["none", "+rms_norm"]}',
    ),
    "verbose": ("flag", "", "show what was decided, and why"),
}
_DEST = "LLM."  # before an argument's name in a parsed command line
# vLLM's short options.
_SHORT: Mapping[str, str] = {
    **{"-q": "quantization", "-cc": "compilation_config", "-sc": "speculative_config", "-ac": "attention_config"},
    **{"-tp": "tensor_parallel_size", "-dp": "data_parallel_size", "-pp": "pipeline_parallel_size"},
    **{"-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size", "-n": "nnodes"},
    **{"-r": "node_rank", "-ep": "enable_expert_parallel", "-O": "optimization_level", "-dpn": "data_parallel_rank"},
    **{"-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local", "-dpa": "data_parallel_address"},
    **{"-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend", "-dph": "data_parallel_hybrid_lb"},
    **{"-dpe": "data_parallel_external_lb"},
}
# Arguments of vLLM's that have no value: what stands behind one is not its own.
_FLAG = re.compile(
    "(enable|disable|use|skip|allow|fail_on|ray_workers_use)_.*|.*_(lb|loras|lora|metrics|adaptive|logging|verbose)|"
    "trust_remote_code|language_model_only|interleave_mm_strings|mm_device_do_normalize|scheduler_reserve_full_isl|"
    "async_scheduling|numa_bind|kv_sharing_fast_prefill|sleep_mode_offload_cudagraph|dcp_q_replicate"
)
# Options that take several values -> what these look like: a prompt behind them is none.
_SEVERAL = {"--logits-processors": r"[\w.]+:[\w.]+", "--lora-modules": r"[\w./-]+=.+|\{.*\}"}


def add_engine_flags(command: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add the arguments of `LLM` under vLLM's names, with dashes or underscores; see `engine_arguments`."""
    about = "Its others, and vLLM's, are taken under their names too, and --NAME.KEY VALUE for one that is an object."
    group = command.add_argument_group("arguments of LLM", about)
    for name, (kind, metavar, about) in ENGINE_FLAGS.items():
        if name not in leave_out:
            _add_flag(group, name, kind, metavar, about)
    command.set_defaults(engine_command=command)


def add_other_flags(command: argparse.ArgumentParser, texts: Iterable[str]) -> None:
    """Add what of these texts are options for further arguments of `LLM`, or of vLLM's, to a command with engine flags:
    `--block-size`, `-ep`, `--compilation-config.custom_ops`.
    """
    from llm.config.engine_args import DEFAULTS  # imports PyTorch

    for option in dict.fromkeys(_option_of(text) for text in texts if text.startswith("-")):
        whole, _, key = option.removeprefix("--").partition(".")
        name = _SHORT.get(option, whole.replace("-", "_"))
        dest: JsonObject = {"dest": _DEST + name, "default": argparse.SUPPRESS}
        is_negated = name.startswith("no_") and name not in DEFAULTS
        if is_negated and name[3:] in DEFAULTS and name[3:] not in ENGINE_FLAGS:
            command.add_argument(option, action="store_false", **{**dest, "dest": _DEST + name[3:]})
        elif name not in DEFAULTS or name == "model":
            continue
        elif key:
            command.add_argument(option, action="append", type=_value, **{**dest, "dest": f"{_DEST}{name}.{key}"})
        elif name in ENGINE_FLAGS:
            continue
        elif _FLAG.fullmatch(name) and "=" not in option:
            command.add_argument(option, action="store_true", **dest)
        else:
            command.add_argument(option, nargs="?", const=True, type=_value, **dest)


def _option_of(text: str) -> str:
    """`--name` of `--name=value`, `-O` of `-O3`."""
    return "-O" if re.fullmatch(r"-O\d", text) else text.partition("=")[0]


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LLM` that a command line gives."""
    found = {name[len(_DEST) :]: value for name, value in vars(args).items() if name.startswith(_DEST)}
    given = {name: value for name, value in found.items() if "." not in name}
    objects: dict[str, JsonObject] = {}
    for path, values in found.items():
        name, _, keys = path.partition(".")
        if not keys:
            continue
        if name in given:
            option = f"--{name.replace('_', '-')}"
            message = f"{option} and {option}.{keys} exclude each other; put both into the JSON."
            raise ValidationError(message, parameter=name, value=values[-1])
        _set(objects.setdefault(name, {}), name, keys.split("."), values)
    return {**given, **objects}


def _set(given: JsonObject, name: str, keys: Sequence[str], values: Sequence[object]) -> None:
    """Set a key of an object in an object; `key+` is a list of all values, of texts with commas between them too."""
    for key in keys[:-1]:
        given = given.setdefault(key, {})
        if not isinstance(given, dict):
            raise ValidationError(f"--{name.replace('_', '-')} has both a value and keys of {key}.", parameter=name)
    key = keys[-1]
    if key.endswith("+"):
        given[key[:-1]] = [
            item for value in values for item in (value.split(",") if isinstance(value, str) else [value])
        ]
    else:
        given[key] = values[-1]


def _add_flag(group: argparse._ArgumentGroup, name: str, kind: str, metavar: str, about: str) -> None:
    short = [option for option, own in _SHORT.items() if own == name]
    options = dict.fromkeys((*short, f"--{name.replace('_', '-')}", f"--{name}"))
    common: dict[str, Any] = {"dest": _DEST + name, "default": argparse.SUPPRESS, "help": about}
    if kind == "flag":
        group.add_argument(*options, action="store_true", **common)
        negated = dict.fromkeys(f"--no-{option[2:]}" for option in options)
        group.add_argument(*negated, action="store_false", **{**common, "help": argparse.SUPPRESS})
        return
    if kind == "several":
        group.add_argument(*options, action="append", metavar=metavar, **common)
        return
    group.add_argument(*options, type=_READ[kind], metavar=metavar, **common)


def _value(text: str) -> object:
    """JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_READ: Mapping[str, Callable[[str], object]] = {"int": int, "text": str, "value": _value}


def add_lora_modules(command: argparse.ArgumentParser) -> None:
    """`--lora-modules NAME=FOLDER ...`, and vLLM's JSON; see `lora_modules_of`."""
    about = "adapters by name, which requests name as their model; plain rows in a column lora_name"
    options = ("--lora-modules", "--lora_modules")
    command.add_argument(*options, metavar="NAME=FOLDER", action="append", default=[], help=about)


def lora_modules_of(args: argparse.Namespace) -> dict[str, str]:
    """The folders of adapters by their names."""
    modules = {}
    for text in args.lora_modules:
        name, _, folder = text.partition("=")
        if text.startswith("{"):
            found = _value(text)
            name, folder = (found.get("name"), found.get("path")) if isinstance(found, dict) else (None, None)
        if not name or not folder or not isinstance(name, str) or not isinstance(folder, str):
            raise ValidationError(f"--lora-modules takes NAME=FOLDER, got {text!r}.", parameter="lora_modules")
        modules[name] = folder
    return modules


def one_by_one(arguments: Sequence[str]) -> list[str]:
    """Several values of an option as one option each: a prompt behind them is none of them."""
    spread: list[str] = []
    option = ""
    for text in arguments:
        pattern = _SEVERAL.get(option.replace("_", "-"), "")
        if option and spread[-1] != option and re.fullmatch(pattern, text):
            spread.append(option)
        elif option and spread[-1] != option:
            option = ""
        option = text if text.replace("_", "-") in _SEVERAL else option
        spread.append(text)
    return spread
