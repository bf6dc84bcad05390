"""From the configuration's sections to a tokenizer and to windows of tokens, in two steps.

`prepare_data` runs before torch and the process group: it is where a missing file or a tokenizer that does
not fit is found, and where text is tokenized, once for all ranks. The windows are then opened by every rank
for itself.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titanish.data.indexed import IndexedReader
from titanish.data.prepare import prepare
from titanish.data.sources import TextSource, megatron_prefix, python_stdlib, text_files
from titanish.data.tokenizer import Tokenizer, load_tokenizer
from titanish.data.windows import MockReader, TokenReader, TokenWindows
from titanish.errors import DataError

if TYPE_CHECKING:
    from titanish.config.sections.model import Model
    from titanish.config.sections.training import Training, Validation

logger = logging.getLogger(__name__)

DATASETS = ("python_stdlib", "text", "megatron", "mock")
# Mock tokens have no end, but a pass over all validation data must.
_MOCK_VALIDATION_TOKENS = 1 << 16


@dataclass(frozen=True)
class Tokens:
    """Where the token ids of one purpose are: a `.bin`/`.idx` prefix, or None for mock tokens.

    `fingerprint` changes when the ids do; a resumed run compares it, since another text means another order.
    """

    dataset: str
    prefix: Path | None
    fingerprint: str


@dataclass(frozen=True)
class Prepared:
    """All of the data that exists before there are ranks. `validation` is None where validation is off."""

    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens | None
    vocab_size: int
    seed: int


def prepare_data(
    training: Training, validation: Validation, model: Model, *, vocab_size: int, seed: int
) -> Prepared:
    """Loads the tokenizer and prepares training and validation data; `vocab_size` is the model's.

    DataError for a tokenizer, dataset or path that cannot be used, and for a tokenizer with ids that the
    model has no embedding for (a smaller one is fine; ids in Megatron files are checked as they are read).
    """
    tokenizer = load_tokenizer(model.tokenizer, model.hf_assets_path)

    def tokens(dataset: str, path: str | None, section: str, *, held_out: bool) -> Tokens:
        if dataset == "mock":
            return Tokens("mock", None, f"mock-{vocab_size}-{seed}-{section}")
        if dataset == "megatron":
            prefix = megatron_prefix(_required(path, dataset, section), setting=f"{section}.dataset_path")
            return Tokens("megatron", prefix, _fingerprint(IndexedReader(prefix)))
        source = _text_source(dataset, path, section, training.text_field, held_out=held_out)
        _check_vocabulary(tokenizer, vocab_size)
        prefix = prepare(
            source,
            tokenizer,
            add_bos=training.add_bos,
            add_eos=training.add_eos,
            cache_dir=training.cache_dir,
        )
        return Tokens(dataset, prefix, prefix.name)

    train = tokens(training.dataset, training.dataset_path, "training", held_out=False)
    if not validation.enable:
        return Prepared(tokenizer, train, None, vocab_size, seed)
    held_out = tokens(
        validation.dataset or training.dataset, validation.dataset_path, "validation", held_out=True
    )
    if held_out.fingerprint == train.fingerprint:
        logger.warning("validation reads the same data as training: its loss says nothing about unseen text")
    return Prepared(tokenizer, train, held_out, vocab_size, seed)


def build_train_windows(prepared: Prepared, *, seq_len: int) -> TokenWindows:
    """Returns the training windows of `seq_len` + 1 tokens, each checked against the model's vocabulary."""
    return TokenWindows(_open(prepared, prepared.train), seq_len, vocab_size=prepared.vocab_size)


def build_validation_windows(prepared: Prepared, *, seq_len: int) -> TokenWindows:
    """Returns the validation windows, the last of which may be shorter."""
    assert prepared.validation is not None, "validation is off"
    reader = _open(prepared, prepared.validation, mock_tokens=max(_MOCK_VALIDATION_TOKENS, seq_len) + 1)
    return TokenWindows(reader, seq_len, vocab_size=prepared.vocab_size, keep_partial=True)


def _open(prepared: Prepared, tokens: Tokens, *, mock_tokens: int | None = None) -> TokenReader:
    if tokens.prefix is not None:
        return IndexedReader(tokens.prefix)
    if mock_tokens is None:
        return MockReader(prepared.vocab_size, prepared.seed)
    return MockReader(prepared.vocab_size, prepared.seed + 1, mock_tokens)


def _text_source(
    dataset: str, path: str | None, section: str, text_field: str, *, held_out: bool
) -> TextSource:
    if dataset == "python_stdlib":
        return python_stdlib(held_out=held_out)
    if dataset == "text":
        setting = f"{section}.dataset_path"
        return text_files(_required(path, dataset, section), setting=setting, text_field=text_field)
    raise DataError(f"{section}.dataset = {dataset!r}: unknown dataset; known are {', '.join(DATASETS)}")


def _required(path: str | None, dataset: str, section: str) -> str:
    if path:
        return path
    where = {
        "text": "a .jsonl or .txt file, a folder of them or a glob",
        "megatron": "the prefix of a .bin/.idx pair",
    }
    also = ", or turn validation off (validation.enable = false)" if section == "validation" else ""
    raise DataError(
        f"{section}.dataset_path is not set, but {section} reads dataset {dataset!r}; "
        f"set it to {where[dataset]}{also}"
    )


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the model's "
            f"vocab_size = {vocab_size} has embeddings for 0 to {vocab_size - 1} only; use "
            f"the model's own tokenizer, or set model.override.vocab_size to {tokenizer.vocab_size} or more"
        )


def _fingerprint(reader: IndexedReader) -> str:
    """A hash that is quick for files of any size: their shape and the tokens at both ends."""
    count = min(4096, reader.num_tokens)
    digest = hashlib.sha256(f"{reader.dtype.name} {reader.num_tokens} {len(reader.lengths)}".encode())
    digest.update(reader.tokens(0, count).tobytes())
    digest.update(reader.tokens(reader.num_tokens - count, count).tobytes())
    return f"{reader.prefix.name}-{digest.hexdigest()[:32]}"
