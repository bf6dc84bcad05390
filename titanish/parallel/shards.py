"""Which part of a parameter a rank holds, read off a DTensor's placements."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Box = list[tuple[int, int]]
"""(start, length) on every tensor dimension."""


def local_box(tensor: Tensor) -> Box:
    """The part of the whole that this rank holds.

    Mesh axes are taken from the innermost outwards: FSDP2 splits what tensor parallelism has left, also where
    both split the same dimension (torch calls the outer placement `_StridedShard` there). Shards are those of
    `torch.chunk`: of ceil(length / ranks), the last ones shorter or empty.
    """
    box = [(0, length) for length in tensor.shape]
    if not isinstance(tensor, DTensor):
        return box
    mesh = tensor.device_mesh
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(tensor.placements[axis], "dim", None)  # only the shard placements have one
        if dim is None:
            continue
        start, length = box[dim]
        size = -(-length // mesh.size(axis))
        offset = min(size * mesh.get_local_rank(axis), length)
        box[dim] = (start + offset, min(size, length - offset))
    return box


def counted_here(tensor: Tensor) -> bool:
    """Whether this rank counts its shard in a sum over the whole: one of each set of replicas does."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return all(
        getattr(placement, "dim", None) is not None or mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(tensor.placements)
    )


def unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) in the model's order, tied parameters once, under their first name."""
    yield from model.named_parameters(remove_duplicate=True)
