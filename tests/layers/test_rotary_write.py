"""Rotary embedding and the write into the cache in one kernel: the bits of the two, and only where both are ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import ISAS, has_kernels, kernel_set, needs_compiler
from pages import normal
from tiny_models import TINY_MODELS, make_prompts, one_thread, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.base.construction import constructing_for
from llm.bench.profile import profile
from llm.config.compilation import CompilationConfig
from llm.forward import AttentionMetadata, ForwardBatch, KVCacheSpec
from llm.kernels.select import REFERENCE, KernelSet
from llm.layers.attention import Attention
from llm.layers.attention import rotary as fusion
from llm.layers.attention.backend import PagedAttention
from llm.layers.rotary import RopeParameters, RotaryEmbedding
from llm.platforms.cpu import CpuPlatform

pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]
LENGTH, SLOTS = 50, 96


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# The kernel.


@dataclass(frozen=True)
class Tokens:
    """Tokens as a layer has them: query, key and value are views of one product."""

    count: int = 5
    heads: int = 3
    kv_heads: int = 2
    head_size: int = 10
    rotated: int = 10
    is_neox_style: bool = True
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Positions, query, key, value, table, slots."""
        generator = torch.Generator().manual_seed(self.seed)
        widths = [self.heads * self.head_size, *[self.kv_heads * self.head_size] * 2, 3]
        query, key, value, _ = normal(self.seed, self.count, sum(widths)).split(widths, dim=-1)
        positions = torch.randint(LENGTH, (self.count,), generator=generator)
        slots = torch.randperm(SLOTS, generator=generator)[: self.count]
        return positions, query, key, value, normal(self.seed + 1, LENGTH, self.rotated), slots

    def caches(self, kernels: KernelSet) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = kernels.op("kv_cache_shapes")(KVCacheSpec(self.kv_heads, self.head_size, self.dtype), SLOTS // 16, 16)
        keys, values = (torch.full(shape, 7, dtype=self.dtype) for shape in shapes)
        return keys, values

    def fused(self, kernels: KernelSet) -> tuple[torch.Tensor, ...]:
        *before, slots = self.inputs()
        caches = self.caches(kernels)
        query = kernels.op("rotary_write_kv")(*before, self.head_size, self.is_neox_style, *caches, slots)
        return query, *caches

    def apart(self, kernels: KernelSet) -> tuple[torch.Tensor, ...]:
        positions, query, key, value, table, slots = self.inputs()
        caches = self.caches(kernels)
        query, key = kernels.op("rotary_embedding")(positions, query, key, table, self.head_size, self.is_neox_style)
        heads = (self.count, self.kv_heads, self.head_size)
        kernels.op("write_kv_cache")(key.view(heads), value.view(heads), *caches, slots)
        return query, *caches


def same_bits(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def by_slot(caches: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [slots, kv_heads, head_size] of the kernels' layout."""
    keys, values = caches
    return keys.permute(0, 3, 1, 2).flatten(0, 1)[:SLOTS], values.transpose(1, 2).flatten(0, 1)[:SLOTS]


@st.composite
def some_tokens(draw: st.DrawFn) -> Tokens:
    head_size = draw(st.sampled_from([2, 10, 32, 64, 80, 128]))
    return Tokens(
        count=draw(st.integers(0, 70)),
        heads=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 3)),
        head_size=head_size,
        rotated=draw(st.sampled_from([head_size, head_size // 4 * 2, 0])),
        is_neox_style=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=60)
@given(tokens=some_tokens())
def test_it_is_the_two_operations_and_its_twin_bit_for_bit(tokens: Tokens) -> None:
    query, *of_twin = tokens.fused(REFERENCE)
    for isa in ISAS:
        fused = tokens.fused(kernel_set(isa))
        assert same_bits(fused, tokens.apart(kernel_set(isa)))
        assert torch.equal(fused[0], query)
        # The twin's caches are [kv_heads, slots, head_size].
        assert same_bits(by_slot(fused[1:]), tuple(cache.transpose(0, 1) for cache in of_twin))


def test_threads_change_no_bit() -> None:
    tokens = Tokens(count=90, heads=14, kv_heads=2, head_size=64, rotated=64)
    alone = tokens.fused(kernel_set(ISAS[-1]))
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert same_bits(tokens.fused(kernel_set(ISAS[-1])), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "change",
    [{"rotated": 8}, {"is_neox_style": False}, {"seed": 1}, {"dtype": torch.float16}, {"kv_heads": 1}],
    ids=str,
)
def test_the_comparison_tells_tokens_apart(change: dict[str, Any]) -> None:
    """The negative control, with the unit in the last place of one stored key beside it."""
    kernels = kernel_set(ISAS[-1])
    assert not same_bits(Tokens().fused(kernels), replace(Tokens(), **change).apart(kernels))
    query, keys, values = Tokens().fused(kernels)
    keys.view(torch.int16).view(-1)[3] ^= 1
    assert not same_bits((query, keys, values), Tokens().apart(kernels))


@pytest.mark.parametrize(
    ("wrong", "index", "sentence"),
    [
        ("positions", -1, "positions[3] is -1, the rotary table has 50"),
        ("positions", LENGTH, "positions[3] is 50, the rotary table has 50"),
        ("slots", -1, "slot_mapping[3] is -1, the cache has 96 slots"),
        ("slots", SLOTS, "slot_mapping[3] is 96, the cache has 96 slots"),
    ],
)
def test_nothing_is_written_when_a_token_is_refused(wrong: str, index: int, sentence: str) -> None:
    tokens = Tokens()
    for isa in ISAS:
        kernels = kernel_set(isa)
        positions, query, key, value, table, slots = tokens.inputs()
        (positions if wrong == "positions" else slots)[3] = index
        keys, values = tokens.caches(kernels)
        with pytest.raises(IndexError) as refused:
            kernels.op("rotary_write_kv")(positions, query, key, value, table, 10, True, keys, values, slots)
        assert str(refused.value) == sentence
        assert (keys == 7).all() and (values == 7).all()


@pytest.mark.parametrize("cut", ["positions", "key", "value", "slots", "table"])
def test_shapes_that_do_not_fit_are_refused(cut: str) -> None:
    kernels = kernel_set(ISAS[-1])
    inputs = dict(zip(("positions", "query", "key", "value", "table", "slots"), Tokens().inputs(), strict=True))
    inputs[cut] = torch.cat((inputs[cut],) * 2, dim=-1)
    *before, slots = inputs.values()
    with pytest.raises(ValueError, match=r"do not fit|as many positions|channels"):
        kernels.op("rotary_write_kv")(*before, 10, True, *Tokens().caches(kernels), slots)


# The layers.


class Layers:
    """A rotary embedding and an attention layer of a CPU, and a step of one row of five tokens."""

    def __init__(self, custom_ops: tuple[str, ...] = (), rope: RopeParameters | None = None) -> None:
        with constructing_for(CpuPlatform(), CompilationConfig(custom_ops=custom_ops)):
            self.rotary = RotaryEmbedding(10, LENGTH, rope or RopeParameters())
            self.attention = Attention(3, 1, 10, layer_index=0, scale=0.3)
        self.inputs = normal(0, 5, 50).split([30, 10, 10], dim=-1)
        self.positions = torch.arange(5)

    def batch(self) -> ForwardBatch:
        shapes = PagedAttention.kv_cache_shapes(CpuPlatform(), KVCacheSpec(1, 10, torch.float32), 2, 16)
        metadata = AttentionMetadata(
            block_table=torch.tensor([[1]], dtype=torch.int32),
            slot_mapping=torch.arange(16, 21),
            query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
            seq_lens=torch.tensor([5], dtype=torch.int32),
            block_size=16,
            query_lens_list=[5],
            seq_lens_list=[5],
        )
        caches = tuple(torch.zeros(shape) for shape in shapes)
        return ForwardBatch(torch.arange(5), self.positions, [metadata], [caches], torch.tensor([4]))  # type: ignore[list-item]

    def run(self) -> torch.Tensor:
        return fusion.rotate_and_attend(self.rotary, self.attention, *self.inputs, self.batch())

    def one_after_the_other(self) -> torch.Tensor:
        query, key, value = self.inputs
        return self.attention(*self.rotary(self.positions, query, key), value, self.batch())


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number of tokens for each call of the fused kernel."""
    calls: list[int] = []
    before = PagedAttention.rotate_and_write

    def counted(self: Any, rotary: Any, positions: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(positions))
        return before(self, rotary, positions, *rest)

    monkeypatch.setattr(PagedAttention, "rotate_and_write", counted)
    return calls


def test_own_layers_are_fused(fused_calls: list[int]) -> None:
    layers = Layers()
    assert torch.equal(layers.run(), layers.one_after_the_other())
    assert fused_calls == [5]


class OtherRotary(RotaryEmbedding):
    def forward_cpu(self, *arguments: Any) -> Any:
        return self.forward_native(*arguments)


class OtherBackend(PagedAttention):
    """Stores keys negated."""

    def write(self, key: torch.Tensor, *rest: Any) -> None:
        super().write(-key, *rest)


class OtherAttention(Attention):
    def forward(self, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(query * 2, *rest)


def other_rotary() -> Layers:
    layers = Layers()
    with constructing_for(CpuPlatform()):
        layers.rotary = OtherRotary(10, LENGTH, RopeParameters())
    return layers


def other_backend() -> Layers:
    layers = Layers()
    with constructing_for(CpuPlatform()):
        layers.attention.backend = OtherBackend(layers.attention.backend.params)
    return layers


def other_attention() -> Layers:
    layers = Layers()
    with constructing_for(CpuPlatform()):
        layers.attention = OtherAttention(3, 1, 10, layer_index=0, scale=0.3)
    return layers


def replaced_forward() -> Layers:
    layers = Layers()
    forward = layers.rotary.forward
    layers.rotary.forward = lambda positions, query, key: forward(positions, -query, key)  # type: ignore[method-assign]
    return layers


def three_positions() -> Layers:
    layers = Layers(rope=RopeParameters(mrope_section=(2, 2, 1)))
    layers.positions = torch.tensor([range(5), range(1, 6), range(7, 12)])
    return layers


@pytest.mark.parametrize(
    "make",
    [
        other_rotary,
        other_backend,
        other_attention,
        replaced_forward,
        three_positions,
        lambda: Layers(custom_ops=("-rotary_embedding",)),
        lambda: Layers(custom_ops=("none",)),
    ],
)
def test_what_is_replaced_or_turned_off_runs_as_it_is(make: Callable[[], Layers], fused_calls: list[int]) -> None:
    layers = make()
    assert torch.equal(layers.run(), layers.one_after_the_other())
    assert not fused_calls


@pytest.mark.parametrize("watched", ["rotary", "attention", "every module"])
def test_hooks_see_both_layers(watched: str, fused_calls: list[int]) -> None:
    layers, seen = Layers(), []
    expected = layers.run()
    fused_calls.clear()

    def hook(module: Any, *_: Any) -> None:
        seen.append(type(module).__name__)

    if watched == "every module":
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = getattr(layers, watched).register_forward_hook(hook)
    try:
        assert torch.equal(layers.run(), expected)
    finally:
        handle.remove()
    assert not fused_calls
    assert set(seen) == {"rotary": {"RotaryEmbedding"}, "attention": {"Attention"}}.get(
        watched, {"RotaryEmbedding", "Attention"}
    )


# Whole models.


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    outputs = run(llm, prompts, SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True))
    return [
        (item.token_ids, [[entry.logprob for entry in position.values()] for position in item.logprobs])
        for output in outputs
        for item in output.outputs
    ]


def not_fused(rotary: Any, attention: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("name", "options"),
    [("gemma3", {}), ("phi3-partial", {"kv_cache_dtype": "bfloat16"}), ("qwen3", {"kv_cache_dtype": "float16"})],
)
def test_models_answer_the_same_either_way(
    name: str,
    options: dict[str, Any],
    fused_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Tokens and logprobs; prompts in chunks, decoding recorded and repeated."""
    row = TINY_MODELS[name]
    prompts = make_prompts(row)
    opening = {"max_num_batched_tokens": 32, "enable_prefix_caching": False, **options, **row.engine}
    with open_llm(str(tiny_checkpoint(name, tmp_path_factory)), skip_tokenizer_init=True, **opening) as llm:
        fused = answers(llm, prompts)
        assert fused_calls and engine_of(llm).runner.replay._steps
        monkeypatch.setattr(fusion, "is_fused", not_fused)
        monkeypatch.setattr(engine_of(llm).runner, "replay", None)
        fused_calls.clear()
        assert answers(llm, prompts) == fused
        assert not fused_calls
        assert answers(llm, [[token + 1 for token in prompt] for prompt in prompts]) != fused  # the control


def test_explain_and_profile_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for custom_ops, expected in (([], True), (["-rotary_embedding"], False)):
        with open_llm(compilation_config={"custom_ops": custom_ops}) as llm:
            (part,) = [part for part in llm.explain().parts if part.name == "rotary_embedding"]
            rows = {row.name for row in profile(engine_of(llm), lambda llm=llm: answers(llm, [[5, 6]])).rows}
        assert part.reason.endswith("fused into the KV cache's kernel") is expected
        assert ("rotary_embedding + KV cache" in rows) is expected
        assert ({"rotary_embedding", "KV cache"} <= rows) is not expected
