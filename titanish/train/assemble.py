"""The composition root: the only place that sees the whole configuration and every part."""

from __future__ import annotations

import dataclasses
import logging
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titanish import __version__
from titanish.checkpoint.manager import CheckpointManager, Progress
from titanish.config.degrees import BatchPlan, Degrees
from titanish.config.load import Loaded
from titanish.config.render import to_toml
from titanish.config.schema import Config
from titanish.data.build import Prepared, build_train_windows, build_validation_windows
from titanish.data.loader import TrainLoader, ValidationBatches
from titanish.models.registry import load_spec
from titanish.observe.events import Events
from titanish.observe.metrics import Throughput
from titanish.observe.reporter import build_reporter
from titanish.optim.build import build_optimizer
from titanish.optim.schedule import build_schedule
from titanish.parallel.apply import parallelize
from titanish.parallel.mesh import Mesh, build_mesh
from titanish.runtime.agreement import Agreement
from titanish.runtime.device import Device, resolve_param_dtype
from titanish.runtime.garbage import GarbageCollection
from titanish.runtime.seeds import set_determinism, set_seed
from titanish.runtime.stop import StopRequests
from titanish.train.anomaly import AnomalyStep, finite_loss
from titanish.train.hooks import (
    CheckpointHook,
    EventsHook,
    FiniteHook,
    GarbageHook,
    ReportHook,
    StopHook,
    TimeoutHook,
    ValidateHook,
)
from titanish.train.job import Hook, Job, TrainState
from titanish.train.loss import TokenLoss
from titanish.train.step import PlainStep, Step
from titanish.train.validate import Validation

logger = logging.getLogger("titanish")


def assemble(
    loaded: Loaded,
    prepared: Prepared,
    device: Device,
    mesh: Mesh,
    events: Events | None = None,
    requests: StopRequests | None = None,
) -> Job:
    """Build every part of the job that `loaded` describes, resumed where there is a checkpoint to resume
    from; without `events` nothing is noted, without `requests` no signal is waited for."""
    config, size, batch = loaded.config, loaded.size, _known(loaded.batch)
    model = build_model(config, size, mesh, device)
    optimizer = build_optimizer(config.optimizer, model.parameters())
    state = TrainState()
    loss = build_loss(config, model, mesh, state)
    manager = build_checkpoint_manager(config, size, prepared, mesh)
    progress = resume(config, manager, model, optimizer)
    events = events or Events()
    note_start(loaded, device, progress.step, events)
    throughput = Throughput(
        flops_per_token=size.flops_per_token(config.training.seq_len),
        world_size=mesh.degrees.world_size,
        peak_flops=device.peak_flops,
    )
    state.step, state.tokens_seen, state.samples_seen = dataclasses.astuple(progress)
    step: Step = PlainStep(
        model=model,
        loss=loss,
        microbatch=batch.local_batch_size,
        batch_group=mesh.batch_group,
        device=device.torch_device,
        reduce_every_microbatch=config.parallelism.reduce_gradients == "microbatch",
    )
    if config.debug.detect_anomaly:
        step = AnomalyStep(step, state)
    return Job(
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(config.lr_scheduler, config.training.steps),
        step=step,
        loader=build_loader(config, prepared, batch, mesh, progress.samples_seen),
        hooks=build_hooks(
            config,
            prepared,
            batch,
            device,
            mesh,
            model,
            optimizer,
            loss,
            manager,
            throughput,
            progress,
            events,
            requests or StopRequests(),
        ),
        state=state,
        throughput=throughput,
        steps=config.training.steps,
        peak_lr=config.optimizer.lr,
        max_norm=config.training.max_norm,
        samples_per_step=batch.global_batch_size,
        tokens_per_step=batch.global_batch_size * batch.seq_len,
    )


def start_mesh(loaded: Loaded, device: Device) -> Mesh:
    """The mesh of the running process group; seeds this rank's generators and sets determinism by it."""
    mesh = build_mesh(_known(loaded.world), device.type)
    d, at = mesh.degrees, mesh.at
    # tp ranks agree: what they drop out is replicated over them
    set_seed(loaded.config.debug.seed, distinct=(at.pp * d.batch + at.batch) * d.cp + at.cp)
    set_determinism(loaded.config.debug)
    return mesh


def build_model(config: Config, size: Any, mesh: Mesh, device: Device) -> nn.Module:
    """The model, split over the mesh, with its initial weights."""
    spec = load_spec(config.model.name)
    param_dtype, why = resolve_param_dtype(config.training.mixed_precision_param, device)
    logger.info(why)
    with torch.device("meta"):
        model = spec.build(size)
    return parallelize(
        model,
        spec,
        size,
        mesh,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        param_dtype=param_dtype,
        device=device.torch_device,
        seed=config.debug.seed,
    )


def build_loss(config: Config, model: nn.Module, mesh: Mesh, state: TrainState) -> TokenLoss:
    """Hidden states to summed loss, under the model's head."""
    head = model.get_submodule("output")
    assert isinstance(head, nn.Linear)
    return TokenLoss(
        head=head,
        chunk_tokens=config.training.loss_chunk_tokens,
        tp_group=mesh.tp.get_group() if mesh.degrees.tp > 1 else None,
        gather_logits=config.parallelism.disable_loss_parallel,
        check=finite_loss(state) if config.debug.detect_anomaly else None,
    )


def build_loader(
    config: Config, prepared: Prepared, batch: BatchPlan, mesh: Mesh, start_sample: int
) -> TrainLoader:
    """This rank's training batches from `start_sample` on."""
    return TrainLoader(
        build_train_windows(prepared, seq_len=batch.seq_len),
        seed=config.debug.seed,
        seq_len=batch.seq_len,
        global_batch_size=batch.global_batch_size,
        batch_rank=mesh.at.batch,
        batch_ranks=batch.batch_ranks,
        start_sample=start_sample,
        **config.training.dataloader.model_dump(),
    )


def build_validation(
    config: Config,
    prepared: Prepared,
    batch: BatchPlan,
    device: Device,
    mesh: Mesh,
    model: nn.Module,
    loss: TokenLoss,
) -> Validation:
    """Validation over this rank's part of the held-out data.

    A step of it is as many sequences as a step of training, so that the amount does not depend on the mesh.
    """
    section = config.validation
    seq_len = section.seq_len or config.training.seq_len
    batches = ValidationBatches(
        build_validation_windows(prepared, seq_len=seq_len),
        seq_len=seq_len,
        local_batch_size=section.local_batch_size,
        batch_rank=mesh.at.batch,
        batch_ranks=mesh.degrees.batch,
        max_windows=None if section.steps == -1 else section.steps * batch.global_batch_size,
        **section.dataloader.model_dump(),
    )
    return Validation(model, loss, batches, mesh.loss_group, device.torch_device)


def build_checkpoint_manager(config: Config, size: Any, prepared: Prepared, mesh: Mesh) -> CheckpointManager:
    """Saves and loads under `job.dump_folder`; what it stores beside tensors is fixed here."""
    about = {
        "model": {"name": config.model.name, "flavor": config.model.flavor, **dataclasses.asdict(size)},
        "mesh": dataclasses.asdict(mesh.degrees),
        "optimizer": config.optimizer.name,
        "data": {
            "dataset": prepared.train.fingerprint,
            "tokenizer": prepared.tokenizer.fingerprint,
            "seq_len": config.training.seq_len,
            "seed": config.debug.seed,
        },
        "versions": {
            "titanish": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    return CheckpointManager(
        folder=Path(config.job.dump_folder) / config.checkpoint.folder,
        keep_latest_k=config.checkpoint.keep_latest_k,
        about=about,
        documents={"config.toml": to_toml(config)},
        attachments={"tokenizer": tuple(prepared.tokenizer.files)},
    )


def resume(
    config: Config, manager: CheckpointManager, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Load the checkpoint to resume from, if checkpoints are on and there is one, and say so."""
    if not config.checkpoint.enable:
        if manager.folder.is_dir() and any(manager.folder.glob("step-*")):
            logger.warning(
                f"{manager.folder} holds checkpoints, but checkpoint.enable is off: starting from step 0"
            )
        return Progress(0, 0, 0)
    step = manager.find(config.checkpoint.load_step)
    if step is None:
        logger.info(f"no checkpoint in {manager.folder}: starting from step 0")
        return Progress(0, 0, 0)
    progress = manager.load(step, model, optimizer)
    logger.info(
        f"resumed from step {progress.step} of {manager.folder} ({progress.tokens_seen} tokens); "
        f"training.steps is {config.training.steps}"
    )
    return progress


def note_start(loaded: Loaded, device: Device, step: int, events: Events) -> None:
    """Note what runs, from which step on."""
    events.step = step
    model = loaded.config.model
    events.add(
        "resume" if step else "start",
        step,
        world=str(loaded.world),
        batch=str(loaded.batch),
        model=f"{model.name} {model.flavor}, {loaded.size.num_parameters:,} parameters",
        device=device.name,
        steps=loaded.config.training.steps,
        titanish=__version__,
        torch=torch.__version__,
    )


def build_hooks(
    config: Config,
    prepared: Prepared,
    batch: BatchPlan,
    device: Device,
    mesh: Mesh,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: TokenLoss,
    manager: CheckpointManager,
    throughput: Throughput,
    progress: Progress,
    events: Events,
    requests: StopRequests,
) -> tuple[Hook, ...]:
    """The hooks in their order: what adds to the row of a step stands before what sends it off."""
    last = config.training.steps
    agreement = Agreement()
    max_minutes = config.training.max_minutes
    stop = StopHook(requests, agreement, max_minutes, last, config.checkpoint.enable, events)
    hooks: list[Hook] = [EventsHook(events), stop]
    if config.debug.detect_anomaly:
        hooks.append(FiniteHook())
    if config.validation.enable:
        validation = build_validation(config, prepared, batch, device, mesh, model, loss)
        hooks.append(ValidateHook(validation, config.validation.freq, last, throughput, events))
    rank = torch.distributed.get_rank()
    reporter = build_reporter(
        config.metrics,
        config.job.dump_folder,
        rank=rank,
        is_main=rank == 0,
        resume_step=progress.step or None,
        total_steps=last,
    )
    hooks.append(ReportHook(reporter, throughput, device, mesh.loss_group, config.metrics.log_freq, last))
    if config.checkpoint.enable:
        section = config.checkpoint
        hooks.append(
            CheckpointHook(
                manager,
                model,
                optimizer,
                section.interval,
                last,
                section.enable_first_step_checkpoint,
                throughput,
                events,
            )
        )
    groups = [mesh.batch_group, mesh.loss_group, mesh.tp.get_group(), mesh.parameters["fsdp"].get_group()]
    groups.append(mesh.parameters["dp_replicate"].get_group())
    if agreement.group is not None:
        groups.append(agreement.group)
    hooks.append(TimeoutHook.of(progress.step + 1, config.comm.train_timeout_seconds, groups))
    hooks.append(GarbageHook(GarbageCollection(config.training.gc_freq, config.training.gc_debug)))
    return tuple(hooks)


def _known(value: Degrees | BatchPlan | None) -> Any:
    assert value is not None, "a valid configuration has its equations"
    return value
