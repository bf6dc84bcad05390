"""Every key that TorchTitan v0.2.2 knows is implemented or explained; its llama3 job files check."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanish.config.keys import field_types, known_keys
from titanish.config.load import load_config
from titanish.config.problem import InvalidConfig
from titanish.config.spelling import toml_value
from titanish.config.status import REMOVED, RENAMED, STATUS
from titanish.config.values import violation
from titanish.models.registry import resolve_size

TABLE = Path(__file__).parents[1] / "fixtures" / "titan_keys.tsv"
TITAN_KEYS = [line.split("\t")[0] for line in TABLE.read_text().splitlines()[1:]]


@pytest.mark.parametrize("key", TITAN_KEYS)
def test_key_of_torchtitan_is_a_field_or_has_a_sentence(key: str) -> None:
    assert (key in field_types()) != (key in STATUS)


def test_nothing_is_explained_that_torchtitan_does_not_know() -> None:
    assert set(STATUS) <= set(TITAN_KEYS)


@pytest.mark.parametrize("key", sorted(key for key, status in STATUS.items() if status.default is not None))
def test_key_without_effect_is_silent_at_its_default(key: str, tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(f"{key} = {toml_value(STATUS[key].default)}\n")
    assert [note.key for note in load_config(path).notes if note.key == key] == []


def other_value(key: str) -> object:
    """A valid value of the key that is not its default."""
    candidates = (
        True,
        False,
        7,
        0.25,
        "other",
        ["other"],
        [["other"]],
        "alltoall",
        "deepep",
        "bfloat16",
        "cuda",
    )
    more = ("rowwise", "fake_backend", "mxfp8")
    fitting = [c for c in (*candidates, *more) if not violation(STATUS[key].type, c)]
    return next((c for c in fitting if c != STATUS[key].default), None)


# One key can only be set to its default.
@pytest.mark.parametrize("key", sorted(set(STATUS) - {"quantize.grouped_mm.mx.recipe_name"}))
def test_key_without_effect_says_its_sentence_when_set(key: str, tmp_path: Path) -> None:
    value = other_value(key)
    assert value is not None
    path = tmp_path / "f.toml"
    path.write_text(f"{key} = {toml_value(value)}\n")
    (note,) = [note for note in load_config(path).notes if note.key == key]
    assert note.message == f"{key} = {toml_value(value)}: {STATUS[key].sentence}"
    assert note.level == STATUS[key].level


def test_start_fails_on_a_key_that_would_change_results() -> None:
    message = "pipeline_parallel_degree = 2: not in this version: comes with pipeline parallel"
    with pytest.raises(InvalidConfig, match=message):
        load_config(None, ["--parallelism.pipeline_parallel_degree=2"], at_start=True)


@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_world_is_not_judged_without_an_axis_that_is_not_there_yet(axis: str) -> None:
    words = [f"--parallelism.{axis}_parallel_degree=2", "--parallelism.data_parallel_shard_degree=4"]
    loaded = load_config(None, words, world_size=8)
    assert loaded.world is None
    assert [note.key for note in loaded.notes if "parallelism" in note.key] == [
        f"parallelism.{axis}_parallel_degree"
    ]


def test_key_without_effect_hides_no_mistake_of_its_section() -> None:
    words = ['--model.converters=["float8"]', "--parallelism.tensor_parallel_degree=3"]
    with pytest.raises(InvalidConfig, match="tensor_parallel_degree = 3 does not fit 4 heads"):
        load_config(None, words, resolve_size=resolve_size)


@pytest.mark.parametrize("key", sorted(RENAMED))
def test_renamed_key_says_what_to_write(key: str) -> None:
    assert key not in known_keys()
    assert RENAMED[key].split()[0] in known_keys()
    with pytest.raises(InvalidConfig) as caught:
        load_config(None, [f"--{key}=1"])
    assert str(caught.value) == f"--{key}: unknown key '{key}' (1); write {RENAMED[key]} instead"


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_removed_key_says_why(key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_config(None, [f"--{key}=1"])
    assert str(caught.value) == f"--{key}: unknown key '{key}' (1); delete it: {REMOVED[key]}"


def titan_job(flavor: str, lr: float, warmup: int, batch: int, seq: int, tensor: int, float8: str) -> str:
    """A job file with the keys that TorchTitan's llama3 jobs set, in our own words."""
    return f"""
[job]
dump_folder = "./outputs"
description = "pretrain {flavor}"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "{flavor}"
hf_assets_path = "./assets/hf/Llama-3.1-{flavor}"
converters = [{float8}]

[optimizer]
name = "AdamW"
lr = {lr}
eps = 1e-8

[lr_scheduler]
warmup_steps = {warmup}

[training]
local_batch_size = {batch}
seq_len = {seq}
max_norm = 1.0
steps = 3000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = {tensor}
enable_async_tensor_parallel = {"true" if float8 else "false"}
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled"

[activation_checkpoint]
mode = "{"full" if tensor > 1 else "selective"}"
selective_ac_option = "op"

[compile]
enable = {"true" if float8 else "false"}
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = {"true" if float8 else "false"}
precompute_float8_dynamic_scale_for_fsdp = {"true" if float8 else "false"}
filter_fqns = ["output"]

[validation]
enable = false
dataset = "c4_validation"
freq = 500
steps = -1
"""


@pytest.mark.parametrize(
    ("job", "world_size", "keys"),
    [
        (titan_job("8B", 3e-4, 200, 1, 8192, 1, ""), 8, set()),
        (titan_job("70B", 1.5e-4, 200, 8, 8192, 8, ""), 256, set()),
        (
            titan_job("405B", 8e-5, 600, 2, 8192, 8, '"float8"'),
            512,
            {
                "model.converters",
                "parallelism.enable_async_tensor_parallel",
                "compile.enable",
                "quantize.linear.float8.enable_fsdp_float8_all_gather",
                "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            },
        ),
    ],
    ids=["8B", "70B", "405B"],
)
def test_torchtitan_job_files_check_with_sentences_only(
    job: str, world_size: int, keys: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job)
    loaded = load_config(path, world_size=world_size, resolve_size=resolve_size)
    assert {note.key for note in loaded.notes} == keys | {
        "profiling.enable_profiling",
        "profiling.save_traces_folder",
        "profiling.profile_freq",
        "model.hf_assets_path",
        "training.dataset",
        "validation.dataset",
        "checkpoint.last_save_model_only",
        "quantize.linear.float8.filter_fqns",
    }
    assert loaded.world is not None
    assert loaded.world.world_size == world_size
