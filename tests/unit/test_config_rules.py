"""Rules between keys: each is seen to speak, with both values and the valid ones, and seen to be silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanish.config.load import load_config
from titanish.config.problem import InvalidConfig, Problem
from titanish.config.rules.all import RULES
from titanish.config.rules.base import any_doubt
from titanish.config.schema import Config
from titanish.models.registry import resolve_size

BYTES = '--model.tokenizer="bytes"'


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def found(
    *overrides: str, world_size: int | None = None, device_type: str | None = None, tokenizer: str = BYTES
) -> tuple[Problem, ...]:
    """All problems and notes with these flags; the byte tokenizer keeps the default dataset quiet."""
    words = [tokenizer, "--lr_scheduler.warmup_steps=0", *overrides] if tokenizer else list(overrides)
    try:
        loaded = load_config(
            None, words, world_size=world_size, resolve_size=resolve_size, device_type=device_type
        )
    except InvalidConfig as error:
        return error.problems + error.notes
    return loaded.notes


def one(*overrides: str, **options: object) -> str:
    (problem,) = found(*overrides, **options)  # type: ignore[arg-type]
    return f"{problem.level}: {problem.where}: {problem.message}"


def test_every_rule_reads_keys_that_exist() -> None:
    def exists(key: str) -> bool:
        value: object = Config()
        for name in key.split("."):
            value = getattr(value, name)
        return True

    assert all(exists(key) for rule in RULES for key in rule.reads)


@pytest.mark.parametrize(
    ("doubtful", "expected"),
    [
        ("training.steps", True),
        ("training", True),
        ("training.steps.x", True),
        ("training.step", False),
        ("training.steps_done", False),
        ("model", False),
    ],
)
def test_doubt_reaches_a_key_from_its_section_and_from_itself(doubtful: str, expected: bool) -> None:
    assert any_doubt(["training.steps"], {doubtful}) is expected


def test_default_with_bytes_needs_no_word() -> None:
    assert found() == ()


# World and batch


def test_degrees_must_be_the_world() -> None:
    assert one("--parallelism.tensor_parallel_degree=2", world_size=3) == (
        "error: --parallelism.tensor_parallel_degree: parallelism.tensor_parallel_degree = 2:"
        " dp_replicate 1 x tp 2 = 2 does not divide world size 3; run on 2 or 4 ranks,"
        " or choose degrees whose product is 1 or 3"
    )


def test_world_problem_cites_every_degree_that_was_written() -> None:
    Path("f.toml").write_text("[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = 2\n")
    with pytest.raises(InvalidConfig) as caught:
        load_config(Path("f.toml"), world_size=8)
    assert str(caught.value) == (
        "f.toml:2: parallelism.tensor_parallel_degree = 2,"
        " parallelism.data_parallel_shard_degree = 2 (f.toml:3):"
        " dp_replicate 1 x dp_shard 2 x tp 2 = 4, but the world size is 8;"
        " set parallelism.data_parallel_shard_degree = 4 (or -1 for what is left), or run on 4 ranks"
    )


def test_global_batch_must_be_whole_passes() -> None:
    assert one("--training.global_batch_size=20", world_size=2) == (
        "error: --training.global_batch_size: training.global_batch_size = 20 with"
        " training.local_batch_size = 8 (default): 20 sequences are no multiple of 2 batch ranks"
        " x 8 (training.local_batch_size) = 16; nearest valid: 16 or 32;"
        " or a training.local_batch_size of 1, 2, 5 or 10"
    )


# Heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "valid"),
    [(6, 2, 4, "1, 2 or 6"), (6, 6, 4, "1, 2, 3 or 6"), (12, 4, 6, "1, 2, 4 or 12"), (4, 2, 3, "1, 2 or 4")],
)
def test_heads_that_do_not_divide_over_tp_are_refused(
    heads: int, kv_heads: int, degree: int, valid: str
) -> None:
    assert one(
        f"--model.override.n_heads={heads}",
        f"--model.override.n_kv_heads={kv_heads}",
        f"--parallelism.tensor_parallel_degree={degree}",
    ) == (
        "error: --parallelism.tensor_parallel_degree:"
        f" parallelism.tensor_parallel_degree = {degree} does not fit {heads} heads with"
        f" {kv_heads} KV heads of"
        ' model.flavor = "debugmodel" (default): it must divide the heads, and divide the KV heads or be a'
        f" multiple of them; valid: {valid}"
    )


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_kv_heads_are_shared_out_or_repeated(degree: int) -> None:
    assert found("--model.override.n_kv_heads=2", f"--parallelism.tensor_parallel_degree={degree}") == ()


def test_width_and_vocabulary_may_be_uneven_over_tp() -> None:
    overrides = ["--model.override.hidden_dim=191", "--model.override.vocab_size=259"]
    assert found(*overrides, "--parallelism.tensor_parallel_degree=4", "--training.seq_len=127") == ()


def test_tensor_parallel_rank_without_a_part_is_refused() -> None:
    tensor_parallel = "--parallelism.tensor_parallel_degree=4"
    assert one(tensor_parallel, "--model.override.hidden_dim=9") == (
        "error: --parallelism.tensor_parallel_degree: parallelism.tensor_parallel_degree = 4 leaves a rank"
        " without a part of hidden_dim = 9 (--model.override.hidden_dim): parts of 3 are used up before the"
        " last of 4 ranks; nearest valid model.override.hidden_dim: 8 or 10"
    )
    assert one(tensor_parallel, "--model.override.vocab_size=3", "--training.dataset=mock").endswith(
        "of vocab_size = 3 (--model.override.vocab_size): parts of 1 are used up before the last of 4 ranks;"
        " nearest valid model.override.vocab_size: 4"
    )
    for width in (4, 7, 8, 10):
        assert found(tensor_parallel, f"--model.override.hidden_dim={width}") == ()


def test_flavor_with_a_rank_without_a_part_is_cited() -> None:
    class Narrow:
        n_heads = n_kv_heads = 4
        vocab_size = 6
        max_seq_len = 4096
        num_parameters = 1

    words = ["--parallelism.tensor_parallel_degree=4", "--training.dataset=mock"]
    with pytest.raises(InvalidConfig) as caught:
        load_config(None, words, resolve_size=lambda *_: Narrow())
    assert str(caught.value) == (
        "--parallelism.tensor_parallel_degree: parallelism.tensor_parallel_degree = 4 leaves a rank without a"
        ' part of vocab_size = 6 (model.flavor = "debugmodel" (default)): parts of 2 are used up before the'
        " last of 4 ranks; nearest valid model.override.vocab_size: 4 or 7"
    )


def test_longer_sequences_than_the_size_is_meant_for_are_noted() -> None:
    assert one("--training.seq_len=4096") == (
        "note: --training.seq_len: training.seq_len = 4096 is longer than the 2048 positions that"
        ' model.flavor = "debugmodel" (default) is meant for (model.override.max_seq_len sets another limit)'
    )


def test_byte_tokenizer_must_fit_the_vocabulary() -> None:
    message = (
        'error: --model.tokenizer: model.tokenizer = "bytes" has 258 ids (bytes, BOS, EOS), but'
        ' model.flavor = "debugmodel" (default) has a vocabulary of 257; set'
        " model.override.vocab_size to 258 or more"
    )
    assert one("--model.override.vocab_size=257") == message
    assert found("--model.override.vocab_size=257", "--training.dataset=mock") == ()


# Datasets


def test_unknown_dataset_suggests_the_nearest() -> None:
    assert one("--training.dataset=txt") == (
        'error: --training.dataset: training.dataset = "txt" is no dataset;'
        " known: python_stdlib, text, megatron, mock; did you mean 'text'?"
    )


@pytest.mark.parametrize("name", ["c4", "c4_test", "c4_validation"])
def test_streamed_dataset_is_told_what_to_write_instead(name: str) -> None:
    assert one(f"--training.dataset={name}") == (
        f'start: --training.dataset: training.dataset = "{name}" streams from a hub, and'
        " Hugging Face datasets"
        ' come later; use dataset = "text" with dataset_path'
    )


def test_streamed_validation_stops_a_start_only_when_it_is_read() -> None:
    assert one("--validation.dataset=c4_validation").startswith("note: --validation.dataset: ")
    assert one("--validation.dataset=c4_validation", "--validation.enable").startswith("start: ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text", "a .jsonl or .txt file, a folder of them, or a glob"),
        ("megatron", "the common prefix of a .bin and an .idx file"),
    ],
)
def test_dataset_that_lies_somewhere_needs_a_path(name: str, expected: str) -> None:
    assert one(f"--training.dataset={name}") == (
        f'error: --training.dataset: training.dataset = "{name}" needs training.dataset_path: {expected}'
    )


def test_missing_text_fails_a_start() -> None:
    assert one("--training.dataset=text", "--training.dataset_path=gone/*.txt") == (
        "start: --training.dataset_path: training.dataset_path = \"gone/*.txt\": there is no 'gone/*.txt';"
        " expected a .jsonl or .txt file, a folder of them, or a glob"
    )


@pytest.mark.parametrize("path", [".", "a.txt", "*.txt"])
def test_text_may_be_a_file_a_folder_or_a_glob(path: str) -> None:
    Path("a.txt").write_text("text")
    assert found("--training.dataset=text", f"--training.dataset_path={path}") == ()


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatron_path_is_a_prefix_and_the_missing_file_is_named(ending: str) -> None:
    Path("tokens.bin").touch()
    words = ["--training.dataset=megatron", f"--training.dataset_path=tokens{ending}"]
    assert "there is no 'tokens.idx'; expected the common prefix" in one(*words)
    Path("tokens.idx").touch()
    assert found(*words) == ()


def test_path_of_a_dataset_without_one_is_noted() -> None:
    assert one("--training.dataset=mock", "--training.dataset_path=x") == (
        'note: --training.dataset_path: training.dataset_path = "x" has no effect:'
        " dataset 'mock' reads no path"
    )


# Validation


def test_python_stdlib_validates_on_its_held_out_part() -> None:
    assert found("--validation.enable") == ()


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (["--training.dataset=mock"], 'validation.dataset = "mock"'),
        (
            ["--training.dataset=text", "--training.dataset_path=."],
            "validation.dataset_path: a .jsonl or .txt file, a folder of them, or a glob",
        ),
        (
            ["--training.dataset=megatron", "--training.dataset_path=tokens"],
            "validation.dataset_path: the common prefix of a .bin and an .idx file",
        ),
    ],
    ids=["mock", "text", "megatron"],
)
def test_validation_without_data_says_what_to_set(words: list[str], needs: str) -> None:
    Path("tokens.bin").touch()
    Path("tokens.idx").touch()
    message = one(*words, "--validation.enable")
    assert message.startswith("error: --validation.enable: validation.enable = true with training.dataset = ")
    assert message.endswith(f"(--training.dataset), which holds nothing out, needs {needs}")


def test_validation_dataset_without_a_path_says_what_to_set() -> None:
    assert one("--validation.enable", "--validation.dataset=text") == (
        'error: --validation.dataset: validation.dataset = "text" needs validation.dataset_path:'
        " a .jsonl or .txt file, a folder of them, or a glob"
    )


def test_missing_validation_data_fails_a_start() -> None:
    words = ["--validation.enable", "--validation.dataset=text", "--validation.dataset_path=gone"]
    assert one(*words).startswith(
        'start: --validation.dataset_path: validation.dataset_path = "gone": there is'
    )


# Tokenizer


@pytest.mark.parametrize("dataset", ["python_stdlib", "text"])
def test_text_without_a_tokenizer_fails_a_start(dataset: str) -> None:
    words = [f"--training.dataset={dataset}", "--lr_scheduler.warmup_steps=0"]
    if dataset == "text":
        words.append("--training.dataset_path=.")
    assert one(*words, tokenizer="") == (
        f"start: --training.dataset: dataset '{dataset}' needs a tokenizer: set"
        " model.hf_assets_path to a folder"
        ' with a tokenizer.json, or model.tokenizer = "bytes"'
    )


@pytest.mark.parametrize("dataset", ["mock", "megatron"])
def test_tokens_need_no_tokenizer(dataset: str) -> None:
    Path("tokens.bin").touch()
    Path("tokens.idx").touch()
    path = ["--training.dataset_path=tokens"] if dataset == "megatron" else []
    words = [f"--training.dataset={dataset}", "--lr_scheduler.warmup_steps=0", *path]
    assert found(*words, tokenizer="") == ()


HF = "--model.tokenizer=hf"


def test_missing_tokenizer_folder_is_named() -> None:
    assert one("--model.hf_assets_path=./gone", tokenizer=HF) == (
        "start: --model.hf_assets_path: model.hf_assets_path = \"./gone\": there is no folder 'gone';"
        " expected tokenizer.json in it"
    )


@pytest.mark.parametrize(
    ("files", "listed"), [([], "nothing"), (["tokenizer_config.json"], "tokenizer_config.json")]
)
def test_folder_without_a_tokenizer_is_named_with_what_it_holds(files: list[str], listed: str) -> None:
    folder = Path("assets")
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    assert one("--model.hf_assets_path=assets", tokenizer=HF) == (
        "start: --model.hf_assets_path: model.hf_assets_path = \"assets\": 'assets' holds no tokenizer.json;"
        f" found: {listed}"
    )


def test_folder_with_a_tokenizer_needs_no_word() -> None:
    Path("assets").mkdir()
    Path("assets/tokenizer.json").write_text("{}")
    assert found("--model.hf_assets_path=assets", tokenizer=HF) == ()


# Workers


@pytest.mark.parametrize("section", ["training", "validation"])
@pytest.mark.parametrize(("name", "value"), [("persistent_workers", "true"), ("prefetch_factor", "2")])
def test_what_only_workers_can_do_needs_workers(section: str, name: str, value: str) -> None:
    key = f"{section}.dataloader.{name}"
    assert one(f"--{key}={value}") == (
        f"error: --{key}: {key} = {value} needs worker processes, but {section}.dataloader.num_workers = 0"
        " (default); set it to 1 or more"
    )
    assert found(f"--{key}={value}", f"--{section}.dataloader.num_workers=1") == ()


# The run


def test_warm_up_longer_than_the_run_is_clamped_and_noted() -> None:
    assert one("--lr_scheduler.warmup_steps=30", "--training.steps=20") == (
        "note: --lr_scheduler.warmup_steps: lr_scheduler.warmup_steps = 30 is clamped to"
        " training.steps = 20 (--training.steps)"
    )
    assert (
        found("--lr_scheduler.warmup_steps=30", "--training.steps=20", "--lr_scheduler.total_steps=40") == ()
    )


def test_decay_that_does_not_fit_after_the_warm_up_is_noted() -> None:
    words = ["--lr_scheduler.warmup_steps=6", "--training.steps=10", "--lr_scheduler.decay_ratio=0.5"]
    assert one(*words) == (
        "note: --lr_scheduler.decay_ratio: lr_scheduler.decay_ratio = 0.5: a decay of 5"
        " steps after 6 of warm-up"
        " is clamped to the 4 that are left of training.steps = 10 (--training.steps)"
    )


def test_momentum_without_sgd_is_noted() -> None:
    assert one("--optimizer.momentum=0.9") == (
        "note: --optimizer.momentum: optimizer.momentum = 0.9 has no effect with"
        ' optimizer.name = "AdamW" (default); only SGD reads it'
    )
    assert found("--optimizer.momentum=0.9", "--optimizer.name=SGD") == ()


def test_memory_budget_mode_fails_a_start() -> None:
    assert one("--activation_checkpoint.mode=memory_budget") == (
        "start: --activation_checkpoint.mode: activation_checkpoint.mode ="
        ' "memory_budget" comes with compilation;'
        ' use "selective" or "full"'
    )


def test_last_step_is_saved_whole() -> None:
    assert one("--checkpoint.last_save_model_only") == (
        "note: --checkpoint.last_save_model_only: checkpoint.last_save_model_only = true:"
        " the last step is saved whole, to be resumable"
    )


def test_saves_are_synchronous() -> None:
    assert one("--checkpoint.async_mode=async") == (
        'note: --checkpoint.async_mode: checkpoint.async_mode = "async": asynchronous saves come later;'
        " saves are synchronous"
    )


def test_warn_only_without_determinism_is_noted() -> None:
    assert one("--debug.deterministic_warn_only") == (
        "note: --debug.deterministic_warn_only: debug.deterministic_warn_only = true"
        " has no effect without debug.deterministic"
    )


def test_what_a_cpu_does_badly_is_noted_on_a_cpu() -> None:
    words = ["--training.mixed_precision_param=bfloat16", "--validation.dataloader.pin_memory"]
    assert [note.message for note in found(*words, device_type="cpu")] == [
        'training.mixed_precision_param = "bfloat16" is far slower than float32 on most CPUs',
        "validation.dataloader.pin_memory = true has no effect without a GPU",
    ]
    assert found(*words, device_type="cuda") == found(*words) == ()
