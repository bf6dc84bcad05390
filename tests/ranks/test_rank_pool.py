"""The warm ranks that all tests over several ranks stand on: what they give, and that nothing can hang or
linger."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from titanish.testing import ranks
from titanish.testing.ranks import RankFailure, RankPool

Pool = Callable[[int], RankPool]

# ------------------------------------------------------------------------------------------- what ranks are
# told to do


def say_who(base: int, *, factor: int = 1) -> tuple[int, float, dict[str, str | None]]:
    total = torch.tensor([float(base + dist.get_rank() * factor)])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return dist.get_rank(), total.item(), {name: os.environ.get(name) for name in names}


def draw_and_leave_traces(folder: str) -> tuple[float, str | None, str, bool, torch.dtype]:
    seen = (
        float(torch.rand(())),
        os.environ.get("TRACE"),
        os.getcwd(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )
    os.environ["TRACE"] = "left"
    os.chdir(folder)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    return seen


def pid() -> int:
    return os.getpid()


def fail_on_rank_1_while_0_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the layer is wrong")
    dist.barrier()


def fail() -> NoReturn:
    raise ValueError("wrong everywhere")


def leave(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def return_a_lambda() -> Callable[[], None]:
    return lambda: None


class Unreadable:
    """Can be pickled, but not be read back."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("not a number",)


def return_unreadable() -> Unreadable:
    return Unreadable()


def be_silent_on_rank_1() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def end_the_parent_and_be_silent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def sum_with_loader_workers() -> int:
    loader: DataLoader[int] = DataLoader(range(8), batch_size=2, num_workers=2)  # type: ignore[arg-type]
    return sum(int(batch.sum()) for batch in loader)


# ------------------------------------------------------------------------------------------------------------
# the tests


def test_every_rank_runs_the_function_and_results_come_in_rank_order(pool: Pool) -> None:
    for rank, (said, total, environment) in enumerate(pool(2).run(say_who, 10, factor=5)):
        assert (said, total) == (rank, 25.0)
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }


def test_four_ranks_work_too(pool: Pool) -> None:
    assert [total for _, total, _ in pool(4).run(say_who, 1)] == [10.0] * 4


@pytest.mark.ranks8
def test_eight_ranks_work_if_asked_for(pool: Pool) -> None:
    assert [rank for rank, _, _ in pool(8).run(say_who, 1)] == list(range(8))


def test_a_call_finds_nothing_that_the_last_one_left(pool: Pool, tmp_path: Path) -> None:
    first = pool(2).run(draw_and_leave_traces, str(tmp_path))
    second = pool(2).run(draw_and_leave_traces, str(tmp_path))
    assert first == second
    assert first[0][1:] == (None, os.getcwd(), False, torch.float32)


def test_workers_stay_for_the_next_call(pool: Pool) -> None:
    assert pool(2).run(pid) == pool(2).run(pid)


def test_a_failing_ranks_traceback_is_the_failure_and_the_next_call_works(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"failed on rank 1 of 2:\nTraceback") as caught:
        pool(2).run(fail_on_rank_1_while_0_waits)
    assert 'raise ValueError("the layer is wrong")' in str(caught.value)
    assert str(caught.value).rstrip().endswith("ValueError: the layer is wrong")
    assert pool(2).run(say_who, 0)[0][1] == 1.0


def test_ranks_that_all_fail_have_answered_and_stay_warm(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 60)
    before = pool(2).run(pid)
    with pytest.raises(
        RankFailure, match=r"(?s)on rank [01] of 2 \(and then on \[[01]\]\):.*wrong everywhere\n$"
    ):
        pool(2).run(fail)
    assert pool(2).run(pid) == before


def test_of_several_failing_ranks_the_first_is_the_failure() -> None:
    answers = {
        0: ranks._Answer(ok=False, value="a consequence", failed_at=12.0),
        2: ranks._Answer(ok=False, value="another", failed_at=11.5),
        1: ranks._Answer(ok=False, value="the cause", failed_at=11.0),
    }
    with pytest.raises(RankFailure) as caught:
        ranks._judge("check", 4, answers, timeout_s=1)
    assert str(caught.value) == "check failed on rank 1 of 4 (and then on [2, 0]):\nthe cause"


@pytest.mark.parametrize(
    ("how", "told"),
    [("exit", "leave: rank 1 ended with exit code 3"), ("kill", "leave: rank 1 was ended by signal SIGKILL")],
)
def test_a_rank_that_dies_is_named_with_its_exit_code(how: str, told: str, pool: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool(2).run(leave, how)
    assert str(caught.value) == told


def test_a_rank_that_died_between_calls_is_named(pool: Pool) -> None:
    victim = pool(2).run(pid)[0]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RankFailure, match="pid: rank 0 was ended by signal SIGKILL"):
        pool(2).run(pid)
    assert victim not in pool(2).run(pid)


def test_a_result_that_cannot_be_pickled_is_a_failure(pool: Pool) -> None:
    expected = r"(?s)return_a_lambda failed on rank [01] of 2.*its result, a function, cannot be sent back: "
    with pytest.raises(RankFailure, match=expected):
        pool(2).run(return_a_lambda)


def test_a_result_that_cannot_be_read_is_a_failure(pool: Pool) -> None:
    expected = "return_unreadable: the result of rank 0 cannot be read here: ValueError: invalid literal"
    with pytest.raises(RankFailure, match=expected):
        pool(2).run(return_unreadable)


def test_a_function_that_cannot_be_pickled_is_a_failure_and_says_where_to_define_it(pool: Pool) -> None:
    before = pool(2).run(pid)
    with pytest.raises(
        RankFailure, match=r"<lambda> cannot be sent to the ranks: .*; define it at module level"
    ):
        pool(2).run(lambda: None)
    assert pool(2).run(pid) == before


def test_a_rank_that_does_not_answer_in_time_is_named(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool(2).run(pid)
    monkeypatch.setattr(pool(2), "timeout_s", 0.5)
    with pytest.raises(
        RankFailure, match=r"be_silent_on_rank_1: no answer from rank\(s\) \[1\] within 0\.5 s"
    ):
        pool(2).run(be_silent_on_rank_1)


def test_ranks_may_have_data_loader_workers(pool: Pool) -> None:
    assert pool(2).run(sum_with_loader_workers) == [28, 28]


def test_eight_ranks_are_refused_where_they_were_not_asked_for(
    pool: Pool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request.config.option, "markexpr", "")
    with pytest.raises(pytest.fail.Exception, match=r"pool\(8\): mark a test of more than four ranks"):
        pool(8)


# -------------------------------------------------------------------------------------------------- nothing
# left over

SCRIPT = """
from titanish.testing.ranks import RankPool
from tests.ranks.test_rank_pool import end_the_parent_and_be_silent, pid

if __name__ == "__main__":
    pool = RankPool(1)
    print(*pool.run(pid), flush=True)
    {then}
"""


def has_ended(process_id: int) -> bool:
    """Waits until the process has ended; False if it lives on for half a minute."""
    try:
        process = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 30)[0])
    finally:
        os.close(process)


@pytest.mark.parametrize(
    ("then", "returncode"),
    [("raise SystemExit(5)", 5), ("pool.run(end_the_parent_and_be_silent)", -signal.SIGKILL)],
    ids=["not_closed", "killed_in_a_call"],
)
def test_no_worker_outlives_the_process_that_made_it(then: str, returncode: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(then=then))
    done = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        # A killed process leaves its temporary folder behind.
        env={**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == returncode
    assert has_ended(int(done.stdout))


def test_an_interrupt_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> NoReturn:
        raise KeyboardInterrupt

    with RankPool(1) as one:
        (worker,) = one.run(pid)
        monkeypatch.setattr(one, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.run(pid)
        assert has_ended(worker)


def test_leaving_the_context_ends_the_ranks() -> None:
    with RankPool(1) as one:
        (worker,) = one.run(pid)
    assert has_ended(worker)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, 0)
        pytest.fail("the worker was not waited for")
