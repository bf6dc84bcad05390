"""Every key of a TOML file is found at its own line, however it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanish.config.toml_file import TomlError, parse_toml, read_toml

DOCUMENT = '''\
# a comment with [brackets] and """quotes"""
base = ["other.toml"]

[training]
seq_len = 128 # ]
"steps" = 3
dataset_path = """
[parallelism]
tensor_parallel_degree = 8
"""
list = [
  "a]",   # ]

  ["b"],
]
dataloader = { num_workers = 1, names = [
  "x",
] }
'a key' = 1

  [model.override]
dim = 64
"a.b" = 1
model.x = \'\'\'
text\'\'\'

[empty]
[[rows]]
one = 1
[[rows]]
one = 2
'''


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("base", 2),
        ("training.seq_len", 5),
        ("training.steps", 6),
        ("training.dataset_path", 7),
        ("training.list", 11),
        ("training.dataloader.num_workers", 16),
        ("training.dataloader.names", 16),
        ('training."a key"', 19),
        ("model.override.dim", 22),
        ('model.override."a.b"', 23),
        ("model.override.model.x", 24),
        ("empty", 27),
        ("rows", 28),
    ],
)
def test_key_is_found_at_the_line_where_it_starts(key: str, line: int) -> None:
    assert {leaf.key: leaf.line for leaf in parse_toml(DOCUMENT).leaves}[key] == line


def test_every_key_and_no_other_is_found() -> None:
    assert len(parse_toml(DOCUMENT).leaves) == 13


def test_tables_are_found_at_their_headers() -> None:
    assert parse_toml(DOCUMENT).tables == {"training": 4, "model.override": 21, "empty": 27, "rows": 28}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_do_not_move_lines(ending: str) -> None:
    leaves = parse_toml(DOCUMENT.replace("\n", ending)).leaves
    assert [leaf.line for leaf in leaves] == [leaf.line for leaf in parse_toml(DOCUMENT).leaves]


def test_a_long_array_is_parsed_a_few_times_and_not_once_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import titanish.config.toml_file as module

    calls = 0
    real = module.tomli.loads

    def counted(text: str) -> dict[str, object]:
        nonlocal calls
        calls += 1
        return real(text)

    monkeypatch.setattr(module.tomli, "loads", counted)
    parse_toml("names = [\n" + '  "name",\n' * 300 + "]\nlast = 1\n")
    assert calls <= 5


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a = 1\nb = \n", 2, "not valid TOML: Invalid value"),
        ("a = 1\na = 2\n", 2, "not valid TOML: Cannot overwrite a value"),
        ("a = 1\n[b\n", 2, "not valid TOML: Expected ']'"),
        ("a = 1\nb = [\n1,\n", 2, "not valid TOML: Invalid value; what begins here never ends"),
        ('a = """\n\n', 1, "not valid TOML: .*; what begins here never ends"),
    ],
)
def test_syntax_error_names_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(TomlError, match=message) as caught:
        parse_toml(text)
    assert caught.value.line == line


def test_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(TomlError, match="no such file"):
        read_toml(tmp_path / "none.toml")


def test_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(TomlError, match="cannot be read: Is a directory"):
        read_toml(tmp_path)


def test_other_encoding_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes("a = 1\nb = 'é'\n".encode("latin-1"))
    with pytest.raises(TomlError, match="not UTF-8") as caught:
        read_toml(path)
    assert caught.value.line == 2


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert [leaf.key for leaf in read_toml(path).leaves] == ["a"]
