"""Keys that are known but not implemented: TorchTitan's (v0.2.2), and older names of keys that we have.

Each stands here as data: its type, its default, and the sentence to say when it is set to something else. A
key that gets implemented moves from here to its section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titanish.config.problem import Level


@dataclass(frozen=True)
class Status:
    """A known key without effect: silent at `default`, and a problem of `level` when set otherwise.

    `start` is for what would change numbers, the mesh or the files written, `note` for what only changes
    speed or reports.
    """

    type: Any
    default: object
    level: Level
    sentence: str


_PIPELINE = "not in this version: comes with pipeline parallel"
_CONTEXT = "not in this version: comes with context parallel"
_EXPERTS = "not in this version: comes with mixture-of-experts models"
_COMPILE = "not in this version: comes with compilation; training runs uncompiled"
_FLOAT8 = "not in this version: comes with float8 training"
_MX = "not in this version: comes with MX formats"
_PROFILER = "not in this version: comes with the profiler; nothing is profiled"
_HUB_WEIGHTS = "not in this version: comes with Hugging Face weights"
_FAULT = (
    "not supported: a job that lost a rank ends, and resumes from its last checkpoint on any number of ranks"
)
_MEMORY = "not supported as a section: an estimate comes with the layout planner"
_CODE = "not in this version: comes with user extensions; no code outside titanish is imported"
_BUDGET = (
    'not in this version: comes with compilation; use activation_checkpoint.mode = "selective" or "full"'
)

STATUS: dict[str, Status] = {
    "job.custom_config_module": Status(str, "", "start", _CODE),
    "profiling.enable_profiling": Status(bool, False, "note", _PROFILER),
    "profiling.save_traces_folder": Status(str, "profile_traces", "note", _PROFILER),
    "profiling.profile_freq": Status(int, 10, "note", _PROFILER),
    "profiling.profiler_active": Status(int, 1, "note", _PROFILER),
    "profiling.profiler_warmup": Status(int, 3, "note", _PROFILER),
    "profiling.enable_memory_snapshot": Status(bool, False, "note", _PROFILER),
    "profiling.save_memory_snapshot_folder": Status(str, "memory_snapshot", "note", _PROFILER),
    "metrics.enable_wandb": Status(
        bool,
        False,
        "note",
        "not in this version: comes with Weights & Biases; use metrics.enable_tensorboard",
    ),
    "model.tokenizer_path": Status(str | None, None, "start", "in titanish this is model.hf_assets_path"),
    "model.converters": Status(tuple[str, ...], (), "start", _FLOAT8),
    "model.print_after_conversion": Status(bool, False, "note", _FLOAT8),
    "optimizer.early_step_in_backward": Status(
        bool,
        False,
        "start",
        "not supported: clipping needs the norm of all gradients before the first update",
    ),
    "training.enable_cpu_offload": Status(
        bool, False, "start", "not in this version: comes with CPU offloading"
    ),
    "training.dtype": Status(
        Literal["bfloat16", "float32"],
        "float32",
        "start",
        "not supported: parameters are float32; training.mixed_precision_param is what they compute in",
    ),
    "parallelism.enable_async_tensor_parallel": Status(bool, False, "note", _COMPILE),
    "parallelism.pipeline_parallel_degree": Status(int, 1, "start", _PIPELINE),
    "parallelism.module_fqns_per_model_part": Status(
        tuple[tuple[str, ...], ...] | None, None, "start", _PIPELINE
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": Status(int, 1, "note", _PIPELINE),
    "parallelism.pipeline_parallel_last_stage_less_layers": Status(int, 1, "note", _PIPELINE),
    "parallelism.pipeline_parallel_layers_per_stage": Status(int | None, None, "note", _PIPELINE),
    "parallelism.pipeline_parallel_schedule": Status(str, "1F1B", "note", _PIPELINE),
    "parallelism.pipeline_parallel_schedule_csv": Status(str | None, "", "note", _PIPELINE),
    "parallelism.pipeline_parallel_microbatch_size": Status(int, 1, "note", _PIPELINE),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Status(bool, True, "note", _PIPELINE),
    "parallelism.context_parallel_degree": Status(int, 1, "start", _CONTEXT),
    "parallelism.context_parallel_load_balancer": Status(str | None, "headtail", "note", _CONTEXT),
    "parallelism.context_parallel_rotate_method": Status(
        Literal["allgather", "alltoall"], "allgather", "note", _CONTEXT
    ),
    "parallelism.expert_parallel_degree": Status(int, 1, "start", _EXPERTS),
    "parallelism.expert_tensor_parallel_degree": Status(int, 1, "start", _EXPERTS),
    "parallelism.expert_parallel_comm_backend": Status(
        Literal["standard", "deepep"], "standard", "note", _EXPERTS
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": Status(bool, True, "note", _FAULT),
    "checkpoint.initial_load_path": Status(
        str | None, None, "start", "not in this version: comes with loading weights to start from"
    ),
    "checkpoint.initial_load_model_only": Status(
        bool, True, "start", "not in this version: comes with loading weights to start from"
    ),
    "checkpoint.initial_load_in_hf": Status(bool, False, "start", _HUB_WEIGHTS),
    "checkpoint.initial_load_in_hf_quantized": Status(bool, False, "start", _HUB_WEIGHTS),
    "checkpoint.last_save_in_hf": Status(bool, False, "start", _HUB_WEIGHTS),
    "checkpoint.export_dtype": Status(
        Literal["float16", "bfloat16", "float32"],
        "float32",
        "start",
        "not in this version: comes with exporting weights; saves are float32",
    ),
    "checkpoint.exclude_from_loading": Status(
        tuple[str, ...], (), "start", "not supported yet: a resume loads all that was saved"
    ),
    "checkpoint.create_seed_checkpoint": Status(
        bool,
        False,
        "start",
        "not needed: initial weights depend on debug.seed only and are the same on every mesh",
    ),
    "checkpoint.load_only": Status(
        bool, False, "start", "not supported yet: checkpoint.enable saves and loads"
    ),
    "activation_checkpoint.memory_budget": Status(float, 0.5, "start", _BUDGET),
    "activation_checkpoint.visualize_memory_budget_pareto": Status(bool, False, "note", _BUDGET),
    "compile.enable": Status(bool, False, "note", _COMPILE),
    "compile.components": Status(tuple[str, ...], ("model", "loss"), "note", _COMPILE),
    "compile.backend": Status(str, "inductor", "note", _COMPILE),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Status(bool, False, "note", _FLOAT8),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Status(bool, False, "note", _FLOAT8),
    "quantize.linear.float8.recipe_name": Status(
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, None, "note", _FLOAT8
    ),
    "quantize.linear.float8.filter_fqns": Status(tuple[str, ...], (), "note", _FLOAT8),
    "quantize.linear.float8.emulate": Status(bool, False, "note", _FLOAT8),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": Status(
        Literal["triton", "cuda", "torch"], "triton", "note", _MX
    ),
    "quantize.linear.mx.recipe_name": Status(str, "mxfp8_cublas", "note", _MX),
    "quantize.linear.mx.filter_fqns": Status(tuple[str, ...], ("output",), "note", _MX),
    "quantize.grouped_mm.float8.fqns": Status(tuple[str, ...] | str, (), "note", _FLOAT8),
    "quantize.grouped_mm.mx.recipe_name": Status(Literal["mxfp8"], "mxfp8", "note", _MX),
    "quantize.grouped_mm.mx.fqns": Status(tuple[str, ...] | str, (), "note", _MX),
    "comm.mode": Status(
        Literal["default", "fake_backend", "local_tensor"],
        "default",
        "start",
        "not in this version: comes with dry runs",
    ),
    "memory_estimation.enable": Status(bool, False, "start", _MEMORY),
    "memory_estimation.disable_fake_mode": Status(bool, False, "note", _MEMORY),
    "fault_tolerance.enable": Status(bool, False, "start", _FAULT),
    "fault_tolerance.process_group": Status(str, "gloo", "note", _FAULT),
    "fault_tolerance.process_group_timeout_ms": Status(int, 10000, "note", _FAULT),
    "fault_tolerance.replica_id": Status(int, 0, "note", _FAULT),
    "fault_tolerance.group_size": Status(int, 0, "note", _FAULT),
    "fault_tolerance.min_replica_size": Status(int, 1, "note", _FAULT),
    "fault_tolerance.semi_sync_method": Status(str | None, None, "start", _FAULT),
    "experimental.custom_import": Status(str, "", "start", _CODE),
    "experimental.custom_args_module": Status(str, "", "start", _CODE),
    "debug.moe_force_load_balance": Status(bool, False, "start", _EXPERTS),
}

# Names from before TorchTitan v0.2 or of other trainers, and where what they said is said now.
RENAMED: dict[str, str] = {
    "activation_checkpoint.selective_option": "activation_checkpoint.selective_ac_option",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_in_safetensors_format": "checkpoint.last_save_in_hf",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "float8.emulate": "quantize.linear.float8.emulate",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "float8.precompute_float8_dynamic_scale_for_fsdp": (
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    ),
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "metrics.enable_color_printing": "metrics.disable_color_printing (the opposite)",
    "metrics.rank_0_only": "metrics.save_for_all_ranks (the opposite)",
    "mx.filter_fqns": "quantize.linear.mx.filter_fqns",
    "mx.recipe_name": "quantize.linear.mx.recipe_name",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.foreach": 'optimizer.implementation = "foreach"',
    "optimizer.fused": 'optimizer.implementation = "fused"',
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.deterministic": "debug.deterministic",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.enable_float8_linear": 'model.converters = ["float8"]',
    "training.enable_loss_parallel": "parallelism.disable_loss_parallel (the opposite)",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.seed": "debug.seed",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
}

# Keys from before TorchTitan v0.2 that say nothing any more, and why.
REMOVED: dict[str, str] = {
    "checkpoint.interval_type": "checkpoint.interval always counts steps",
    "job.use_for_integration_test": "it has no meaning outside TorchTitan's own tests",
    "model.norm_type": "the model family decides its norm",
    "training.data_parallel_type": "parallelism.data_parallel_shard_degree = 1 is DDP, anything else shards",
}
