"""A keyed bijection on [0, n): the order in which an epoch visits its windows, computed instead of stored.

A shuffled index of a trillion-token dataset takes gigabytes and has to be rebuilt at every start. A small
block cipher over the window numbers needs no memory, gives the position of any sample in a few
microseconds, and makes the whole state of the data one number. Construction: a balanced Feistel network on
the smallest even number of bits that holds n, applied again while its result is not below n (cycle walking:
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain is smaller than 4n, so
fewer than four rounds of walking are expected.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TypeVar, overload

import numpy as np

_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_Words = TypeVar("_Words", int, np.ndarray)


@overload
def permute(index: int, n: int, key: tuple[int, int]) -> int: ...
@overload
def permute(index: np.ndarray, n: int, key: tuple[int, int]) -> np.ndarray: ...
def permute(index: int | np.ndarray, n: int, key: tuple[int, int]) -> int | np.ndarray:
    """Returns where `index` goes under the bijection on [0, n) that `key` = (seed, epoch) selects.

    `index` is an int or an integer array of any shape (then the result is an int64 array of that shape).
    The order is part of what a checkpoint promises: changing this function changes the data of every
    resumed run.
    """
    keys = _round_keys(key)
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    if isinstance(index, np.ndarray):
        assert index.size == 0 or (index.min() >= 0 and index.max() < n), f"index outside [0, {n})"
        flat = _encrypt(index.ravel().astype(np.uint64), half_bits, keys)
        while (outside := flat >= n).any():
            flat[outside] = _encrypt(flat[outside], half_bits, keys)
        return flat.astype(np.int64).reshape(index.shape)
    assert 0 <= index < n, f"index {index} outside [0, {n})"
    value = _encrypt(int(index), half_bits, keys)
    while value >= n:
        value = _encrypt(value, half_bits, keys)
    return value


@lru_cache(maxsize=64)
def _round_keys(key: tuple[int, int]) -> tuple[int, ...]:
    """One 64-bit word per round; hashed, so that neighbouring seeds and epochs have unrelated words."""
    seed, epoch = key
    digest = hashlib.blake2b(
        f"titanish permutation {seed} {epoch}".encode(), digest_size=8 * _ROUNDS
    ).digest()
    return tuple(int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(_ROUNDS))


def _encrypt(value: _Words, half_bits: int, keys: tuple[int, ...]) -> _Words:
    """A Feistel network: each round is invertible whatever `mix64` is, so the whole is a bijection."""
    half_mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & half_mask
    for round_key in keys:
        left, right = right, left ^ (mix64((right + round_key) & _MASK64) >> (64 - half_bits))
    return (left << half_bits) | right


def mix64(word: _Words) -> _Words:
    """Returns 64 well-mixed bits of `word` (int below 2**64, or uint64 array).

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    2014), with Stafford's constants "Mix13".
    """
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK64
    return word ^ (word >> 31)
