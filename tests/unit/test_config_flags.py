"""The command line: every way to write a value, and every way to get it wrong."""

from __future__ import annotations

import pytest

from titanish.config.flags import parse_flags


def values(*words: str) -> dict[str, object]:
    flags, problems = parse_flags(words)
    assert problems == ()
    return {flag.key: flag.value for flag in flags}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--training.steps=10"], "training.steps", 10),
        (["--training.steps", "10"], "training.steps", 10),
        (["--training.seq_len=1_024"], "training.seq_len", 1024),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--training.max_norm=inf"], "training.max_norm", float("inf")),
        (["--optimizer.lr=1e-3"], "optimizer.lr", 1e-3),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--no-checkpoint.enable"], "checkpoint.enable", False),
        (["--checkpoint.enable=false"], "checkpoint.enable", False),
        (["--checkpoint.enable", "false"], "checkpoint.enable", False),
        (["--compile.enable"], "compile.enable", True),
        (["--model.flavor=8B"], "model.flavor", "8B"),
        (['--model.flavor="8B"'], "model.flavor", "8B"),
        (["--job.description=a b"], "job.description", "a b"),
        (["--job.description", "a = b"], "job.description", "a = b"),
        (["--job.description="], "job.description", ""),
        (["--job.description=1\nother = 2"], "job.description", "1\nother = 2"),
        (["--activation_checkpoint.selective_ac_option=2"], "activation_checkpoint.selective_ac_option", "2"),
        (['--compile.components=["model", "loss"]'], "compile.components", ["model", "loss"]),
        (["--model.override.dim=64"], "model.override.dim", 64),
        (["--model.override.tied_embeddings", "true"], "model.override.tied_embeddings", True),
        (["--model.override={ dim = 64 }"], "model.override.dim", 64),
        (["--training.steps=ten"], "training.steps", "ten"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_value_is_read(words: list[str], key: str, value: object) -> None:
    assert values(*words) == {key: value}


def test_switch_does_not_swallow_what_follows() -> None:
    assert values("--checkpoint.enable", "--training.steps", "5") == {
        "checkpoint.enable": True,
        "training.steps": 5,
    }


def test_flags_keep_their_order_and_spelling() -> None:
    flags, _ = parse_flags(["--training.steps=1", "--no-checkpoint.enable", "--training.steps=2"])
    assert [(flag.source.flag, flag.value) for flag in flags] == [
        ("--training.steps", 1),
        ("--no-checkpoint.enable", False),
        ("--training.steps", 2),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stray"], "stray: neither a flag nor the value of one; write --section.key=VALUE"),
        (["-x"], "-x: neither a flag nor the value of one; write --section.key=VALUE"),
        (
            ["jobs/f.toml"],
            "jobs/f.toml: neither a flag nor the value of one; write --job.config_file jobs/f.toml",
        ),
        (
            ["--help"],
            "--help: 'titanish config show FILE' lists every key with its value;"
            " override one with --section.key=VALUE",
        ),
        (
            ["-h"],
            "-h: 'titanish config show FILE' lists every key with its value;"
            " override one with --section.key=VALUE",
        ),
        (["--"], "--: neither a flag nor the value of one; write --section.key=VALUE"),
        (
            ["--training.steps"],
            "--training.steps: training.steps needs a value; write --training.steps=VALUE",
        ),
        (
            ["--training.steps", "--checkpoint.enable"],
            "--training.steps: training.steps needs a value; write --training.steps=VALUE",
        ),
        (
            ["--model.override.dim"],
            "--model.override.dim: model.override.dim needs a value; write --model.override.dim=VALUE",
        ),
        (
            ["--no-training.steps"],
            "--no-training.steps: training.steps is not true or false, so it cannot be switched off;"
            " write --training.steps=VALUE",
        ),
        (
            ["--no-checkpoint.enable=true"],
            "--no-checkpoint.enable: a switch takes no value;"
            " write --no-checkpoint.enable or --checkpoint.enable=false",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_word_that_is_no_value_is_a_problem(words: list[str], message: str) -> None:
    _, problems = parse_flags(words)
    assert [str(problem) for problem in problems] == [message]
