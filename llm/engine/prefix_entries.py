"""What the prefix cache has, as plain data, and putting it into an empty one.

Owns the order: the entries that would be evicted first come first, so that a smaller cache keeps the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm.engine.block_manager import BlockManager, BlockPool
from llm.engine.kv_cache import SLOTS


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
