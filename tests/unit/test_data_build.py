"""From configuration sections to windows: each dataset, its validation data, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

from titanish.config.schema import Model, Training, Validation
from titanish.data.build import Prepared, build_train_windows, build_validation_windows, prepare_data
from titanish.data.indexed import IndexedWriter
from titanish.errors import DataError

BYTES = Model(tokenizer="bytes")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITANISH_CACHE", str(tmp_path / "cache"))


def prepared(training: Training, validation: Validation | None = None, model: Model = BYTES) -> Prepared:
    return prepare_data(training, validation or Validation(), model, vocab_size=258, seed=0)


def write_tokens(prefix: Path, tokens: list[int]) -> Path:
    with IndexedWriter(prefix, np.dtype("uint16")) as writer:
        writer.add_document(tokens)
    return prefix


def test_standard_library_trains_and_validates_on_different_files() -> None:
    data = prepared(Training(dataset="python_stdlib"), Validation(enable=True))
    assert data.validation is not None
    assert data.train.fingerprint != data.validation.fingerprint
    train, validation = build_train_windows(data, seq_len=64), build_validation_windows(data, seq_len=64)
    assert 0 < validation.num_windows < 0.2 * train.num_windows
    first = validation.window(0)
    assert first[0] == data.tokenizer.bos_id


def test_validation_that_is_off_prepares_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    data = prepared(Training(dataset="text", dataset_path=str(tmp_path / "a.txt")))
    assert data.validation is None


def test_text_uses_its_own_path_for_validation(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"body": "training text"}))
    (tmp_path / "valid.jsonl").write_text(json.dumps({"body": "held out"}))
    data = prepared(
        Training(
            dataset="text",
            dataset_path=str(tmp_path / "train.jsonl"),
            text_field="body",
            add_bos=False,
            cache_dir=str(tmp_path / "here"),
        ),
        Validation(enable=True, dataset_path=str(tmp_path / "valid.jsonl")),
    )
    assert data.tokenizer.decode(build_train_windows(data, seq_len=12).window(0)) == "training text"
    validation = build_validation_windows(data, seq_len=100)
    assert validation.window(0).tolist() == [*b"held out", 257]
    assert data.train.prefix is not None
    assert data.train.prefix.parent == tmp_path / "here"


def test_megatron_data_is_read_as_it_is(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "data", list(range(20)))
    validation = write_tokens(tmp_path / "valid", [7, 8, 9])
    data = prepared(
        Training(dataset="megatron", dataset_path=f"{prefix}.idx"),
        Validation(enable=True, dataset_path=str(validation)),
    )
    assert build_train_windows(data, seq_len=4).window(1).tolist() == [4, 5, 6, 7, 8]
    assert build_validation_windows(data, seq_len=4).window(0).tolist() == [7, 8, 9]


def test_megatron_fingerprint_follows_the_content(tmp_path: Path) -> None:
    fingerprints = []
    for tokens in ([1, 2, 3], [1, 2, 4], [1, 2, 3, 4], [1, 2, 3]):
        training = Training(dataset="megatron", dataset_path=str(write_tokens(tmp_path / "data", tokens)))
        fingerprints.append(prepared(training).train.fingerprint)
    assert len(set(fingerprints)) == 3
    assert fingerprints[0] == fingerprints[3]


def test_mock_needs_no_file_and_its_validation_ends() -> None:
    data = prepared(Training(dataset="mock"), Validation(enable=True))
    train, validation = build_train_windows(data, seq_len=8), build_validation_windows(data, seq_len=8)
    assert train.sample(10**8, 0).max() < 258
    assert validation.num_windows == 8192
    assert train.window(0).tolist() != validation.window(0).tolist()
    assert build_validation_windows(data, seq_len=10**6).num_windows == 1


def test_validation_may_be_another_kind(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "data", list(range(20)))
    data = prepared(
        Training(dataset="mock"), Validation(enable=True, dataset="megatron", dataset_path=str(prefix))
    )
    assert build_validation_windows(data, seq_len=19).window(0).tolist() == list(range(20))


def test_validating_on_the_training_data_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "a.txt")
    Path(path).write_text("some text")
    prepared(Training(dataset="text", dataset_path=path), Validation(enable=True, dataset_path=path))
    assert "validation reads the same data as training" in caplog.text


@pytest.mark.parametrize(
    ("dataset", "what"), [("text", "a .jsonl or .txt file"), ("megatron", "the prefix of a")]
)
def test_a_path_that_is_not_set_is_named(dataset: str, what: str) -> None:
    with pytest.raises(
        DataError,
        match=rf"training.dataset_path is not set, but training reads dataset '{dataset}'; set it to {what}",
    ):
        prepared(Training(dataset=dataset))


def test_validation_without_a_path_says_how_to_turn_it_off(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    training = Training(dataset="text", dataset_path=str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match=r"validation.dataset_path is not set.*or turn validation off"):
        prepared(training, Validation(enable=True))


def test_an_unknown_dataset_is_named() -> None:
    with pytest.raises(
        DataError,
        match=r"training.dataset = 'pile': unknown dataset; known are python_stdlib, text, megatron, mock",
    ):
        prepared(Training(dataset="pile"))


def tokenizer_folder(folder: Path, num_ids: int) -> Path:
    vocabulary = {f"w{i}": i for i in range(num_ids)}
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_larger_than_the_model_is_refused_at_the_start(tmp_path: Path) -> None:
    model = Model(tokenizer="hf", hf_assets_path=str(tokenizer_folder(tmp_path, 300)))
    training = Training(dataset="python_stdlib", add_bos=False, add_eos=False)
    with pytest.raises(
        DataError, match=r"has ids up to 299, but the model's vocab_size = 257 .*vocab_size to 300"
    ):
        prepare_data(training, Validation(), model, vocab_size=257, seed=0)
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_smaller_than_the_model_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1")
    model = Model(tokenizer="hf", hf_assets_path=str(tokenizer_folder(tmp_path, 257)))
    training = Training(dataset="text", dataset_path=str(tmp_path / "a.txt"), add_bos=False, add_eos=False)
    assert prepare_data(training, Validation(), model, vocab_size=264, seed=0).tokenizer.vocab_size == 257


def test_a_token_file_with_an_id_that_the_model_lacks_is_refused_when_it_is_read(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "data", [1, 2, 300, 3])
    data = prepared(Training(dataset="megatron", dataset_path=str(prefix)))
    with pytest.raises(DataError, match=r"data.bin: largest token id 300 .* vocab_size = 258"):
        build_train_windows(data, seq_len=3).window(0)


def test_preparing_data_does_not_import_torch() -> None:
    check = "import sys, titanish.data.build; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[2], check=False).returncode
        == 0
    )
