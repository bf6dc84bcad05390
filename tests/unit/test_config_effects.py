"""Every key of the configuration has a row that says what changing it changes.

Most rows stand in `tests/effects` and are run on whole jobs by `tests/ranks/test_config_effects_ranks.py`.
Here are the keys whose effect no small job on a CPU shows: those with one value, those that only leave a
note, and those about a GPU or a fault.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from tests.effects.table import TABLES
from titanish.config.keys import field_types
from titanish.config.load import Loaded, load_config
from titanish.config.schema import ActivationCheckpoint
from titanish.data.build import Prepared, prepare_data
from titanish.errors import ConfigError
from titanish.models.registry import resolve_size
from titanish.parallel.recompute import apply_recompute
from titanish.train.assemble import build_loader, build_validation

ONE_VALUE = {
    "model.name": ("gpt2", 'model.name = "gpt2": unknown model; known: llama3'),
    "training.mixed_precision_reduce": (
        "bfloat16",
        "training.mixed_precision_reduce = \"bfloat16\": must be 'float32'",
    ),
}
NOTED = {
    "checkpoint.last_save_model_only": ("true", "the last step is saved whole, to be resumable"),
    "checkpoint.async_mode": ("async", "asynchronous saves come later; saves are synchronous"),
}
PINNED = ("training.dataloader.pin_memory", "validation.dataloader.pin_memory")
FAULTS = ("activation_checkpoint.determinism_check", "activation_checkpoint.debug")
# Read before there is a process group: seen on a job that loses a rank, in tests/jobs/test_failures.py.
LOST = ("comm.trace_buf_size", "comm.save_traces_folder", "comm.save_traces_file_prefix")


def load(*flags: str) -> Loaded:
    """The configuration of a start on one CPU."""
    common = ("--training.dataset=mock", "--validation.dataset=mock", "--model.tokenizer=bytes")
    return load_config(
        None,
        (*common, *flags),
        world_size=1,
        resolve_size=resolve_size,
        at_start=True,
        device_type="cpu",
    )


def notes(*flags: str) -> list[str]:
    return [note.message for note in load(*flags).notes]


def test_every_key_has_one_row_and_every_row_a_key() -> None:
    rows = Counter(key for table in (*TABLES, ONE_VALUE, NOTED, PINNED, FAULTS, LOST) for key in table)
    assert rows == Counter(field_types().keys())


@pytest.mark.parametrize("key", ONE_VALUE)
def test_a_key_with_one_value_refuses_another(key: str) -> None:
    value, message = ONE_VALUE[key]
    with pytest.raises(ConfigError) as refusal:
        load(f"--{key}={value}")
    assert message in str(refusal.value)


@pytest.mark.parametrize("key", NOTED)
def test_a_key_without_effect_says_so(key: str) -> None:
    value, sentence = NOTED[key]
    (note,) = set(notes(f"--{key}={value}")) - set(notes())
    assert note.startswith(f"{key} = ")
    assert note.endswith(sentence)


@pytest.mark.parametrize("key", PINNED)
def test_pinning_memory_on_a_cpu_says_that_it_has_no_effect(key: str) -> None:
    (note,) = set(notes(f"--{key}")) - set(notes())
    assert note == f"{key} = true has no effect without a GPU"


@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("key", PINNED)
def test_memory_is_pinned_where_asked_and_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, key: str, accelerator: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    asked = [accelerator and key == each for each in PINNED]
    assert pins(load("--validation.enable")) == [False, False]
    assert pins(load("--validation.enable", f"--{key}")) == asked


def pins(loaded: Loaded) -> list[bool]:
    """Whether the loaders of training and of validation pin what they load."""
    config, prepared = loaded.config, prepare(loaded)
    mesh: Any = SimpleNamespace(
        at=SimpleNamespace(batch=0), degrees=SimpleNamespace(batch=1), loss_group=None
    )
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    nothing: Any = None
    assert loaded.batch is not None
    training = build_loader(config, prepared, loaded.batch, mesh, start_sample=0)
    validation = build_validation(config, prepared, loaded.batch, device, mesh, nothing, nothing)
    return [loader._batches._loader.pin_memory for loader in (training, validation.batches)]


def prepare(loaded: Loaded) -> Prepared:
    config = loaded.config
    return prepare_data(
        config.training, config.validation, config.model, vocab_size=loaded.size.vocab_size, seed=0
    )


class Forgetful(nn.Module):
    """A layer that computes with one element only when it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (x if self.runs == 1 else x[:1]).exp().sum()


def backward_through_a_forgetful_layer(**section: Any) -> None:
    layer = Forgetful()
    apply_recompute(nn.ModuleDict({"0": layer}), ActivationCheckpoint(mode="full", **section))
    layer(torch.ones(4, requires_grad=True)).backward()
    assert layer.runs == 2


def test_a_recompute_that_saves_other_shapes_is_noticed_unless_the_check_is_off() -> None:
    with pytest.raises(CheckpointError, match="different metadata"):
        backward_through_a_forgetful_layer(determinism_check="default")
    backward_through_a_forgetful_layer(determinism_check="none")


def test_debug_shows_the_operations_of_both_passes() -> None:
    with pytest.raises(CheckpointError) as plain:
        backward_through_a_forgetful_layer()
    with pytest.raises(CheckpointError) as shown:
        backward_through_a_forgetful_layer(debug=True)
    assert "aten.exp" not in str(plain.value)
    assert str(shown.value).count("aten.exp") >= 2
    assert "aten.slice" in str(shown.value)  # what only the second pass ran
