"""Tensor parallelism without processes: the slices of ranks 0 to n - 1, put together, are the layer of one rank.

Each layer is built once per rank and loaded from the same whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_answers import same_values
from thread_ranks import NOWHERE, ThreadRanks
from torch import nn

from llm.base.construction import constructing_for
from llm.errors import LLMError, ValidationError
from llm.layers.communicators import HostCommunicator, NcclCommunicator, communicator_cls
from llm.layers.embedding import LogitsLayer, ParallelLMHead, VocabParallelEmbedding, VocabShard, gathered_columns
from llm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from llm.layers.parallel import Communicator, TensorParallel
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import Platform

pytestmark = pytest.mark.usefixtures("one_core")

K = 24
SIZES = (1, 2, 4)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ranks(size: int, build: Callable[..., Any]) -> list[Any]:
    return [build(tp=TensorParallel(rank, size)) for rank in range(size)]


def load(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None, shard_id: Any = None) -> None:
    """Load whole tensors, which must fill what they say they fill."""
    filled = layer.weight_loader(layer.weight, weight, shard_id)
    if shard_id is None:
        assert filled == layer.weight.numel()
    if bias is not None:
        layer.weight_loader(layer.bias, bias, shard_id)


def with_kernels(work: Callable[[TensorParallel], Any]) -> Callable[[TensorParallel], Any]:
    """Its layers have the kernels of the CPU: the order of PyTorch's sums depends on the number of rows of a matrix."""

    def bound(tp: TensorParallel) -> Any:
        with constructing_for(CpuPlatform()):
            return work(tp)

    return bound


def rows(layer: Any, index: int, y: torch.Tensor) -> torch.Tensor:
    """The columns of y that logical matrix `index` of this rank made."""
    return y.split(layer.output_partition_sizes, dim=-1)[index]


# Linear layers


@pytest.mark.parametrize("size", SIZES)
def test_columns_side_by_side_are_the_whole(size: int) -> None:
    x, weight, bias = normal(0, 5, K), normal(1, 16, K), normal(2, 16)
    layers = ranks(size, lambda tp: ColumnParallelLinear(K, 16, tp=tp, return_bias=False))
    for layer in layers:
        load(layer, weight, bias)
        assert layer.weight.shape == (16 // size, K) and layer.output_size_per_partition == 16 // size
    assert torch.allclose(
        torch.cat([layer(x) for layer in layers], -1), nn.functional.linear(x, weight, bias), atol=1e-5
    )
    assert torch.equal(torch.cat([layer.weight for layer in layers]), weight)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_merged_matrices_are_split_each(size: int, stacked: bool) -> None:
    x, parts = normal(0, 5, K), [normal(1, 8, K), normal(2, 20, K)]
    layers = ranks(size, lambda tp: MergedColumnParallelLinear(K, [8, 20], bias=False, tp=tp, return_bias=False))
    for layer in layers:
        if stacked:
            load(layer, torch.cat(parts), None)
        else:
            for index, part in enumerate(parts):
                load(layer, part, None, index)
    for index, part in enumerate(parts):
        together = torch.cat([rows(layer, index, layer(x)) for layer in layers], -1)
        assert torch.allclose(together, x @ part.T, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_heads_are_split_and_key_heads_repeat_where_they_must(size: int, kv_heads: int, stacked: bool) -> None:
    head, heads = 3, 8
    parts = {"q": normal(1, heads * head, K), "k": normal(2, kv_heads * head, K), "v": normal(3, kv_heads * head, K)}
    biases = {name: weight[:, 0].clone() for name, weight in parts.items()}
    layers = ranks(size, lambda tp: QKVParallelLinear(K, head, heads, kv_heads, tp=tp, return_bias=False))
    x = normal(0, 5, K)
    for rank, layer in enumerate(layers):
        if stacked:
            load(layer, torch.cat(list(parts.values())), torch.cat(list(biases.values())))
        else:
            for name, weight in parts.items():
                load(layer, weight, biases[name], name)
        assert layer.num_heads == heads // size and layer.num_kv_heads == max(1, kv_heads // size)
        # Query head h reads key head h // (heads / kv_heads): those must be on the same rank.
        first = rank * layer.num_heads // (heads // kv_heads)
        for index, name in enumerate("qkv"):
            start, count = (rank * layer.num_heads, layer.num_heads) if name == "q" else (first, layer.num_kv_heads)
            own = slice(start * head, (start + count) * head)
            expected = nn.functional.linear(x, parts[name][own], biases[name][own])
            assert torch.allclose(rows(layer, index, layer(x)), expected, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("input_is_parallel", [True, False])
def test_a_projection_of_slices_has_the_bits_of_one_rank(size: int, input_is_parallel: bool) -> None:
    x, weight, bias = normal(0, 5, K), normal(1, 8, K), normal(2, 8)

    @with_kernels
    def work(tp: TensorParallel) -> torch.Tensor:
        layer = RowParallelLinear(K, 8, input_is_parallel=input_is_parallel, tp=tp, return_bias=False)
        load(layer, weight, bias)
        own = slice(8 // tp.size * tp.rank, 8 // tp.size * (tp.rank + 1))
        assert torch.equal(layer.weight, weight[own]) and torch.equal(layer.bias, bias[own])
        layer.quant_method.process_weights_after_loading(layer)
        return layer(x.chunk(tp.size, -1)[tp.rank] if input_is_parallel else x)

    (alone,) = ThreadRanks(1).run(work)
    for result in ThreadRanks(size).run(work):
        assert same_values(result, alone)
    assert torch.allclose(alone, nn.functional.linear(x, weight, bias), atol=1e-5)


def test_a_replicated_layer_and_one_that_opts_out_are_whole_on_every_rank() -> None:
    weight = normal(1, 6, K)
    for layer in (
        *ranks(2, lambda tp: ReplicatedLinear(K, 6, bias=False, tp=tp, return_bias=False)),
        *ranks(2, lambda tp: ColumnParallelLinear(K, 6, bias=False, tp=tp, disable_tp=True, return_bias=False)),
        *ranks(2, lambda tp: RowParallelLinear(K, 6, bias=False, tp=tp, disable_tp=True, return_bias=False)),
        *ranks(2, lambda tp: QKVParallelLinear(K, 1, 2, bias=False, tp=tp, disable_tp=True, return_bias=False)),
    ):
        load(layer, weight, None)
        assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_can_talk_all_have_the_result(size: int) -> None:
    """A feed-forward, then a gathered projection, as ranks run it: the same on each, and what one rank computes."""
    x, up, down, last = normal(0, 5, K), normal(1, 16, K), normal(2, K, 16), normal(3, 8, K)

    @with_kernels
    def work(tp: TensorParallel) -> torch.Tensor:
        first = ColumnParallelLinear(K, 16, bias=False, tp=tp, return_bias=False)
        second = RowParallelLinear(16, K, bias=True, tp=tp, return_bias=False)
        third = ColumnParallelLinear(K, 8, bias=False, gather_output=True, tp=tp, return_bias=False)
        load(first, up, None)
        load(second, down, torch.ones(K))
        load(third, last, None)
        for layer in (first, second, third):
            layer.quant_method.process_weights_after_loading(layer)
        return third(second(first(x)))

    (alone,) = ThreadRanks(1).run(work)
    for result in ThreadRanks(size).run(work):
        assert same_values(result, alone)
    assert torch.allclose(alone, (x @ up.T @ down.T + 1) @ last.T, atol=1e-4, rtol=1e-4)


def test_parameters_shorter_than_the_weight_are_cut_in_proportion() -> None:
    """What a quantization method stores: a scale per group of columns, two values per packed row."""
    scales, packed = normal(0, 16, 8), torch.arange(8 * K).view(8, K).int()
    for rank in range(4):
        column = MergedColumnParallelLinear(K, [4, 12], bias=False, tp=TensorParallel(rank, 4), return_bias=False)
        blocks = RowParallelLinear(K, 16, bias=False, tp=TensorParallel(rank, 4), return_bias=False)
        own = parameter(torch.zeros(2, K, dtype=torch.int32), output_dim=0, input_dim=1)
        with pytest.raises(ValueError, match="cannot be shared out"):
            column.weight_loader(own, packed)  # half of a row of the first matrix
        even = MergedColumnParallelLinear(K, [8, 8], bias=False, tp=TensorParallel(rank, 4), return_bias=False)
        assert even.weight_loader(own, packed) == 2 * K
        assert torch.equal(own.data, torch.stack((packed[rank], packed[4 + rank])))
        groups = parameter(torch.zeros(4, 8), output_dim=0, input_dim=1)
        assert blocks.weight_loader(groups, scales) == 32
        assert torch.equal(groups.data, scales[4 * rank : 4 * rank + 4])
        alone = parameter(torch.zeros(1))
        assert blocks.weight_loader(alone, torch.ones(1)) == 1 and alone.item() == 1


def parameter(data: torch.Tensor, **attributes: int) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_a_bias_is_returned_as_vllm_does() -> None:
    """`self.kv_b_proj(x)[0]` is all rows of the result, and `y, _ = layer(x)` unpacks no rows."""
    weight, bias, x = normal(1, 6, K), normal(2, 6), normal(0, 2, K)
    for layer in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        kept, added, alone = layer(K, 6, skip_bias_add=True), layer(K, 6), layer(K, 6, return_bias=False)
        for op in (kept, added, alone):
            load(op, weight, bias)
        y, returned = kept(x)
        assert torch.equal(returned, bias) and torch.allclose(y + bias, added(x)[0], atol=1e-5)
        assert added(x)[1] is None and torch.equal(added(x)[0], alone(x)) and alone(x).shape == (2, 6)


def test_the_arguments_have_vllms_places() -> None:
    """Bias, what is gathered or split, skip_bias_add, the type, (reduce_results,) quantization and prefix."""
    common = False, torch.bfloat16
    layers: list[Any] = [
        ReplicatedLinear(K, 8, True, *common, None, "a.b"),
        ColumnParallelLinear(K, 8, True, False, *common, None, "a.b"),
        MergedColumnParallelLinear(K, [4, 4], True, False, *common, None, "a.b"),
        QKVParallelLinear(K, 2, 2, 1, True, *common, None, "a.b"),
        RowParallelLinear(K, 8, True, True, *common, False, None, "a.b"),
    ]
    for layer in layers:
        assert (layer.prefix, layer.weight.dtype, layer.skip_bias_add) == ("a.b", torch.bfloat16, False)
    assert layers[-1].reduce_results is False and layers[-1].input_is_parallel is True


# Vocabulary


def ids_of_rows(shard: VocabShard) -> list[int]:
    """The id in each row, -1 for padding: the tables of the documentation."""
    original = list(range(shard.org_start, shard.org_end))
    added = list(range(shard.added_start, shard.added_end))
    return [
        *original,
        *[-1] * (shard.org_rows - len(original)),
        *added,
        *[-1] * (shard.added_rows - len(added)),
    ]


def test_the_tables_of_the_documentation() -> None:
    """Vocabulary 1010, 16 added, padding 64: 1088 rows on one rank, 544 on each of two."""
    one = VocabShard.of(1026, 1010, 64, TensorParallel())
    assert ids_of_rows(one) == [*range(1010), *[-1] * 14, *range(1010, 1026), *[-1] * 48] and one.rows == 1088
    first, second = (VocabShard.of(1026, 1010, 64, TensorParallel(rank, 2)) for rank in (0, 1))
    assert ids_of_rows(first) == [*range(512), *range(1010, 1026), *[-1] * 16]
    assert ids_of_rows(second) == [*range(512, 1010), *[-1] * 14, *[-1] * 32]
    assert first.rows == second.rows == 544


@settings(max_examples=100)
@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 9), st.integers(1, 5))
def test_every_id_is_in_one_row_of_one_rank(original: int, added: int, padding: int, size: int) -> None:
    total = original + added
    shards = [VocabShard.of(total, original, padding, TensorParallel(rank, size)) for rank in range(size)]
    tables = [ids_of_rows(shard) for shard in shards]
    everywhere = [token for table in tables for token in table]
    assert sorted(token for token in everywhere if token >= 0) == list(range(total))
    assert {len(table) for table in tables} == {shards[0].rows} and len(everywhere) % padding == 0
    token_ids = torch.arange(total)
    for shard, table in zip(shards, tables, strict=True):
        found, held = shard.row_of(token_ids)
        assert held.tolist() == [token in table for token in range(total)]
        assert found.tolist() == [table.index(token) if token in table else 0 for token in range(total)]
    columns = gathered_columns(total, original, padding, size)
    assert [everywhere[column] for column in columns] == list(range(total))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("has_added", [True, False], ids=["added rows loaded", "added rows zero"])
def test_every_rank_has_the_embedding_of_every_id(size: int, has_added: bool) -> None:
    table, token_ids = normal(0, 25, K), torch.tensor([24, 0, 7, 19, 20, 21, 7])
    whole = table if has_added else torch.cat((table[:20], torch.zeros(5, K)))

    def work(tp: TensorParallel) -> torch.Tensor:
        layer = VocabParallelEmbedding(25, K, org_num_embeddings=20, padding_size=8, tp=tp)
        layer.weight.data.fill_(float("nan"))
        load(layer, table if has_added else table[:20], None)
        return layer(token_ids)

    for result in ThreadRanks(size).run(work):
        assert torch.equal(result, whole[token_ids])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("original", [25, 20])
def test_logits_of_ranks_are_in_order_of_ids(size: int, original: int) -> None:
    table, bias, hidden = normal(0, 25, K), normal(1, 25), normal(2, 4, K)

    def work(tp: TensorParallel) -> tuple[torch.Tensor, ...]:
        head = ParallelLMHead(25, K, True, org_num_embeddings=original, padding_size=8, tp=tp)
        load(head, table, bias)
        given = torch.zeros(head.shard.rows)
        return (
            LogitsLayer(25)(head, hidden),
            LogitsLayer(25, original)(head, hidden),
            LogitsLayer(25)(head, hidden, given),
        )

    expected = nn.functional.linear(hidden, table, bias)
    for everything, of_originals, without_bias in ThreadRanks(size).run(work):
        assert torch.allclose(everything, expected, atol=1e-5)
        assert torch.equal(of_originals, everything[:, :original])
        assert torch.allclose(without_bias + bias, everything, atol=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("build", "parameter"),
    [
        (lambda tp: ColumnParallelLinear(K, 7, tp=tp, return_bias=False), "output_size"),
        (lambda tp: MergedColumnParallelLinear(K, [8, 7], tp=tp, return_bias=False), "output_size"),
        (lambda tp: RowParallelLinear(7, K, tp=tp, return_bias=False), "input_size"),
        (lambda tp: RowParallelLinear(K, 7, tp=tp, return_bias=False), "output_size"),
        (lambda tp: RowParallelLinear(K, 8, reduce_results=False, tp=tp, return_bias=False), "reduce_results"),
        (lambda tp: RowParallelLinear(K, 8, skip_bias_add=True, tp=tp), "skip_bias_add"),
        (lambda tp: QKVParallelLinear(K, 4, 3, 2, tp=tp, return_bias=False), "total_num_heads"),
        (lambda tp: QKVParallelLinear(K, 4, 6, 3, tp=tp, return_bias=False), "total_num_kv_heads"),
        (
            lambda tp: MergedColumnParallelLinear(K, [8, 8], gather_output=True, tp=tp, return_bias=False),
            "gather_output",
        ),
        (lambda tp: ColumnParallelLinear(K, 8, skip_bias_add=True, tp=tp, return_bias=False), "skip_bias_add"),
        (lambda tp: VocabParallelEmbedding(8, K, org_num_embeddings=9, tp=tp, padding_size=1), "org_num_embeddings"),
        (lambda tp: LogitsLayer(8, 9), "org_vocab_size"),
        (lambda tp: TensorParallel(2, 2), "rank"),
    ],
)
def test_a_constructor_names_what_is_wrong(build: Any, parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build(TensorParallel(0, 2))
    assert caught.value.parameter == parameter


class Doubling(Communicator):
    """Two ranks with the same part."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, -1)


class Connected(CpuPlatform):
    def get_communicator_cls(self) -> str:
        return f"{__name__}.Doubling"


class Nccl(Platform):
    def get_communicator_cls(self) -> str:
        return "llm.layers.communicators.NcclCommunicator"


def test_a_group_has_the_communicator_of_its_platform() -> None:
    kind = communicator_cls(Connected(), shares_device=True)
    assert kind is Doubling
    tp = TensorParallel(1, 2, kind(1, 2, NOWHERE, Connected()))
    assert tp.all_gather(torch.ones(1)).tolist() == [1, 1]
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(tp.pick(rows, torch.tensor([1, 0, 1])), rows)
    # Of devices between which nothing is known to go; NCCL serves one rank on each.
    assert communicator_cls(Platform()) is communicator_cls(Nccl(), shares_device=True) is HostCommunicator
    assert communicator_cls(Nccl()) is NcclCommunicator


def test_a_group_without_a_communicator_does_not_pretend() -> None:
    tp = TensorParallel(0, 2)
    for layer, width in (
        (ColumnParallelLinear(K, 8, bias=False, gather_output=True, tp=tp, return_bias=False), K),
        (RowParallelLinear(K, 8, bias=False, tp=tp, return_bias=False), K // 2),
    ):
        layer.weight.data.zero_()
        with pytest.raises(LLMError, match="communicator"):
            layer(torch.zeros(1, width))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (ColumnParallelLinear(K, 8, bias=False, tp=TensorParallel(1, 2), return_bias=False), (4, K)),
        (ColumnParallelLinear(K, 8, bias=False, tp=TensorParallel(1, 2), return_bias=False), (8,)),
        (RowParallelLinear(K, 8, bias=False, tp=TensorParallel(1, 2), return_bias=False), (4, K)),
        (VocabParallelEmbedding(25, K, org_num_embeddings=20, tp=TensorParallel(1, 2), padding_size=1), (24, K)),
        (VocabParallelEmbedding(25, K, padding_size=1), (24, K)),
    ],
)
def test_a_slice_in_place_of_the_whole_is_refused(layer: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the model needs"):
        layer.weight_loader(layer.weight, torch.zeros(shape))


def test_a_rank_that_takes_the_wrong_slice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every rank loads the slice of rank 0."""

    def first(self: LinearBase, target: Any, loaded: torch.Tensor, dim: int, lengths: Any, indices: Any) -> int:
        return target.copy_(loaded.narrow(dim, 0, target.shape[dim])).numel()

    monkeypatch.setattr(LinearBase, "_copy_rows", first)
    test_columns_side_by_side_are_the_whole(1)
    with pytest.raises(AssertionError):
        test_columns_side_by_side_are_the_whole(2)


def test_embeddings_are_padded_as_vllms() -> None:
    """The example of its documentation: 1010 ids and 16 added ones, each padded to a multiple of 64."""
    shard = VocabParallelEmbedding(1026, 4, org_num_embeddings=1010).shard
    assert (shard.org_rows, shard.rows) == (1024, 1088)
    head = ParallelLMHead(1026, 4, True, torch.bfloat16, 1010, 128)
    assert head.weight.shape == (1152, 4) and head.bias is not None and head.bias.dtype is torch.bfloat16
