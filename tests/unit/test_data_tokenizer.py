"""Tokenizers: exactly the BOS and EOS asked for, and a sentence for every folder that is not one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from titanish.data.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer
from titanish.errors import DataError

A, B, C, BOS, EOS = 0, 1, 2, 3, 4


def folder_with_tokenizer(folder: Path, *, template: str = "$A", bos: str = "<s>", eos: str = "</s>") -> Path:
    """A word-level tokenizer of a, b, c, whose post-processor adds what `template` says."""
    tokenizer = tokenizers.Tokenizer(
        WordLevel({"a": A, "b": B, "c": C, "<s>": BOS, "</s>": EOS, "?": 5}, unk_token="?")
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))
    return folder


# The four kinds that other trainers got wrong: (template, bos token, eos token).
KINDS = {
    "template_adds_bos": ("<s> $A", "<s>", "</s>"),
    "template_adds_none": ("$A", "<s>", "</s>"),
    "one_token_for_both": ("$A </s>", "</s>", "</s>"),
    "template_adds_both": ("<s> $A </s>", "<s>", "</s>"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_documents_have_exactly_the_specials_asked_for(
    tmp_path: Path, kind: str, add_bos: bool, add_eos: bool
) -> None:
    template, bos, eos = KINDS[kind]
    tokenizer = HFTokenizer(folder_with_tokenizer(tmp_path, template=template, bos=bos, eos=eos))
    bos_id = BOS if bos == "<s>" else EOS
    documents = tokenizer.encode_documents(["a b", "c"], add_bos=add_bos, add_eos=add_eos)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text, ids in zip(["a b", "c"], documents, strict=True):
        bare = plain.encode(text, add_special_tokens=False).ids
        assert ids.tolist() == [bos_id] * add_bos + bare + [EOS] * add_eos


@pytest.mark.parametrize("kind", KINDS)
def test_encode_adds_nothing_whatever_the_template_says(tmp_path: Path, kind: str) -> None:
    template, bos, eos = KINDS[kind]
    tokenizer = HFTokenizer(folder_with_tokenizer(tmp_path, template=template, bos=bos, eos=eos))
    assert tokenizer.encode("a b") == [A, B]


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.enable_truncation(2)
    saved.enable_padding(length=2)
    saved.save(str(tmp_path / "tokenizer.json"))
    documents = HFTokenizer(tmp_path).encode_documents(["a b c a", "b"], add_bos=False, add_eos=False)
    assert [ids.tolist() for ids in documents] == [[A, B, C, A], [B]]


def test_decode_leaves_specials_and_unknown_ids_out(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(folder_with_tokenizer(tmp_path))
    assert tokenizer.decode([BOS, A, B, EOS, 6, 10**6]) == "a b"


def test_vocab_size_is_the_largest_id_plus_one(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["vocab"]["far"] = 299
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert HFTokenizer(tmp_path).vocab_size == 300


def test_specials_may_be_objects(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    tokenizer = HFTokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, None)


def test_specials_come_from_the_next_file_where_one_is_silent(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<gone>"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": EOS, "eos_token_id": [EOS, A]}))
    tokenizer = HFTokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, EOS)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_special_that_is_asked_for_but_not_defined_is_named(tmp_path: Path, name: str) -> None:
    folder_with_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    wanted = {"add_bos": name == "bos", "add_eos": name == "eos"}
    with pytest.raises(DataError) as caught:
        HFTokenizer(tmp_path).encode_documents(["a"], **wanted)
    assert str(caught.value) == (
        f"training.add_{name} = true, but the tokenizer {tmp_path} has no {name.upper()} token in its "
        f"vocabulary; name one as {name}_token in its tokenizer_config.json, or set "
        f"training.add_{name} = false"
    )


def test_fingerprint_covers_ids_and_specials(tmp_path: Path) -> None:
    one = HFTokenizer(folder_with_tokenizer(tmp_path / "one")).fingerprint
    same = HFTokenizer(folder_with_tokenizer(tmp_path / "same")).fingerprint
    other_bos = HFTokenizer(folder_with_tokenizer(tmp_path / "bos", bos="</s>")).fingerprint
    other_json = HFTokenizer(folder_with_tokenizer(tmp_path / "json", template="<s> $A")).fingerprint
    assert one == same
    assert len({one, other_bos, other_json}) == 3


def test_files_are_those_that_a_checkpoint_keeps(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert [file.name for file in HFTokenizer(tmp_path).files] == ["tokenizer.json", "tokenizer_config.json"]


def test_bytes_round_trip() -> None:
    tokenizer = load_tokenizer("bytes", None)
    text = "größer 中 🙂\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 258


def test_byte_documents_have_exactly_the_specials_asked_for() -> None:
    tokenizer = ByteTokenizer()
    both = tokenizer.encode_documents(["ab", ""], add_bos=True, add_eos=True)
    assert [ids.tolist() for ids in both] == [[256, 97, 98, 257], [256, 257]]
    assert tokenizer.encode_documents(["ab"], add_bos=False, add_eos=False)[0].tolist() == [97, 98]


def test_byte_decode_replaces_broken_utf8_and_drops_specials() -> None:
    assert ByteTokenizer().decode([256, 195, 97, 257, 300, -1]) == "\ufffda"


def test_a_path_that_is_not_set_is_named() -> None:
    with pytest.raises(
        DataError, match=r'model.hf_assets_path is not set.*tokenizer.json.*model.tokenizer = "bytes"'
    ):
        load_tokenizer("hf", None)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(
        DataError, match=rf"model.hf_assets_path = '{path}': no such folder \(searched {path}\)"
    ):
        load_tokenizer("hf", path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"no tokenizer.json in {tmp_path} \(the folder is empty\); copy"):
        load_tokenizer("hf", tmp_path)


def test_a_folder_with_only_the_config_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        DataError,
        match=rf"no tokenizer.json in {tmp_path} \(the folder holds only tokenizer_config.json\); copy",
    ):
        load_tokenizer("hf", tmp_path)


def test_a_file_instead_of_the_folder_is_named(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path)
    with pytest.raises(
        DataError, match=r"tokenizer.json': is a file; give the folder that holds tokenizer.json"
    ):
        load_tokenizer("hf", tmp_path / "tokenizer.json")


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json: cannot be read as a tokenizer: "):
        load_tokenizer("hf", tmp_path)


def test_a_tokenizer_without_a_vocabulary_is_named(tmp_path: Path) -> None:
    tokenizers.Tokenizer(WordLevel({}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer.json: the tokenizer's vocabulary is empty"):
        load_tokenizer("hf", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tokenizer_config.json: not valid JSON"),
        ("[]", r"tokenizer_config.json: expected a JSON object"),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    folder_with_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer("hf", tmp_path)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(DataError, match=r"model.tokenizer = 'sentencepiece': unknown tokenizer"):
        load_tokenizer("sentencepiece", None)
