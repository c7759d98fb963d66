"""CustomOp and PluggableLayer: registration, replacement, dispatch, and the reason that each operation keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import llm.models.decoder  # noqa: F401  (registers the in-tree operations before `registries` looks)
from llm.base.construction import constructing_for
from llm.base.custom_op import CustomOp, PluggableLayer, check_registered, op_registry, op_registry_oot
from llm.config.compilation import CompilationConfig, CompilationMode, notes
from llm.config.engine import EngineConfig
from llm.errors import LLMError, ValidationError
from llm.explain import explain_model
from llm.layers.embedding import ParallelLMHead
from llm.platforms.interface import Platform
from llm.runner.inspection import what_varies


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    before = dict(op_registry), dict(op_registry_oot)
    yield
    for registry, entries in zip((op_registry, op_registry_oot), before, strict=True):
        registry.clear()
        registry.update(entries)


class Methods(CustomOp):
    """Answers with the name of the method that ran."""

    def forward_native(self) -> str:
        return "native"


def make(*methods: str, base: type = Methods, **attributes: Any) -> type:
    """A class that defines `methods`; each returns "Name.method" so that it shows whose code ran."""

    def method(name: str, label: str) -> Any:
        def run(self: Any) -> str:
            return label

        run.__name__ = name
        return run

    cls_name = attributes.pop("name", "Op")
    attributes = {"__module__": __name__, **attributes}
    members = {f"forward_{key}": method(f"forward_{key}", f"{cls_name}.{key}") for key in methods}
    return type(base)(cls_name, (base,), {**members, **attributes})


def platform(key: str) -> Platform:
    made = Platform()
    made.dispatch_key = key
    return made


def run_on(cls: Any, key: str, config: CompilationConfig | None = None, **kwargs: Any) -> tuple[str, str]:
    """(what ran, why) for an instance made for a platform."""
    with constructing_for(platform(key), config):
        op = cls(**kwargs)
    return op(), op.binding.reason


# --- Registration. ---


def test_a_registered_name_leads_to_the_class() -> None:
    cls = CustomOp.register("made_up")(make("native"))
    assert op_registry["made_up"] is CustomOp.op_registry["made_up"] is cls
    assert cls.name == "made_up"


@pytest.mark.parametrize("mechanism", [CustomOp, PluggableLayer])
def test_a_name_is_taken_once(mechanism: Any) -> None:
    mechanism.register("made_up")(type("First", (mechanism,), {}))
    with pytest.raises(ValidationError, match=r"'made_up' is already registered: .*First") as error:
        mechanism.register("made_up")(type("Second", (mechanism,), {}))
    assert (error.value.parameter, error.value.value) == ("name", "made_up")
    assert op_registry["made_up"].__name__ == "First"


def test_only_classes_of_the_mechanism_are_registered() -> None:
    for wrong in (lambda: None, torch.nn.Linear, type("Layer", (PluggableLayer,), {})):
        with pytest.raises(ValidationError, match="only classes derived from CustomOp"):
            CustomOp.register("made_up")(wrong)
    with pytest.raises(ValidationError, match="only classes derived from"):
        CustomOp.register_oot(name="made_up")(torch.nn.Linear)


IN_TREE = "in_tree_op"


def in_tree() -> Any:
    return CustomOp.register(IN_TREE)(make("native", "cpu", name="InTree"))


@pytest.mark.parametrize(
    "register",
    [
        lambda cls, base: CustomOp.register_oot(cls),
        lambda cls, base: CustomOp.register_oot()(cls),
        lambda cls, base: CustomOp.register_oot(name="InTree")(cls),
        lambda cls, base: CustomOp.register_oot("InTree")(cls),
        lambda cls, base: CustomOp.register_oot(IN_TREE)(cls),
        lambda cls, base: CustomOp.register_oot(_decorated_op_cls=cls, name="InTree"),
        lambda cls, base: PluggableLayer.register_oot("InTree")(cls),
        lambda cls, base: base.register_oot(cls),
        lambda cls, base: base.register_oot()(cls),
    ],
    ids=["bare", "parentheses", "name=", "class name", "op name", "call", "other base", "on class", "on class ()"],
)
def test_every_form_of_register_oot(register: Any) -> None:
    base = in_tree()
    replacement = make("oot", base=base, name="Mine")
    assert register(replacement, base) is replacement
    assert op_registry_oot == {"InTree": replacement}
    assert run_on(base, "cpu")[0] == "Mine.oot"
    assert type(base()) is replacement


def test_the_replacement_of_a_name_is_taken_once() -> None:
    base = in_tree()
    CustomOp.register_oot(make("oot", base=base, name="First"))
    with pytest.raises(ValidationError, match=r"'InTree' is already registered: .*First"):
        CustomOp.register_oot(make("oot", base=base, name="Second"))


def test_a_notebook_cell_can_be_run_again() -> None:
    base = in_tree()
    first, second = (make("oot", base=base, name="Mine", __module__="__main__") for _ in range(2))
    CustomOp.register_oot(first)
    CustomOp.register_oot(second)
    assert op_registry_oot["InTree"] is second
    with pytest.raises(ValidationError, match="already registered"):
        CustomOp.register_oot(make("oot", base=base, name="Other", __module__="__main__"))


def test_a_replacement_that_is_no_subclass_is_refused() -> None:
    base = in_tree()
    stranger = make("oot", name="Stranger")
    for register in (CustomOp.register_oot(name="InTree"), CustomOp.register_oot(IN_TREE), base.register_oot):
        with pytest.raises(ValidationError, match="Stranger cannot replace InTree: it does not derive from it"):
            register(stranger)
    op_registry_oot["InTree"] = stranger  # past the decorator
    with pytest.raises(LLMError, match="Stranger cannot replace InTree"):
        base()


def test_what_is_replaced_must_be_clear() -> None:
    between = make("native", base=in_tree(), name="Between")
    with pytest.raises(ValidationError, match=r"base Between is not registered.*name="):
        CustomOp.register_oot(make("oot", base=between, name="Mine"))
    mine = CustomOp.register_oot(name="Between")(make("oot", base=between, name="Mine"))
    assert type(between()) is mine


def test_subclasses_of_the_replaced_class_stand_alone() -> None:
    base = in_tree()
    CustomOp.register_oot(make("oot", base=base, name="Mine"))
    assert run_on(make("cpu", "native", base=base, name="Sub"), "cpu")[0] == "Sub.cpu"


def test_the_replacement_can_be_made_by_its_own_name() -> None:
    base = in_tree()
    mine = CustomOp.register_oot(name="InTree")(make("oot", base=base, name="InTree"))
    assert type(mine()) is type(base()) is mine


# --- Dispatch. ---

ALL = ("native", "cpu", "cuda", "hip", "xpu", "tpu", "oot")


@pytest.mark.parametrize("key", ALL)
def test_the_platforms_method_is_bound(key: str) -> None:
    ran, why = run_on(make(*ALL), key)
    assert ran == f"Op.{key}"
    assert why == ("native" if key == "native" else f"{key} kernel")


@pytest.mark.parametrize("key", ["cpu", "cuda", "hip", "xpu", "tpu", "oot"])
def test_without_a_kernel_native_is_bound(key: str) -> None:
    ran, why = run_on(make("native"), key)
    assert ran == "Op.native"
    assert why == {"hip": "no forward_hip, no forward_cuda, native"}.get(key, f"no forward_{key}, native")


def test_hip_falls_back_to_cuda() -> None:
    assert run_on(make("native", "cuda"), "hip") == ("Op.cuda", "no forward_hip, cuda kernel")


def test_an_operation_made_by_hand_is_native() -> None:
    op = make(*ALL)()
    assert (op(), op.binding.reason) == ("Op.native", "made outside of an LLM, native")


def test_an_unknown_dispatch_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="dispatch_key 'gpu'; use one of cpu, cuda"):
        run_on(make("native"), "gpu")


def test_an_operation_without_native_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Op has no forward_native"):
        run_on(type("Op", (CustomOp,), {}), "cpu")


def test_the_method_is_chosen_once() -> None:
    with constructing_for(platform("cpu")):
        op = make("native", "cpu")()
    with constructing_for(platform("cpu"), CompilationConfig(custom_ops=("none",))):
        assert op() == "Op.cpu"


def test_the_context_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), constructing_for(platform("cpu")):
        raise ZeroDivisionError
    assert make("native", "cpu")()() == "Op.native"


def test_an_inherited_kernel_never_hides_a_newer_definition() -> None:
    parent = make("native", "cpu", name="Parent")
    ran, why = run_on(make("native", base=parent, name="Child"), "cpu")
    assert ran == "Child.native"
    assert why == "forward_cpu is Parent's and Child has a forward_native of its own, native"
    assert run_on(make(base=parent, name="Child"), "cpu")[0] == "Parent.cpu"


def test_an_operation_may_decline_its_kernel() -> None:
    class Picky(Methods):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width  # set after super().__init__(), and seen by `declines`

        def forward_cpu(self) -> str:
            return "cpu"

        def declines(self, method: str) -> str | None:
            return f"{method} needs a multiple of 8" if self.width % 8 else None

    assert run_on(Picky, "cpu", width=8) == ("cpu", "cpu kernel")
    assert run_on(Picky, "cpu", width=9) == ("native", "forward_cpu needs a multiple of 8, native")
    assert run_on(Picky, "cuda", width=9) == ("native", "no forward_cuda, native")


@pytest.mark.parametrize("key", ["cpu", "oot"])
@pytest.mark.parametrize("method", ["forward_cpu", "forward_oot"])
def test_a_replacement_may_decline_its_kernel_too(key: str, method: str) -> None:
    base = CustomOp.register(IN_TREE)(make(*ALL, name="InTree"))
    said = {"declines": lambda self, asked: f"{asked} is not for this width" if self.is_odd else None}
    for is_odd in (False, True):
        mine = make(method.removeprefix("forward_"), "native", base=base, name="Mine", is_odd=is_odd, **said)
        with registered(mine):
            ran, why = run_on(base, key)
        runs = method == "forward_oot" or key == "cpu"
        assert ran == (f"Mine.{method.removeprefix('forward_')}" if runs and not is_odd else "Mine.native")
        assert ("is not for this width, native" in why) == (runs and is_odd)


@contextmanager
def registered(replacement: type) -> Iterator[None]:
    before = dict(op_registry_oot)
    CustomOp.register_oot(replacement)
    yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


def test_an_operation_may_be_abstract() -> None:
    class Half(Methods, ABC):
        @abstractmethod
        def part(self) -> None: ...

    with pytest.raises(TypeError, match="part"):
        Half()


# --- Replacements: what is bound, and that inherited code never hides theirs. ---


@pytest.mark.parametrize(
    ("key", "own", "expected"),
    [
        ("oot", ("oot", "cpu", "native"), "Mine.oot"),
        ("cpu", ("oot", "cpu", "native"), "Mine.oot"),
        ("cpu", ("cpu", "native"), "Mine.cpu"),
        ("cpu", ("native",), "Mine.native"),  # the in-tree forward_cpu is inherited and not bound
        ("oot", ("native",), "Mine.native"),
        ("hip", ("cuda",), "Mine.cuda"),
        ("native", ("oot",), "Mine.oot"),
    ],
)
def test_a_replacements_own_method_is_bound(key: str, own: tuple[str, ...], expected: str) -> None:
    base = CustomOp.register(IN_TREE)(make(*ALL, name="InTree"))
    CustomOp.register_oot(make(*own, base=base, name="Mine"))
    ran, why = run_on(base, key)
    assert ran == expected
    assert why.startswith(f"replaced from {__name__}: Mine; ")


@pytest.mark.parametrize(("key", "own"), [("cpu", ()), ("cpu", ("cuda",)), ("oot", ("cpu",))])
def test_a_replacement_that_overrides_nothing_is_refused(key: str, own: tuple[str, ...]) -> None:
    base = CustomOp.register(IN_TREE)(make(*ALL, name="InTree"))
    CustomOp.register_oot(make(*own, base=base, name="Mine"))
    with pytest.raises(ValidationError, match="Mine replaces InTree and overrides none of forward_oot"):
        run_on(base, key)


def test_a_replacement_may_inherit_its_method_from_its_own_package() -> None:
    base = in_tree()
    middle = make("oot", base=base, name="Middle")
    CustomOp.register_oot(name="InTree")(make(base=middle, name="Mine"))
    assert run_on(base, "cpu")[0] == "Middle.oot"


def test_a_replacement_is_governed_by_the_registered_name() -> None:
    base = in_tree()
    CustomOp.register_oot(make("oot", base=base, name="Mine"))
    ran, why = run_on(base, "cpu", CompilationConfig(custom_ops=(f"-{IN_TREE}",)))
    assert ran == "InTree.native"
    assert why == f"replaced from {__name__}: Mine; disabled by -{IN_TREE}"


def test_a_pluggable_layer_is_replaced_and_never_dispatched() -> None:
    @PluggableLayer.register("made_up_layer")
    class Layer(PluggableLayer):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def forward(self) -> str:
            return f"in-tree {self.size}"

    assert Layer(3)() == "in-tree 3"

    @Layer.register_oot
    class Mine(Layer):
        def forward(self) -> str:
            return f"mine {self.size}"

    with constructing_for(platform("cpu"), CompilationConfig(custom_ops=("none",))):
        assert Layer(3)() == "mine 3"


def layer_to_replace() -> Any:
    @PluggableLayer.register("made_up_layer")
    class Layer(PluggableLayer):
        def forward(self) -> str:
            return "in-tree"

    return Layer


def test_a_layers_forward_oot_is_what_runs() -> None:
    """As where the documents have these layers as CustomOps."""
    layer = layer_to_replace()

    @CustomOp.register_oot("Layer")
    class Mine(layer):  # type: ignore[misc, valid-type]
        def forward_oot(self) -> str:
            return "oot"

    [part] = explain_model(layer(), EngineConfig(None, None, None, "cpu", False)).parts  # type: ignore[arg-type]
    assert layer()() == "oot" and (part.implementation, part.runs) == ("Mine", "forward_oot")


def test_a_layers_own_forward_runs_before_its_forward_oot() -> None:
    layer = layer_to_replace()
    members = {"forward": lambda self: "mine", "forward_oot": lambda self: "oot"}
    layer.register_oot(type("Mine", (layer,), members))
    assert layer()() == "mine"


def test_a_method_of_a_layer_that_nothing_calls_is_refused() -> None:
    layer = layer_to_replace()
    with pytest.raises(ValidationError, match=r"Mine has a forward_cpu that would never run: Layer is a Pluggable"):
        layer.register_oot(type("Mine", (layer,), {"forward_cpu": lambda self: ""}))
    with pytest.raises(ValidationError, match=r"nothing calls the forward of ParallelLMHead; override logits"):
        PluggableLayer.register_oot("ParallelLMHead")(type("Head", (ParallelLMHead,), {"forward_oot": lambda self: ""}))
    quiet = type("Quiet", (layer,), {"weight_loader": lambda self: ""})
    assert layer.register_oot(quiet) is quiet and layer()() == "in-tree"


def test_a_subclass_may_choose_its_method() -> None:
    class Chooser(make("native", "cpu", "oot")):  # type: ignore[misc]
        def dispatch_forward(self, compile_native: bool = True) -> Any:
            return self.forward_oot if compile_native else super().dispatch_forward(compile_native)

    assert run_on(Chooser, "cpu") == ("Op.oot", "chosen by Chooser.dispatch_forward")
    assert run_on(Chooser, "cpu", compile_native=False)[0] == "Op.cpu"
    with constructing_for(platform("cpu")):
        assert what_varies(Chooser()) == "Chooser chooses its method itself"


# --- custom_ops. ---


@pytest.mark.parametrize(
    ("custom_ops", "rest", "is_on", "item"),
    [
        ((), {}, True, "all, the default"),
        (["all"], {}, True, "all"),
        (["none"], {}, False, "none"),
        (["none", "+made_up"], {}, True, "+made_up"),
        (["+made_up", "none"], {}, True, "+made_up"),
        (["-made_up"], {}, False, "-made_up"),
        (["all", "-made_up"], {}, False, "-made_up"),
        (["+other"], {}, True, "all, the default"),
        ("none, +made_up,+other", {}, True, "+made_up"),
        (["all,-made_up"], {}, False, "-made_up"),
        ((), {"mode": 3}, False, "none, the default"),
        (["+made_up"], {"mode": 3}, True, "+made_up"),
        (["all"], {"mode": 3}, True, "all"),
        ((), {"mode": 3, "backend": "eager"}, True, "all, the default"),
        ((), {"mode": 0}, True, "all, the default"),
    ],
)
def test_who_is_on(custom_ops: Any, rest: dict[str, Any], is_on: bool, item: str) -> None:
    config = CompilationConfig.of({"custom_ops": custom_ops, **rest})
    assert config.judge("made_up") == (is_on, item)
    cls = CustomOp.register("made_up")(make("native", "cpu"))
    with constructing_for(platform("cpu"), config):
        assert cls.enabled() is is_on
        assert CustomOp.default_on() is (config.base_mode == "all")
        binding = cls(compile_native=False).binding
    assert binding.reason == ("cpu kernel" if is_on else f"disabled by {item}")
    assert binding.method == ("forward_cpu" if is_on else "forward_native")


@pytest.mark.parametrize(
    ("custom_ops", "value"),
    [
        (["all", "none"], ["all", "none"]),
        ("all,all", ["all", "all"]),
        (["+a", "-a"], ["+a", "-a"]),
        ("none,+a,-a", ["none", "+a", "-a"]),
        (["rms_norm"], "rms_norm"),
        (["+"], "+"),
        (["all,"], ""),
        ([""], ""),
        (["+a b"], "+a b"),
        (["++a"], "++a"),
        (["ALL"], "ALL"),
        ([None], None),
        ([["all"]], ["all"]),
        (3, 3),
        ({"all": True}, {"all": True}),
    ],
)
def test_malformed_and_contradictory_custom_ops(custom_ops: Any, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        CompilationConfig.of({"custom_ops": custom_ops})
    assert (error.value.parameter, error.value.value) == ("custom_ops", value)


@pytest.mark.parametrize(
    ("given", "mode"),
    [(None, 0), (0, 0), (3, 3), ("3", 3), ("none", 0), ("VLLM_COMPILE", 3), ({}, 0), ({"mode": None}, 0)],
)
def test_the_forms_of_a_config(given: Any, mode: int) -> None:
    config = CompilationConfig.of(given)
    assert config.mode is CompilationMode(mode)
    assert CompilationConfig.of(config) == config


def test_json_is_a_form_too() -> None:
    config = CompilationConfig.of('{"custom_ops": ["none", "+rms_norm"], "cudagraph_mode": "NONE"}')
    assert config == CompilationConfig(custom_ops=("none", "+rms_norm"))


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        (True, "compilation_config"),
        (3.0, "compilation_config"),
        (["none"], "compilation_config"),
        ("{nonsense", "compilation_config"),
        ({"custom_op": []}, "compilation_config"),
        (4, "mode"),
        ("fast", "mode"),
        ({"mode": True}, "mode"),
        ({"backend": "made_up"}, "backend"),
        ({"backend": 3}, "backend"),
    ],
)
def test_a_wrong_config_names_the_key(given: Any, parameter: str) -> None:
    with pytest.raises(ValidationError) as error:
        CompilationConfig.of(given)
    assert error.value.parameter == parameter


def test_an_unknown_key_lists_near_ones() -> None:
    with pytest.raises(ValidationError, match=r"no key 'custom_op'.*Did you mean 'custom_ops'.*mode, backend"):
        CompilationConfig.of({"custom_op": []})


def test_what_became_of_keys_without_effect() -> None:
    given = {"custom_ops": ["none"], "cudagraph_mode": "NONE", "cache_dir": "x"}
    assert [note.split(" ")[1] for note in notes(given)] == ["cudagraph_mode", "cache_dir"]
    assert notes(None) == notes(3) == []


def test_enforce_enable_beats_the_config() -> None:
    config = CompilationConfig(custom_ops=("none",))
    cls = make("native", "cpu")
    assert run_on(cls, "cpu", config)[0] == "Op.native"
    assert run_on(cls, "cpu", config, enforce_enable=True) == ("Op.cpu", "enforced; cpu kernel")
    assert run_on(cls, "cpu", enforce_enable=True) == ("Op.cpu", "cpu kernel")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rms_nrm", "Did you mean 'rms_norm'"),
        ("RMSNorm", "Did you mean 'rms_norm'"),
        ("zzz", "no operation is registered as 'zzz'"),
        ("made_up_layer", "is a PluggableLayer"),
    ],
)
def test_a_name_that_is_no_operation_is_refused(name: str, hint: str) -> None:
    PluggableLayer.register("made_up_layer")(type("Layer", (PluggableLayer,), {}))
    check_registered(CompilationConfig(custom_ops=("none", "+rms_norm")))
    with pytest.raises(ValidationError, match=hint) as error:
        check_registered(CompilationConfig(custom_ops=(f"-{name}",)))
    assert (error.value.parameter, error.value.value) == ("custom_ops", name)


# --- Compiling what is off. ---


class Doubling(CustomOp):
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.mark.parametrize(
    ("config", "compile_native", "compiled"),
    [
        (CompilationConfig(CompilationMode.VLLM_COMPILE), True, True),
        (CompilationConfig(CompilationMode.STOCK_TORCH_COMPILE), True, True),
        (CompilationConfig(CompilationMode.VLLM_COMPILE), False, False),
        (CompilationConfig(CompilationMode.VLLM_COMPILE, custom_ops=("all",)), True, False),
        (CompilationConfig(CompilationMode.VLLM_COMPILE, "eager", ("none",)), True, False),
        (CompilationConfig(custom_ops=("none",)), True, False),
    ],
)
def test_what_is_off_is_compiled_when_asked(
    monkeypatch: pytest.MonkeyPatch, config: CompilationConfig, compile_native: bool, compiled: bool
) -> None:
    calls: list[dict[str, Any]] = []

    def fake(method: Any, **options: Any) -> Any:
        calls.append(options)
        return lambda x: method(x) + 1

    monkeypatch.setattr(torch, "compile", fake)
    with constructing_for(platform("cpu"), config):
        op = Doubling(compile_native=compile_native)
    assert calls == [{"dynamic": True, "backend": "inductor"}] * compiled
    assert op.binding.compiled is compiled
    assert op.binding.reason.endswith("compiled by inductor") is compiled
    assert op(torch.ones(2)).tolist() == [3.0 if compiled else 2.0] * 2
