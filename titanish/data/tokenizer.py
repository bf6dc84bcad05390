"""Text to token ids and back: raw bytes, or any `tokenizer.json` folder of the Hugging Face layout.

Special tokens are never left to the tokenizer's own template: text is always encoded without any, and
exactly one BOS and one EOS are put around a document where the configuration asks for them. Special tokens
that are spelled out in the text itself are recognised, as transformers does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from titanish.errors import DataError

# What makes up a tokenizer in the Hugging Face layout; the first is needed, the others are taken where
# present.
_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


class Tokenizer(Protocol):
    """What data preparation and sampling need of a tokenizer."""

    name: str
    """Where it comes from, for messages."""
    vocab_size: int
    """Largest id + 1."""
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    """SHA-256 (hex) over everything that decides which ids a text becomes."""
    files: tuple[Path, ...]
    """The files it consists of; a checkpoint keeps copies of them."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without BOS and EOS."""
        ...

    def encode_documents(self, texts: Sequence[str], *, add_bos: bool, add_eos: bool) -> list[np.ndarray]:
        """Returns one int array per text, with BOS and EOS as asked.

        DataError if one that is asked for is not defined.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, special tokens left out."""
        ...


def load_tokenizer(kind: str, path: str | Path | None) -> Tokenizer:
    """Returns the tokenizer of `model.tokenizer` = "bytes" or "hf" and `model.hf_assets_path`."""
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "hf":
        return HFTokenizer(path)
    raise DataError(f'model.tokenizer = {kind!r}: unknown tokenizer; write "hf" or "bytes"')


def edge_ids(tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> tuple[list[int], list[int]]:
    """Returns the ids to put before and after each document. DataError if one asked for is not defined."""
    for name, wanted, token_id in (("bos", add_bos, tokenizer.bos_id), ("eos", add_eos, tokenizer.eos_id)):
        if wanted and token_id is None:
            raise DataError(
                f"training.add_{name} = true, but the tokenizer {tokenizer.name} has no {name.upper()} token "
                f"in its vocabulary; name one as {name}_token in its tokenizer_config.json, or set "
                f"training.add_{name} = false"
            )
    before = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    after = [tokenizer.eos_id] if add_eos and tokenizer.eos_id is not None else []
    return before, after


class ByteTokenizer:
    """The UTF-8 bytes of a text as ids 0 to 255; 256 is BOS, 257 is EOS."""

    name = "bytes"
    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = hashlib.sha256(b"titanish byte tokenizer, BOS 256, EOS 257").hexdigest()
    files: tuple[Path, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of `text`."""
        return list(text.encode())

    def encode_documents(self, texts: Sequence[str], *, add_bos: bool, add_eos: bool) -> list[np.ndarray]:
        """Returns one uint16 array per text."""
        before, after = (np.array(ids, np.uint16) for ids in edge_ids(self, add_bos=add_bos, add_eos=add_eos))
        return [np.concatenate([before, np.frombuffer(text.encode(), np.uint8), after]) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; bytes that are no UTF-8 become U+FFFD, ids above 255 are left out."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class HFTokenizer:
    """A folder with `tokenizer.json`, run by the `tokenizers` library on all cores.

    BOS and EOS are taken from tokenizer_config.json, else special_tokens_map.json, else config.json.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = _tokenizer_folder(folder)
        self.name = str(self.folder)
        path = self.folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path}: cannot be read as a tokenizer: {error}") from error
        # A file may carry the truncation and padding of whoever saved it; both would change documents
        # silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size == 0:
            raise DataError(f"{path}: the tokenizer's vocabulary is empty")
        self.bos_id = self._special_id("bos")
        self.eos_id = self._special_id("eos")
        self.files = tuple(f for name in _FOLDER_FILES if (f := self.folder / name).is_file())
        digest = hashlib.sha256(path.read_bytes())
        digest.update(f" BOS {self.bos_id} EOS {self.eos_id}".encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without those that the tokenizer's template would add."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str], *, add_bos: bool, add_eos: bool) -> list[np.ndarray]:
        """Returns one int32 array per text, encoded on all cores."""
        before, after = edge_ids(self, add_bos=add_bos, add_eos=add_eos)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*before, *encoding.ids, *after], np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; special tokens and ids that the tokenizer does not have are left out."""
        return self._tokenizer.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)

    def _special_id(self, name: str) -> int | None:
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._read_json(file).get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and (token_id := self._tokenizer.token_to_id(token)) is not None:
                return token_id
        token_id = self._read_json("config.json").get(f"{name}_token_id")
        if (
            isinstance(token_id, list) and token_id
        ):  # chat models list several ends; the first ends a document
            token_id = token_id[0]
        known = isinstance(token_id, int) and self._tokenizer.id_to_token(token_id) is not None
        return token_id if known else None

    def _read_json(self, file: str) -> dict[str, Any]:
        path = self.folder / file
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
        return value


def _tokenizer_folder(folder: str | Path | None) -> Path:
    """Returns the folder, once it is known to hold a tokenizer.json."""
    remedy = (
        "copy tokenizer.json and tokenizer_config.json of the model from Hugging Face there, "
        'or set model.tokenizer = "bytes"'
    )
    if folder is None or not str(folder):
        raise DataError(
            'model.hf_assets_path is not set, but model.tokenizer = "hf" needs a folder with tokenizer.json; '
            'set it, or set model.tokenizer = "bytes"'
        )
    path = Path(folder).expanduser()
    if not path.exists():
        raise DataError(
            f"model.hf_assets_path = {str(folder)!r}: no such folder (searched {path.absolute()}); {remedy}"
        )
    if not path.is_dir():
        raise DataError(
            f"model.hf_assets_path = {str(folder)!r}: is a file; give the folder that holds tokenizer.json"
        )
    if not (path / "tokenizer.json").is_file():
        found = sorted(entry.name for entry in path.iterdir())
        holds = (
            f"holds only {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}" if found else "is empty"
        )
        raise DataError(
            f"model.hf_assets_path = {str(folder)!r}: no tokenizer.json in {path.absolute()} "
            f"(the folder {holds}); {remedy}"
        )
    return path
