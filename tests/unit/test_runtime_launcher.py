"""Numbers from the launcher, and the end of a rank whose launcher died."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from titanish.errors import TitanishError
from titanish.runtime.launcher import launcher_number


def test_a_number_is_read_and_an_absent_one_has_its_default() -> None:
    assert launcher_number("RANK", 0, environment={"RANK": "5"}) == 5
    assert launcher_number("RANK", 0, environment={}) == 0


@pytest.mark.parametrize("text", ["x", "", "-1", "1.5"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(TitanishError, match=r"RANK = .*: must be a number of at least 0; start ranks with"):
        launcher_number("RANK", 0, environment={"RANK": text})


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(TitanishError, match="WORLD_SIZE = '0': must be a number of at least 1"):
        launcher_number("WORLD_SIZE", 1, low=1, environment={"WORLD_SIZE": "0"})


CHILD = """
import os, sys
from titanish.runtime.launcher import end_with_launcher
os.environ["TORCHELASTIC_RUN_ID"] = "x"
end_with_launcher()
print(os.getpid(), flush=True)
sys.stdin.read()
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_a_rank_ends_with_its_launcher() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.stdin.write("now\n")
        parent.stdin.flush()
        # The pipe ends when the last process that holds it is gone: parent and child.
        ended, _, _ = select.select([parent.stdout], [], [], 30.0)
        if not ended:
            os.kill(child, signal.SIGKILL)
        assert ended, "the rank outlived its launcher"
        assert parent.stdout.read() == ""
