"""Text drawn from a model: what argmax by hand gives, the same on every mesh, reproducible by its seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.layouts import JOB, LAYOUTS, Layout
from titanish.errors import ConfigError
from titanish.generate.sample import encode_prompt, sample_text
from titanish.testing.equality import build_job, whole_tensors
from titanish.testing.ranks import RankPool
from titanish.train.job import train_step

Pool = Callable[[int], RankPool]
CPU = torch.device("cpu")
EOS = 9


@dataclass(frozen=True)
class Numbers:
    """A tokenizer whose text is its ids, and which remembers nothing."""

    bos_id: int | None = 8
    eos_id: int | None = EOS
    name: str = "numbers"

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Successor(nn.Module):
    """Likeliest after token t is t + 1, with t + 2 close behind; remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.positions: list[list[int]] = []

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.seen.append(tokens[0].tolist())
        self.positions.append(positions.tolist())
        one, two = (nn.functional.one_hot((tokens + step) % 10, 10).float() for step in (1, 2))
        return 2.0 * one + 1.0 * two

    def output(self, hidden: Tensor) -> Tensor:
        return hidden


def draw(model: Any, prompt: str, *, tokenizer: Numbers = Numbers(), **settings: Any) -> str | None:
    options = {"max_new_tokens": 4, "temperature": 0.0, "max_seq_len": 100, "seed": 0, **settings}
    ids = encode_prompt(tokenizer, prompt, vocab_size=257)
    return sample_text(model, tokenizer, ids, device=CPU, **options)


def test_temperature_zero_takes_the_likeliest() -> None:
    model = Successor()
    assert draw(model, "1 2") == "3 4 5 6"
    assert model.seen == [[8, 1, 2], [8, 1, 2, 3], [8, 1, 2, 3, 4], [8, 1, 2, 3, 4, 5]]
    assert model.positions[-1] == list(range(6))


def test_it_stops_at_the_end_of_a_document() -> None:
    assert draw(Successor(), "5", max_new_tokens=50) == "6 7 8"


def test_without_an_end_it_stops_at_the_limit() -> None:
    tokenizer = Numbers(eos_id=None)
    assert draw(Successor(), "5", max_new_tokens=6, tokenizer=tokenizer) == "6 7 8 9 0 1"


def test_an_empty_prompt_begins_a_document() -> None:
    model = Successor()
    draw(model, "", max_new_tokens=1, tokenizer=Numbers(bos_id=3))
    assert model.seen == [[3]]


def test_an_empty_prompt_without_a_first_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sample.prompt = '': the tokenizer numbers has no BOS token"):
        encode_prompt(Numbers(bos_id=None), "", vocab_size=10)


def test_a_prompt_that_the_model_has_no_embedding_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gives the id 12, but the model's vocab_size is 12"):
        encode_prompt(Numbers(), "5 12", vocab_size=12)


def test_the_model_sees_no_more_than_its_length() -> None:
    model = Successor()
    assert draw(model, "1 2", max_seq_len=3) == "3 4 5 6"
    assert model.seen == [[8, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert model.positions == [[0, 1, 2]] * 4


def test_a_seed_draws_the_same_again_and_another_something_else() -> None:
    texts = [draw(Successor(), "1", temperature=1.0, seed=seed, max_new_tokens=20) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_temperature_divides_the_logits() -> None:
    def share_of_the_likeliest(temperature: float) -> float:
        first = [
            draw(Successor(), "1", temperature=temperature, seed=seed, max_new_tokens=1)
            for seed in range(400)
        ]
        return first.count("2") / len(first)

    logits = torch.tensor([2.0, 1.0, *[0.0] * 8])
    for temperature in (0.5, 1.0, 4.0):
        expected = (logits / temperature).softmax(0)[0].item()
        # four standard deviations of 400 draws
        assert share_of_the_likeliest(temperature) == pytest.approx(expected, abs=4 * 0.5 / 20)


def test_no_temperature_is_too_small_to_divide_by() -> None:
    assert draw(Successor(), "1", temperature=1e-45) == "2 3 4 5"


def test_nothing_is_drawn_from_logits_that_are_not_finite() -> None:
    class Diverged(Successor):
        def output(self, hidden: Tensor) -> Tensor:
            return hidden * float("nan")

    assert draw(Diverged(), "1", temperature=1.0) is None


def test_drawing_leaves_torchs_random_state_alone() -> None:
    before = torch.get_rng_state()
    draw(Successor(), "1", temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


def texts_of_a_job(flags: tuple[str, ...]) -> tuple[str, str, dict[str, Tensor], dict[str, Tensor]]:
    """A likeliest and a drawn text after a step, and the weights before and after another step."""
    job, _ = build_job((*flags, "--optimizer.lr=0.01"))
    batches = iter(job.loader)
    train_step(job, batches)
    texts = [
        draw(job.model, "1 2 3", temperature=temperature, max_new_tokens=12) for temperature in (0.0, 1.0)
    ]
    before = whole_tensors(job, lambda p: p)
    train_step(job, batches)
    return texts[0], texts[1], before, whole_tensors(job, lambda p: p)


@pytest.mark.parametrize("name", ["fsdp2", "tp2", "tp2-without-sp", "fsdp2-tp2"])
def test_every_mesh_draws_the_text_of_one_rank_and_trains_on(pool: Pool, name: str) -> None:
    flags = (*JOB, "--lr_scheduler.warmup_steps=0")
    likeliest, drawn, _, after = pool(1).run(texts_of_a_job, (*flags, *Layout().command_line()))[0]
    layout = LAYOUTS[name]
    for ours in pool(layout.world_size).run(texts_of_a_job, (*flags, *layout.command_line())):
        assert ours[:2] == (likeliest, drawn)
        for key, tensor in ours[3].items():
            assert (tensor - after[key]).norm() <= 1e-4 * after[key].norm(), key
            assert not torch.equal(tensor, ours[2][key]), key
    assert likeliest != drawn


def argmax_by_hand(flags: tuple[str, ...]) -> tuple[str, str]:
    job, _ = build_job(flags)
    model: Any = job.model
    ids = [8, 1, 2, 3]
    with torch.no_grad():
        for _ in range(8):
            hidden = model(torch.tensor([ids]), torch.arange(len(ids)))
            # the head's weight is a plain tensor here: gathered by the forward, and no backward follows
            ids.append(int((hidden[0, -1] @ model.output.weight.t()).argmax()))
    return draw(model, "1 2 3", max_new_tokens=8, tokenizer=Numbers(eos_id=None)), Numbers().decode(ids[4:])


def test_a_real_models_likeliest_text_is_that_of_argmax_by_hand(pool: Pool) -> None:
    text, expected = pool(1).run(argmax_by_hand, (*JOB, *Layout().command_line()))[0]
    assert text == expected
    assert len(text.split()) == 8
