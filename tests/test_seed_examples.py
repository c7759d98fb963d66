"""Every example of the five documents that this project implements, as it stands: only import lines are changed.

`seeds_examples/` holds the examples, one file per document: 000 and 001 are vLLM's page on `CustomOp` (two versions),
002 an article on platform plugins, 003 vLLM's page on custom logits processors, 004 an article on quantization. A test
is named after its example. What a document leaves out as `...` is filled in by the test (`filled`).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import pytest
import torch
from embedded import ROOT, copy_model
from plugin_packages import install
from torch import Tensor, nn

import llm.layers
import llm.models
import llm.platforms
from llm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, cli, plugins
from llm.base.command_line import engine_arguments
from llm.base.custom_op import CustomOp, PluggableLayer, op_registry, op_registry_oot, platform_replacements
from llm.config import MultiModalConfig
from llm.config.compilation import CompilationConfig
from llm.layers.custom_op import constructing_for
from llm.model_executor.layers.attention import MMEncoderAttention
from llm.model_executor.layers.layernorm import RMSNorm
from llm.model_executor.layers.linear import ColumnParallelLinear
from llm.platforms import CpuPlatform, Platform, select_platform
from llm.plugins import PLATFORM_PLUGINS_GROUP, load_plugins_by_group
from llm.utils.import_utils import resolve_obj_by_qualname
from llm.v1.sample import logits_processor

NOT_RUN = {
    "003_serve_several": "starts a server; the option itself is tested with `generate`, `run` and `chat`",
    "003_serve": "starts a server",
    "003_curl": "asks a server",
    "003_openai": "asks a server",
}

# Example -> the test of another that runs it.
WITHIN = {
    "003_processor": "003_path_llm",
    "003_generate": "003_path_llm",
    "003_generate_async": "003_path_async",
}

# Operations are registered by their modules: before `surroundings` looks what there is.
for _package in (llm.layers, llm.models):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        importlib.import_module(_module.name)


def read_examples() -> dict[str, str]:
    """Number of the document and name of the example -> its text, after headings `#== name | heading`."""
    examples = {}
    for path in sorted((ROOT / "tests" / "seeds_examples").glob("*.txt")):
        for part in path.read_text(encoding="utf-8").split("#== ")[1:]:
            heading, _, text = part.partition("\n")
            examples[f"{path.name[:3]}_{heading.split(' | ')[0]}"] = text.rstrip() + "\n"
    return examples


EXAMPLES = read_examples()


def example(name: str) -> str:
    """The example with `llm` for `vllm` in its import lines and in the groups of entry points."""
    text = re.sub(r"^(\s*from )vllm\b", r"\1llm", EXAMPLES[name], flags=re.MULTILINE)
    return re.sub(r'"vllm\.(\w+)"', r'"llm.\1"', text)


def filled(text: str, *replacements: tuple[str, str]) -> str:
    """`text` with something for its dots; every replacement is needed."""
    for dots, code in replacements:
        assert dots in text, dots
        text = text.replace(dots, code)
    return text


def executed(text: str, **names: Any) -> dict[str, Any]:
    """The names that are there after `text`, which sees `names`."""
    names = {"__name__": "example", **names}
    exec(compile(text, "<example>", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an example registers or imports is gone afterwards."""
    for name in ("LLM_PLUGINS", "LLM_PLUGIN_ERRORS", "LLM_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_loaded", "_answers"):
        monkeypatch.setattr(plugins, name, {})
    monkeypatch.setattr(plugins, "_called", set())
    registries: tuple[dict[str, Any], ...] = (op_registry, op_registry_oot, platform_replacements)
    before = [dict(registry) for registry in registries]
    modules = set(sys.modules)
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in {"vllm_ascend", "your", "some", "dummy_package"}:
            del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._scan.cache_clear()
    return tmp_path


def platform(key: str) -> Platform:
    return type("Made", (Platform,), {"dispatch_key": key, "device_type": "cpu"})()


def test_every_example_is_run_or_listed() -> None:
    tested = {name.removeprefix("test_") for name in globals() if re.match(r"test_\d{3}_", name)}
    tested |= {f"{document}_{name}" for document in ("000", "001") for name in ("operations", "replace")}
    assert set(WITHIN.values()) <= tested
    assert sorted([*tested, *WITHIN, *NOT_RUN]) == sorted(EXAMPLES)


# --- 000 and 001: vLLM's page on CustomOp. ---


def test_000_registries() -> None:
    theirs = executed(example("000_registries"), nn=nn)["CustomOp"]
    for name in theirs.__annotations__:
        assert type(getattr(CustomOp, name)) is type(getattr(theirs, name)) is dict
    assert issubclass(CustomOp, nn.Module)


def test_000_command_line() -> None:
    """`op1` and `op2` stand for operations."""
    ops = ("silu_and_mul", "rms_norm", "gelu_new")
    text = filled(example("000_command_line"), ("op1", ops[0]), ("op2", ops[1]))
    on = []
    for line in text.splitlines():
        arguments = cli.parsed(["explain", *shlex.split(line)])
        config = CompilationConfig.of(engine_arguments(arguments).get("compilation_config"))
        on.append([config.judge(op)[0] for op in ops])
    assert on == [[True] * 3, [False] * 3, [False, True, True], [True, True, False]]


DECLARED = re.compile(r'@\w+\.register\("(\w+)"\)\nclass (\w+)\((.*)\):')
# Bases of the older page that the newer has replaced by PluggableLayer, as here.
LAYERS_SINCE = set(
    "multi_head_latent_attention vocab_parallel_embedding logits_processor mamba_mixer mamba_mixer2 "
    "plamo2_mamba_mixer".split()
)


@pytest.mark.parametrize(("name", "others"), [("000_operations", LAYERS_SINCE), ("001_operations", set())])
def test_00x_operations(name: str, others: set[str]) -> None:
    """The declarations of the list: name, class and bases. Their bodies are left out, which are vLLM's own."""
    found = DECLARED.findall(example(name))
    assert len(found) == example(name).count("@")
    differing = set()
    for op, cls, bases in found:
        ours = op_registry[op]
        assert cls in {ours.__name__, ours.vllm_name}
        if not set(bases.split(", ")) <= {base.__name__ for base in ours.__mro__}:
            differing.add(op)
    assert differing == others


def test_000_tutorial() -> None:
    """Each platform runs the forward that the page says it does."""
    text = re.sub(r"^( +)# (Call .*)$", r'\1return "\2"', example("000_tutorial"), flags=re.MULTILINE)
    del op_registry["mm_encoder_attn"]
    made = executed(text, CustomOp=CustomOp, MultiModalConfig=MultiModalConfig, torch=torch)["MMEncoderAttention"]
    assert op_registry["mm_encoder_attn"] is made
    ran = {}
    for key in ("cpu", "cuda", "hip", "xpu", "tpu", "oot"):
        with constructing_for(platform(key)):
            ran[key] = made(2, 4, multimodal_config=MultiModalConfig())(None, None, None)
    sdpa, flash = "Call TORCH_SDPA implementation...", "Call FA or TORCH_SDPA implementation..."
    fa, pallas = "Call FA implementation...", "Call PALLAS implementation..."
    assert ran == {"cpu": sdpa, "cuda": flash, "hip": flash, "xpu": fa, "tpu": pallas, "oot": sdpa}
    with constructing_for(platform("cuda"), CompilationConfig(custom_ops=("none",))):
        assert made(2, 4)(None, None, None) == sdpa


@pytest.mark.parametrize("name", ["000_replace", "001_replace"])
def test_00x_replace(name: str) -> None:
    text = filled(
        example(name),
        ("def __init__(...)", "def __init__(self, *args, **kwargs)"),
        ("super().__init__(...)", "super().__init__(*args, **kwargs)"),
        ("def forward_oot(...)", "def forward_oot(self, query, key, value)"),
        ("        ...\n", "        return -query\n"),
    )
    x = torch.randn(1, 3, 8)

    def made() -> Any:
        with constructing_for(platform("oot")):
            return MMEncoderAttention(num_heads=2, head_size=4)

    assert not torch.equal(made()(x, x, x), -x)
    names = executed(text)
    custom = names["CustomMMEncoderAttention"]
    assert names["CustomOp"].op_registry_oot["MMEncoderAttention"] is custom
    op = made()
    assert type(op) is custom and op.binding.method == "forward_oot" and torch.equal(op(x, x, x), -x)


def test_000_one_place() -> None:
    names: dict[str, Any] = {}
    for index in (1, 2, 3):
        base = CustomOp.register(f"custom_op_{index}")(type(f"CustomOP{index}", (CustomOp,), {}))
        names[f"CustomOP{index}"] = base
        names[f"YourCustomOp{index}"] = type(f"YourCustomOp{index}", (base,), {"forward_oot": lambda self: "yours"})
    executed(example("000_one_place"), **names)
    for index in (1, 2, 3):
        with constructing_for(platform("oot")):
            op = names[f"CustomOP{index}"]()
        assert type(op) is names[f"YourCustomOp{index}"] and op() == "yours"


# --- 002: platform plugins. ---

PLATFORM = """
from llm.platforms import CpuPlatform

class NPUPlatform(CpuPlatform):
    dispatch_key = "oot"

    @classmethod
    def get_device_name(cls, device_id=0): return "Ascend"

    @classmethod
    def get_device_capability(cls, device_id=0): return None
"""
CALLED = "called = []\ndef {name}(): called.append(1)\n"


@pytest.fixture
def ascend(site: Path) -> Path:
    """The document's package, installed with the entry points of its setup.py."""
    package = site / "vllm_ascend"
    (package / "model_loader").mkdir(parents=True)
    (package / "__init__.py").write_text(example("002_package"))
    (package / "platform.py").write_text(PLATFORM)
    (package / "distributed.py").write_text(CALLED.format(name="register_connector"))
    (package / "model_loader" / "netloader.py").write_text(CALLED.format(name="register_netloader"))
    (package / "profiling_config.py").write_text(CALLED.format(name="generate_service_profiling_config"))
    given: dict[str, Any] = {}
    executed(filled(example("002_setup"), ("    ...\n", "")), setup=given.update)
    folder = site / f"{given['name']}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {given['name']}\nVersion: 1.0\n")
    groups = ["\n".join([f"[{group}]", *lines]) for group, lines in given["entry_points"].items()]
    (folder / "entry_points.txt").write_text("\n".join(groups))
    plugins._scan.cache_clear()
    return package


@pytest.mark.usefixtures("ascend")
def test_002_setup() -> None:
    assert set(load_plugins_by_group("llm.general_plugins")) == {
        "ascend_kv_connector",
        "ascend_model_loader",
        "ascend_service_profiling",
    }
    assert type(select_platform("ascend")[0]).__name__ == "NPUPlatform"


@pytest.mark.usefixtures("ascend")
def test_002_package() -> None:
    plugins.load_general_plugins()
    for module in ("distributed", "model_loader.netloader", "profiling_config"):
        assert importlib.import_module(f"vllm_ascend.{module}").called == [1]


@pytest.mark.usefixtures("ascend")
def test_002_load_plugins() -> None:
    theirs = executed(example("002_load_plugins"), Callable=Callable, Any=Any)["load_plugins_by_group"]
    for group in (PLATFORM_PLUGINS_GROUP, "llm.general_plugins"):
        assert theirs(group) == load_plugins_by_group(group) != {}


@pytest.mark.usefixtures("ascend")
def test_002_current_platform() -> None:
    names = executed(
        example("002_current_platform"),
        chain=chain,
        builtin_platform_plugins={},
        PLATFORM_PLUGINS_GROUP=PLATFORM_PLUGINS_GROUP,
        load_plugins_by_group=load_plugins_by_group,
        resolve_obj_by_qualname=resolve_obj_by_qualname,
    )
    theirs = names["__getattr__"]("current_platform")
    assert names["__getattr__"]("current_platform") is theirs
    assert type(theirs) is type(llm.platforms.current_platform)
    assert names["resolve_current_platform_cls_qualname"]() == "vllm_ascend.platform.NPUPlatform"


def test_002_use_platform(request: pytest.FixtureRequest) -> None:
    assert executed(example("002_use_platform"))["device_name"]
    request.getfixturevalue("ascend")
    names = executed(example("002_use_platform"))
    assert (names["device_name"], names["device_capability"]) == ("Ascend", None)


def test_002_new_operation() -> None:
    text = filled(example("002_new_operation"), ("__init__(...):\n        ...", "__init__(self): super().__init__()"))
    for method in ("native", "cpu", "cuda"):
        text = filled(text, (f"{method}(...):\n        ...", f"{method}(self): return '{method}'"))
    made = executed(text, CustomOp=CustomOp)["XxxOp"]
    assert op_registry["op_name"] is made
    for key, ran in {"cpu": "cpu", "cuda": "cuda", "hip": "cuda", "xpu": "native", "oot": "native"}.items():
        with constructing_for(platform(key)):
            assert made()() == ran


def test_002_registries() -> None:
    assert example("002_registries").endswith(example("000_registries"))


def test_002_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = example("002_replace").split("# 在 vllm-xxx")
    theirs = executed(inside)["AaaCustomOp"]
    monkeypatch.setitem(sys.modules, "llm.xxx", SimpleNamespace(AaaCustomOp=theirs))
    text = filled(
        f"# {outside}",
        ("def __init__(...)", "def __init__(self)"),
        ("super().__init__(...)", "super().__init__()"),
        ("def forward_oot(...)", "def forward_oot(self)"),
        ("        ...\n", "        return 'oot'\n"),
    )
    mine = executed(text, CustomOp=CustomOp)["BbbCustomOp"]
    with constructing_for(platform("oot")):
        op = theirs()
    assert type(op) is mine and op() == "oot"


def test_002_custom_op() -> None:
    """An excerpt of vLLM's own class: ours can be called as that one."""
    theirs = executed(example("002_custom_op"), nn=nn)["CustomOp"]
    for name in ("register", "register_oot"):
        parameters = [inspect.signature(getattr(cls, name)).parameters for cls in (theirs, CustomOp, PluggableLayer)]
        described = [[(p.name, p.kind, p.default) for p in one.values()] for one in parameters]
        assert described[0] == described[1] == described[2]


# --- 003: custom logits processors. ---

TYPING = {"Any": Any, "Optional": Optional, "Union": Union, "Callable": Callable}


@pytest.fixture
def opt(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model at the document's name, the document's processor at its import paths."""
    copy_model(site / "facebook" / "opt-125m")
    monkeypatch.chdir(site)
    for module in ("your/module/path", "some/module"):
        path = site / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example("003_processor"))
    importlib.invalidate_caches()


def check_llm(model: LLM, kind: str = "DummyLogitsProcessor") -> None:
    """A row that asks for a token gets it, one that does not is left alone."""
    text = filled(example("003_generate"), ("(...,", "(temperature=0, max_tokens=3,"))
    with model:
        assert [processor.__name__ for processor in model.logits_processors] == [kind]
        (asking,) = executed(text, llm=model, SamplingParams=SamplingParams)["outputs_logitproc"]
        (other,) = model.generate("your prompt", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert asking.outputs[0].token_ids == [67] * 3 != other.outputs[0].token_ids


def check_async(engine: AsyncLLM) -> None:
    text = filled(
        example("003_generate_async"),
        ("SamplingParams(...,", "SamplingParams(temperature=0, max_tokens=3,"),
        ("    ...\n", "    answers.append(out.outputs[0].token_ids)\n"),
    )
    answers: list[list[int]] = []
    code = f"async def run():\n{textwrap.indent(text, '    ')}"
    try:
        asyncio.run(executed(code, engine=engine, SamplingParams=SamplingParams, answers=answers)["run"]())
    finally:
        engine.shutdown()
    assert answers[-1] == [67] * 3


def test_003_annotation() -> None:
    names = executed(example("003_annotation"), Union=Union, Callable=Callable, Tensor=Tensor)
    assert names["RequestLogitsProcessor"] == logits_processor.RequestLogitsProcessor


@pytest.mark.usefixtures("opt")
def test_003_wrapped() -> None:
    names = executed(example("003_wrapped"), SamplingParams=SamplingParams, torch=torch, **TYPING)
    kind = names["WrappedPerReqLogitsProcessor"]
    check_llm(LLM("facebook/opt-125m", logits_processors=[kind]), kind.__name__)


@pytest.mark.usefixtures("opt")
def test_003_path_llm() -> None:
    check_llm(executed(example("003_path_llm"), LLM=LLM)["llm"])


@pytest.mark.usefixtures("opt")
def test_003_path_async() -> None:
    names = executed(example("003_path_async"), AsyncEngineArgs=AsyncEngineArgs, AsyncLLM=AsyncLLM)
    check_async(names["async_llm"])


@pytest.mark.usefixtures("opt")
def test_003_entry_point(site: Path) -> None:
    group, line = example("003_entry_point").splitlines()
    name, path = re.fullmatch(r'(\w+) = "(.*)"', line).groups()  # type: ignore[union-attr]
    install(site, "dummy-package", "")
    entries = site / "dummy_package-0.5.dist-info" / "entry_points.txt"
    entries.write_text(f"[{group.split(chr(34))[1]}]\n{name} = {path}\n")
    plugins._scan.cache_clear()
    check_llm(LLM("facebook/opt-125m"))


@pytest.mark.usefixtures("opt")
def test_003_classes() -> None:
    body = example("003_processor").partition("class DummyLogitsProcessor(LogitsProcessor):\n")[2]
    text = filled(example("003_classes"), ("    # See DummyLogitsProcessor implementation above\n    ...\n", body))
    above = executed(example("003_processor"))
    names = executed(text, **above | {"LLM": LLM, "AsyncLLM": AsyncLLM, "AsyncEngineArgs": AsyncEngineArgs})
    assert names["DummyLogitsProcessor"] is not above["DummyLogitsProcessor"]
    check_llm(names["llm"])
    check_async(names["async_llm"])


# --- 004: quantization. ---


def test_004_forward() -> None:
    torch.manual_seed(0)
    layer = SimpleNamespace(kv_a_layernorm=RMSNorm(8), kv_b_proj=ColumnParallelLinear(8, 6, bias=False))
    weight = layer.kv_b_proj.weight
    nn.init.normal_(weight)
    x = torch.randn(5, 8)
    with constructing_for(CpuPlatform()), torch.no_grad():
        names = executed(textwrap.dedent(example("004_forward")), self=layer, kv_a=x)
        assert torch.equal(names["kv"], nn.functional.linear(layer.kv_a_layernorm(x), weight))
    assert names["kv"].shape == (5, 6)
