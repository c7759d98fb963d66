"""Philox4x32-10, a counter-based random generator (Salmon et al., SC 2011).

A number is a pure function of (key, counter). There is no state, so it cannot depend on the rest of the batch, and the
user's global generators are not touched.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds on counters uint32 [n, 4] under keys uint32 [n, 2] -> uint32 [n, 4]."""
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(10):
        left, right = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniform(seeds: np.ndarray, sample_indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits for each (seed uint64, sample index, position) [n]."""
    seeds = seeds.astype(np.uint64)
    key = np.stack((seeds & _LOW, seeds >> _SHIFT), axis=1)
    zeros = np.zeros(len(seeds), dtype=np.uint64)
    counter = np.stack((positions.astype(np.uint64), sample_indices.astype(np.uint64), zeros, zeros), axis=1)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[:, 0] << _SHIFT) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) / float(1 << 53)
