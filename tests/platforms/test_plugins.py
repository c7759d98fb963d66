"""Plugins: finding, allowing and loading them; and two real packages, installed as a user would, end to end.

The packages are in `tests/plugins/`: "acme" uses every part of the contract, "rival" is a second platform in its way.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from embedded import GREEDY, PROMPTS, open_llm, run, tokens
from plugin_packages import in_plugin_process, install, install_platform, pip_install

from llm import plugins
from llm.errors import LLMError, PluginError, ValidationError
from llm.platforms import CpuPlatform, Platform, select_platform
from llm.plugins import CONTRACT_VERSION, GENERAL_PLUGINS, PLATFORM_PLUGINS, load_class
from llm.runner.model_runner import ModelRunner
from llm.setup.extensions import kv_cache_specs, let_platform_update

COUNTING = "calls = []\ndef register(): calls.append(1)\n"


def test_each_is_called_once(site: Path) -> None:
    install(site, "made-up", COUNTING, general_plugins__one="register", general_plugins__two="register")
    for _ in range(3):
        plugins.load_general_plugins()
    assert len(sys.modules["made_up"].calls) == 2  # one for each entry point


@pytest.mark.parametrize(
    ("allowed", "calls"),
    [(None, 2), ("one", 1), ("one,two", 2), (" two , ", 1), ("", 0)],
)
def test_the_allow_list(site: Path, monkeypatch: pytest.MonkeyPatch, allowed: str | None, calls: int) -> None:
    install(site, "made-up", COUNTING, general_plugins__one="register", general_plugins__two="register")
    if allowed is not None:
        monkeypatch.setenv("LLM_PLUGINS", allowed)
    plugins.load_general_plugins()
    assert len(getattr(sys.modules.get("made_up"), "calls", [])) == calls


def test_a_name_on_the_allow_list_that_nobody_has(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "made-up", COUNTING, general_plugins__acme="register")
    monkeypatch.setenv("LLM_PLUGINS", "acne")
    with pytest.raises(ValidationError, match=r"LLM_PLUGINS names 'acne'.*Did you mean 'acme'") as error:
        plugins.load_general_plugins()
    assert error.value.parameter == "LLM_PLUGINS"


def test_entry_points_that_nothing_uses_are_told_once(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = "io_processor_plugins", "stat_logger_plugins", "general_plugin"
    install(site, "made-up", COUNTING, **{f"{group}__mine": "register" for group in groups})
    for _ in range(2):
        plugins.load_general_plugins()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and all("'mine' of made-up 0.5 is not used: its group is llm." in line for line in said)
    assert "Did you mean 'llm.general_plugins'?" in said[0]
    assert "convert data in your own code" in said[1] and "get_metrics" in said[2]
    assert "made_up" not in sys.modules


BROKEN = {
    "cannot be imported": "import no_such_module_anywhere\n",
    "failed": "def register(): raise RuntimeError('no such device')\n",
}
EXITS = {"cannot be imported": "raise SystemExit(3)\n", "failed": "def register(): raise SystemExit(3)\n"}


@pytest.mark.parametrize("problem", EXITS)
def test_a_plugin_that_exits_does_not_end_the_program(site: Path, problem: str) -> None:
    install(site, "made-up-3", EXITS[problem], general_plugins__leaves="register")
    with pytest.raises(PluginError, match=f"plugin 'leaves' of made-up-3 0.5 {problem}: SystemExit: 3;"):
        plugins.load_general_plugins()


@pytest.mark.parametrize("problem", BROKEN)
@pytest.mark.parametrize("group", [GENERAL_PLUGINS, PLATFORM_PLUGINS])
def test_a_broken_plugin_is_named_with_its_package(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str, group: str
) -> None:
    install(site, "made-up-2", BROKEN[problem], **{f"{group.removeprefix('llm.')}__broken": "register"})
    load = plugins.load_general_plugins if group == GENERAL_PLUGINS else select_platform
    for _ in range(2):  # it stays an error
        with pytest.raises(PluginError, match=f"plugin 'broken' of made-up-2 0.5 {problem}: .*LLM_PLUGIN_ERRORS=warn"):
            load()
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "warn")
    with caplog.at_level(logging.WARNING, logger="llm"):
        load()
    (record,) = caplog.records
    assert f"plugin 'broken' of made-up-2 0.5 {problem}" in record.getMessage()
    assert select_platform()[0].name == "cpu"


def test_a_malformed_setting_for_errors(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "made-up", BROKEN["failed"], general_plugins__broken="register")
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "Ignore")
    with pytest.raises(ValidationError, match=r"LLM_PLUGIN_ERRORS='Ignore' is not known; use one of RAISE, WARN"):
        plugins.load_general_plugins()


def test_a_broken_plugin_does_not_block_what_is_asked_for_by_name(site: Path) -> None:
    install(site, "made-up", BROKEN["failed"], platform_plugins__broken="register")
    assert select_platform("cpu")[0].name == "cpu"


@pytest.mark.parametrize("path", ["made_up.Gadget", "made_up:Gadget"])
def test_a_plugin_beats_the_built_in_platforms(site: Path, path: str) -> None:
    install_platform(site, "made-up", path)
    platform, reason = select_platform()
    assert (type(platform).__name__, platform.name) == ("Gadget", "made_up")
    assert reason == "plugin 'made_up' of made-up 0.5"
    assert select_platform("made_up")[0] is select_platform()[0] is platform
    assert sys.modules["made_up"].calls == [1]
    assert select_platform("cpu")[0].name == "cpu"
    assert plugins.plugin_of(type(platform)) == "made_up"
    assert plugins.plugin_of(CpuPlatform) is None


def test_a_plugin_without_its_device_is_passed_over(site: Path) -> None:
    install(site, "made-up", "def there(): return None\n", platform_plugins__gadget="there")
    assert select_platform()[0].name == "cpu"
    with pytest.raises(ValidationError, match=r"device='gadget' cannot be used: .*its device is not there"):
        select_platform("gadget")


def test_two_active_platforms_are_both_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_platform(site, "made-up-a")
    install_platform(site, "made-up-b")
    with pytest.raises(PluginError, match=r"'made_up_a' of made-up-a 0\.5 and plugin 'made_up_b' of made-up-b 0\.5"):
        select_platform()
    monkeypatch.setenv("LLM_PLATFORM", "made_up_b")
    assert select_platform()[0].name == "made_up_b"
    monkeypatch.delenv("LLM_PLATFORM")
    monkeypatch.setenv("LLM_PLUGINS", "made_up_a")
    assert select_platform()[0].name == "made_up_a"


@pytest.mark.parametrize(
    ("version", "said"),
    [("contract_version = 2", "was written for version 2"), ("contract_version = None", "says no contract_version")],
)
def test_the_contract_is_checked(site: Path, version: str, said: str) -> None:
    assert CONTRACT_VERSION == 1
    install_platform(site, "made-up", version=version)
    with pytest.raises(PluginError, match=f"plugin 'made_up' of made-up 0.5 {said}.*this release has version 1"):
        select_platform()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("made_up.NoPlatform", "does not derive from llm.platforms.interface.Platform"),
        ("made_up.Absent", "cannot be imported: AttributeError"),
        ("no_such_module.Gadget", "cannot be imported: ModuleNotFoundError"),
        ("Gadget", "must answer with a class path"),
        (3, "must answer with a class path"),
    ],
)
def test_a_class_path_that_leads_nowhere(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: Any, problem: str
) -> None:
    install_platform(site, "made-up", path)
    with pytest.raises(PluginError, match=f"plugin 'made_up' of made-up 0.5 .*{problem}"):
        select_platform()
    check_left_out(monkeypatch, caplog, problem)


def test_a_platform_that_fails_when_it_is_made(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = "contract_version = 1\n    def __init__(self): raise OSError('no driver')"
    install_platform(site, "made-up", version=failing)
    problem = "failed while it was made: OSError: no driver"
    with pytest.raises(PluginError, match=f"plugin 'made_up' of made-up 0.5 {problem}"):
        select_platform()
    check_left_out(monkeypatch, caplog, problem)


def check_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str) -> None:
    """LLM_PLUGIN_ERRORS=warn goes on without the platform, unless it was asked for by name."""
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "warn")
    with caplog.at_level(logging.WARNING, logger="llm"):
        assert select_platform()[0].name == "cpu"
    (record,) = caplog.records
    assert "plugin 'made_up' of made-up 0.5 " in record.getMessage() and problem in record.getMessage()
    with pytest.raises(PluginError, match=r"device='made_up' cannot be used: plugin 'made_up' of made-up .* is broken"):
        select_platform("made_up")


def test_the_base_of_a_class_path_is_checked() -> None:
    assert load_class("llm.runner.model_runner.ModelRunner", ModelRunner, "a test") is ModelRunner
    with pytest.raises(PluginError, match=r"a test names .* does not derive from llm\.runner\.model_runner"):
        load_class("llm.platforms.cpu.CpuPlatform", ModelRunner, "a test")


def test_hooks_that_answer_nonsense_are_refused() -> None:
    class Careless(CpuPlatform):
        def check_and_update_config(self, args: Any) -> Any:
            return None

        def update_kv_cache_specs(self, specs: Any) -> Any:
            return specs[1:]

    with pytest.raises(PluginError, match=r"Careless\.check_and_update_config must return the LLMArgs"):
        let_platform_update(Careless(), None)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"Careless\.update_kv_cache_specs must return one StateSpec for each of 1"):
        kv_cache_specs(Careless(), [None])  # type: ignore[list-item]
    assert issubclass(PluginError, LLMError)
    assert issubclass(Careless, Platform)


# --- Real packages. ---


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed acme and rival into."""
    target = tmp_path_factory.mktemp("site")
    pip_install(tmp_path_factory.mktemp("source"), target, "acme", "rival")
    return target


END_TO_END = """
import dataclasses, json, sys
from llm import LLM, SamplingParams
from llm.errors import ValidationError
prompts = json.loads(sys.argv[1])
def run(**kwargs):
    with LLM(max_model_len=64, **kwargs) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runner = llm._engine.runner
        int8 = [name for name, param in runner.model.named_parameters() if param.dtype.itemsize == 1]
        more = {"int8": len(int8), "steps": runner.steps, "placed": runner.placed, "config": repr(llm.config)}
        parts = [dataclasses.asdict(part) for part in llm.explain().parts]
        return {"tokens": [output.outputs[0].token_ids for output in outputs], "parts": parts, **more}
result = {
    "plain": run(kv_cache_dtype="float32"),
    "off": run(kv_cache_dtype="float32", compilation_config={"custom_ops": ["none"]}),
    "model": run(hf_overrides={"architectures": ["AcmeForCausalLM"]}),
    "int8": run(quantization="acme_int8"),
}
try:
    run(quantization="w8a8")
except ValidationError as error:
    result["refused"] = str(error)
from acme.kernels import AcmeBackend
from acme.layers import AcmeRowParallelLinear
from llm.platforms import current_platform
result["kernel_calls"] = AcmeBackend.calls
result["calls"] = AcmeRowParallelLinear.calls
result["device"] = current_platform.get_device_name()
result["loaded"] = "rival" in sys.modules
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def acme(installed: Path) -> dict[str, Any]:
    code = END_TO_END.replace("sys.argv[1]", repr(json.dumps(PROMPTS)))
    result = in_plugin_process(installed, code)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def ours() -> list[list[int]]:
    """The same prompts without plugins, in plain PyTorch."""
    with open_llm(kv_cache_dtype="float32", max_model_len=64, compilation_config={"custom_ops": ["none"]}) as llm:
        return tokens(run(llm, PROMPTS, GREEDY))


def test_the_same_tokens_on_acme(acme: dict[str, Any], ours: list[list[int]]) -> None:
    assert acme["plain"]["tokens"] == ours
    assert acme["off"]["tokens"] == ours


def found(run: dict[str, Any], kind: str) -> dict[str, tuple[str, str, str]]:
    return {
        part["name"]: (part["implementation"], part["runs"], part["reason"])
        for part in run["parts"]
        if part["kind"] == kind
    }


def test_explain_shows_every_replacement(acme: dict[str, Any]) -> None:
    operations = found(acme["plain"], "CustomOp")
    for name, cls in {
        "rms_norm": "AcmeRMSNorm",
        "silu_and_mul": "AcmeSiluAndMul",
        "rotary_embedding": "AcmeRotaryEmbedding",
    }.items():
        assert operations[name] == (cls, "forward_oot", f"replaced by plugin acme: {cls}; oot kernel")
    layers = found(acme["plain"], "PluggableLayer")
    cls = "AcmeRowParallelLinear"
    assert layers["row_parallel_linear"] == (cls, "forward", f"replaced by plugin acme: {cls}")
    assert found(acme["plain"], "attention")["Attention"] == ("AcmeAttention", "attend", "acme's layout")
    platform = ("AcmePlatform", "cpu", "plugin 'acme' of acme-llm 1.2.3")
    assert found(acme["plain"], "platform") == {"acme": platform}
    assert found(acme["plain"], "model runner")["model_runner"][0::2] == ("AcmeModelRunner", "plugin acme")
    assert found(acme["plain"], "model")["llama"][0::2] == ("LlamaForCausalLM", "in-tree")


def test_operations_of_a_plugin_can_be_turned_off(acme: dict[str, Any]) -> None:
    reason = "replaced by plugin acme: AcmeRMSNorm; disabled by none"
    assert found(acme["off"], "CustomOp")["rms_norm"] == ("AcmeRMSNorm", "forward_native", reason)


def test_the_parts_of_a_plugin_were_used(acme: dict[str, Any]) -> None:
    assert acme["device"] == "Acme One"
    assert acme["plain"]["steps"] >= 12  # the runner's own `forward`
    assert acme["plain"]["placed"] > 0
    assert acme["calls"] > 0  # the layer's
    assert acme["kernel_calls"] >= 3 * 12  # its argmax: once a step of the greedy runs
    assert "block_size               8  (set by platform acme)" in acme["plain"]["config"]
    # 4 layers, keys and values, 2 heads of 64 channels that are stored as 128, 4 bytes each, 8 tokens to a block
    assert f"({4 * 2 * 2 * 128 * 4 * 8:,} bytes each)" in acme["plain"]["config"]
    assert acme["loaded"] is False  # rival was not on the allow-list, so nothing of it was imported


def test_a_model_of_a_plugin(acme: dict[str, Any]) -> None:
    assert acme["model"]["tokens"] == [[7] * 12] * len(PROMPTS)
    assert found(acme["model"], "model")["llama"] == ("AcmeForCausalLM", "forward", "plugin acme")


def test_a_quantization_method_of_a_plugin(acme: dict[str, Any], ours: list[list[int]]) -> None:
    methods = found(acme["int8"], "quant method")
    assert methods["QKVParallelLinear"][:2] == ("AcmeInt8Linear", "ACME_INT8")
    assert (acme["plain"]["int8"], acme["int8"]["int8"]) == (0, 16)  # four linear layers in each of four blocks
    assert all(len(row) == 12 for row in acme["int8"]["tokens"])
    # Rounding to 8 bits moves few logits past each other: most first tokens stay.
    assert sum(row[0] == plain[0] for row, plain in zip(acme["int8"]["tokens"], ours, strict=True)) >= 2
    assert "quantization='w8a8' is not computed on acme; known: acme_int8" in acme["refused"]


def test_a_second_platform_is_a_conflict(installed: Path) -> None:
    code = "from llm import LLM\ntry:\n    LLM()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    result = in_plugin_process(installed, code, LLM_PLUGINS="acme,rival")
    assert result.stdout.startswith("PluginError only one platform plugin can be active"), result.stderr
    assert "plugin 'acme' of acme-llm 1.2.3 and plugin 'rival' of rival-llm 0.0.1" in result.stdout
