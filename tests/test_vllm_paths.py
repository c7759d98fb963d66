"""Doors: the paths that code for vLLM imports lead to what is defined elsewhere, and what is missing says so."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import llm
from llm.base.vllm_paths import MODULES, NAMES, PACKAGES, PATHS, stub

ROOT = Path(__file__).resolve().parent.parent
# Paths that type checkers read from a `.pyi` file: those that vLLM's documents name.
STUBS = (
    *("llm.model_executor.custom_op", "llm.model_executor.layers.attention"),
    *("llm.attention.layers.mm_encoder_attention", "llm.v1.sample.logits_processor"),
)
# Modules of the rooms under whose vLLM name people look for what is not here.
ROOMS = ("llm", "llm.config", "llm.inputs", "llm.outputs", "llm.platforms", "llm.plugins", "llm.sampling_params")


DOORS = sorted({*PATHS, *PACKAGES})


@pytest.mark.parametrize("name", DOORS)
def test_a_path_leads_somewhere(name: str) -> None:
    path = importlib.import_module(name)
    exported = path.__all__
    assert exported or name in PACKAGES, f"{name} exports nothing"
    values = [getattr(path, item) for item in exported]
    owners = {value.__module__ for value in values if isinstance(value, type | FunctionType)} - {"builtins"}
    assert not [owner for owner in owners if owner in DOORS or not owner.startswith("llm.")]


def test_every_error_is_in_llm_and_under_the_name_it_had() -> None:
    from llm import errors

    raised = [name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__]
    raised = [name for name in raised if isinstance(getattr(errors, name), type)]
    assert len(raised) > 15 and set(errors.__all__) == set(raised)
    assert all(getattr(llm, name) is getattr(errors, name) for name in raised) and set(raised) <= set(llm.__all__)


def stub_file(path: str) -> Path:
    return ROOT / f"{path.replace('.', '/')}.pyi"


def test_the_stubs_are_those_of_the_table() -> None:
    assert sorted((ROOT / "llm").rglob("*.pyi")) == sorted(map(stub_file, STUBS))
    for path in STUBS:
        assert stub_file(path).read_text("utf-8") == stub(path), f"write stub({path!r}) into the file"


def test_a_class_is_pickled_under_the_path_that_defines_it() -> None:
    from llm.logprobs import Logprob

    assert pickle.loads(pickle.dumps(Logprob(-1.0, 1, "a"))) == Logprob(-1.0, 1, "a")
    old = pickle.dumps(Logprob(-1.0, 1, "a"), protocol=0).replace(b"cllm.outputs", b"cllm.logprobs", 1)
    assert b"llm.logprobs" in old and pickle.loads(old) == Logprob(-1.0, 1, "a")


PLUGIN = """
from llm.model_executor.custom_op import CustomOp, PluggableLayer
from llm.model_executor.layers.activation import QuickGELU, SiluAndMul
from llm.model_executor.layers.attention import Attention, MMEncoderAttention
from llm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention as Same
from llm.model_executor.layers.conv import Conv3dLayer
from llm.model_executor.layers.fused_moe import FusedMoE, FusedMoEMethodBase, UnquantizedFusedMoEMethod
from llm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from llm.model_executor.layers.linear import ColumnParallelLinear, LinearMethodBase, UnquantizedLinearMethod
from llm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from llm.model_executor.layers.logits_processor import LogitsProcessor
from llm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from llm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from llm.model_executor.layers.mamba.short_conv import ShortConv
from llm.model_executor.layers.quantization import register_quantization_config
from llm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from llm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from llm.model_executor.layers.rotary_embedding import ApplyRotaryEmb, RotaryEmbedding
from llm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from llm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb as AlsoSame
from llm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from llm.v1.sample.logits_processor import LogitsProcessor as ChangesLogits
assert Same is MMEncoderAttention and AlsoSame is ApplyRotaryEmb and ChangesLogits is not LogitsProcessor
"""


def test_the_imports_of_a_plugin_in_a_fresh_interpreter() -> None:
    result = subprocess.run([sys.executable, "-c", PLUGIN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_paths_are_seen_by_a_type_checker(tmp_path: Path) -> None:
    """mypy finds every name, and refuses one that is missing although the module has a `__getattr__` at run time."""
    script = tmp_path / "plugin.py"
    script.write_text(f"{PLUGIN}from llm import EngineCore\nfrom llm.plugins import load_plugins_by_groups\n")
    # The options of pyproject.toml alone, so that the check of the whole tree finds the cache of this one.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(script)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # By the file's name: the cache may hold the same script in the folder of an earlier run.
    lines = [line for line in result.stdout.splitlines() if f"{script.name}:" in line]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    assert len(errors) == 2 and "EngineCore" in errors[0] and "load_plugins_by_groups" in errors[1], result.stdout


# --- What is missing. ---


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("from llm import EngineCore", "llm has no EngineCore; an LLM drives its engine"),
        ("from llm.v1.core.sched.scheduler import Scheduler", "there is no llm.v1.core; the scheduler"),
        ("from llm.entrypoints import openai", "llm.entrypoints has no openai; the endpoint is `python -m llm serve`"),
        ("import llm.entrypoints.openai.api_server", "there is no llm.entrypoints.openai; the endpoint is"),
        ("import llm.lora.layers", "there is no llm.lora.layers; adapters are enabled by"),
        ("from llm.distributed import init_distributed_environment", "tensor_parallel_size=\\) starts the ranks"),
        ("from llm.utils import make_async", "llm.AsyncLLM is the engine for asyncio"),
        ("from llm.v1.engine.core import EngineCore", "there is no llm.v1.engine.core; an LLM drives its engine"),
        ("from llm.sampling_params import GuidedDecodingParams", "StructuredOutputsParams"),
        ("from llm.model_executor.layers.fused_moe import FusedMoEConfig", "experts is an llm.layers.moe.FusedMoE"),
        ("from llm.model_executor.layers.fused_moe.layer import FusedMoE", "experts is an llm.layers.moe.FusedMoE"),
        ("from llm.model_executor.layers.activation import SituAndMul", "derive your own from .*CustomOp"),
        ("from llm.model_executor.layers.rotary_embedding import get_rope", "RotaryEmbedding with RopeParameters"),
    ],
)
def test_what_vllm_has_and_this_has_not_is_told_in_a_sentence(statement: str, said: str) -> None:
    with pytest.raises(ImportError, match=f"{said}.*\\.$") as error:
        exec(statement)
    assert "\n" not in str(error.value) and "Did you mean" not in str(error.value)


@pytest.mark.parametrize("name", [*ROOMS, *DOORS])
def test_an_unknown_name_is_an_ordinary_error(name: str) -> None:
    module = importlib.import_module(name)
    assert not hasattr(module, "no_such_name")
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from {name} import no_such_name")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'llm\.no_such_module'"):
        importlib.import_module("llm.no_such_module")


def answered(modules: list[ModuleType], name: str) -> list[str]:
    """The modules that have what the table says is missing."""
    return [module.__name__ for module in modules if name in {*vars(module), *getattr(module, "__all__", ())}]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_about_names_that_do_not_exist(name: str) -> None:
    modules = [importlib.import_module(module) for module in [*ROOMS, *DOORS] if module != "llm.config"]
    assert answered(modules, name) == []
    assert answered([llm], "LLM") == ["llm"]


@pytest.mark.parametrize("name", MODULES)
def test_the_table_is_about_modules_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"there is no {name}; "):
        importlib.import_module(name)
    parent, _, last = name.rpartition(".")
    folders = [Path(folder) for folder in importlib.import_module(parent).__path__]
    assert not any((folder / last).exists() or (folder / f"{last}.py").exists() for folder in folders)
