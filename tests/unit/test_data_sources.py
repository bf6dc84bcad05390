"""Text sources: what counts as a document, and that nothing is lost without being counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titanish.data.sources import SourceReport, TextSource, megatron_prefix, python_stdlib, text_files
from titanish.errors import DataError


def source(path: Path | str, text_field: str = "text") -> TextSource:
    return text_files(path, setting="training.dataset_path", text_field=text_field)


def read(path: Path | str, text_field: str = "text") -> tuple[list[str], SourceReport]:
    report = SourceReport()
    return list(source(path, text_field).documents(report)), report


def test_a_jsonl_line_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two\\nlines\\u2028"}')
    documents, report = read(file)
    assert documents == ["one", "two\nlines\u2028"]
    assert report.documents == 2
    assert report.bytes_read == file.stat().st_size
    assert report.describe() == ""


def test_a_txt_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read(tmp_path / "a.txt")[0] == ["one\n\ntwo\n"]


def test_the_text_field_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x", "text": "y"}\n')
    assert read(tmp_path / "a.jsonl", "content")[0] == ["x"]


BAD_LINES = {
    b"": "blank lines",
    b'{"text": ""}': "empty documents",
    b'{"text": " \\n\\t"}': "empty documents",
    b'{"txt": "x"}': "records without the text field",
    b'{"text": null}': "records with a null text field",
    b'{"text": ["x"]}': "records whose text field is no string",
    b'"x"': "lines that are no JSON object",
    b'{"text": "x"': "lines of broken JSON",
    b'{"text": ' + b"[" * 100_000 + b"}": "lines of broken JSON",
    b'{"text": "\xff"}': "lines of invalid UTF-8",
    b'{"text": "\\ud800"}': "documents with half a surrogate pair",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda bad: bad[:16].decode("latin-1"))
def test_a_bad_first_line_is_counted_and_passed_over(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(bad + b'\n{"text": "good"}\n')
    documents, report = read(file)
    assert documents == ["good"]
    assert report.skipped == {BAD_LINES[bad]: 1}
    assert report.describe() == f"skipped 1 {BAD_LINES[bad]} (first: {file}:1)"


def test_the_report_counts_every_kind_and_keeps_the_first_place(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "x"}\n{}\nnot json\n{"text": ""}\n{"text": ""}\n')
    assert read(file)[1].describe() == (
        f"skipped 2 empty documents (first: {file}:4), 1 lines of broken JSON (first: {file}:3), "
        f"1 records without the text field (first: {file}:2)"
    )


def test_byte_order_marks_and_crlf_are_removed_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfthree\r\nfour\r\n")
    documents, report = read(tmp_path)
    assert documents == ["one", "two", "three\nfour\n"]
    assert report.mended == {"byte order marks": 2, "CRLF line ends": 2}
    assert report.describe().startswith(f"removed 2 CRLF line ends (first: {tmp_path}/a.jsonl), 2 byte")


def test_txt_files_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "b.txt").write_bytes(b" \n")
    (tmp_path / "c.txt").write_bytes(b"good")
    documents, report = read(tmp_path)
    assert documents == ["good"]
    assert report.skipped == {"files of invalid UTF-8": 1, "empty documents": 1}


def test_a_field_that_no_line_has_names_the_fields_there_are(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"content": "x", "id": 1}\n\n{"content": "y"}\n')
    with pytest.raises(DataError) as caught:
        read(file)
    assert str(caught.value) == (
        f"training.dataset_path = '{file}': none of the 2 records has the field training.text_field = "
        "'text'; fields found: 'content' (2), 'id' (1); "
        "set training.text_field to the one that holds the text"
    )


def test_nothing_usable_is_an_error_with_the_counts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with pytest.raises(
        DataError, match=r"not one usable document in 1 files: skipped 1 empty documents .*1 records"
    ):
        read(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match=r"not one usable document in 1 files: the files are empty"):
        read(tmp_path)


def test_a_folder_is_read_in_the_order_of_relative_names(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.txt", "a/b.JSONL", "c.md", ".git/x.txt", ".hidden.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert [file.name for file in source(tmp_path).files] == ["a/b.JSONL", "a/z.txt", "b.txt"]


def test_links_to_folders_are_followed_but_not_round_in_circles(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("x")
    (data / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(data)
    assert [file.name for file in source(data).files] == ["link/a.txt"]


def test_a_glob_takes_files_and_what_is_below_folders_once(tmp_path: Path) -> None:
    for name in ["part-1.txt", "part-2.txt", "other.txt", "part-3/deep/x.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [file.name for file in source(f"{tmp_path}/part-*").files]
    assert names == ["part-1.txt", "part-2.txt", "part-3/deep/x.txt"]
    assert len(source(f"{tmp_path}/**/*.txt").files) == 4


def test_a_name_with_glob_characters_is_that_file_if_it_exists(tmp_path: Path) -> None:
    (tmp_path / "data[1].txt").write_text("x")
    assert read(tmp_path / "data[1].txt")[0] == ["x"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", r"training.dataset_path = '.*missing': no such file or folder"),
        ("*.jsonl", r"training.dataset_path = '.*\*.jsonl': no file matches this pattern"),
        ("empty", r"no text files in this folder \(it is empty\); text files end in .jsonl .* or .txt"),
        ("wrong", r"no text files in this folder \(it holds .parquet\); text files end in"),
        ("wrong/a.parquet", r"a.parquet is no text file; text files end in"),
        ("wrong/*", r"a.parquet is no text file; text files end in"),
    ],
)
def test_a_path_without_text_is_named(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong/a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=message):
        source(tmp_path / path)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    found = source(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"training.dataset_path = .*: cannot read .*a.txt: No such file"):
        list(found.documents(SourceReport()))


def test_the_standard_library_splits_by_file_without_tests_and_packages() -> None:
    train, held_out = python_stdlib(held_out=False), python_stdlib(held_out=True)
    train_names, held_out_names = ({file.name for file in part.files} for part in (train, held_out))
    assert not train_names & held_out_names
    everything = train_names | held_out_names
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= everything
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not any(excluded & set(name.split("/")) for name in everything)
    assert 0.005 < len(held_out_names) / len(everything) < 0.05
    assert [file.name for file in train.files] == sorted(train_names)


def test_the_split_of_a_file_depends_on_its_name_alone(tmp_path: Path) -> None:
    for i in range(300):
        (tmp_path / f"m{i}.py").write_text("x")
    before = {file.name for file in python_stdlib(held_out=True, root=tmp_path).files}
    for i in range(0, 300, 2):
        (tmp_path / f"m{i}.py").unlink()
    after = {file.name for file in python_stdlib(held_out=True, root=tmp_path).files}
    assert after == {name for name in before if int(name[1:-3]) % 2}


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"'python_stdlib' \(training files\): no .py files in {tmp_path}; this Python"
    ):
        python_stdlib(held_out=False, root=tmp_path)


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatron_data_is_found_by_prefix_or_either_file(tmp_path: Path, ending: str) -> None:
    for name in ["my.data.bin", "my.data.idx"]:
        (tmp_path / name).write_bytes(b"")
    assert (
        megatron_prefix(f"{tmp_path}/my.data{ending}", setting="training.dataset_path")
        == tmp_path / "my.data"
    )


@pytest.mark.parametrize(("present", "missing"), [("bin", "idx"), ("idx", "bin")])
def test_the_missing_half_of_megatron_data_is_named(tmp_path: Path, present: str, missing: str) -> None:
    (tmp_path / f"data.{present}").write_bytes(b"")
    with pytest.raises(
        DataError, match=rf"training.dataset_path = '.*data': no file {tmp_path}/data.{missing}; token"
    ):
        megatron_prefix(tmp_path / "data", setting="training.dataset_path")


def test_megatron_data_that_is_not_there_names_both_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*data.bin and .*data.idx; token data is a pair"):
        megatron_prefix(tmp_path / "data", setting="training.dataset_path")
