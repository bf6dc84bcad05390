"""What happens around steps, each thing in a small class of its own; `assemble` sets their order."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from titanish.checkpoint.manager import CheckpointManager, Progress
from titanish.errors import TitanishError
from titanish.observe.events import Events
from titanish.observe.metrics import Row, StepMetrics, Throughput
from titanish.observe.reporter import Reporter
from titanish.runtime.agreement import Agreement
from titanish.runtime.device import Device
from titanish.runtime.garbage import GarbageCollection
from titanish.runtime.log import log_once
from titanish.runtime.process_group import use_train_timeout
from titanish.runtime.stop import StopRequests
from titanish.train.job import StepResult, TrainState
from titanish.train.validate import Validation

logger = logging.getLogger("titanish")


class Idle:
    """A hook that does nothing; the others override what they need."""

    def before_step(self, state: TrainState, row: Row) -> None:
        pass

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ValidateHook(Idle):
    """Validation before the first step of training, every `freq` steps, and after the last."""

    validation: Validation
    freq: int
    last_step: int
    throughput: Throughput
    events: Events

    def before_step(self, state: TrainState, row: Row) -> None:
        if state.step == 0:
            self._validate(state, row)

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        due = state.step % self.freq == 0 or state.step == self.last_step
        if due and state.stop is None:  # who stops a run does not wait for that
            self._validate(state, row)

    def _validate(self, state: TrainState, row: Row) -> None:
        start = time.perf_counter()
        with self.throughput.excluded():
            row["validation_loss"] = loss = self.validation.run()
        self.events.add("validation", state.step, loss=loss, seconds=_since(start))

    def close(self) -> None:
        self.validation.close()


@dataclass(frozen=True)
class ReportHook(Idle):
    """Sends a row off every `freq` steps, after the first and the last, and whenever another hook left a
    value."""

    reporter: Reporter
    throughput: Throughput
    device: Device
    loss_group: dist.ProcessGroup
    freq: int
    last_step: int

    def before_step(self, state: TrainState, row: Row) -> None:
        if row:
            self.reporter.log({"step": state.step, **row})

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        self.reporter.advance(state.step)
        if state.step % self.freq == 0 or state.step in (1, self.last_step) or state.stop:
            row = {**self._metrics(state, result), **row}
        if row:
            self.reporter.log({"step": state.step, **row})

    def _metrics(self, state: TrainState, result: StepResult) -> Row:
        total = result.loss_share.double()
        dist.all_reduce(total, group=self.loss_group)
        loss, grad_norm = total.item(), result.grad_norm.item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)) and dist.get_rank() == 0:
            log_once(
                "the loss or the gradient norm is not finite: training has diverged, and "
                "checkpoint.keep_latest_k goes on deleting checkpoints from before that",
                logging.WARNING,
            )
        speed = self.throughput.read()
        return StepMetrics(
            step=state.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=result.lr,
            tokens_seen=state.tokens_seen,
            tokens_per_second=speed.tokens_per_second,
            step_seconds=speed.step_seconds,
            data_wait_fraction=speed.data_wait_fraction,
            memory_gib=self.device.peak_memory_gib(),
            model_flops_per_second=speed.model_flops_per_second,
            mfu=speed.mfu,
        ).row()

    def close(self) -> None:
        self.reporter.close()


@dataclass(frozen=True)
class CheckpointHook(Idle):
    """Saves every `interval` steps, after the last also where a run is stopped, and after the first if asked
    for."""

    manager: CheckpointManager
    model: nn.Module
    optimizer: torch.optim.Optimizer
    interval: int
    last_step: int
    after_first: bool
    throughput: Throughput
    events: Events

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        due = state.step % self.interval == 0 or state.step == self.last_step
        if due or state.stop or (self.after_first and state.step == 1):
            start = time.perf_counter()
            with self.throughput.excluded():
                progress = Progress(state.step, state.tokens_seen, state.samples_seen)
                self.manager.save(self.model, self.optimizer, progress)
            size = self.manager.size(state.step) if dist.get_rank() == 0 else None
            self.events.add("checkpoint", state.step, seconds=_since(start), bytes=size)


@dataclass(frozen=True)
class EventsHook(Idle):
    """Tells the diary which step is done, before the other hooks of that step have anything to warn about."""

    events: Events

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        self.events.step = state.step


@dataclass(frozen=True)
class StopHook(Idle):
    """Ends the run after a step where a rank was sent a signal, or where the time is up by rank 0's clock.

    Ranks put in what they know after each step and act on what they put in after the one before: a request
    on one rank stops all of them with the same step, at most one step later.
    """

    requests: StopRequests
    agreement: Agreement
    max_minutes: float | None
    last_step: int
    saves: bool
    events: Events

    TIME_IS_UP = 1000  # signals have smaller numbers

    def before_step(self, state: TrainState, row: Row) -> None:
        self.requests.defer()

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        if state.step == self.last_step:
            return
        # The request with the rank in one number, so that all ranks agree on both.
        ranks = dist.get_world_size()
        code, rank = divmod(self.agreement.exchange(self._request() * ranks + dist.get_rank()), ranks)
        if code:
            state.stop = self._words(code, rank)
            saved = (
                "a checkpoint of it is saved" if self.saves else "checkpoint.enable is off: nothing is saved"
            )
            if dist.get_rank() == 0:
                logger.warning(f"{state.stop}: training stops after step {state.step}; {saved}")
            self.events.add("stop", state.step, reason=state.stop)

    def _request(self) -> int:
        if self.requests.signal is not None:
            return self.requests.signal
        limit = self.max_minutes
        up = limit is not None and dist.get_rank() == 0 and self.requests.minutes >= limit
        return self.TIME_IS_UP if up else 0

    def _words(self, code: int, rank: int) -> str:
        if code == self.TIME_IS_UP:
            return f"training.max_minutes = {self.max_minutes:g} are over"
        return f"{signal.Signals(code).name} on rank {rank}"


@dataclass(frozen=True)
class FiniteHook(Idle):
    """Ends the run where the gradient's norm is not finite, before anything is saved; waits for the
    device."""

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        norm = result.grad_norm.item()
        if not math.isfinite(norm):
            raise TitanishError(
                f"step {state.step}: the gradient norm is {norm} on all ranks, though no operation of a "
                "backward pass returned NaN (debug.detect_anomaly)"
            )


@dataclass(frozen=True)
class TimeoutHook(Idle):
    """The long timeout of the start ends with the first step of this process."""

    first_step: int
    shorten: Callable[[], None]

    @classmethod
    def of(cls, first_step: int, seconds: float, groups: list[dist.ProcessGroup]) -> TimeoutHook:
        return cls(first_step, lambda: use_train_timeout(seconds, groups))

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        if state.step == self.first_step:
            self.shorten()


@dataclass(frozen=True)
class GarbageHook(Idle):
    """Python's garbage collection at the same step on every rank."""

    collection: GarbageCollection

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None:
        self.collection.after_step(state.step)

    def close(self) -> None:
        self.collection.close()


def _since(start: float) -> float:
    """Seconds on the clock since `start`, in milliseconds' precision: a diary needs no more."""
    return round(time.perf_counter() - start, 3)
