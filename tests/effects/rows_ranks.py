"""What changing each key changes, for the keys whose effect takes two ranks; rank 0 looks."""

from __future__ import annotations

from tests.effects.ran import Effect, Ran, files

_SHARD, _REPLICATE, _TP = (
    f"--parallelism.{name}_degree=2"
    for name in ("data_parallel_shard", "data_parallel_replicate", "tensor_parallel")
)
_STEPS = 2
_GROUPS = 4  # of parameters: two layers, the embedding, norm and head


def _layout(ran: Ran) -> tuple[dict[str, int], tuple[int, ...]]:
    """The mesh axes that a (64, 64) weight is on, and the shape of this rank's part of it."""
    weight = ran.weight()
    axes = dict(zip(weight.device_mesh.mesh_dim_names or (), weight.device_mesh.shape, strict=True))
    return axes, tuple(weight.to_local().shape)


def _gathers(ran: Ran) -> int:
    return ran.operators["c10d::_allgather_base_"]


def _reductions(ran: Ran) -> int:
    return ran.operators["c10d::_reduce_scatter_base_"]


PARALLELISM = {
    "parallelism.data_parallel_replicate_degree": Effect(
        (_REPLICATE,), _layout, ({"fsdp": 2}, (32, 64)), ({"dp_replicate": 2, "fsdp": 1}, (64, 64)), ranks=2
    ),
    # The product of the degrees is the number of ranks, so another one has to make up for it.
    "parallelism.data_parallel_shard_degree": Effect(
        ("--parallelism.data_parallel_shard_degree=1", _REPLICATE),
        _layout,
        ({"fsdp": 2}, (32, 64)),
        ({"dp_replicate": 2, "fsdp": 1}, (64, 64)),
        given=(_SHARD,),
        ranks=2,
    ),
    "parallelism.tensor_parallel_degree": Effect(
        (_TP,), _layout, ({"fsdp": 2}, (32, 64)), ({"fsdp": 1, "tp": 2}, (32, 64)), ranks=2
    ),
    "parallelism.fsdp_reshard_after_forward": Effect(
        ("--parallelism.fsdp_reshard_after_forward=never",),
        _gathers,
        (_GROUPS + 3) * _STEPS,  # the backward gathers all but norm and head again
        _GROUPS * _STEPS,
        ranks=2,
    ),
    "parallelism.reduce_gradients": Effect(
        ("--parallelism.reduce_gradients=step",),
        _reductions,
        _GROUPS * 2 * _STEPS,
        _GROUPS * _STEPS,
        given=("--training.local_batch_size=3",),  # two forward passes a step
        ranks=2,
    ),
    "parallelism.disable_loss_parallel": Effect(
        ("--parallelism.disable_loss_parallel",),
        lambda ran: ran.operators["c10d::allgather_"] == len(ran.logits),  # whole logits of every chunk
        False,
        True,
        given=(_TP,),
        ranks=2,
    ),
    "parallelism.sequence_parallel": Effect(
        ("--no-parallelism.sequence_parallel",),
        lambda ran: {tuple(shape) for shape in ran.layer_inputs},
        {(6, 17, 64)},
        {(6, 33, 64)},
        given=(_TP,),
        ranks=2,
    ),
}

METRICS = {
    "metrics.save_for_all_ranks": Effect(
        ("--metrics.save_for_all_ranks",),
        lambda ran: files("outputs/metrics*.jsonl"),
        ["outputs/metrics.jsonl"],
        ["outputs/metrics.jsonl", "outputs/metrics.rank0.jsonl", "outputs/metrics.rank1.jsonl"],
        ranks=2,
    ),
}
