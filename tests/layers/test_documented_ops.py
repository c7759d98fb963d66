"""The examples of vLLM's documents on CustomOp and on platform plugins, with `llm` for `vllm` in the import lines and
something in the place of their dots: every form of registration there runs and is what `explain` and dispatch see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from llm.attention.layers.mm_encoder_attention import MMEncoderAttention as OlderPath
from llm.base.errors import ValidationError
from llm.config import MultiModalConfig
from llm.layers.custom_op import constructing_for
from llm.model_executor.custom_op import CustomOp
from llm.model_executor.layers.attention import MMEncoderAttention
from llm.model_executor.layers.mamba.abstract import MambaBase
from llm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from llm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from llm.model_executor.models.deepencoder import RelPosAttention
from llm.platforms import current_platform
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import Platform
from llm.plugins import PLATFORM_PLUGINS_GROUP, load_plugins_by_group
from llm.utils.import_utils import resolve_obj_by_qualname


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    before = dict(CustomOp.op_registry), dict(CustomOp.op_registry_oot)
    yield
    for registry, entries in zip((CustomOp.op_registry, CustomOp.op_registry_oot), before, strict=True):
        registry.clear()
        registry.update(entries)


class Acme(Platform):
    dispatch_key = "oot"


def custom_attention() -> type[Any]:
    class CustomMMEncoderAttention(MMEncoderAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        def forward_oot(self, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return -query

    return CustomMMEncoderAttention


def make(cls: Any) -> Any:
    with constructing_for(Acme()):
        return cls(num_heads=2, head_size=4)


def by_class_name() -> type[Any]:
    return CustomOp.register_oot("MMEncoderAttention")(custom_attention())


def all_at_one_place() -> type[Any]:
    custom = custom_attention()
    for op_name, op_cls in {"MMEncoderAttention": custom}.items():
        CustomOp.register_oot(_decorated_op_cls=op_cls, name=op_name)
    return custom


@pytest.mark.parametrize("register", [by_class_name, all_at_one_place])
def test_an_op_is_replaced_by_class_name(register: Any) -> None:
    assert OlderPath is MMEncoderAttention and issubclass(MMEncoderAttention, nn.Module)
    x = torch.randn(1, 3, 8)
    assert not torch.equal(make(MMEncoderAttention)(x, x, x), -x)
    custom = register()
    assert CustomOp.op_registry_oot["MMEncoderAttention"] is custom
    op = make(MMEncoderAttention)
    assert type(op) is custom and op.binding.method == "forward_oot"
    assert torch.equal(op(x, x, x), -x)


def test_an_op_is_replaced_by_the_name_it_was_registered_under() -> None:
    @CustomOp.register("Aaa")
    class AaaCustomOp(CustomOp):
        def forward_native(self) -> str:
            return "native"

    @CustomOp.register_oot("Aaa")
    class BbbCustomOp(AaaCustomOp):
        def __init__(self) -> None:
            super().__init__()

        def forward_oot(self) -> str:
            return "oot"

    with constructing_for(Acme()):
        op = AaaCustomOp()
    assert isinstance(op, BbbCustomOp) and op() == "oot"


def test_the_platform_describes_its_device() -> None:
    assert current_platform.get_device_name()
    current_platform.get_device_capability()


def test_the_tutorial_of_a_new_op_runs() -> None:
    """Each forward of its own, with its annotations; what is inherited from the base can be called by hand."""

    @CustomOp.register("tutorial_attn")
    class TutorialAttention(CustomOp):
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float | None = None,
            num_kv_heads: int | None = None,
            prefix: str = "",
            multimodal_config: MultiModalConfig | None = None,
        ) -> None:
            super().__init__()

        def forward_native(self, query: torch.Tensor, max_seqlen: torch.Tensor | None = None) -> torch.Tensor:
            return query + 1

        def forward_cpu(self, query: torch.Tensor, max_seqlen: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward_cpu(query) + 1

    assert CustomOp.op_registry["tutorial_attn"] is TutorialAttention
    x = torch.zeros(2)
    with constructing_for(CpuPlatform()):
        op = TutorialAttention(num_heads=2, head_size=4, multimodal_config=MultiModalConfig())
    assert op.binding.method == "forward_cpu" and op(x).tolist() == [2, 2]
    others = (op.forward_cuda, op.forward_hip, op.forward_xpu, op.forward_tpu, op.forward_oot)
    assert all(torch.equal(other(x), x + 1) for other in others)


def test_plugins_are_loaded_by_group_and_classes_by_path() -> None:
    assert load_plugins_by_group(PLATFORM_PLUGINS_GROUP) == {}
    with pytest.raises(ValidationError, match=r"group='vllm.platform_plugins' is none of llm.platform_plugins"):
        load_plugins_by_group("vllm.platform_plugins")
    assert resolve_obj_by_qualname("llm.platforms.cpu.CpuPlatform") is CpuPlatform


def test_paths_and_bases_of_the_list_of_operations() -> None:
    assert issubclass(MambaMixer2, MambaBase) and RelPosAttention.name == "rel_pos_attention"
    assert CustomOp.op_registry["multi_head_latent_attention"] is MultiHeadLatentAttentionWrapper
