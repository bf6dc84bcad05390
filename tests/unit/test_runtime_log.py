"""Log lines say when, which rank and where; which rank may speak; and how a run's last error looks."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from titanish.errors import ConfigError, TitanishError
from titanish.runtime.log import log_once, report_failure, set_place, setup_logging

logger = logging.getLogger("titanish")


class Terminal(io.StringIO):
    """A terminal that records what it was given in each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


@pytest.fixture(autouse=True)
def _place_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOG_RANK", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    monkeypatch.delenv("LOG_RANK", raising=False)
    setup_logging()


def stderr(capsys: pytest.CaptureFixture[str]) -> str:
    """What was written, each time of day as TIME."""
    return re.sub(r"\b\d\d:\d\d:\d\d\b", "TIME", capsys.readouterr().err)


def test_a_line_carries_time_level_rank_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(rank=0)
    logger.info("starting")
    set_place("dp0 tp1")
    logger.warning("slow %s", "disk")
    assert stderr(capsys) == "TIME INFO r0 | starting\nTIME WARNING r0 dp0 tp1 | slow disk\n"


def test_each_line_of_a_longer_message_carries_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(rank=0, place="dp0")
    logger.info("mesh\n\n  fsdp 2\n")
    assert stderr(capsys) == "TIME INFO r0 dp0 | mesh\nTIME INFO r0 dp0 |\nTIME INFO r0 dp0 |   fsdp 2\n"


def test_a_logged_exception_comes_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    try:
        raise ValueError("boo")
    except ValueError:
        logger.exception("it failed")
    lines = stderr(capsys).splitlines()
    assert lines[:2] == ["TIME ERROR r0 | it failed", "TIME ERROR r0 | Traceback (most recent call last):"]
    assert lines[-1] == "TIME ERROR r0 | ValueError: boo"


def test_a_message_is_written_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    setup_logging(disable_color=True)
    logger.info("one\ntwo")
    report_failure(TitanishError("three\nfour"))
    assert [text.count("\n") for text in terminal.writes] == [2, 2]


@pytest.mark.parametrize(
    ("log_rank", "rank", "informs"),
    [(None, 0, True), (None, 1, False), ("1", 0, False), ("0, 3", 3, True), ("0,3", 2, False)],
)
def test_log_rank_says_who_informs_and_all_ranks_warn(
    log_rank: str | None,
    rank: int,
    informs: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if log_rank is not None:
        monkeypatch.setenv("LOG_RANK", log_rank)
    setup_logging(rank=rank)
    logger.info("information")
    logger.warning("warning")
    expected = f"TIME INFO r{rank} | information\n" if informs else ""
    assert stderr(capsys) == expected + f"TIME WARNING r{rank} | warning\n"


def test_a_log_rank_that_is_no_list_of_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_RANK", "all")
    with pytest.raises(
        TitanishError, match=r"^LOG_RANK = 'all': must be ranks separated by commas, as in LOG_RANK="
    ):
        setup_logging()


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(rank=0)
    setup_logging(rank=0, place="tp0")
    logger.info("once")
    assert stderr(capsys) == "TIME INFO r0 tp0 | once\n"


def test_a_configured_root_logger_does_not_print_lines_again(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        setup_logging()
        logger.info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stderr(capsys).count("once") == 1


@pytest.mark.parametrize(
    ("disable_color", "no_color", "coloured"),
    [(False, None, True), (True, None, False), (False, "1", False)],
    ids=["terminal", "disable_color_printing", "NO_COLOR"],
)
def test_colour_on_a_terminal_unless_it_is_not_wanted(
    disable_color: bool, no_color: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    setup_logging(disable_color=disable_color)
    logger.warning("careful")
    (text,) = terminal.writes
    assert ("\x1b[33m" in text) is coloured
    assert text.endswith(" careful\n")


def test_log_once_logs_a_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    for _ in range(2):
        log_once("half the data was skipped", logging.WARNING)
        log_once("another")
    assert stderr(capsys) == "TIME WARNING r0 | half the data was skipped\nTIME INFO r0 | another\n"


def test_a_users_mistake_ends_the_run_with_its_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(rank=5, place="dp0 tp1")
    report_failure(ConfigError("a.toml:3: wrong\nb.toml:4: wrong too"))
    assert (
        stderr(capsys)
        == "TIME ERROR r5 dp0 tp1 | a.toml:3: wrong\nTIME ERROR r5 dp0 tp1 | b.toml:4: wrong too\n"
    )


def test_any_other_error_ends_the_run_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(rank=1)
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise RuntimeError("effect") from cause
    except RuntimeError as error:
        report_failure(error)
    lines = stderr(capsys).splitlines()
    assert all(line.startswith("TIME ERROR r1 |") for line in lines)
    assert lines[0].endswith("Traceback (most recent call last):")
    assert any(line.endswith("KeyError: 'cause'") for line in lines)
    assert any("test_runtime_log.py" in line for line in lines)
    assert lines[-1].endswith("RuntimeError: effect")


def test_ranks_that_share_a_pipe_do_not_cut_each_others_lines() -> None:
    script = (
        "import logging, os; from titanish.runtime.log import setup_logging\n"
        "rank = int(os.environ['RANK']); setup_logging(rank, f'dp{rank}')\n"
        "for n in range(100): logging.getLogger('titanish').warning('x' * 200 + f'\\nend of {n}')\n"
    )
    read, write = os.pipe()
    ranks = [
        subprocess.Popen([sys.executable, "-c", script], stderr=write, env={**os.environ, "RANK": str(rank)})
        for rank in range(2)
    ]
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    assert [rank.wait() for rank in ranks] == [0, 0]
    # Each message is two lines; a cut in a message would part them, a cut in a line would break the pattern.
    line = re.compile(r"\d\d:\d\d:\d\d WARNING (r\d) dp\d \| (x{200}|end of \d+)")
    parsed = [match.groups() for text in lines if (match := line.fullmatch(text))]
    assert len(parsed) == len(lines) == 400
    for (rank, first), (same_rank, second) in zip(parsed[::2], parsed[1::2], strict=True):
        assert (rank, first[0], second[0]) == (same_rank, "x", "e")


def test_logging_does_not_import_torch() -> None:
    script = "import sys, titanish.runtime.log; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
