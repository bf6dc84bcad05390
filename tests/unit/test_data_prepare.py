"""The token cache: built once, found again by content, safe against kills and against others."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanish.data import prepare as module
from titanish.data.indexed import IndexedReader, bin_path
from titanish.data.prepare import default_cache_dir, prepare
from titanish.data.sources import TextSource, text_files
from titanish.data.tokenizer import ByteTokenizer
from titanish.errors import DataError


class CountingTokenizer(ByteTokenizer):
    """Counts the documents that it encodes."""

    def __init__(self) -> None:
        self.documents = 0

    def encode_documents(self, texts: Sequence[str], *, add_bos: bool, add_eos: bool) -> list[np.ndarray]:
        self.documents += len(texts)
        return super().encode_documents(texts, add_bos=add_bos, add_eos=add_eos)


def source(path: Path, text_field: str = "text") -> TextSource:
    return text_files(path, setting="training.dataset_path", text_field=text_field)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with two files that were last changed long ago."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(
        '{"text": "one", "other": "x"}\n{"text": ""}\n{"text": "two", "other": "y"}\n'
    )
    (folder / "b.txt").write_text("three")
    for file in folder.iterdir():
        os.utime(file, (1_600_000_000, 1_600_000_000))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def run(
    data: Path,
    cache: Path,
    tokenizer: ByteTokenizer | None = None,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    text_field: str = "text",
) -> Path:
    found = source(data, text_field)
    return prepare(found, tokenizer or ByteTokenizer(), add_bos=add_bos, add_eos=add_eos, cache_dir=cache)


def test_documents_are_laid_end_to_end_in_file_order(data: Path, cache: Path) -> None:
    reader = IndexedReader(run(data, cache))
    assert reader.dtype == np.uint16
    assert reader.lengths.tolist() == [5, 5, 7]
    expected = [i for text in ("one", "two", "three") for i in (256, *text.encode(), 257)]
    assert reader.tokens(0, reader.num_tokens).tolist() == expected


def test_batches_do_not_change_the_order(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "c.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    whole = bin_path(run(data, cache)).read_bytes()
    monkeypatch.setattr(module, "_BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 30)
    assert bin_path(run(data, cache.with_name("other"))).read_bytes() == whole


def test_a_second_start_tokenizes_and_reads_nothing(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = CountingTokenizer()
    first = run(data, cache, tokenizer)
    assert tokenizer.documents == 3
    monkeypatch.setattr(module, "_sha256", lambda path: pytest.fail(f"{path} was read again"))
    assert run(data, cache, tokenizer) == first
    assert tokenizer.documents == 3


def test_a_hash_of_a_file_that_just_changed_is_not_remembered(data: Path, cache: Path) -> None:
    first = run(data, cache)
    os.utime(data / "b.txt")
    stamp = (data / "b.txt").stat()
    run(data, cache)
    (data / "b.txt").write_text("THREE")  # same size, and a clock that did not tick
    os.utime(data / "b.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert run(data, cache) != first


@pytest.mark.parametrize("change", [{"add_bos": False}, {"add_eos": False}, {"text_field": "other"}])
def test_settings_that_change_the_tokens_change_the_name(
    data: Path, cache: Path, change: dict[str, Any]
) -> None:
    assert run(data, cache) != run(data, cache, **change)


def test_tokenizer_names_and_content_change_the_name(data: Path, cache: Path) -> None:
    other_tokenizer = CountingTokenizer()
    other_tokenizer.fingerprint = "other"
    prefixes = [run(data, cache), run(data, cache, other_tokenizer)]
    (data / "b.txt").write_text("four!")
    prefixes.append(run(data, cache))
    (data / "b.txt").rename(data / "0.txt")
    prefixes.append(run(data, cache))
    assert len(set(prefixes)) == 4


def test_the_same_content_elsewhere_is_found(data: Path, cache: Path) -> None:
    tokenizer = CountingTokenizer()
    first = run(data, cache, tokenizer)
    moved = data.rename(data.with_name("moved"))
    assert run(moved, cache, tokenizer) == first
    assert tokenizer.documents == 3


def test_both_starts_log_what_there_is_and_what_was_skipped(
    data: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefix = run(data, cache)
    skipped = f"skipped 1 empty documents (first: {data}/a.jsonl:2)"
    assert f"prepared text: 3 documents, 17 tokens, {skipped} in 0." in caplog.text
    caplog.clear()
    run(data, cache)
    assert f"using prepared text: 3 documents, 17 tokens, {skipped}: {prefix}" in caplog.text


def test_the_cache_is_found_without_its_summary(
    data: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefix = run(data, cache)
    prefix.with_name(prefix.name + ".json").unlink()
    assert run(data, cache) == prefix
    assert f"using prepared data: {prefix}" in caplog.text


def test_damaged_data_is_made_again(data: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = run(data, cache)
    whole = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes(whole[:-2])
    run(data, cache)
    assert bin_path(prefix).read_bytes() == whole
    assert "the prepared data is damaged and will be made again: " in caplog.text


DAMAGED = ["{", "{}", "3", "[]", "null", '"x"', "[" * 5000]


@pytest.mark.parametrize(
    "damaged",
    [*DAMAGED, "entry 3", "entry []", "entry [1, 2]", 'entry ["a", 2, "b"]'],
    ids=lambda text: text[:20],
)
def test_a_damaged_memory_of_hashes_only_costs_time(data: Path, cache: Path, damaged: str) -> None:
    prefix = run(data, cache)
    (memory,) = cache.glob("hashes-*.json")
    whole = memory.read_text()
    if damaged.startswith("entry "):
        damaged = json.dumps(dict.fromkeys(json.loads(whole), json.loads(damaged.removeprefix("entry "))))
    memory.write_text(damaged)
    assert run(data, cache) == prefix
    assert memory.read_text() == whole


@pytest.mark.parametrize(
    "damaged", [*DAMAGED, '{"dataset": "text", "documents": "x"}'], ids=lambda text: text[:20]
)
def test_a_damaged_summary_is_as_good_as_none(
    data: Path, cache: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefix = run(data, cache)
    prefix.with_name(prefix.name + ".json").write_text(damaged)
    assert run(data, cache) == prefix
    assert f"using prepared data: {prefix}" in caplog.text


KILLED = """
import os, signal, sys
from titanish.data import prepare as module
from titanish.data.sources import text_files
from titanish.data.tokenizer import ByteTokenizer

class Killer(ByteTokenizer):
    def encode_documents(self, texts, **edges):
        if "three" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_documents(texts, **edges)

module._BATCH_DOCUMENTS = 1
source = text_files(sys.argv[1], setting="training.dataset_path", text_field="text")
module.prepare(source, Killer(), add_bos=sys.argv[3] == "bos", add_eos=True, cache_dir=sys.argv[2])
"""


@pytest.mark.parametrize("same_data", [True, False], ids=["the_same_build", "another_build"])
def test_a_killed_build_is_cleaned_up_and_made_again(data: Path, cache: Path, same_data: bool) -> None:
    command = [sys.executable, "-c", KILLED, str(data), str(cache), "bos" if same_data else "none"]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -9
    assert len(list(cache.glob("*.partial"))) == 4
    assert IndexedReader(run(data, cache)).num_tokens == 17
    assert list(cache.glob("*.partial")) == []


def test_a_build_in_progress_is_not_cleaned_up(data: Path, cache: Path) -> None:
    cache.mkdir()
    owner = f"text-{'0123' * 8}"
    ours = cache / f"{owner}.bin.0123abcd.partial"
    ours.write_bytes(b"")
    with module._locked(cache / owner, waiting_for="nothing"):
        run(data, cache)
        assert ours.exists()


@pytest.mark.parametrize(
    "name",
    [
        "film.partial",
        "text-0123.bin.0123abcd.partial",
        f"text-{'0' * 32}.iso.0123abcd.partial",
        f"text-{'0' * 32}.bin.partial",
        f"my-text-{'0' * 32}.bin.0123abcd.partial",
    ],
)
def test_a_file_of_another_program_is_never_deleted(data: Path, cache: Path, name: str) -> None:
    cache.mkdir()
    (cache / name).write_text("theirs")
    run(data, cache)
    assert (cache / name).read_text() == "theirs"
    assert not (cache / f"{name.split('.')[0]}.lock").exists()


class LogEvent(logging.Handler):
    """Is set once a record with the text was logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.event = text, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.event.set()


def test_a_second_start_waits_says_so_and_then_reads(data: Path, cache: Path) -> None:
    tokenizer = CountingTokenizer()
    prefix = run(data, cache, tokenizer)
    bin_path(prefix).unlink()  # so that both have to build
    handler = LogEvent("waiting for another start that prepares the same data")
    logger = logging.getLogger("titanish.data.prepare")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with module._locked(prefix, waiting_for="nothing"):
            waiting = threading.Thread(target=run, args=(data, cache, tokenizer))
            waiting.start()
            assert handler.event.wait(30)
            module._build(
                source(data),
                module._stamps(source(data).files),
                tokenizer,
                prefix,
                add_bos=True,
                add_eos=True,
            )
        waiting.join(30)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert not waiting.is_alive()
    assert tokenizer.documents == 6  # the first run and the build above; the one that waited made none


def test_a_file_that_changes_while_it_is_read_is_named(data: Path, cache: Path) -> None:
    class Meddler(ByteTokenizer):
        def encode_documents(self, texts: Sequence[str], *, add_bos: bool, add_eos: bool) -> list[np.ndarray]:
            with (data / "b.txt").open("a") as file:
                file.write(" more")
            return super().encode_documents(texts, add_bos=add_bos, add_eos=add_eos)

    with pytest.raises(
        DataError, match=r"training.dataset_path = .*b.txt changed while it was read; start again"
    ):
        run(data, cache, Meddler())
    assert list(cache.glob("*.bin*")) == []


def test_a_file_that_vanishes_before_it_is_read_is_named(data: Path, cache: Path) -> None:
    found = source(data)
    (data / "b.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*b.txt: No such file or directory"):
        prepare(found, ByteTokenizer(), add_bos=True, add_eos=True, cache_dir=cache)


def test_a_missing_special_token_is_named_before_any_work(data: Path, cache: Path) -> None:
    tokenizer = CountingTokenizer()
    tokenizer.bos_id = None
    with pytest.raises(DataError, match=r"training.add_bos = true, but the tokenizer bytes has no BOS"):
        run(data, cache, tokenizer)
    assert not cache.exists()


def test_a_cache_that_cannot_be_made_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    with pytest.raises(DataError) as caught:
        run(data, cache)
    assert str(caught.value) == (
        f"the cache folder {cache} cannot be written (Not a directory: {cache}); make room or set "
        "training.cache_dir (or $TITANISH_CACHE) to a folder that can be written"
    )


def test_a_full_disk_is_named(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("titanish.data.indexed.os.fsync", refuse)
    with pytest.raises(
        DataError, match=rf"the cache folder {cache} cannot be written \(No space left on device"
    ):
        run(data, cache)
    assert list(cache.glob("*.partial")) == []


def test_the_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITANISH_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.setenv("TITANISH_CACHE", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/titanish")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_progress_bar_is_for_terminals_only(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    run(data, cache)
    assert ("tokenizing text" in stream.getvalue()) == stream.isatty()
