"""Which request owns which KV block.

Reference counts, the free list and the prefix cache, per KV group. A block is an index into the runner's cache.
`check_integrity()` audits all of it.

A block's life:   free list --allocate--> owned by 1..n requests --release--> free list
                       ^                                                        |
                       +-- hashed blocks keep their content there until they are evicted, oldest first

Block 0 of every group, the null block, is never allocated: in a block table it replaces blocks that were freed because
they are outside the sliding window.

A model with recurrent states also has slots: each running request owns one, with all its recurrent states after its
last token. In further slots are snapshots: copies of the states after a prefix. A cached prefix can be used up to a
position where there is a snapshot.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from llm.engine.request import Request
from llm.forward import SLOTS

NULL_BLOCK = 0


class IntegrityError(RuntimeError):
    """The block manager's state is inconsistent: a defect of the engine, never of the caller."""


class BlockPool:
    """The blocks of one KV group.

    A cached block is found by its chain hash. Its tokens are compared on a hit, so that a hash collision cannot return
    another prompt's keys.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # In the order of reuse: blocks without a hash first, then the least recently released.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.by_hash: dict[bytes, int] = {}
        self.content: dict[int, tuple[bytes, bytes]] = {}  # block -> (hash, tokens)
        # Called with the hash of each block that leaves the prefix cache.
        self.on_forget: Callable[[bytes], None] = lambda digest: None

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the free list; the caller has checked that there are enough."""
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self._forget(block)
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """Add an owner to a cached block, which may be on the free list."""
        if self.ref_counts[block] == 0:
            del self.free[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        if block == NULL_BLOCK:
            return
        if self.ref_counts[block] <= 0:
            raise IntegrityError(f"block {block} freed twice")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free[block] = None
            if block not in self.content:
                self.free.move_to_end(block, last=False)

    def remember(self, block: int, digest: bytes, tokens: bytes) -> None:
        """Add a full block to the prefix cache; of two blocks with equal content the first stays in it."""
        if digest not in self.by_hash and block not in self.content:
            self.by_hash[digest] = block
            self.content[block] = (digest, tokens)

    def find(self, digest: bytes, tokens: bytes) -> int:
        """The cached block with these tokens after this prefix, -1 if there is none."""
        block = self.by_hash.get(digest, -1)
        return block if block >= 0 and self.content[block][1] == tokens else -1

    def reset_cache(self) -> None:
        self.by_hash.clear()
        self.content.clear()

    def _forget(self, block: int) -> None:
        content = self.content.pop(block, None)
        if content is not None:
            del self.by_hash[content[0]]
            self.on_forget(content[0])

    def check_integrity(self, owners: Counter[int]) -> None:
        """`owners`: how many live requests own each block. Raises `IntegrityError` for any inconsistency."""
        for block in range(1, self.num_blocks):
            if self.ref_counts[block] != owners[block]:
                raise IntegrityError(f"block {block} counts {self.ref_counts[block]} owners, has {owners[block]}")
            if (self.ref_counts[block] == 0) != (block in self.free):
                raise IntegrityError(f"block {block} with {self.ref_counts[block]} owners is on the wrong side")
        if NULL_BLOCK in self.free or self.ref_counts[NULL_BLOCK]:
            raise IntegrityError("the null block was handed out")
        if {digest: block for block, (digest, _) in self.content.items()} != self.by_hash:
            raise IntegrityError("the prefix cache's two directions disagree")


class StateSnapshots:
    """Copies of recurrent states after prefixes, at multiples of `interval` tokens.

    A snapshot is found by the chain hash of the last block before its position. It can be found once the step that
    makes it has run, and is dropped with that block or when it is the least recently used.

    Args:
        count: how many there can be.
        first_slot: the index of the first in the state tensors; the others follow.
    """

    def __init__(self, count: int, interval: int, first_slot: int) -> None:
        self.interval = interval
        self._pool = BlockPool(count + 1)
        self._offset = first_slot - 1
        self._taken: list[tuple[int, bytes, bytes]] = []  # in this step: snapshot, hash, tokens

    def find(self, digest: bytes, tokens: bytes) -> int:
        """The slot with the states after these tokens, -1 if there is none; it is now the most recently used."""
        found = self._pool.find(digest, tokens)
        if found < 0:
            return -1
        self._pool.free.move_to_end(found)
        return self._offset + found

    def take(self, digest: bytes, tokens: bytes) -> int:
        """A slot for the states after the tokens of this step, -1 if they are kept already or no slot is left."""
        if self._pool.find(digest, tokens) >= 0 or not self._pool.free:
            return -1
        (snapshot,) = self._pool.allocate(1)
        self._taken.append((snapshot, digest, tokens))
        return self._offset + snapshot

    def commit(self) -> None:
        """What was taken has been written."""
        for snapshot, digest, tokens in self._taken:
            self._pool.remember(snapshot, digest, tokens)
            self._pool.release(snapshot)
        self._taken.clear()

    def drop(self, digest: bytes) -> None:
        """Forget the snapshot behind the block with this hash."""
        snapshot = self._pool.by_hash.pop(digest, -1)
        if snapshot >= 0:
            del self._pool.content[snapshot]
            self._pool.free.move_to_end(snapshot, last=False)

    def reset_cache(self) -> None:
        self._pool.reset_cache()

    def check_integrity(self) -> None:
        self._pool.check_integrity(Counter(snapshot for snapshot, _, _ in self._taken))


class BlockManager:
    """The blocks of all groups, allocated and freed per request.

    Args:
        num_blocks: per pool, the null block included.
        windows: the sliding window of each KV group, None for full attention.
        block_size: tokens per block.
        num_slots: of recurrent states, the null slot included; 0: the model has no such states.
        snapshots: of recurrent states; None: requests with such states share no prefixes.
    """

    def __init__(
        self,
        num_blocks: int,
        windows: list[int | None],
        block_size: int,
        num_slots: int = 0,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self._any_window = any(window is not None for window in windows)
        self.pools = [BlockPool(num_blocks) for _ in windows]
        self.slots = BlockPool(num_slots) if num_slots else None
        self.snapshots = snapshots
        if snapshots is not None:
            for pool in self.pools:
                pool.on_forget = snapshots.drop

    def num_free_blocks(self) -> int:
        return min((len(pool.free) for pool in self.pools), default=0)

    def num_free_slots(self) -> int:
        return 0 if self.slots is None else len(self.slots.free)

    def match_prefix(self, request: Request) -> tuple[int, list[list[int]]]:
        """The longest cached prefix: (tokens, block ids per group). At least one token is always left to compute."""
        limit = min(request.num_tokens - 1, request.max_cached_tokens) // self.block_size
        if not self._shares(request) or limit == 0:
            return 0, [[] for _ in self.pools]
        self._extend_hashes(request)
        length = limit
        shortened = True
        while shortened:
            length = self._last_snapshot(request, length)
            found = [self._match_group(pool, window, request, length) for pool, window in self._groups()]
            shortest = min((len(blocks) for blocks in found), default=length)
            shortened, length = shortest < length, shortest
        return length * self.block_size, found

    def allocate(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Extend the request's block tables to `num_tokens`; returns the new ids per group.

        None: there are not enough free blocks. An empty list: the tables are long enough already.
        """
        if not request.blocks:
            request.blocks = [[] for _ in self.pools]
        wanted = -(-num_tokens // self.block_size)
        # The groups' tables have the same length.
        if not self.pools or (len(request.blocks[0]) >= wanted and not self._any_window):
            return []  # the usual case
        self._release_out_of_window(request)
        missing = [wanted - len(blocks) for blocks in request.blocks]
        if any(count > len(pool.free) for count, pool in zip(missing, self.pools, strict=True)):
            return None
        new = [pool.allocate(max(0, count)) for count, pool in zip(missing, self.pools, strict=True)]
        for blocks, more in zip(request.blocks, new, strict=True):
            blocks.extend(more)
        return new

    def admit(self, request: Request, num_tokens: int, prefix: tuple[int, list[list[int]]]) -> bool:
        """Give a request without blocks its cached prefix and blocks for `num_tokens`; False if they do not fit."""
        if self.slots is not None and not self.slots.free:
            return False
        cached_tokens, hits = prefix
        wanted = -(-num_tokens // self.block_size) - cached_tokens // self.block_size
        for pool, blocks in zip(self.pools, hits, strict=True):
            revived = sum(block != NULL_BLOCK and pool.ref_counts[block] == 0 for block in blocks)
            if wanted + revived > len(pool.free):
                return False
        for pool, blocks in zip(self.pools, hits, strict=True):
            for block in blocks:
                if block != NULL_BLOCK:
                    pool.share(block)
        request.blocks = [list(blocks) for blocks in hits]
        request.num_computed_tokens = cached_tokens
        request.num_findable_blocks = cached_tokens // self.block_size
        if self.slots is not None:
            (request.slot,) = self.slots.allocate(1)
            last = cached_tokens // self.block_size - 1
            request.restored_slot = NULL_BLOCK if last < 0 else self._snapshot(request, last)
        return self.allocate(request, num_tokens) is not None

    def remember(self, request: Request, num_tokens: int) -> None:
        """Add the full blocks of the first `num_tokens`, which are known, to the prefix cache.

        Called when a step that computes them is scheduled: later requests of the same step may already share them,
        because attention writes all keys before it reads any. If the step fails, cached blocks may never have been
        computed: the engine then starts with a new manager.
        """
        full = num_tokens // self.block_size
        first = request.num_findable_blocks
        if full <= first or not self._shares(request):
            return
        self._extend_hashes(request)
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            for index in range(first, full):
                if blocks[index] != NULL_BLOCK:
                    pool.remember(blocks[index], request.block_hashes[index], self._tokens(request, index))
        request.num_findable_blocks = full

    def next_snapshot(self, request: Request) -> int:
        """The first position behind the computed tokens where a snapshot is to be taken; 0: none is."""
        if self.snapshots is None or not self._shares(request):
            return 0
        interval = self.snapshots.interval
        return (request.num_computed_tokens // interval + 1) * interval

    def take_snapshot(self, request: Request, num_tokens: int) -> int:
        """A slot for the request's states after `num_tokens`, which this step computes last; -1: none is taken."""
        if self.snapshots is None or num_tokens % self.snapshots.interval or not self._shares(request):
            return -1
        self._extend_hashes(request)
        last = num_tokens // self.block_size - 1
        return self.snapshots.take(request.block_hashes[last], self._tokens(request, last))

    def commit_snapshots(self) -> None:
        """The step that was scheduled last has run."""
        if self.snapshots is not None:
            self.snapshots.commit()

    def room(self, request: Request, reserve: int) -> int:
        """How many tokens the request can hold with all free blocks except `reserve`."""
        if not self.pools:
            return request.max_total_tokens
        held = len(request.blocks[0]) if request.blocks else 0
        return (held + max(0, self.num_free_blocks() - reserve)) * self.block_size

    def trim(self, request: Request) -> None:
        """Release the blocks after the computed tokens, which held rejected drafts only."""
        kept = -(-request.num_computed_tokens // self.block_size)
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            while len(blocks) > kept:
                pool.release(blocks.pop())

    def free(self, request: Request) -> None:
        """Release all blocks of the request, last block first, so that the ends of prefixes are evicted first."""
        for pool, blocks in zip(self.pools, request.blocks, strict=False):
            for block in reversed(blocks):
                pool.release(block)
        request.blocks = []
        request.num_findable_blocks = 0
        if self.slots is not None:
            self.slots.release(request.slot)
            request.slot = request.restored_slot = NULL_BLOCK

    def reset_prefix_cache(self) -> None:
        for pool in self.pools:
            pool.reset_cache()
        if self.snapshots is not None:
            self.snapshots.reset_cache()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Check every pool against the blocks and slots of the requests; raises `IntegrityError`."""
        requests = list(requests)
        if self.slots is not None:
            self.slots.check_integrity(Counter(request.slot for request in requests if request.slot != NULL_BLOCK))
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        owners = [Counter[int]() for _ in self.pools]
        for request in requests:
            for count, blocks in zip(owners, request.blocks, strict=False):
                count.update(block for block in blocks if block != NULL_BLOCK)
        for pool, count in zip(self.pools, owners, strict=True):
            pool.check_integrity(count)

    def _shares(self, request: Request) -> bool:
        return request.cache_key is not None and (self.slots is None or self.snapshots is not None)

    def _snapshot(self, request: Request, last: int) -> int:
        """The slot with the states after block `last`, -1 if there is none."""
        if self.snapshots is None:
            return -1
        return self.snapshots.find(request.block_hashes[last], self._tokens(request, last))

    def _last_snapshot(self, request: Request, length: int) -> int:
        """How many of the first `length` blocks there are before the last snapshot; all, if states are not needed."""
        if self.snapshots is None:
            return length
        step = self.snapshots.interval // self.block_size
        usable = (blocks for blocks in range(length // step * step, 0, -step))
        return next((blocks for blocks in usable if self._snapshot(request, blocks - 1) >= 0), 0)

    def _groups(self) -> Iterable[tuple[BlockPool, int | None]]:
        return zip(self.pools, self.windows, strict=True)

    def _match_group(self, pool: BlockPool, window: int | None, request: Request, limit: int) -> list[int]:
        """Block ids of the longest usable prefix of at most `limit` blocks; a window needs only the last ones."""
        if window is None:
            return list(takewhile(lambda block: block >= 0, (self._find(pool, request, i) for i in range(limit))))
        found = [self._find(pool, request, index) for index in range(limit)]
        for length in range(limit, 0, -1):
            first = self._first_seen_block(length * self.block_size, window)
            if all(block >= 0 for block in found[first:length]):
                return [NULL_BLOCK] * first + found[first:length]
        return []

    def _find(self, pool: BlockPool, request: Request, index: int) -> int:
        return pool.find(request.block_hashes[index], self._tokens(request, index))

    def _first_seen_block(self, position: int, window: int) -> int:
        """The first block that a token at `position` or later still sees."""
        return max(0, position - window + 1) // self.block_size

    def _release_out_of_window(self, request: Request) -> None:
        for (pool, window), blocks in zip(self._groups(), request.blocks, strict=True):
            if window is None:
                continue
            index = min(self._first_seen_block(request.num_computed_tokens, window), len(blocks)) - 1
            while index >= 0 and blocks[index] != NULL_BLOCK:
                pool.release(blocks[index])
                blocks[index] = NULL_BLOCK
                index -= 1

    def _extend_hashes(self, request: Request) -> None:
        """Extend the hash chain to every full block: SHA-256 of (parent hash, cache key, tokens)."""
        hashes = request.block_hashes
        for index in range(len(hashes), request.num_tokens // self.block_size):
            parent = hashes[-1] if hashes else request.cache_key or b""
            hashes.append(hashlib.sha256(parent + self._tokens(request, index)).digest())

    def _tokens(self, request: Request, index: int) -> bytes:
        start = index * self.block_size
        ids = request.token_ids[start : start + self.block_size]
        return array("q", ids if request.images is None else request.images.content(ids, start)).tobytes()


@dataclass(frozen=True)
class Entry:
    """A cached block, or the snapshot of recurrent states behind one.

    Attributes:
        row: the block, or the slot of the snapshot.
        digest: its chain hash.
        tokens: of the block, int64.
    """

    row: int
    digest: bytes
    tokens: bytes


def cached_entries(blocks: BlockManager) -> dict[int, list[Entry]]:
    """By group, `SLOTS` for snapshots. Called between two steps, when every cached block has been computed."""
    found = {group: _entries(pool, 0) for group, pool in enumerate(blocks.pools)}
    if blocks.snapshots is not None:
        found[SLOTS] = _entries(blocks.snapshots._pool, blocks.snapshots._offset)
    return found


def restore_entries(blocks: BlockManager, group: int, entries: list[Entry]) -> list[tuple[int, int]]:
    """Give entries, whose rows count from 0, blocks or slots that nobody uses; the last ones if there is no room.

    Returns (row, block or slot). The caller writes their content before the next step.
    """
    pool, offset = _pool(blocks, group)
    room = sum(block not in pool.content for block in pool.free)
    placed = []
    for entry in entries[max(0, len(entries) - room) :]:
        if entry.digest in pool.by_hash:
            continue
        (block,) = pool.allocate(1)
        pool.remember(block, entry.digest, entry.tokens)
        pool.release(block)
        placed.append((entry.row, offset + block))
    return placed


def _pool(blocks: BlockManager, group: int) -> tuple[BlockPool, int]:
    if group != SLOTS:
        return blocks.pools[group], 0
    if blocks.snapshots is None:
        raise ValueError("there are no snapshots of recurrent states")
    return blocks.snapshots._pool, blocks.snapshots._offset


def _entries(pool: BlockPool, offset: int) -> list[Entry]:
    """Blocks in use last. Of each prefix the end comes first, as in the free list."""
    used = [block for block in reversed(pool.by_hash.values()) if block not in pool.free]
    order = [*(block for block in pool.free if block in pool.content), *used]
    return [Entry(offset + block, *pool.content[block]) for block in order]
