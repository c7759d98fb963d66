"""The token embedding and the LM head, tied or not; how their rows are split over ranks, and logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llm.base.construction import construction
from llm.base.custom_op import PluggableLayer
from llm.errors import ValidationError
from llm.kernels.select import backend_of_construction
from llm.layers.lora import LayerAdapters
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import EmbeddingMethodBase, QuantizationConfig
from llm.quantization.unquantized import UnquantizedEmbeddingMethod, fill_rows, new_parameter

DEFAULT_VOCAB_PADDING_SIZE = 64


@dataclass(frozen=True)
class VocabShard:
    """The rows of one rank: [original ids | padding | added ids | padding].

    Original ids (in the checkpoint) and ids added after them are split over the ranks separately, each padded so that
    every rank has the same number of rows.

    Attributes:
        org_start, org_end, added_start, added_end: the ids of this rank, ends excluded.
        org_rows, added_rows: their rows, padding included.
    """

    org_start: int
    org_end: int
    org_rows: int
    added_start: int
    added_end: int
    added_rows: int

    @classmethod
    def of(cls, num_embeddings: int, org_num_embeddings: int, padding_size: int, tp: TensorParallel) -> VocabShard:
        multiple = math.lcm(padding_size, tp.size)
        padded_org = _round_up(org_num_embeddings, multiple)
        padded = _round_up(padded_org + num_embeddings - org_num_embeddings, multiple)
        org_rows, added_rows = padded_org // tp.size, (padded - padded_org) // tp.size

        def clipped(start: int, end: int) -> tuple[int, int]:
            return min(start, end), min(start + org_rows, end)

        org_start, org_end = clipped(tp.rank * org_rows, org_num_embeddings)
        added = org_num_embeddings + tp.rank * added_rows
        added_start, added_end = min(added, num_embeddings), min(added + added_rows, num_embeddings)
        return cls(org_start, org_end, org_rows, added_start, added_end, added_rows)

    @property
    def rows(self) -> int:
        return self.org_rows + self.added_rows

    def row_of(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the row of each id, 0 for ids of other ranks; True for each id of this rank)."""
        is_org = (token_ids >= self.org_start) & (token_ids < self.org_end)
        is_added = (token_ids >= self.added_start) & (token_ids < self.added_end)
        rows = torch.where(is_org, token_ids - self.org_start, token_ids - self.added_start + self.org_rows)
        held = is_org | is_added
        return torch.where(held, rows, 0), held


def gathered_columns(num_embeddings: int, org_num_embeddings: int, padding_size: int, ranks: int) -> torch.Tensor:
    """The column of each id in the logits gathered from all ranks, padding included: int64 [num_embeddings]."""
    token_ids = torch.arange(num_embeddings)
    columns = torch.zeros_like(token_ids)
    for rank in range(ranks):
        shard = VocabShard.of(num_embeddings, org_num_embeddings, padding_size, TensorParallel(rank, ranks))
        rows, held = shard.row_of(token_ids)
        columns = torch.where(held, rank * shard.rows + rows, columns)
    return columns


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@PluggableLayer.register("vocab_parallel_embedding")
class VocabParallelEmbedding(PluggableLayer):
    """An embedding table [num_embeddings, embedding_dim], stored by `quant_method`. Ranks split the ids.

    Shapes: ids int64 [N] -> [N, embedding_dim], of the type of the model's activations.

    Args:
        num_embeddings: ids, added ones included.
        embedding_dim: width of a row.
        params_dtype: storage type of an unquantized table; None: torch's default.
        org_num_embeddings: number of ids in the checkpoint; later ids were added; None: all.
        padding_size: rows are padded to a multiple of it and of the ranks; models here say 1, because kernels pad.
        quant_config: picks the method for `prefix`; None: unquantized.
        prefix: dotted path of the layer in the model.
        tied: the table is also the LM head.
        tp: this layer's place in a tensor-parallel group.
    """

    quant_kind = "embedding"
    is_lm_head = False
    # Where the logits of each id are among those of all ranks; None: in order.
    logit_columns: torch.Tensor | None
    # With several ranks, of each id, int64 [ids, 1]: its row, 0 on other ranks than its own; its rank.
    row_of_id: torch.Tensor
    rank_of_id: torch.Tensor
    # Of rows that are read by id, and of the logits; None: no adapter can change them.
    adapters: LayerAdapters | None = None
    head_adapters: LayerAdapters | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        tied: bool = False,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.is_lm_head = self.is_lm_head or tied
        self.num_embeddings = num_embeddings
        self.org_vocab_size = num_embeddings if org_num_embeddings is None else org_num_embeddings
        if not 0 < self.org_vocab_size <= num_embeddings:
            raise ValidationError(
                f"org_num_embeddings={org_num_embeddings} must be from 1 to num_embeddings={num_embeddings}.",
                parameter="org_num_embeddings",
                value=org_num_embeddings,
            )
        self.embedding_dim = embedding_dim
        self.prefix = prefix
        self.tp = tp
        self.shard = VocabShard.of(num_embeddings, self.org_vocab_size, padding_size, tp)
        self.num_embeddings_padded = self.shard.rows * tp.size
        self.output_size = VocabShard.of(num_embeddings, self.org_vocab_size, padding_size, SINGLE).rows
        # Row i is id i: one rank, and no padding.
        self.is_plain = self.num_embeddings_padded == num_embeddings and tp.size == 1
        # Or so are those of all ranks, one after another, with padding behind them.
        self.is_in_order = self.is_plain or (tp.size > 1 and self.org_vocab_size == num_embeddings)
        if not self.is_plain:
            columns = gathered_columns(num_embeddings, self.org_vocab_size, padding_size, tp.size)
            in_order = self.org_vocab_size == num_embeddings
            self.register_buffer("logit_columns", None if in_order else columns, persistent=False)
        if tp.size > 1:
            own, _ = self.shard.row_of(torch.arange(num_embeddings))
            self.register_buffer("row_of_id", own.view(-1, 1), persistent=False)
            self.register_buffer("rank_of_id", (columns // self.shard.rows).view(-1, 1), persistent=False)
            self._ops = backend_of_construction().ops
        self.bias: nn.Parameter | None = None
        dtype = params_dtype or torch.get_default_dtype()
        self._activations = construction().activations
        self.quant_method = self._resolve_method(quant_config)
        self.quant_method.create_weights(
            self,
            embedding_dim,
            [self.shard.rows],
            embedding_dim,
            self.num_embeddings_padded,
            dtype,
            weight_loader=self.weight_loader,
        )

    def _resolve_method(self, quant_config: QuantizationConfig | None) -> EmbeddingMethodBase:
        method = quant_config.get_quant_method(self, self.prefix) if quant_config else None
        if method is None:
            return UnquantizedEmbeddingMethod()
        if not isinstance(method, EmbeddingMethodBase):
            raise TypeError(f"{self.prefix}: {type(method).__name__} is not an EmbeddingMethodBase")
        return method

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        """Copy this rank's rows; padding, and added ids that are not in `loaded`, become zero.

        `loaded` has a row per id, or per original id. Returns the number of elements of `param`; raises ValueError if
        the shapes disagree.
        """
        if getattr(param, "shard_slots", False) and loaded.numel() == 1:
            param.data.fill_(loaded.item())
            return param.numel()
        output_dim = None if self.is_plain else getattr(param, "output_dim", None)
        expected = list(param.shape)
        if output_dim is not None:
            packed = self._rows_packed(param.shape[output_dim])
            has_added = loaded.dim() == param.dim() and loaded.shape[output_dim] * packed == self.num_embeddings
            expected[output_dim] = (self.num_embeddings if has_added else self.org_vocab_size) // packed
        if list(loaded.shape) != expected:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {expected}")
        if output_dim is None:
            fill_rows(param, 0, 0, loaded)
        else:
            self._copy_rows(param, loaded, output_dim, packed)
        return param.numel()

    def _rows_packed(self, length: int) -> int:
        """Rows that are one along a parameter's dimension of this length, such as bits in words; raises ValueError."""
        packed, rest = divmod(self.shard.rows, length)
        if rest or any(place % packed for run in self._places(self.num_embeddings) for place in run):
            raise ValueError(f"of length {length} cannot be shared out to {self.tp.size} ranks")
        return packed

    def rows_of_rank(self, loaded: torch.Tensor, shard_id: object) -> torch.Tensor:
        """This rank's rows of a tensor with a row per id, or per original id; padding and other added ids are zeros.

        Raises ValueError if it has another number of rows.
        """
        if self.is_plain:
            return loaded
        if len(loaded) not in (self.num_embeddings, self.org_vocab_size):
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {self.num_embeddings} rows")
        own = loaded.new_zeros(self.shard.rows, *loaded.shape[1:])
        for start, end, row in self._places(len(loaded)):
            own[row : row + end - start] = loaded[start:end]
        return own

    def rows_of_all(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts of all ranks as one has the whole: a row per id."""
        rows = torch.cat(list(parts))
        return rows[: self.num_embeddings] if self.logit_columns is None else rows[self.logit_columns]

    def _places(self, count: int) -> list[tuple[int, int, int]]:
        """(first, end, row) of each run of ids that this rank has of the first `count`."""
        shard = self.shard
        runs = (
            (shard.org_start, min(shard.org_end, count), 0),
            (shard.added_start, min(shard.added_end, count), shard.org_rows),
        )
        return [(start, end, row) for start, end, row in runs if end > start]

    def _copy_rows(self, param: nn.Parameter, loaded: torch.Tensor, dim: int, packed: int) -> None:
        param.data.zero_()
        for place in self._places(loaded.shape[dim] * packed):
            start, end, row = (index // packed for index in place)
            fill_rows(param, dim, row, loaded.narrow(dim, start, end - start))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.is_plain:
            found = self._rows(token_ids)
            return found if self.adapters is None else self.adapters.add(found, token_ids)
        if self.tp.size == 1:
            return self._rows(self.shard.row_of(token_ids)[0])
        select = self._ops.select_rows
        rows, owners = (select(table, token_ids).view(-1) for table in (self.row_of_id, self.rank_of_id))
        found = self.tp.pick(self._rows(rows), owners)
        return found if self.adapters is None else self.adapters.add(found, token_ids)

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.quant_method.embedding(self, rows)
        return found if self._activations is torch.float32 else found.to(self._activations)

    def logits(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """This rank's product with the table, padding included: float32 [L, embedding_dim] -> [L, rows]."""
        y = self.quant_method.apply(self, hidden, bias)
        return y if self.head_adapters is None else self.head_adapters.add(y, hidden)

    def extra_repr(self) -> str:
        shape = f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, rows={self.shard.rows}"
        return f"{shape}, rank={self.tp.rank} of {self.tp.size}"


@PluggableLayer.register("parallel_lm_head")
class ParallelLMHead(VocabParallelEmbedding):
    """The output projection hidden -> logits; tied models use their `VocabParallelEmbedding` in its place.

    As in vLLM its `forward` is not called: `LogitsLayer` calls `logits`.

    Args:
        bias: whether logits get one.
        Further arguments: `VocabParallelEmbedding`.
    """

    is_lm_head = True
    called_by = "logits"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        *further: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, params_dtype, *further, **kwargs)
        if bias:
            dtype = params_dtype or torch.get_default_dtype()
            data = torch.empty(self.shard.rows, dtype=dtype)
            self.bias = new_parameter(data, self.weight_loader, output_dim=0)


@PluggableLayer.register("logits_processor")
class LogitsLayer(PluggableLayer):
    """hidden [L, H] -> float32 logits [L, org_vocab_size], through the LM head's quant method, without padding.

    vLLM calls this class LogitsProcessor, the name that it also uses for `llm.sampling.logits_processors`.

    Args:
        vocab_size: ids of the LM head, added ones included.
        org_vocab_size: number of logits to return; None: all.
        scale: factor on the logits, after the cap.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap); None: no cap.
    """

    vllm_name = "LogitsProcessor"

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        if not 0 < self.org_vocab_size <= vocab_size:
            raise ValidationError(
                f"org_vocab_size={org_vocab_size} must be from 1 to vocab_size={vocab_size}.",
                parameter="org_vocab_size",
                value=org_vocab_size,
            )
        self.scale = scale
        self.soft_cap = soft_cap
        self._ops = backend_of_construction().ops

    def forward(
        self, lm_head: VocabParallelEmbedding, hidden: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`embedding_bias`: added to this rank's logits; None: the bias of `lm_head`, if it has one."""
        bias = lm_head.bias if embedding_bias is None else embedding_bias
        logits = self._of_ids(lm_head, lm_head.logits(hidden, bias))
        if self.soft_cap is not None:
            logits = self._ops.soft_cap(logits.contiguous(), self.soft_cap)
        if self.scale != 1.0:
            logits = self._ops.scale(logits.contiguous(), self.scale)
        return logits

    def _of_ids(self, lm_head: VocabParallelEmbedding, own: torch.Tensor) -> torch.Tensor:
        """This rank's logits -> the logits of all ranks, one column per id."""
        if not lm_head.is_plain:
            own = lm_head.tp.all_gather(own)
            if lm_head.logit_columns is not None:
                own = own[..., lm_head.logit_columns]
        own = own[..., : self.org_vocab_size] if self.org_vocab_size < own.shape[-1] else own
        return own if own.dtype is torch.float32 else own.float()
