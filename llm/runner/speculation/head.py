"""Drafts from a head that reads the target's hidden states: multi-token prediction, EAGLE-3.

A head has one layer. At position p it takes what the target computed there and the token at p + 1, and predicts the
token at p + 2; for a token further it takes its own result in place of the target's.

A step that drafts nothing only keeps the target's
hidden states, and the head computes many positions in one pass. Its keys and values are in blocks of the row, which the
scheduler shares and frees as it does the target's, and those of drafts also in blocks of its own behind these. So after
a hit in the prefix cache they are there, but for positions that waited when the request that computed them ended; and
the last one was computed before that request's next token. This costs drafts some accuracy. Of a row whose hidden
states are not known, because many rows ran, nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from llm.forward import AttentionMetadata, ForwardBatch
from llm.runner.batch import InputBatch
from llm.runner.speculation.proposer import ComputedStep, Offer, Source
from llm.runner.speculation.speculator import MOST_ROWS
from llm.sampling.logprobs import NO_LOGPROBS
from llm.sampling.sampler import Sampler, SamplingRows

# Positions that wait until the head computes them, drafts or not: as many as a pass over its weights is worth.
_MOST_WAITING = 64
_FADE = 0.9  # what a draft's time keeps of those before


class DraftHead(Protocol):
    """The module of a head; H is the target's hidden size."""

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the target computed, [N, H] or [N, taps * H] -> float [N, H of the head]."""

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (what `compute_logits` takes, `hidden` for the next token)."""


@dataclass(frozen=True)
class PlacedHead:
    """A head beside its target.

    Attributes:
        embed: token ids int64 [N] -> float [N, H].
        compute_logits: float [L, H] -> float32 [L, vocabulary of the target].
        states: `ForwardBatch.states` for the head's layer.
        group: the KV group whose block tables its blocks are in.
        first_own_block: of the blocks behind those that the scheduler gives to rows.
        reads_taps: it takes `ForwardBatch.taps`; False: the target's last hidden states.
    """

    module: DraftHead
    embed: Callable[[torch.Tensor], torch.Tensor]
    compute_logits: Callable[[torch.Tensor], torch.Tensor]
    states: list[tuple[torch.Tensor, ...]]
    group: int
    first_own_block: int
    reads_taps: bool


def own_blocks(most: int, block_size: int) -> int:
    """Blocks for the drafts of all rows, at most `most` each."""
    return MOST_ROWS * -(-most // block_size)


@dataclass
class _Row:
    """What is known of one row.

    Attributes:
        position: the first that the head has not computed.
        waiting: the target's hidden states from there on.
        result: of the head at the position before: what logits are computed from, and what it carries on.
    """

    position: int
    waiting: list[torch.Tensor] = field(default_factory=list)
    result: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting))


class HeadSource(Source):
    """Args:
    kind: what drafts are called, "of the head".
    most: most drafts of a row.
    """

    follows = True

    def __init__(
        self,
        head: PlacedHead,
        sampler: Sampler,
        upload: Callable[[np.ndarray], torch.Tensor],
        most: int,
        kind: str,
    ) -> None:
        self._head = head
        self._sampler = sampler
        self._upload = upload
        self._most = most
        self._kind = kind
        self._rows: dict[str, _Row | None] = {}  # None: hidden states are missing

    def observe(self, step: ComputedStep) -> None:
        batch = step.batch
        if len(batch.request_ids) > MOST_ROWS:
            self._rows = dict.fromkeys(batch.request_ids)
            return
        taps, metadata = step.input.forward_batch.taps, step.input.forward_batch.metadata[-1]
        hidden = torch.cat(taps, dim=-1) if self._head.reads_taps else step.hidden
        start = 0
        counts = zip(step.input.rows.tolist(), step.input.counts.tolist(), metadata.seq_lens_list, strict=True)
        for row, count, end in counts:
            first = end - count
            # The token after a position must be known: those of rejected drafts do not count.
            kept = min(end, int(batch.num_tokens[row]) - 1) - first
            self._follow(batch, row, first, hidden[start : start + max(0, kept)])
            start += count

    def offer(self, batch: InputBatch, row: int, most: int) -> Offer | None:
        own = self._rows.get(batch.request_ids[row])
        if own is None or own.position + own.num_waiting != batch.num_tokens[row] - 1:
            return None
        return Offer(min(most, self._most), self._kind)

    def draft(self, batch: InputBatch, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        started = perf_counter()
        rows = np.array(sorted(counts))
        self._compute([row for row in rows.tolist() if self._of(batch, row).waiting], batch)
        drafts: dict[int, list[int]] = {row: [] for row in counts}
        results = [self._of(batch, row).result or _none() for row in rows.tolist()]
        scored, carried = (torch.cat(parts) for parts in zip(*results, strict=True))
        for index in range(max(counts.values())):
            tokens = self._draw(batch, rows, scored, index)
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                drafts[row].append(token)
            going = [place for place, row in enumerate(rows.tolist()) if counts[row] > index + 1]
            if not going:
                break
            rows, tokens, carried = rows[going], tokens[going], carried[going]
            firsts, ones = batch.num_tokens[rows] - 1 + index, np.ones(len(rows), dtype=np.int64)
            scored, carried = self._forward(batch, rows, firsts, ones, tokens, carried)
        seconds = (perf_counter() - started) / sum(counts.values())
        self.seconds_per_draft = _FADE * (self.seconds_per_draft or seconds) + (1.0 - _FADE) * seconds
        return drafts

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def reset(self) -> None:
        self._rows.clear()

    def _of(self, batch: InputBatch, row: int) -> _Row:
        own = self._rows[batch.request_ids[row]]
        if own is None:
            raise RuntimeError("a row that was offered nothing is to be drafted for")
        return own

    def _follow(self, batch: InputBatch, row: int, first: int, hidden: torch.Tensor) -> None:
        """Keep the hidden states of the positions from `first` on."""
        name = batch.request_ids[row]
        own = self._rows.setdefault(name, _Row(first))
        if own is None or own.position + own.num_waiting != first:
            self._rows[name] = None
            return
        if len(hidden):
            own.waiting.append(hidden.clone())  # the next step overwrites it
        if own.num_waiting >= _MOST_WAITING:
            self._compute([row], batch)

    def _compute(self, rows: list[int], batch: InputBatch) -> None:
        """Let the head compute what waits."""
        if not rows:
            return
        found = [self._of(batch, row) for row in rows]
        counts, firsts = np.array([own.num_waiting for own in found]), np.array([own.position for own in found])
        spans = [range(first, first + count) for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
        following = np.concatenate(
            [batch.token_ids[row, span.start + 1 : span.stop + 1] for row, span in zip(rows, spans, strict=True)]
        )
        hidden = self._head.module.combine(torch.cat([part for own in found for part in own.waiting]))
        results = self._forward(batch, np.array(rows), firsts, counts, following.astype(np.int64), hidden)
        for own, end in zip(found, np.cumsum(counts).tolist(), strict=True):
            own.position += own.num_waiting
            own.waiting.clear()
            own.result = results[0][end - 1 : end].clone(), results[1][end - 1 : end].clone()

    def _forward(
        self,
        batch: InputBatch,
        rows: np.ndarray,
        firsts: np.ndarray,
        counts: np.ndarray,
        following: np.ndarray,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head at `counts` positions of each row from `firsts` on, before the tokens `following`, int64 [N]."""
        metadata, positions = self._metadata(batch, rows, firsts, counts)
        input_ids, none = self._upload(following), self._upload(np.zeros(0, dtype=np.int64))
        states = self._head.states
        step = ForwardBatch(input_ids, self._upload(positions), [metadata] * len(states), states, none)
        return self._head.module(self._head.embed(input_ids), hidden, step)

    def _metadata(
        self, batch: InputBatch, rows: np.ndarray, firsts: np.ndarray, counts: np.ndarray
    ) -> tuple[AttentionMetadata, np.ndarray]:
        """Where the positions are in the head's cache, and the positions. Those behind a row's blocks are in the head's
        own blocks."""
        size, ends = batch.block_size, firsts + counts
        table = batch.block_tables[self._head.group][rows, : -(-int(ends.max()) // size)]
        each = -(-self._most // size)
        for place, row in enumerate(rows.tolist()):
            held = -(-int(batch.num_computed[row]) // size)
            table[place, held:] = self._head.first_own_block + row * each + np.arange(table.shape[1] - held) % each
        places = np.repeat(np.arange(len(rows)), counts)
        starts = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(starts[-1]) - starts[places] + firsts[places]
        slots = table[places, positions // size].astype(np.int64) * size + positions % size
        metadata = AttentionMetadata(
            block_table=self._upload(table),
            slot_mapping=self._upload(slots),
            query_start_loc=self._upload(starts.astype(np.int32)),
            seq_lens=self._upload(ends.astype(np.int32)),
            block_size=size,
            query_lens_list=counts.tolist(),
            seq_lens_list=ends.tolist(),
        )
        return metadata, positions

    def _draw(self, batch: InputBatch, rows: np.ndarray, scored: torch.Tensor, index: int) -> np.ndarray:
        """The tokens after `index` drafts, drawn as the rows would: where distributions are alike, so are tokens."""
        outputs = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] + index
        drawn = self._sampler(self._head.compute_logits(scored), _without_logprobs(batch.sampling), rows, outputs)
        return drawn.tokens.cpu().numpy()


def _without_logprobs(params: SamplingRows) -> SamplingRows:
    found = copy(params)
    found.logprobs, found.logprob_token_ids = np.full_like(params.logprobs, NO_LOGPROBS), {}
    return found


def _none() -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("the head has computed nothing of a row that is to be drafted for")
