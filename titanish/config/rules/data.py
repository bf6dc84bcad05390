"""Rules about datasets, tokenizers and the paths where they lie."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from pathlib import Path

from titanish.config.keys import value_at
from titanish.config.problem import Problem
from titanish.config.rules.base import Facts, rule
from titanish.config.schema import Config

DATASETS = ("python_stdlib", "text", "megatron", "mock")
TOKENIZED = frozenset({"python_stdlib", "text"})
"""Datasets that are text, and so need a tokenizer."""

_AT_A_PATH = ("text", "megatron")
_STREAMED = ("c4", "c4_test", "c4_validation")
_STREAMED_SENTENCE = (
    'streams from a hub, and Hugging Face datasets come later; use dataset = "text" with dataset_path'
)


def validation_dataset(config: Config) -> str:
    """The kind of dataset that validation reads: its own, or else the training's."""
    return config.validation.dataset or config.training.dataset


def dataset_kinds(config: Config) -> set[str]:
    """The kinds of dataset that the run reads."""
    return {config.training.dataset} | ({validation_dataset(config)} if config.validation.enable else set())


@rule("training.dataset")
def training_dataset_is_known(facts: Facts) -> Iterator[Problem]:
    """The dataset is one of ours; TorchTitan's own get a sentence."""
    yield from _known_dataset(facts, "training.dataset", "start")


@rule("validation.dataset", "validation.enable")
def validation_dataset_is_known(facts: Facts) -> Iterator[Problem]:
    """As for training, but a dataset that is not read stops nothing."""
    yield from _known_dataset(
        facts, "validation.dataset", "start" if facts.config.validation.enable else "note"
    )


def _known_dataset(facts: Facts, key: str, level: str) -> Iterator[Problem]:
    name = value_at(facts.config, key)
    if name is None or name in DATASETS:
        return
    if name in _STREAMED:
        message = f"{facts.cite(key)} {_STREAMED_SENTENCE}"
        yield facts.problem("start" if level == "start" else "note", key, message)
        return
    near = difflib.get_close_matches(name, DATASETS, n=1)
    meant = f"; did you mean '{near[0]}'?" if near else ""
    yield facts.problem("error", key, f"{facts.cite(key)} is no dataset; known: {', '.join(DATASETS)}{meant}")


@rule("training.dataset", "training.dataset_path")
def training_path_is_there(facts: Facts) -> Iterator[Problem]:
    """Datasets that lie somewhere have a path, and something is there."""
    training = facts.config.training
    if training.dataset in _AT_A_PATH and training.dataset_path is None:
        message = (
            f"{facts.cite('training.dataset')} needs training.dataset_path: {_EXPECTED[training.dataset]}"
        )
        yield facts.problem("error", "training.dataset", message)
    yield from _path(facts, "training", training.dataset)


@rule("training.dataset", "validation.enable", "validation.dataset", "validation.dataset_path")
def validation_data_is_there(facts: Facts) -> Iterator[Problem]:
    """Only `python_stdlib` holds out a part of itself; any other validation must be told what to read."""
    config, kind = facts.config, validation_dataset(facts.config)
    if not config.validation.enable:
        return
    if kind in _AT_A_PATH and config.validation.dataset_path is None:
        what, key = f"validation.dataset_path: {_EXPECTED[kind]}", "validation.dataset"
    elif kind == "mock" and config.validation.dataset is None:
        what, key = 'validation.dataset = "mock"', "validation.dataset"
    else:
        yield from _path(facts, "validation", kind)
        return
    message = (
        f"{facts.cite('validation.enable')} with {facts.cite('training.dataset')}, which holds nothing out,"
        f" needs {what}"
    )
    if config.validation.dataset is not None:
        message = f"{facts.cite('validation.dataset')} needs {what}"
    yield facts.problem("error", key, message, "validation.enable")


_EXPECTED = {
    "text": "a .jsonl or .txt file, a folder of them, or a glob",
    "megatron": "the common prefix of a .bin and an .idx file",
}


def _path(facts: Facts, section: str, kind: str) -> Iterator[Problem]:
    key = f"{section}.dataset_path"
    path = value_at(facts.config, key)
    if path is None:
        return
    if kind not in _AT_A_PATH:
        if kind in DATASETS:
            message = f"{facts.cite(key)} has no effect: dataset '{kind}' reads no path"
            yield facts.problem("note", key, message)
        return
    missing = _missing_files(path, kind)
    if missing:
        message = f"{facts.cite(key)}: there is no {missing}; expected {_EXPECTED[kind]}"
        yield facts.problem("start", key, message)


def _missing_files(path: str, kind: str) -> str:
    """What should be at the path and is not; "" if all is there."""
    if kind == "megatron":
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        return " and no ".join(
            f"'{prefix}{end}'" for end in (".bin", ".idx") if not Path(prefix + end).is_file()
        )
    return "" if Path(path).exists() or glob.glob(path, recursive=True) else f"'{path}'"


@rule("model.tokenizer", "model.hf_assets_path", "training.dataset", "validation")
def tokenizer_is_there(facts: Facts) -> Iterator[Problem]:
    """Text needs a tokenizer, and a folder that is named holds one."""
    model = facts.config.model
    key = "model.hf_assets_path"
    if model.tokenizer != "hf":
        return
    if model.hf_assets_path is None:
        if facts.complete and (kinds := sorted(TOKENIZED & dataset_kinds(facts.config))):
            message = (
                f"dataset '{kinds[0]}' needs a tokenizer: set {key} to a folder with a tokenizer.json,"
                ' or model.tokenizer = "bytes"'
            )
            yield facts.problem("start", key, message, "model.tokenizer", "training.dataset", "model.name")
        return
    folder = Path(model.hf_assets_path)
    if not folder.is_dir():
        yield facts.problem(
            "start", key, f"{facts.cite(key)}: there is no folder '{folder}'; expected tokenizer.json in it"
        )
    elif not (folder / "tokenizer.json").is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        message = f"{facts.cite(key)}: '{folder}' holds no tokenizer.json; found: {found}"
        yield facts.problem("start", key, message)


@rule("training.dataloader")
def training_workers(facts: Facts) -> Iterator[Problem]:
    """What only worker processes can do needs worker processes."""
    yield from _workers(facts, "training.dataloader")


@rule("validation.dataloader")
def validation_workers(facts: Facts) -> Iterator[Problem]:
    """As for training."""
    yield from _workers(facts, "validation.dataloader")


def _workers(facts: Facts, section: str) -> Iterator[Problem]:
    workers = f"{section}.num_workers"
    if value_at(facts.config, workers):
        return
    for name in ("persistent_workers", "prefetch_factor"):
        key = f"{section}.{name}"
        if value_at(facts.config, key):
            message = (
                f"{facts.cite(key)} needs worker processes, but {facts.cite(workers)}; set it to 1 or more"
            )
            yield facts.problem("error", key, message)
