"""The platform of a plugin beside others in one process: whose replacements apply where, and whose hook has failed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import GREEDY, PROMPTS, open_llm, run, tokens
from plugin_packages import in_plugin_process, install, pip_install

import llm.platforms
from llm import plugins
from llm.base import custom_op as replacement
from llm.base.construction import constructing_for
from llm.base.custom_op import CustomOp, op_registry_oot, platform_replacements
from llm.errors import LLMError, PluginError, ValidationError
from llm.layers.activation import SiluAndMul
from llm.platforms import CpuPlatform, Platform, PlatformEnum, select_platform


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    yield
    op_registry_oot.clear()
    platform_replacements.clear()


def built_for(device: str) -> str:
    """The class that `SiluAndMul()` makes for a model on this platform."""
    with constructing_for(select_platform(device)[0]):
        return type(SiluAndMul()).__name__


# --- Whose replacements apply where. ---

REPLACING = """
from llm.layers.custom_op import CustomOp
from llm.layers.activation import SiluAndMul

def register():
    @CustomOp.register_oot
    class Theirs(SiluAndMul):
        def forward_oot(self, x): return self.forward_native(x)

        def forward_native(self, x): return super().forward_native(x)
"""
GADGET = (
    """
from llm.platforms.cpu import CpuPlatform
class Gadget(CpuPlatform):
    contract_version = 1
    dispatch_key = "oot"
    {body}
def there(): return "made_up.Gadget"
"""
    + REPLACING
)


def install_gadget(site: Path, body: str, **entries: str) -> None:
    install(site, "made-up", GADGET.format(body=body), platform_plugins__gadget="there", **entries)


def test_a_platform_may_state_its_kind_as_vllm_does(site: Path) -> None:
    body = "from llm.platforms import PlatformEnum; _enum = PlatformEnum.OOT\n    dispatch_key = 'PrivateUse1'"
    install_gadget(site, body)
    platform = select_platform("gadget")[0]
    assert (platform.kind, platform.dispatch_key) == (PlatformEnum.OOT, "oot")
    assert platform.is_out_of_tree() and not platform.is_cpu() and CpuPlatform().is_cpu()
    import made_up

    made_up.register()
    with constructing_for(platform):
        assert SiluAndMul().binding.method == "forward_oot"


@pytest.mark.parametrize("hook", ["pre_register_and_update", "import_kernels"])
def test_what_a_platform_registers_applies_to_it_alone(site: Path, hook: str) -> None:
    # The class is another package's, so it is the running hook that tells whose it is.
    (site / "made_up_ops.py").write_text(REPLACING)
    install_gadget(site, f"def {hook}(self):\n        import made_up_ops; made_up_ops.register()")
    select_platform("gadget")[0].import_kernels()
    assert (built_for("cpu"), built_for("gadget"), type(SiluAndMul()).__name__) == (
        "SiluAndMul",
        "Theirs",
        "SiluAndMul",
    )


def test_a_module_of_its_package_applies_to_it_alone(site: Path) -> None:
    install_gadget(site, "pass")
    import made_up

    made_up.register()  # as when somebody imports the module before the platform is chosen
    assert (built_for("cpu"), built_for("gadget")) == ("SiluAndMul", "Theirs")


def test_what_a_general_plugin_registers_applies_everywhere(site: Path) -> None:
    install_gadget(site, "pass", general_plugins__more="register")
    plugins.load_general_plugins()
    assert (built_for("cpu"), built_for("gadget")) == ("Theirs", "Theirs")


def replace_from_here(base: type = SiluAndMul) -> type:
    class Mine(base):  # type: ignore[misc, valid-type]
        def forward_oot(self, x: Any) -> Any:
            return self.forward_native(x)

    return CustomOp.register_oot(Mine, name="SiluAndMul")


def test_what_a_user_registers_applies_everywhere(site: Path) -> None:
    install_gadget(site, "pass")
    replace_from_here()
    assert (built_for("cpu"), built_for("gadget")) == ("Mine", "Mine")


def test_a_users_replacement_beside_a_platforms(site: Path) -> None:
    """Either order is fine where only one applies; where both do, neither is dropped silently."""
    install_gadget(site, "def pre_register_and_update(self): register()")
    select_platform("gadget")
    replace_from_here()
    assert built_for("cpu") == "Mine"
    with pytest.raises(ValidationError, match=r"SiluAndMul is replaced twice on gadget: by .*Theirs.* and by .*Mine"):
        built_for("gadget")
    op_registry_oot.pop("SiluAndMul")
    assert (built_for("cpu"), built_for("gadget")) == ("SiluAndMul", "Theirs")


def test_the_same_platform_replaces_a_class_once(site: Path) -> None:
    install_gadget(site, "def import_kernels(self): register()")
    platform = select_platform("gadget")[0]
    platform.import_kernels()
    with pytest.raises(ValidationError, match=r"already registered: made_up.Theirs; platform_replacements\['gadget'\]"):
        platform.import_kernels()


TWO_PLATFORMS = """
import json, sys
from llm import LLM, SamplingParams
prompts = json.loads(sys.argv[1])
def run(device):
    with LLM(device=device, max_model_len=64, kv_cache_dtype="float32") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        rows = [output.outputs[0].token_ids for output in outputs]
        return {"tokens": rows, "classes": sorted({part.implementation for part in llm.explain().parts[3:]})}
print(json.dumps([run("auto"), run("cpu"), run("acme")]))
"""


def test_the_cpu_after_a_plugins_platform(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("site")
    pip_install(tmp_path_factory.mktemp("source"), target, "acme")
    result = in_plugin_process(target, TWO_PLATFORMS.replace("sys.argv[1]", repr(json.dumps(PROMPTS))))
    assert result.returncode == 0, result.stderr
    acme, cpu, again = json.loads(result.stdout)
    with open_llm(kv_cache_dtype="float32", max_model_len=64, speculative_config="auto") as llm:
        classes = sorted({part.implementation for part in llm.explain().parts[3:]})
        alone = {"tokens": tokens(run(llm, PROMPTS, GREEDY)), "classes": classes}
    assert cpu == alone
    assert acme == again
    assert {"AcmeRMSNorm", "AcmeRowParallelLinear"} <= set(acme["classes"])


# --- Whose hook has failed. ---

HOOKS = {
    "check_and_update_config": "args",
    "update_kv_cache_specs": "specs",
    "import_kernels": "",
    "supported_dtypes": "",
    "memory_free": "",
    "get_model_runner_cls": "",
    "get_attn_backend_cls": "head_size",
}


def install_failing(site: Path, hook: str, body: str = "raise OSError('no driver')") -> None:
    arguments = ", ".join(filter(None, ("self", HOOKS[hook])))
    install_gadget(site, f"def {hook}({arguments}): {body}")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_its_plugins(site: Path, hook: str) -> None:
    install_failing(site, hook)
    said = f"plugin 'gadget' of made-up 0.5: {hook} failed: OSError: no driver; repair or uninstall it"
    with pytest.raises(PluginError, match=said), open_llm():
        pass


@pytest.mark.parametrize("hook", HOOKS)
def test_a_platform_whose_hook_raises_can_be_left_out(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    install_failing(site, hook)
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "warn")
    with caplog.at_level(logging.WARNING, logger="llm"), open_llm() as llm:
        assert llm.explain().parts[0].name == "cpu"
    (record,) = caplog.records
    assert f"plugin 'gadget' of made-up 0.5: {hook} failed: OSError: no driver; it is left out" in record.getMessage()
    with pytest.raises(PluginError, match=r"device='gadget' cannot be used: plugin 'gadget' of made-up 0\.5 is broken"):
        select_platform("gadget")


def test_a_platform_that_is_asked_for_by_name_is_not_left_out(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_failing(site, "import_kernels")
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "warn")
    with (
        pytest.raises(PluginError, match=r"plugin 'gadget' of made-up 0\.5: import_kernels failed"),
        open_llm(device="gadget"),
    ):
        pass


@pytest.mark.parametrize(
    ("hook", "body"), [("check_and_update_config", "pass"), ("update_kv_cache_specs", "return []")]
)
def test_a_platform_that_answers_nonsense_can_be_left_out(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str, body: str
) -> None:
    install_failing(site, hook, body)
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "warn")
    with caplog.at_level(logging.WARNING, logger="llm"), open_llm() as llm:
        assert llm.explain().parts[0].name == "cpu"
    assert f"Gadget.{hook} must return" in caplog.text


def test_what_a_hook_refuses_is_the_users_to_mend(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValidationError is no failure: the platform computes, not with these arguments."""
    body = "from llm.errors import ValidationError; raise ValidationError('too long for a gadget.')"
    install_failing(site, "check_and_update_config", body)
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "warn")
    with pytest.raises(ValidationError, match=r"^too long for a gadget\.$"), open_llm():
        pass


# --- How often it is asked. ---


def test_a_plugin_is_asked_once_per_environment(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os\nasked = []\ndef there(): asked.append(1)\n"
    install(site, "made-up", code, platform_plugins__gadget="there")
    look: Callable[[], Platform] = lambda: llm.platforms.current_platform  # noqa: E731
    assert look() is look() is select_platform()[0]
    import made_up

    assert len(made_up.asked) == 1
    monkeypatch.setenv("MADE_UP_DEVICE", "1")  # what it looks at may be there
    assert look() is look()
    assert len(made_up.asked) == 2


def test_the_registries_are_empty_between_tests() -> None:
    assert not replacement.op_registry_oot and not replacement.platform_replacements


# --- A platform as the documents on vLLM's hardware plugins have it. ---

NPU = """
import torch
from llm.runner.model_runner import ModelRunner
from llm.layers.norm import RMSNorm
from llm.model_executor.custom_op import CustomOp
from llm.platforms import Platform, PlatformEnum

asked = {}
normed = []

class AscendRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        normed.append(1)
        return self.forward_native(x, residual)

def register_ascend_customop():
    CustomOp.register_oot(_decorated_op_cls=AscendRMSNorm, name="RMSNorm")

class NPUWorker(ModelRunner):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        register_ascend_customop()

class NPUPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "cpu"
    dispatch_key = "PrivateUse1"
    supported_quantization = []

    @property
    def supported_dtypes(self):
        return [torch.float32]

    @classmethod
    def get_device_name(cls, device_id=0):
        return "Ascend"

    @classmethod
    def get_device_capability(cls, device_id=0):
        return None

    @classmethod
    def check_and_update_config(cls, vllm_config):
        parallel_config = vllm_config.parallel_config
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = "made_up.NPUWorker"
        vllm_config.cache_config.block_size = 8
        vllm_config.compilation_config.custom_ops = ["all"]

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, head_size, dtype, kv_cache_dtype, block_size, use_mla, **more):
        asked.update(head_size=head_size, use_mla=use_mla)
        return "llm.layers.attention.PagedAttention"

def register():
    return "made_up.NPUPlatform"
"""


def test_the_documents_platform_runs(site: Path) -> None:
    install(site, "made-up", NPU, platform_plugins__ascend="register")
    import made_up

    with open_llm(max_model_len=64, kv_cache_dtype="float32") as expected:
        rows = tokens(run(expected, PROMPTS, GREEDY))
    with open_llm(device="ascend", max_model_len=64, kv_cache_dtype="float32") as llm:
        assert tokens(run(llm, PROMPTS, GREEDY)) == rows and made_up.normed
        parts = {part.name: part for part in llm.explain().parts}
        assert parts["rms_norm"].implementation == "AscendRMSNorm" and parts["rms_norm"].runs == "forward_oot"
        assert parts["model_runner"].implementation == "NPUWorker"
        assert llm.config.cache_config.block_size == 8
        assert llm.config.compilation_config.custom_ops == ("all",)
    assert made_up.asked["head_size"] and made_up.asked["use_mla"] is False
    platform = select_platform("ascend")[0]
    assert platform.get_device_name() == "Ascend" and platform.memory_total() == CpuPlatform().memory_total()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "vllm_config.cache_config.blocksize = 8",
            "sets 'blocksize', which is not in its config; there are block_size",
        ),
        ("vllm_config.parallel_config.world_size = 2", "several devices"),
        ("vllm_config.parallel_config.worker_cls = 'made_up.NPUPlatform'", "does not derive from .*ModelRunner"),
        ("vllm_config.scheduler_config.max_num_seqs = 0", "max_num_seqs"),
    ],
)
def test_what_a_hook_sets_is_used_or_refused(site: Path, line: str, said: str) -> None:
    code = NPU.replace("vllm_config.cache_config.block_size = 8", line)
    install(site, "made-up", code, platform_plugins__ascend="register")
    with pytest.raises(LLMError, match=said), open_llm(device="ascend", max_model_len=64):
        pass


def test_a_hook_reads_how_many_devices_there_are(site: Path) -> None:
    read = "assert (parallel_config.tensor_parallel_size, parallel_config.world_size) == (2, 2)"
    code = NPU.replace("vllm_config.cache_config.block_size = 8", read)
    install(site, "made-up", code, platform_plugins__ascend="register")
    with (
        pytest.raises(ValidationError, match="1 on ascend, whose model runner is its own"),
        open_llm(device="ascend", max_model_len=64, tensor_parallel_size=2),
    ):
        pass


def test_a_hook_that_needs_what_is_not_known_is_told(site: Path) -> None:
    code = NPU.replace("use_mla, **more", "use_mla, moon_phase")
    install(site, "made-up", code, platform_plugins__ascend="register")
    known = "asks for moon_phase; known are head_size"
    with pytest.raises(PluginError, match=known), open_llm(device="ascend", max_model_len=64):
        pass
