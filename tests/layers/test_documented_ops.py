"""What vLLM's documents on CustomOp and platform plugins say beside their examples (`tests/test_seed_examples.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from llm.config import MultiModalConfig
from llm.errors import ValidationError
from llm.layers.custom_op import constructing_for
from llm.model_executor.custom_op import CustomOp
from llm.model_executor.layers.mamba.abstract import MambaBase
from llm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from llm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from llm.model_executor.models.deepencoder import RelPosAttention
from llm.platforms.cpu import CpuPlatform
from llm.plugins import PLATFORM_PLUGINS_GROUP, load_plugins_by_group
from llm.utils.import_utils import resolve_obj_by_qualname


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    before = dict(CustomOp.op_registry), dict(CustomOp.op_registry_oot)
    yield
    for registry, entries in zip((CustomOp.op_registry, CustomOp.op_registry_oot), before, strict=True):
        registry.clear()
        registry.update(entries)


def test_what_is_inherited_from_the_base_can_be_called_by_hand() -> None:

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
    assert RelPosAttention(16).num_heads == 8  # vLLM's, where none are given
    assert CustomOp.op_registry["multi_head_latent_attention"] is MultiHeadLatentAttentionWrapper
