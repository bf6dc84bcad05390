"""The small model and the layouts that the equality tests share."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass

GLOBAL_BATCH = 12

# Nothing here divides: a prime vocabulary, a sequence and an FFN width that no degree divides.
MODEL = (
    "--model.override.dim=64",
    "--model.override.hidden_dim=90",
    "--model.override.n_layers=2",
    "--model.override.n_heads=4",
    "--model.override.n_kv_heads=2",
    "--model.override.vocab_size=257",
)
# Reports of jobs whose test does not look at them.
DUMP_FOLDER = tempfile.mkdtemp(prefix="titanish-tests-")
atexit.register(shutil.rmtree, DUMP_FOLDER, ignore_errors=True)
JOB = (
    *MODEL,
    f"--job.dump_folder={DUMP_FOLDER}",
    "--model.tokenizer=bytes",
    "--training.dataset=mock",
    "--training.seq_len=33",
    f"--training.global_batch_size={GLOBAL_BATCH}",
    "--training.loss_chunk_tokens=20",
    "--training.steps=10",
    "--lr_scheduler.warmup_steps=2",
    "--activation_checkpoint.mode=none",
    "--debug.seed=42",
)
SGD = (
    "--optimizer.name=SGD",
    "--optimizer.lr=0.5",
    "--optimizer.weight_decay=0",
    "--lr_scheduler.warmup_steps=0",
)
ADAMW = ("--optimizer.lr=1e-3",)


@dataclass(frozen=True)
class Layout:
    """A mesh by its degrees; `flags` are further overrides."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    flags: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tp

    def command_line(self, accumulation: int = 1) -> tuple[str, ...]:
        """The overrides of this layout, with microbatches such that a step accumulates `accumulation` of
        them."""
        local = GLOBAL_BATCH // (self.replicate * self.shard * accumulation)
        return (
            f"--parallelism.data_parallel_replicate_degree={self.replicate}",
            f"--parallelism.data_parallel_shard_degree={self.shard}",
            f"--parallelism.tensor_parallel_degree={self.tp}",
            f"--training.local_batch_size={local}",
            *self.flags,
        )


LAYOUTS = {
    "fsdp2": Layout(shard=2),
    "fsdp4": Layout(shard=4),
    "hsdp2x2": Layout(replicate=2, shard=2),
    "ddp2": Layout(replicate=2),
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),  # twice as many ranks as KV heads
    "tp2-without-sp": Layout(tp=2, flags=("--no-parallelism.sequence_parallel",)),
    "fsdp2-tp2": Layout(shard=2, tp=2),
    "ddp2-tp2": Layout(replicate=2, tp=2),
}
