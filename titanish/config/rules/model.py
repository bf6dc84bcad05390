"""Rules about the model's size: what its heads, vocabulary and positions allow."""

from __future__ import annotations

from collections.abc import Iterator

from titanish.config.degrees import divisors, nearest
from titanish.config.keys import OVERRIDE
from titanish.config.problem import Problem
from titanish.config.rules.base import Facts, Size, rule
from titanish.config.rules.data import TOKENIZED, dataset_kinds

_BYTE_TOKENS = 258
"""256 bytes, BOS and EOS."""


@rule("parallelism.tensor_parallel_degree", "model")
def heads_divide_over_tp(facts: Facts) -> Iterator[Problem]:
    """Whole heads on each rank: key/value heads are shared out, or each is repeated on as many ranks."""
    size, key = facts.size, "parallelism.tensor_parallel_degree"
    degree = facts.config.parallelism.tensor_parallel_degree
    if size is None or _fits(size, degree):
        return
    valid = nearest((each for each in divisors(size.n_heads) if _fits(size, each)), degree)
    model = facts.cite("model.flavor")
    message = (
        f"{facts.cite(key)} does not fit {size.n_heads} heads with {size.n_kv_heads} KV heads of {model}:"
        f" it must divide the heads, and divide the KV heads or be a multiple of them; valid: {valid}"
    )
    yield facts.problem("error", key, message, "model.flavor")


def _fits(size: Size, degree: int) -> bool:
    kv_fits = size.n_kv_heads % degree == 0 or degree % size.n_kv_heads == 0
    return size.n_heads % degree == 0 and kv_fits


@rule("parallelism.tensor_parallel_degree", "model")
def every_tp_rank_has_a_part(facts: Facts) -> Iterator[Problem]:
    """Uneven shards are fine, empty ones are not: FSDP cannot sum the gradients of a rank without a part.

    A width is cut into parts of ceil(width / degree), so the last rank has one if all the others' leave some.
    """
    size, key = facts.size, "parallelism.tensor_parallel_degree"
    degree = facts.config.parallelism.tensor_parallel_degree
    if size is None or not _fits(size, degree):
        return
    for field in ("hidden_dim", "vocab_size"):
        width = getattr(size, field, None)  # not every family has both
        if width is None:
            continue
        part = -(-width // degree)
        if part * (degree - 1) < width:
            continue
        wide = f"{(part - 1) * degree} or " if part > 1 else ""
        override = f"{OVERRIDE}.{field}"
        origin = facts.source(override) if facts.written(override) else facts.cite("model.flavor")
        message = (
            f"{facts.cite(key)} leaves a rank without a part of {field} = {width} ({origin}): parts of {part}"
            f" are used up before the last of {degree} ranks; nearest valid {override}:"
            f" {wide}{part * (degree - 1) + 1}"
        )
        yield facts.problem("error", key, message, override, "model.flavor")


@rule("training.seq_len", "model")
def positions_reach(facts: Facts) -> Iterator[Problem]:
    """RoPE has no last position, but beyond a size's own length it was never trained."""
    length = facts.config.training.seq_len
    if facts.size is not None and length > facts.size.max_seq_len:
        message = (
            f"{facts.cite('training.seq_len')} is longer than the {facts.size.max_seq_len} positions that"
            f" {facts.cite('model.flavor')} is meant for (model.override.max_seq_len sets another limit)"
        )
        yield facts.problem("note", "training.seq_len", message, "model.flavor")


@rule("training.dataset", "validation", "model")
def bytes_fit_the_vocabulary(facts: Facts) -> Iterator[Problem]:
    """Every id that the byte tokenizer can produce has a row in the embedding."""
    size, model = facts.size, facts.config.model
    reads_text = TOKENIZED & dataset_kinds(facts.config)
    if size is None or model.tokenizer != "bytes" or not reads_text or size.vocab_size >= _BYTE_TOKENS:
        return
    key = "model.tokenizer"
    message = (
        f"{facts.cite(key)} has {_BYTE_TOKENS} ids (bytes, BOS, EOS),"
        f" but {facts.cite('model.flavor')} has a vocabulary of {size.vocab_size};"
        f" set model.override.vocab_size to {_BYTE_TOKENS} or more"
    )
    yield facts.problem("error", key, message, "model.override.vocab_size", "model.flavor")
