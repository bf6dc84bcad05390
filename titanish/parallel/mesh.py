"""The device mesh, once per way of looking at the same ranks; handed on, never looked up."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanish.config.degrees import Degrees
from titanish.parallel.dims import Coordinates, coordinates, place


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job.

    Attributes:
        parameters: axes pp, dp_replicate, fsdp (dp_shard x cp), tp: how parameters are split.
        reading: axes pp, batch (dp_replicate x dp_shard), cp, tp: who reads which data.
        loss: axes pp, loss (batch x cp), tp: over which ranks loss sums add up.
        at: this rank's index on the axes of `reading`.
        place: the same in words, for logs and errors.
    """

    degrees: Degrees
    parameters: DeviceMesh
    reading: DeviceMesh
    loss: DeviceMesh
    at: Coordinates
    place: str

    @property
    def tp(self) -> DeviceMesh:
        return self.parameters["tp"]

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP2 takes: (dp_replicate, fsdp) where parameters are replicated, (fsdp,) where not."""
        if self.degrees.dp_replicate > 1:
            return self.parameters["dp_replicate", "fsdp"]
        return self.parameters["fsdp"]

    @property
    def batch_group(self) -> dist.ProcessGroup:
        return self.reading["batch"].get_group()

    @property
    def loss_group(self) -> dist.ProcessGroup:
        return self.loss["loss"].get_group()


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """The mesh of `degrees` over all ranks of the running process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert degrees.world_size == world_size, (degrees, world_size)
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))

    def view(**axes: int) -> DeviceMesh:
        # Views of one root mesh, which FSDP2 asks for where it meets tensor parallelism. `_unflatten` is
        # private in PyTorch 2.11 to 2.13; its public relative can only flatten, and then warns when it is
        # sliced.
        return world._unflatten(0, tuple(axes.values()), tuple(axes))

    d = degrees
    return Mesh(
        degrees=degrees,
        parameters=view(pp=d.pp, dp_replicate=d.dp_replicate, fsdp=d.fsdp, tp=d.tp),
        reading=view(pp=d.pp, batch=d.batch, cp=d.cp, tp=d.tp),
        loss=view(pp=d.pp, loss=d.loss, tp=d.tp),
        at=coordinates(degrees, rank),
        place=place(degrees, rank),
    )
