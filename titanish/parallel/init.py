"""Initial weights that depend on the seed and the parameter's name, and on nothing else.

A parameter is cut into blocks of whole rows, a size fixed by its shape alone, and each block is drawn from a
generator of its own keyed by (seed, name, block). A rank draws the blocks that meet its shard, so every mesh
starts from the same bits and no rank ever holds the whole. (torch's own DTensor random operators repeat
values over the shards of a CPU mesh, and a generator that runs through the model would tie the weights to the
order of layers.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanish.models.spec import Init
from titanish.parallel.shards import local_box, unique_parameters

BLOCK_ELEMENTS = 65_536
"""Changing this changes every initial weight."""


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory on `device`, uninitialised; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[id(parameter)])


@torch.no_grad()
def initialize(model: nn.Module, init: Callable[[str], Init], seed: int) -> None:
    """Draw this rank's share of every parameter of `model` in place."""
    for name, parameter in unique_parameters(model):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        how = init(name)
        if how.std:
            _draw(local, tuple(parameter.shape), local_box(parameter), how.std, f"{seed}:{name}")
        else:
            local.fill_(how.constant)


def _draw(local: Tensor, shape: tuple[int, ...], box: list[tuple[int, int]], std: float, key: str) -> None:
    """Fill `local`, which is the part `box` of a tensor of `shape`, block of rows by block of rows."""
    if not local.numel():
        return
    row_elements = max(1, torch.Size(shape[1:]).numel())
    block_rows = max(1, BLOCK_ELEMENTS // row_elements)
    first, rows = box[0]
    for block in range(first // block_rows, -(-(first + rows) // block_rows)):
        start = block * block_rows
        length = min(block_rows, shape[0] - start)
        # float32 on the CPU whatever the device: the same bits on a laptop and on GPUs
        values = torch.empty((length, *shape[1:])).normal_(0.0, std, generator=_generator(f"{key}:{block}"))
        for dim, (offset, size) in enumerate(box[1:], start=1):
            values = values.narrow(dim, offset, size)
        low, high = max(first, start), min(first + rows, start + length)
        local[low - first : high - first].copy_(values[low - start : high - start])


def _generator(key: str) -> torch.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)  # manual_seed takes 63 bits
