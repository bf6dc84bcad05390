"""Initial weights over meshes: the same bits everywhere, no two of them alike, the documented spread."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from tests.ranks.layouts import JOB, LAYOUTS, Layout
from titanish.models.llama3.sizes import Size
from titanish.models.llama3.spec import SPEC
from titanish.parallel.shards import counted_here, local_box, unique_parameters
from titanish.testing.equality import build_job, whole_tensors
from titanish.testing.ranks import RankPool

Pool = Callable[[int], RankPool]
Weights = dict[str, Tensor]

# Wide enough for a spread within 5 percent, and for several row blocks in a tensor (257 x 320 > 65536).
SIZE = Size(dim=320, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=340, vocab_size=257)
FLAGS = (
    *JOB,
    *(f"--model.override.{key}={getattr(SIZE, key)}" for key in ("dim", "n_layers", "hidden_dim")),
)


def initial(flags: tuple[str, ...]) -> Weights:
    """The initial weights, whole, of rank 0; the others only take part."""
    job, _ = build_job(flags)
    weights = whole_tensors(job, lambda p: p)
    return weights if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def weights_of(pool: Pool) -> Callable[[str], Weights]:
    @cache
    def of(name: str) -> Weights:
        layout = {"one": Layout(), **LAYOUTS}[name]
        return pool(layout.world_size).run(initial, (*FLAGS, *layout.command_line()))[0]

    return of


@pytest.mark.parametrize("name", ["fsdp2", "tp2", "fsdp2-tp2", "fsdp4"])
def test_every_mesh_starts_from_the_bits_of_one_rank(weights_of: Callable[[str], Weights], name: str) -> None:
    one, other = weights_of("one"), weights_of(name)
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.parametrize("name", ["fsdp2", "tp2", "fsdp2-tp2"])
def test_spread_is_the_documented_one_and_norms_are_ones(
    weights_of: Callable[[str], Weights], name: str
) -> None:
    for key, tensor in weights_of(name).items():
        if key.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), key
            continue
        into_residual = key.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        std = 0.02 / (2 * 3) ** 0.5 if into_residual else 0.02
        assert SPEC.init(SIZE, key).std == pytest.approx(std)
        assert tensor.std().item() == pytest.approx(std, rel=0.05), key
        assert abs(tensor.mean().item()) < 0.05 * std, key
        # a normal distribution, not a uniform one of the same spread
        assert ((tensor.abs() > 2 * std).float().mean().item()) == pytest.approx(0.0455, abs=0.01), key


@pytest.mark.parametrize("name", ["fsdp2", "tp2", "fsdp2-tp2"])
def test_no_two_parts_of_a_weight_and_no_two_layers_are_alike(
    weights_of: Callable[[str], Weights], name: str
) -> None:
    weights = {key: t for key, t in weights_of(name).items() if t.ndim == 2}
    for key, tensor in weights.items():
        for dim, parts in itertools.product((0, 1), (2, 4)):
            length = tensor.size(dim) // parts
            blocks = [tensor.narrow(dim, i * length, length) for i in range(parts)]
            for a, b in itertools.combinations(blocks, 2):
                assert not (a == b).float().mean() > 0.01, (key, dim, parts)
    for (key_a, a), (key_b, b) in itertools.combinations(weights.items(), 2):
        if a.shape == b.shape:
            assert not torch.equal(a, b), (key_a, key_b)


# First and last element of every matrix for seed 42: these numbers are part of what a seed means. The last of
# the embedding is in its second row block.
GOLDEN = {
    "tok_embeddings.weight": (0.0053077983, -0.035936002),
    "layers.0.attention.wq.weight": (-0.022982301, 0.040664777),
    "layers.0.attention.wk.weight": (0.027594756, -0.019101448),
    "layers.0.attention.wv.weight": (-0.02265623, 0.013599892),
    "layers.0.attention.wo.weight": (-0.0084229102, 0.0087996004),
    "layers.0.feed_forward.w1.weight": (-0.0027339745, 0.0068735755),
    "layers.0.feed_forward.w2.weight": (-0.010650378, 0.0040728673),
    "layers.0.feed_forward.w3.weight": (-0.0037199105, 0.025918761),
    "layers.1.attention.wq.weight": (0.017363003, -0.0027576955),
    "layers.1.attention.wk.weight": (0.011894244, 0.011634635),
    "layers.1.attention.wv.weight": (-0.0094362656, -0.012669291),
    "layers.1.attention.wo.weight": (-0.0024443117, -0.0051307362),
    "layers.1.feed_forward.w1.weight": (0.016892968, -0.034417048),
    "layers.1.feed_forward.w2.weight": (0.0040529189, 0.0081654396),
    "layers.1.feed_forward.w3.weight": (0.03065289, -0.0027133236),
    "layers.2.attention.wq.weight": (-0.024173645, -0.0031264164),
    "layers.2.attention.wk.weight": (0.0002229063, -0.020682858),
    "layers.2.attention.wv.weight": (-0.0081345029, 0.017984621),
    "layers.2.attention.wo.weight": (0.0099975914, 0.0015654531),
    "layers.2.feed_forward.w1.weight": (0.017346309, 0.022297923),
    "layers.2.feed_forward.w2.weight": (0.0098612774, 0.014523731),
    "layers.2.feed_forward.w3.weight": (-0.0015353189, 0.020207966),
    "output.weight": (-0.0052707307, -0.0050666002),
}


def test_initial_weights_never_change(weights_of: Callable[[str], Weights]) -> None:
    matrices = {key: t for key, t in weights_of("one").items() if t.ndim == 2}
    assert matrices.keys() == GOLDEN.keys()
    for key, tensor in matrices.items():
        # not bitwise: machines differ in the last bit of a logarithm
        assert (tensor[0, 0].item(), tensor[-1, -1].item()) == pytest.approx(GOLDEN[key], rel=1e-5), key


@pytest.mark.parametrize("flag", ["--debug.seed=43", "--model.override.init_std=0.03"])
def test_seed_and_spread_reach_the_weights(
    pool: Pool, weights_of: Callable[[str], Weights], flag: str
) -> None:
    other = pool(1).run(initial, (*FLAGS, *Layout().command_line(), flag))[0]
    for key, tensor in weights_of("one").items():
        assert torch.equal(tensor, other[key]) == key.endswith("norm.weight"), key


# ------------------------------------------------------------------------------- whose part a rank holds


def boxes_by_distribution(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: str) -> bool:
    """Whether `local_box` cuts what torch gives this rank out of a whole tensor."""
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    tensor = distribute_tensor(whole, mesh, [placement(letter) for letter in placements], src_data_rank=None)
    assert torch.equal(tensor.full_tensor(), whole)
    return torch.equal(cut(whole, local_box(tensor)), tensor.to_local())


def placement(letter: str) -> Placement:
    return Replicate() if letter == "R" else Shard(int(letter))


def cut(whole: Tensor, box: list[tuple[int, int]]) -> Tensor:
    for dim, (start, length) in enumerate(box):
        whole = whole.narrow(dim, start, length)
    return whole


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((257, 6), (4,), "0"),
        ((257, 6), (2,), "0"),
        ((5, 6), (4,), "0"),  # 2, 2, 1 and none
        ((6, 5), (4,), "1"),
        ((5,), (4,), "0"),
        ((2,), (4,), "0"),
        ((5, 6), (4,), "R"),
        ((5, 7), (2, 2), "01"),
        ((5, 7), (2, 2), "R1"),
        ((5, 7), (2, 2), "0R"),
    ],
    ids=str,
)
def test_box_is_the_part_that_torch_gives_a_rank(
    pool: Pool, shape: tuple[int, ...], mesh: tuple[int, ...], placements: str
) -> None:
    ranks = torch.Size(mesh).numel()
    assert all(pool(ranks).run(boxes_by_distribution, shape, mesh, placements))


def boxes_of_a_job(flags: tuple[str, ...]) -> list[str]:
    """Parameters that torch does not put together as `local_box` took them apart."""
    job, _ = build_job(flags)
    wrong, counted = [], 0
    for name, parameter in unique_parameters(job.model):
        assert isinstance(parameter, DTensor)
        whole = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
        with torch.no_grad():
            parameter.to_local().copy_(cut(whole, local_box(parameter)))
        if not torch.equal(parameter.full_tensor(), whole):
            wrong.append(name)
        counted += parameter.to_local().numel() if counted_here(parameter) else 0
    total = torch.tensor(counted)
    dist.all_reduce(total)
    assert total == sum(p.numel() for _, p in unique_parameters(job.model)), "counted once over all ranks"
    return wrong


@pytest.mark.parametrize("name", ["fsdp2", "fsdp4", "tp2", "tp4", "fsdp2-tp2", "ddp2-tp2", "hsdp2x2"])
def test_boxes_of_a_real_job_put_together_the_whole(pool: Pool, name: str) -> None:
    layout = LAYOUTS[name]
    assert (
        pool(layout.world_size).run(boxes_of_a_job, (*JOB, *layout.command_line()))
        == [[]] * layout.world_size
    )


def test_a_plain_tensor_is_all_of_it_and_counts() -> None:
    assert local_box(torch.zeros(3, 4)) == [(0, 3), (0, 4)]
    assert counted_here(torch.zeros(2))
