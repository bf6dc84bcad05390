"""What changing each key changes, for all keys whose effect one rank shows."""

from __future__ import annotations

import math
import multiprocessing

from tests.effects.ran import ANY, Effect, Ran, files, letters_of, shapes_of, tokens_of
from titanish.data.loader import TrainLoader

# A vocabulary that the byte tokenizer fits in, and a text of the letter "a".
TEXT = (
    "--training.dataset=text",
    "--training.dataset_path=text.jsonl",
    "--model.override.vocab_size=258",
)
BOS, EOS = 256, 257

JOB = {
    "job.config_file": Effect(
        ("--job.config_file=job.toml",), lambda ran: "written in a file; on" in ran.log, False, True
    ),
    "job.dump_folder": Effect(
        ("--job.dump_folder=elsewhere",),
        lambda ran: files("metrics.jsonl"),
        ["outputs/metrics.jsonl"],
        ["elsewhere/metrics.jsonl"],
    ),
    "job.description": Effect(
        ("--job.description=my job",), lambda ran: "my job; on" in ran.log, False, True
    ),
    "job.print_config": Effect(
        ("--job.print_config",), lambda ran: "| loss_chunk_tokens = 20" in ran.log, False, True
    ),
    "job.save_config_file": Effect(
        ("--job.save_config_file=copy.toml",),
        lambda ran: files("outputs/*.toml"),
        ["outputs/config.toml"],
        ["outputs/config.toml", "outputs/copy.toml"],
    ),
}

MODEL = {
    "model.flavor": Effect(  # the overrides of BASE leave 1B its tied embeddings
        ("--model.flavor=1B",),
        lambda ran: ran.job.model.output.weight is ran.job.model.tok_embeddings.weight,
        False,
        True,
    ),
    "model.override": Effect(
        ("--model.override.n_layers=3",), lambda ran: list(ran.job.model.layers), ["0", "1"], ["0", "1", "2"]
    ),
    "model.tokenizer": Effect(  # the one in the folder has neither BOS nor EOS
        ("--model.tokenizer=hf", "--no-training.add_bos", "--no-training.add_eos"),
        lambda ran: {7, ord("a")}.intersection(tokens_of(ran.trained)),
        {ord("a")},
        {7},
        given=(*TEXT, "--model.hf_assets_path=tokenizer"),
    ),
    "model.hf_assets_path": Effect(
        ("--model.hf_assets_path=other-tokenizer",),
        lambda ran: tokens_of(ran.trained),
        [7],
        [8],
        given=(
            *TEXT,
            "--model.tokenizer=hf",
            "--model.hf_assets_path=tokenizer",
            "--no-training.add_bos",
            "--no-training.add_eos",
        ),
    ),
}

_SAMPLE = ("--sample.enable", "--sample.max_new_tokens=3")
SAMPLE = {
    "sample.enable": Effect(
        _SAMPLE[:1], lambda ran: "sampled from the trained model" in ran.log, False, True, given=_SAMPLE[1:]
    ),
    "sample.prompt": Effect(
        ("--sample.prompt=ab",),
        lambda ran: ran.judged[0].tokens.tolist(),
        [[BOS]],
        [[BOS, ord("a"), ord("b")]],
        given=_SAMPLE,
    ),
    "sample.max_new_tokens": Effect(
        ("--sample.max_new_tokens=5",), lambda ran: len(ran.judged), 3, 5, given=_SAMPLE
    ),
    "sample.temperature": Effect(  # the tokens that the last forward pass went on from
        ("--sample.temperature=0",), lambda ran: ran.judged[-1].tokens.tolist(), ANY, ANY, given=_SAMPLE
    ),
}


def _workers_of_two_passes(loader: TrainLoader) -> int:
    """How many worker processes serve two passes (training makes only one, which has no end)."""
    workers = set()
    for _ in range(2):
        next(iter(loader))
        workers |= {child.pid for child in multiprocessing.active_children()}
    loader.close()
    return len(workers)


DATA = {
    "training.dataset": Effect(
        ("--training.dataset=text",), lambda ran: letters_of(ran.trained) == "a", False, True, given=TEXT[1:]
    ),
    "training.dataset_path": Effect(
        ("--training.dataset_path=other.jsonl",), lambda ran: letters_of(ran.trained), "a", "c", given=TEXT
    ),
    "training.text_field": Effect(
        ("--training.text_field=body",), lambda ran: letters_of(ran.trained), "a", "b", given=TEXT
    ),
    "training.add_bos": Effect(
        ("--no-training.add_bos",), lambda ran: BOS in tokens_of(ran.trained), True, False, given=TEXT
    ),
    "training.add_eos": Effect(
        ("--no-training.add_eos",), lambda ran: EOS in tokens_of(ran.trained), True, False, given=TEXT
    ),
    "training.cache_dir": Effect(
        ("--training.cache_dir=here",),
        lambda ran: [name.split("/")[0] for name in files("text-*.bin")],
        ["cache"],
        ["here"],
        given=TEXT,
    ),
    "training.dataloader.num_workers": Effect(
        ("--training.dataloader.num_workers=1",),
        lambda ran: [len(each.loaders) for each in ran.trained],
        [0, 0, 0, 0],
        [1, 1, 1, 1],
    ),
    "training.dataloader.persistent_workers": Effect(
        ("--training.dataloader.persistent_workers",),
        lambda ran: _workers_of_two_passes(ran.job.loader),
        2,
        1,
        given=("--training.dataloader.num_workers=1",),
    ),
    "training.dataloader.prefetch_factor": Effect(
        ("--training.dataloader.prefetch_factor=4",),
        lambda ran: ran.job.loader._batches._loader.prefetch_factor,
        2,  # torch's own
        4,
        given=("--training.dataloader.num_workers=1",),
    ),
}

TRAINING = {
    "training.local_batch_size": Effect(
        ("--training.local_batch_size=4",), lambda ran: shapes_of(ran.trained), [(6, 33)] * 4, [(4, 33)] * 6
    ),
    "training.global_batch_size": Effect(
        ("--training.global_batch_size=24",), lambda ran: shapes_of(ran.trained), [(6, 33)] * 4, [(6, 33)] * 8
    ),
    "training.seq_len": Effect(
        ("--training.seq_len=40",), lambda ran: shapes_of(ran.trained), [(6, 33)] * 4, [(6, 40)] * 4
    ),
    "training.steps": Effect(
        ("--training.steps=3",), lambda ran: [row["step"] for row in ran.rows], [1, 2], [1, 2, 3]
    ),
    "training.max_minutes": Effect(
        ("--training.max_minutes=0.0001",), lambda ran: [row["step"] for row in ran.rows], [1, 2], [1]
    ),
    "training.max_norm": Effect(  # the update of plain SGD is the clipped gradient
        ("--training.max_norm=0.01",),
        lambda ran: round(ran.update_norm(), 4),
        0.02,
        0.01,
        given=(
            "--training.max_norm=0.02",
            "--training.steps=1",
            "--optimizer.name=SGD",
            "--optimizer.lr=1",
            "--optimizer.weight_decay=0",
            "--lr_scheduler.warmup_steps=0",
        ),
    ),
    "training.mixed_precision_param": Effect(
        ("--training.mixed_precision_param=bfloat16",),
        lambda ran: {str(each.dtype) for each in ran.trained},
        {"torch.float32"},
        {"torch.bfloat16"},
    ),
    "training.gc_freq": Effect(("--training.gc_freq=1",), lambda ran: ran.collections, 0, 2),
    "training.gc_debug": Effect(
        ("--training.gc_debug",), lambda ran: ran.log.count("| garbage collection after step"), 0, 2
    ),
    "training.loss_chunk_tokens": Effect(
        ("--training.loss_chunk_tokens=50",), lambda ran: max(rows for rows, _ in ran.logits), 20, 50
    ),
}

_VALIDATE = (
    "--validation.enable",
    "--validation.dataset=mock",
    "--validation.steps=1",
    "--validation.local_batch_size=12",  # the global batch: one forward pass
)
_VALIDATE_TEXT = (
    "--model.override.vocab_size=258",
    "--validation.enable",
    "--validation.dataset=text",
    "--validation.dataset_path=text.jsonl",
)
_VALIDATE_APART = (*_VALIDATE, "--validation.dataloader.num_workers=1")


def _loaders_of_validations(ran: Ran) -> int:
    """How many worker processes fed the two validations: before the first step, after the last."""
    return len(frozenset().union(*(each.loaders for each in ran.judged)))


VALIDATION = {
    "validation.enable": Effect(
        ("--validation.enable",), lambda ran: ran.validated_at, [], [0, 2], given=_VALIDATE[1:]
    ),
    "validation.dataset": Effect(
        ("--validation.dataset=text",),
        lambda ran: letters_of(ran.judged).strip("\0") == "a",  # rows that the data does not fill are zeros
        False,
        True,
        given=(*_VALIDATE_TEXT, "--validation.dataset=mock", "--validation.steps=1"),
    ),
    "validation.dataset_path": Effect(
        ("--validation.dataset_path=other.jsonl",),
        lambda ran: letters_of(ran.judged).strip("\0"),  # rows that the data does not fill are zeros
        "a",
        "c",
        given=_VALIDATE_TEXT,
    ),
    "validation.local_batch_size": Effect(
        ("--validation.local_batch_size=3",),
        lambda ran: shapes_of(ran.judged),
        [(12, 33)] * 2,
        [(3, 33)] * 8,
        given=_VALIDATE,
    ),
    "validation.seq_len": Effect(
        ("--validation.seq_len=20",),
        lambda ran: shapes_of(ran.judged),
        [(12, 33)] * 2,
        [(12, 20)] * 2,
        given=_VALIDATE,
    ),
    "validation.freq": Effect(
        ("--validation.freq=1",), lambda ran: ran.validated_at, [0, 2], [0, 1, 2], given=_VALIDATE
    ),
    "validation.steps": Effect(
        ("--validation.steps=3",), lambda ran: len(ran.judged), 2 * 1, 2 * 3, given=_VALIDATE
    ),
    "validation.dataloader.num_workers": Effect(
        ("--validation.dataloader.num_workers=1",),
        lambda ran: [len(each.loaders) for each in ran.judged],
        [0, 0],
        [1, 1],
        given=_VALIDATE,
    ),
    "validation.dataloader.persistent_workers": Effect(
        ("--validation.dataloader.persistent_workers",), _loaders_of_validations, 2, 1, given=_VALIDATE_APART
    ),
    "validation.dataloader.prefetch_factor": Effect(
        ("--validation.dataloader.prefetch_factor=4",),
        lambda ran: ran.validation.batches._batches._loader.prefetch_factor,
        2,
        4,
        given=_VALIDATE_APART,
    ),
}

_SGD = ("--optimizer.name=SGD",)
OPTIMIZER = {
    "optimizer.name": Effect(_SGD, lambda ran: type(ran.job.optimizer).__name__, "AdamW", "SGD"),
    "optimizer.lr": Effect(
        ("--optimizer.lr=0.002",), lambda ran: [row["lr"] for row in ran.rows], [4e-4, 8e-4], [1e-3, 2e-3]
    ),
    "optimizer.beta1": Effect(
        ("--optimizer.beta1=0.8",), lambda ran: ran.options["betas"], (0.9, 0.95), (0.8, 0.95)
    ),
    "optimizer.beta2": Effect(
        ("--optimizer.beta2=0.99",), lambda ran: ran.options["betas"], (0.9, 0.95), (0.9, 0.99)
    ),
    "optimizer.eps": Effect(("--optimizer.eps=1e-6",), lambda ran: ran.options["eps"], 1e-8, 1e-6),
    "optimizer.weight_decay": Effect(
        ("--optimizer.weight_decay=0",), lambda ran: ran.options["weight_decay"], 0.1, 0
    ),
    "optimizer.momentum": Effect(
        ("--optimizer.momentum=0.5",), lambda ran: ran.options["momentum"], 0, 0.5, given=_SGD
    ),
    "optimizer.implementation": Effect(
        ("--optimizer.implementation=for-loop",),
        lambda ran: ran.operators["aten::_fused_adamw_"],
        2,  # one call a step for all parameters
        0,
    ),
}

# One step of warm-up, one at the peak, then a decay that would end a step after the fourth.
_SCHEDULE = ("--training.steps=4", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.001")


def _factors(ran: Ran) -> list[float]:
    return [round(row["lr"] / 0.001, 4) for row in ran.rows]


def _schedule(change: str, after: list[float]) -> Effect:
    return Effect((change,), _factors, [1.0, 1.0, 0.6667, 0.3333], after, given=_SCHEDULE)


SCHEDULE = {
    "lr_scheduler.warmup_steps": _schedule("--lr_scheduler.warmup_steps=2", [0.5, 1.0, 1.0, 0.5]),
    "lr_scheduler.total_steps": _schedule("--lr_scheduler.total_steps=6", [1.0, 1.0, 0.8, 0.6]),
    "lr_scheduler.decay_ratio": _schedule("--lr_scheduler.decay_ratio=0.5", [1.0, 1.0, 1.0, 0.5]),
    "lr_scheduler.decay_type": _schedule(
        "--lr_scheduler.decay_type=sqrt",
        [1.0, 1.0, round(1 - math.sqrt(1 / 3), 4), round(1 - math.sqrt(2 / 3), 4)],
    ),
    "lr_scheduler.min_lr_factor": _schedule("--lr_scheduler.min_lr_factor=0.1", [1.0, 1.0, 0.7, 0.4]),
}
