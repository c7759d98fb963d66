"""A model split over ranks is the whole model: every rank has its logits, and holds its share of heads and cache.

Ranks are threads of this process (`thread_ranks.py`), each with a model that loads its slice of one checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks
from tiny_models import TINY_MODELS, make_prompts, write_checkpoint

from llm.base.construction import constructing_for
from llm.config.compilation import CompilationConfig
from llm.forward import AttentionMetadata, ForwardBatch
from llm.kernels.select import backend_for
from llm.layers.attention import attention_backend
from llm.layers.parallel import SINGLE, TensorParallel
from llm.loading.checkpoint import Checkpoint
from llm.loading.loader import load_weights
from llm.models.config_reader import ConfigReader
from llm.models.decoder import AttentionConfig, Heads, NormConfig
from llm.models.decoder.part import BuildContext
from llm.models.interface import BuildOptions
from llm.models.registry import resolve_model_cls
from llm.platforms import select_platform
from llm.runner.kv_cache import allocate_kv_caches

pytestmark = pytest.mark.usefixtures("one_core")

BLOCK_SIZE = 4
TOLERANCE = 1e-4
# Row of the table -> what it needs to be split: sizes that the ranks divide.
EVEN = {"intermediate_size": 92, "num_attention_heads": 8, "num_key_value_heads": 2}
SPLIT: dict[str, dict[str, Any]] = {
    "llama": EVEN,
    "llama-biases-one-kv-head": {**EVEN, "num_key_value_heads": 1},
    "qwen3": EVEN,
    "olmo2": EVEN,
    "gemma2-caps": EVEN,
    "granite": EVEN,
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 92, "num_attention_heads": 8},
    "opt": {"ffn_dim": 92, "num_attention_heads": 8},
    "qwen2-moe": {**EVEN, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 28},
}


@dataclass
class Split:
    """A checkpoint, and the prompt it is compared on."""

    folder: Path
    prompt: list[int]

    def model(self, tp: TensorParallel) -> Any:
        raw = json.loads((self.folder / "config.json").read_text())
        cls = resolve_model_cls(raw["architectures"], raw["model_type"])
        config = cls.read_config(ConfigReader(raw))
        with constructing_for(select_platform("cpu")[0], CompilationConfig()):
            model = cls(config, BuildOptions(64, torch.float32, tp=tp))
        with Checkpoint.open(self.folder) as checkpoint:
            load_weights(model, checkpoint, show_progress=False)
        return model

    @torch.inference_mode()
    def logits(self, tp: TensorParallel) -> torch.Tensor:
        model = self.model(tp)
        specs = model.kv_cache_specs(model.config, torch.float32, tp)
        return model.compute_logits(model.forward(one_row(self.prompt, specs)))


def one_row(prompt: list[int], specs: list[Any]) -> ForwardBatch:
    """A prompt in one step, over caches of its own."""
    count = len(prompt)
    blocks = -(-count // BLOCK_SIZE)
    metadata = AttentionMetadata(
        block_table=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count) + BLOCK_SIZE,
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_size=BLOCK_SIZE,
        query_lens_list=[count],
        seq_lens_list=[count],
    )
    platform = select_platform("cpu")[0]

    def shapes(spec: Any, num_blocks: int, block_size: int) -> Any:
        return attention_backend(platform, spec.head_size).kv_cache_shapes(platform, spec, num_blocks, block_size)

    return ForwardBatch(
        input_ids=torch.tensor(prompt),
        positions=torch.arange(count),
        metadata=[metadata] * len(specs),
        states=allocate_kv_caches(specs, blocks + 1, BLOCK_SIZE, shapes, backend_for(platform)),
        logits_indices=torch.arange(count),
    )


@pytest.fixture(scope="module", params=SPLIT)
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Split:
    row = TINY_MODELS[request.param]
    row = replace(row, config={**row.config, **SPLIT[request.param]})
    folder = tmp_path_factory.mktemp("split")
    write_checkpoint(row, folder)
    return Split(folder, max(make_prompts(row), key=len))


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_logits_of_the_whole_model(split: Split, size: int) -> None:
    whole = split.logits(SINGLE)
    for logits in ThreadRanks(size).run(split.logits):
        assert logits.shape == whole.shape
        assert (logits - whole).abs().max() < TOLERANCE * whole.abs().max()


def test_a_rank_that_adds_nothing_is_missed(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with one rank's terms left out, the logits are others."""
    whole = split.logits(SINGLE)
    exchange = ThreadRanks.exchange

    def planted(self: ThreadRanks, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        return [part if other == 0 else torch.zeros_like(part) for other, part in enumerate(exchange(self, rank, x))]

    monkeypatch.setattr(ThreadRanks, "exchange", planted)
    for logits in ThreadRanks(2).run(split.logits):
        assert (logits - whole).abs().max() > 100 * TOLERANCE * whole.abs().max()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_cache_is_what_the_ranks_attention_layers_hold(split: Split, size: int) -> None:
    model = split.model(TensorParallel(size - 1, size))
    specs = model.kv_cache_specs(model.config, torch.bfloat16, TensorParallel(size - 1, size))
    attention = [layer.self_attn.attn for layer in model.model.layers]
    assert specs == [layer.kv_cache_spec(torch.bfloat16) for layer in attention]
    assert [layer.layer_index for layer in attention] == list(range(len(specs)))
    whole = model.kv_cache_specs(model.config, torch.bfloat16)
    for part, spec in zip(specs, whole, strict=True):
        assert part.num_kv_heads == max(1, spec.num_kv_heads // size)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_norm_of_each_head_is_that_of_the_ranks_heads(size: int) -> None:
    """Ranks that share a key head have its norm, whichever of them they are."""
    config = AttentionConfig(Heads(8, 2, 6), qk_norm=NormConfig(1e-5), qk_norm_over="own head")
    stored = {"q_norm": torch.randn(8, 6), "k_norm": torch.randn(2, 6)}
    for rank in range(size):
        context = BuildContext(BuildOptions(64, torch.float32, tp=TensorParallel(rank, size)), 48)
        with constructing_for(select_platform("cpu")[0], CompilationConfig()):
            attention: Any = config.build(context, "self_attn")
        for name, whole in stored.items():
            weight = getattr(attention, name).weight
            weight.weight_loader(weight, whole)
            first = rank * len(whole) // size
            assert torch.equal(weight, whole[first : first + max(1, len(whole) // size)])
