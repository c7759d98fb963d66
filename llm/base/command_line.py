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
# Options that take several values -> what these look like: a prompt behind them is none.
_SEVERAL = {"--logits-processors": r"[\w.]+:[\w.]+", "--lora-modules": r"[\w./-]+=.+|\{.*\}"}


def add_engine_flags(command: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add the arguments of `LLM` under vLLM's names, with dashes or underscores; see `engine_arguments`."""
    group = command.add_argument_group("arguments of LLM", "Its others, and vLLM's, are taken under their names too.")
    for name, (kind, metavar, about) in ENGINE_FLAGS.items():
        if name not in leave_out:
            _add_flag(group, name, kind, metavar, about)
    if "compilation_config" not in leave_out:
        options = ("--compilation-config.custom_ops", "--compilation_config.custom_ops")
        about = "the same for custom_ops alone: none,+rms_norm"
        group.add_argument(*options, dest=f"{_DEST}custom_ops", metavar="OPS", default=argparse.SUPPRESS, help=about)
    command.set_defaults(engine_command=command)


def add_other_flags(command: argparse.ArgumentParser, options: Iterable[str]) -> None:
    """Add those of `options` that are further arguments of `LLM`, or of vLLM's, to a command with engine flags."""
    from llm.config.engine_args import DEFAULTS  # imports PyTorch

    for option in dict.fromkeys(option.partition("=")[0] for option in options):
        name = option[2:].replace("-", "_")
        is_negated = name.startswith("no_") and name not in DEFAULTS
        name = name[3:] if is_negated else name
        if name not in DEFAULTS or name == "model" or name in ENGINE_FLAGS:
            continue
        dest = _DEST + name
        if is_negated:
            command.add_argument(option, dest=dest, action="store_false", default=argparse.SUPPRESS)
        else:
            command.add_argument(option, dest=dest, nargs="?", const=True, type=_value, default=argparse.SUPPRESS)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LLM` that a command line gives."""
    given = {name[len(_DEST) :]: value for name, value in vars(args).items() if name.startswith(_DEST)}
    ops = given.pop("custom_ops", None)
    if ops is None:
        return given
    if "compilation_config" in given:
        raise ValidationError(
            "--compilation-config and --compilation-config.custom_ops exclude each other; put both into the JSON.",
            parameter="compilation_config",
            value=ops,
        )
    return given | {"compilation_config": {"custom_ops": _value(ops)}}


def _add_flag(group: argparse._ArgumentGroup, name: str, kind: str, metavar: str, about: str) -> None:
    options = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
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
