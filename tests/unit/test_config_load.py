"""Loading: layers and their sources, every kind of mistake with its place, and all of them at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from titanish.config.keys import field_types, known_sections, value_at
from titanish.config.load import Loaded, load_config
from titanish.config.problem import InvalidConfig
from titanish.config.schema import Config
from titanish.errors import ConfigError
from titanish.models.registry import resolve_size

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into an empty working directory; paths in messages are then short."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "f.toml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def problems(file: Path | None, overrides: Sequence[str] = (), **options: object) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load_config(file, overrides, **options)  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return str(caught.value).splitlines()


# Values and where they came from


def test_defaults_alone_are_a_configuration() -> None:
    loaded = load_config(None)
    assert loaded.config.training.seq_len == 2048
    assert str(loaded.sources["training.seq_len"]) == "default"


def test_every_key_has_a_source(write: Write) -> None:
    loaded = load_config(write("[training]\nsteps = 5\n"))
    assert set(field_types()) <= set(loaded.sources)


def test_file_overrides_defaults_and_flags_override_files(write: Write) -> None:
    path = write("[training]\nsteps = 5\nseq_len = 16\n")
    loaded = load_config(path, ["--training.steps=7", "--training.steps=8"])
    assert (loaded.config.training.steps, loaded.config.training.seq_len) == (8, 16)
    assert str(loaded.sources["training.steps"]) == "--training.steps"
    assert str(loaded.sources["training.seq_len"]) == "f.toml:3"


def test_base_lies_below_the_file_that_names_it_key_by_key(write: Write) -> None:
    write(
        "[training]\nsteps = 1\nseq_len = 2\nlocal_batch_size = 3\n[training.dataloader]\nnum_workers = 4\n",
        "a/one.toml",
    )
    write('base = ["one.toml"]\n[training]\nseq_len = 20\nlocal_batch_size = 30\n', "a/two.toml")
    path = write('base = ["a/two.toml"]\n[training]\nlocal_batch_size = 300\n')
    loaded = load_config(path)
    training = loaded.config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (1, 20, 300)
    assert training.dataloader.num_workers == 4
    assert str(loaded.sources["training.steps"]) == "a/one.toml:2"
    assert str(loaded.sources["training.seq_len"]) == "a/two.toml:3"
    assert str(loaded.sources["training.local_batch_size"]) == "f.toml:3"


def test_of_two_bases_the_later_wins_and_both_may_share_one(write: Write) -> None:
    write("[training]\nsteps = 1\nseq_len = 1\n", "common.toml")
    write('base = ["common.toml"]\n[training]\nsteps = 2\n', "left.toml")
    write('base = ["common.toml"]\n[training]\nseq_len = 3\n', "right.toml")
    loaded = load_config(write('base = ["left.toml", "right.toml"]\n'))
    assert (loaded.config.training.steps, loaded.config.training.seq_len) == (1, 3)


def test_flag_names_the_file(write: Write) -> None:
    path = write("[training]\nsteps = 5\n")
    loaded = load_config(None, ["--job.config_file", str(path), "--training.seq_len=4"])
    assert loaded.config.training.steps == 5
    assert loaded.config.job.config_file == "f.toml"


def test_list_is_the_same_from_file_and_flag(write: Write) -> None:
    key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    from_file = load_config(write(f'{key} = ["a", "b"]\n')).config
    from_flag = load_config(None, [f'--{key}=["a", "b"]']).config
    assert from_file == from_flag
    assert from_file.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns == ("a", "b")


def test_integer_is_a_number_and_infinity_a_norm(write: Write) -> None:
    config = load_config(write("[optimizer]\nlr = 1\n[training]\nmax_norm = inf\n")).config
    assert (config.optimizer.lr, config.training.max_norm) == (1.0, float("inf"))


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(None).config.training.steps = 3  # type: ignore[misc]


def test_override_reaches_the_size(write: Write) -> None:
    path = write("[model.override]\nn_layers = 2\n")
    loaded = load_config(path, ["--model.override.vocab_size=300"], resolve_size=resolve_size)
    assert (loaded.size.n_layers, loaded.size.vocab_size) == (2, 300)
    assert str(loaded.sources["model.override.n_layers"]) == "f.toml:2"


def test_world_and_batch_are_resolved() -> None:
    loaded = load_config(
        None,
        [
            "--parallelism.tensor_parallel_degree=2",
            "--training.global_batch_size=48",
            "--training.seq_len=256",
        ],
        world_size=4,
    )
    assert str(loaded.world) == "world 4 = pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2"
    assert str(loaded.batch).startswith("global batch 48 = 2 batch ranks x 8 local x 3 accumulation")
    assert not loaded.world_assumed


def test_without_a_world_size_the_smallest_that_fits_is_taken() -> None:
    loaded = load_config(None, ["--parallelism.tensor_parallel_degree=2"])
    assert loaded.world is not None
    assert (loaded.world.world_size, loaded.world_assumed) == (2, True)


# Mistakes in keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[training]\nsequence_len = 2048",
            "f.toml:2: unknown key 'training.sequence_len' (2048); did you mean 'training.seq_len'?",
        ),
        (
            "training.stepss = 3",
            "f.toml:1: unknown key 'training.stepss' (3); did you mean 'training.steps'?",
        ),
        (
            "[training.dataloader]\nworkers = 3",
            "f.toml:2: unknown key 'training.dataloader.workers' (3);"
            " did you mean 'training.dataloader.num_workers'?",
        ),
        (
            "[compile]\nenabled = true",
            "f.toml:2: unknown key 'compile.enabled' (true); did you mean 'compile.enable'?",
        ),
        (
            "[training]\nlr = 1e-3",
            "f.toml:2: unknown key 'training.lr' (0.001); 'lr' belongs in [optimizer]: write 'optimizer.lr'",
        ),
        (
            "[optimizer]\nseq_len = 5",
            "f.toml:2: unknown key 'optimizer.seq_len' (5); 'seq_len' belongs in [training] or [validation]:"
            " write 'training.seq_len' or 'validation.seq_len'",
        ),
        (
            "seq_len = 5",
            "f.toml:1: unknown key 'seq_len' (5); did you mean 'training.seq_len' or 'validation.seq_len'?",
        ),
        (
            '"training.seq_len" = 5',
            """f.toml:1: unknown key '"training.seq_len"' (5); did you mean 'training.seq_len'?""",
        ),
        (
            "[comm]\nquux = 1",
            "f.toml:2: unknown key 'comm.quux' (1); [comm] has init_timeout_seconds, mode,"
            " save_traces_file_prefix, save_traces_folder, trace_buf_size, train_timeout_seconds",
        ),
        (
            "quux = 1",
            "f.toml:1: unknown key 'quux' (1); the sections are activation_checkpoint,"
            " checkpoint, comm, compile,"
            " debug, experimental, fault_tolerance, job, lr_scheduler, memory_estimation, metrics, model,"
            " optimizer, parallelism, profiling, quantize, sample, training, validation",
        ),
        (
            "[training.steps]\nx = 3",
            "f.toml:2: unknown key 'training.steps.x' (3); 'training.steps' is a value, not a section",
        ),
        (
            "[training]\nbatch_size = 8",
            "f.toml:2: unknown key 'training.batch_size' (8); write training.local_batch_size instead",
        ),
        (
            "[float8]\nrecipe_name = 'rowwise'",
            "f.toml:2: unknown key 'float8.recipe_name' (\"rowwise\");"
            " write quantize.linear.float8.recipe_name instead",
        ),
        (
            "[model]\nnorm_type = 'rmsnorm'",
            "f.toml:2: unknown key 'model.norm_type' (\"rmsnorm\"); delete it: the model"
            " family decides its norm",
        ),
        (
            "\n[trainning]\nseq_len = 5\nsteps = 3",
            "f.toml:2: unknown section [trainning] (seq_len, steps); did you mean [training]?",
        ),
        ("[trainning]", "f.toml:1: unknown section [trainning]; did you mean [training]?"),
        (
            "[training.dataloder]\nnum_workers = 3",
            "f.toml:1: unknown section [training.dataloder] (num_workers); did you mean"
            " [training.dataloader]?",
        ),
        (
            "[hyper]\nquux = 1\nbeta1 = 0.9",
            "f.toml:1: unknown section [hyper] (quux, beta1); 'beta1' is 'optimizer.beta1'",
        ),
        (
            "[quux]\nfoo = 1",
            "f.toml:1: unknown section [quux] (foo); the sections are activation_checkpoint,"
            " checkpoint, comm,"
            " compile, debug, experimental, fault_tolerance, job, lr_scheduler,"
            " memory_estimation, metrics, model,"
            " optimizer, parallelism, profiling, quantize, sample, training, validation",
        ),
        (
            'bse = ["x.toml"]\nparallelism.tensor_parallel_degree = 3',
            "f.toml:1: unknown key 'bse' ([\"x.toml\"]); did you mean 'base'?",
        ),
        ("training = 3", "f.toml:1: training = 3: 'training' is a section; write [training]"),
        (
            "[[training]]\nsteps = 3",
            "f.toml:1: training = [{ steps = 3 }]: 'training' is a section; write [training]",
        ),
    ],
    ids=lambda text: text.replace("\n", " ")[:40],
)
def test_key_that_does_not_exist_is_named_with_what_may_be_meant(
    write: Write, text: str, message: str
) -> None:
    assert problems(write(text)) == [message]


def test_unknown_flag_is_named_with_the_nearest_key() -> None:
    expected = ["--training.seq_lenn: unknown key 'training.seq_lenn' (5); did you mean 'training.seq_len'?"]
    assert problems(None, ["--training.seq_lenn=5"]) == expected
    assert problems(None, ["--training.seq_lenn", "5"]) == expected


def test_unknown_switch_is_the_key_and_not_a_missing_value() -> None:
    assert problems(None, ["--checkpoint.enabled"]) == [
        "--checkpoint.enabled: unknown key 'checkpoint.enabled' (true); did you mean 'checkpoint.enable'?"
    ]


def test_base_belongs_in_a_file() -> None:
    assert problems(None, ["--base=x.toml"]) == [
        '--base: unknown key \'base\' ("x.toml"); only a file has a base: write base = ["x.toml"] at its top'
    ]


@pytest.mark.parametrize(
    "text",
    [
        'tokenizer = "bytes"',
        '[modle]\ntokenizer = "bytes"',
        '[quux]\nx = "bytes"',
        'base = ["f.toml"]',
        'base = ["none.toml"]',
        'bse = ["x.toml"]',
    ],
)
def test_tokenizer_is_not_missed_where_it_may_stand_in_what_was_not_understood(
    write: Write, text: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_config(write(text))
    assert len(caught.value.problems) == 1
    assert caught.value.notes == ()


def test_file_without_its_flag_is_the_only_mistake() -> None:
    assert problems(None, ["f.toml"], at_start=True) == [
        "f.toml: neither a flag nor the value of one; write --job.config_file f.toml"
    ]


def test_empty_section_says_nothing(write: Write) -> None:
    assert load_config(write("[training]\n[model.override]\n")).config == load_config(None).config


@pytest.mark.parametrize("section", sorted(s for s in known_sections() if s != "model.override"))
def test_wrong_key_is_found_in_every_section(write: Write, section: str) -> None:
    found = problems(write(f"[{section}]\nzzz = 1\n"))
    assert len(found) == 1
    assert found[0].startswith(f"f.toml:2: unknown key '{section}.zzz' (1); ")


# Mistakes in values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('training.steps = "10"', 'training.steps = "10": must be an integer; write 10 without quotes'),
        ("training.steps = 10.0", "training.steps = 10.0: must be an integer; write 10"),
        ("training.steps = 10.5", "training.steps = 10.5: must be an integer"),
        ("training.steps = true", "training.steps = true: must be an integer"),
        ("training.steps = [10]", "training.steps = [10]: must be an integer"),
        ("training.steps = {}", "training.steps = {}: must be an integer"),
        ("training.steps = 1979-05-27", "training.steps = 1979-05-27: must be an integer"),
        ("training.steps = 0", "training.steps = 0: must be at least 1"),
        ('optimizer.lr = "1e-3"', 'optimizer.lr = "1e-3": must be a number; write 1e-3 without quotes'),
        ("optimizer.lr = true", "optimizer.lr = true: must be a number"),
        ("optimizer.lr = 0", "optimizer.lr = 0: must be greater than 0"),
        ("optimizer.lr = inf", "optimizer.lr = inf: must be a finite number"),
        ("optimizer.beta1 = 1.0", "optimizer.beta1 = 1.0: must be less than 1"),
        ("lr_scheduler.decay_ratio = 1.5", "lr_scheduler.decay_ratio = 1.5: must be at most 1"),
        ("training.max_norm = nan", "training.max_norm = nan: must be a number"),
        ("optimizer.lr = nan", "optimizer.lr = nan: must be a finite number"),
        ("optimizer.beta1 = nan", "optimizer.beta1 = nan: must be a finite number"),
        ("lr_scheduler.decay_ratio = nan", "lr_scheduler.decay_ratio = nan: must be a finite number"),
        ("model.override.rope_theta = inf", "model.override.rope_theta = inf: must be a finite number"),
        ("model.override.rope_theta = nan", "model.override.rope_theta = nan: must be a finite number"),
        ("training.steps = nan", "training.steps = nan: must be an integer"),
        ('job.dump_folder = ""', 'job.dump_folder = "": must not be empty'),
        ('job.save_config_file = ""', 'job.save_config_file = "": must not be empty'),
        (
            'job.save_config_file = "./config.toml"',
            'job.save_config_file = "./config.toml": must be another name: the run itself writes config.toml,'
            " metrics.jsonl and events.jsonl",
        ),
        (
            'job.save_config_file = "metrics.jsonl"',
            'job.save_config_file = "metrics.jsonl": must be another name: the run itself writes config.toml,'
            " metrics.jsonl and events.jsonl",
        ),
        (
            'job.description = "a\\u0000b"',
            'job.description = "a\\u0000b": must not contain a NUL character',
        ),
        (
            'model.override.x = "\\u0000"',
            'model.override.x = "\\u0000": must not contain a NUL character',
        ),
        (
            'compile.components = ["a", "\\u0000"]',
            'compile.components = ["a", "\\u0000"]: must not contain a NUL character',
        ),
        (
            'optimizer.name = "adamw"',
            "optimizer.name = \"adamw\": must be 'AdamW', 'Adam' or 'SGD'; did you mean 'AdamW'?",
        ),
        ("optimizer.name = 3", "optimizer.name = 3: must be 'AdamW', 'Adam' or 'SGD'"),
        (
            'checkpoint.enable = "true"',
            'checkpoint.enable = "true": must be true or false; write true without quotes',
        ),
        ("checkpoint.enable = 1", "checkpoint.enable = 1: must be true or false"),
        ("job.dump_folder = 3", 'job.dump_folder = 3: must be a string; write "3" in quotes'),
        ("job.description = 07:32:00", "job.description = 07:32:00: must be a string; dates need quotes"),
        (
            'compile.components = "model,loss"',
            'compile.components = "model,loss": must be a list; write ["model", "loss"]',
        ),
        (
            "compile.components = ['a', 2]",
            'compile.components = ["a", 2]: item 2 must be a string; write "2" in quotes',
        ),
        ("quantize.grouped_mm.mx.fqns = 1", "quantize.grouped_mm.mx.fqns = 1: must be a list or a string"),
        (
            "parallelism.data_parallel_shard_degree = 0",
            "parallelism.data_parallel_shard_degree = 0: must be -1 or at least 1",
        ),
        (
            "activation_checkpoint.selective_ac_option = 2",
            'activation_checkpoint.selective_ac_option = 2: must be a string; write "2" in quotes',
        ),
        (
            "activation_checkpoint.selective_ac_option = '0'",
            'activation_checkpoint.selective_ac_option = "0": must be "op" or a positive'
            " whole number in quotes",
        ),
        (
            "model.override.dim = [1]",
            "model.override.dim = [1]: must be true or false or an integer or a number or a string",
        ),
        ("comm.mode = 'fake'", "comm.mode = \"fake\": must be 'default', 'fake_backend' or 'local_tensor'"),
    ],
    ids=lambda text: text[:40],
)
def test_value_of_the_wrong_kind_is_named_with_the_rule(write: Write, text: str, message: str) -> None:
    assert problems(write(text)) == [f"f.toml:1: {message}"]


_TOKENS = ("training.seq_len", "training.local_batch_size", "training.loss_chunk_tokens")
LARGEST = {
    "debug.seed": 2**63 - 1,
    "comm.init_timeout_seconds": 10**7,
    "comm.train_timeout_seconds": 10**7,
    **dict.fromkeys(_TOKENS, 2**31 - 1),
    "training.global_batch_size": 2**31 - 1,
    "validation.seq_len": 2**31 - 1,
    "validation.local_batch_size": 2**31 - 1,
    "training.steps": 2**53,
    "validation.steps": 2**53,
    "lr_scheduler.total_steps": 2**53,
    "lr_scheduler.warmup_steps": 2**53,
    "training.dataloader.num_workers": 1024,
    "validation.dataloader.num_workers": 1024,
}


@pytest.mark.parametrize(("key", "largest"), LARGEST.items())
def test_number_that_nothing_could_hold_is_refused(key: str, largest: int) -> None:
    assert value_at(Config.model_validate_json(nested(key, largest)), key) == largest
    assert problems(None, [f"--{key}={largest + 1}"]) == [
        f"--{key}: {key} = {largest + 1}: must be at most {largest}"
    ]


def nested(key: str, value: int) -> str:
    """One key's value as the JSON of a configuration."""
    *tables, name = key.split(".")
    tree: dict[str, object] = {name: value}
    for table in reversed(tables):
        tree = {table: tree}
    return json.dumps(tree)


def test_value_on_the_command_line_meets_the_same_rules() -> None:
    assert problems(None, ["--training.steps=ten", "--checkpoint.enable=True", "--training.seq_len=0"]) == [
        '--training.steps: training.steps = "ten": must be an integer',
        '--checkpoint.enable: checkpoint.enable = "True": must be true or false; write true',
        "--training.seq_len: training.seq_len = 0: must be at least 1",
    ]


def test_value_that_is_overridden_does_no_harm(write: Write) -> None:
    assert load_config(write('training.steps = "x"'), ["--training.steps=3"]).config.training.steps == 3


# Mistakes in files


def test_missing_file_is_one_problem() -> None:
    assert problems(Path("none.toml")) == ["none.toml: no such file"]


def test_syntax_error_is_one_problem_with_its_line(write: Write) -> None:
    assert problems(write("[training]\nsteps = \n")) == ["f.toml:2: not valid TOML: Invalid value"]


TOO_DEEP = "nested more than 64 levels deep, which no key and no value needs to be"
TOO_LONG = "an integer of more than 64 bits, which no key takes"


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        (f"x = {'[' * 5000}", TOO_DEEP),
        (f"x = {'[' * 65}{']' * 65}", TOO_DEEP),
        (f"{'.'.join('a' * 3000)} = 1", TOO_DEEP),
        (f"{'.'.join('a' * 900)} = 1", TOO_DEEP),
        (f"[{'.'.join('a' * 3000)}]", TOO_DEEP),
        (f"steps = {'9' * 5000}", TOO_LONG),
        (f"steps = 0x{'f' * 5000}", TOO_LONG),
    ],
    ids=["brackets", "closed", "key", "shorter_key", "header", "digits", "hexadecimal"],
)
def test_file_that_is_too_much_for_a_parser_is_one_problem(write: Write, statement: str, rule: str) -> None:
    assert problems(write(f"[training]\nseq_len = 5\n{statement}\n")) == [f"f.toml:3: {rule}"]


def test_names_that_are_too_deep_only_together_are_one_problem(write: Write) -> None:
    half = ".".join("a" * 40)
    assert problems(write(f"[{half}]\n{half} = 1\n")) == [f"f.toml: {TOO_DEEP}"]


def test_flag_that_is_too_much_for_a_parser_is_one_problem() -> None:
    words = [
        f"--training.steps={'9' * 5000}",
        f"--training.seq_len={'[' * 5000}",
        f"--{'.'.join('a' * 3000)}=1",
        f"--optimizer.lr='{'[' * 5000}'",
    ]
    assert problems(None, words) == [
        f'--training.steps: training.steps = "{"9" * 56}...: {TOO_LONG}',
        f'--training.seq_len: training.seq_len = "{"[" * 56}...: {TOO_DEEP}',
        f"--{'a.' * 29}...: a key of more than 64 parts; write --section.key=VALUE",
        f'--optimizer.lr: optimizer.lr = "{"[" * 56}...: must be a number',
    ]


def test_missing_base_is_told_where_it_is_named(write: Write) -> None:
    path = write('\nbase = ["sub/none.toml"]\n', "jobs/f.toml")
    assert problems(path) == ["jobs/f.toml:2: jobs/sub/none.toml: no such file"]


def test_base_with_a_syntax_error_is_told_at_its_own_line(write: Write) -> None:
    write("a = 1\nb = \n", "base.toml")
    assert problems(write('base = ["base.toml"]\n')) == ["base.toml:2: not valid TOML: Invalid value"]


def test_files_that_name_each_other_are_refused(write: Write) -> None:
    write('base = ["f.toml"]\n', "other.toml")
    assert problems(write('\nbase = ["other.toml"]\n')) == [
        'other.toml:1: base = "f.toml": the files name each other: f.toml -> other.toml -> f.toml'
    ]


def test_base_must_be_a_list(write: Write) -> None:
    expected = 'f.toml:1: base = "other.toml": must be a list; write ["other.toml"]'
    assert problems(write('base = "other.toml"\n')) == [expected]


def test_mistake_in_a_base_is_told_at_its_own_line(write: Write) -> None:
    write("[training]\nstepss = 3\n", "base.toml")
    assert problems(write('base = ["base.toml"]\n[training]\nseq_lenn = 3\n')) == [
        "f.toml:3: unknown key 'training.seq_lenn' (3); did you mean 'training.seq_len'?",
        "base.toml:2: unknown key 'training.stepss' (3); did you mean 'training.steps'?",
    ]


def test_two_files_are_one_too_many(write: Write) -> None:
    path = write("")
    assert problems(path, ["--job.config_file=g.toml"]) == [
        "--job.config_file: job.config_file = \"g.toml\": 'f.toml' is the file already; name one file"
    ]


# Mistakes in the model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model.name = 'llama4'",
            "f.toml:1: model.name = \"llama4\": unknown model; known: llama3; did you mean 'llama3'?",
        ),
        (
            "model.flavor = '9B'",
            'f.toml:1: model.flavor = "9B": unknown flavor; known: debugmodel, 1B, 3B, 8B, 70B, 405B',
        ),
        (
            "\n[model.override]\nn_layer = 4",
            "f.toml:3: model.override.n_layer = 4: unknown size field; known: ",
        ),
        ("\n[model.override]\nn_layers = 'x'", 'f.toml:3: model.override.n_layers = "x": must be an integer'),
        (
            "\n[model.override]\nn_heads = 3",
            'f.toml:3: model.override.n_kv_heads = 2 (model.flavor = "debugmodel"'
            " (default)): must divide n_heads = 3",
        ),
    ],
    ids=["name", "flavor", "field", "type", "clash"],
)
def test_wrong_size_is_told_at_its_own_line(write: Write, text: str, message: str) -> None:
    found = problems(write(text), resolve_size=resolve_size)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_unknown_size_field_suggests_the_nearest() -> None:
    (found,) = problems(None, ["--model.override.n_layer=4"], resolve_size=resolve_size)
    assert found.startswith("--model.override.n_layer: ")
    assert found.endswith("; did you mean 'n_layers'?")


# All at once


def test_all_problems_come_together_in_the_order_of_the_file(write: Write) -> None:
    path = write("training.steps = 0\ntraining.lr = 1\noptimizer.lr = 'x'\nmodel.flavour = '8B'\n")
    found = problems(path, ["--training.seq_len=x", "stray"])
    assert [line.split(": ")[0] for line in found] == [
        "f.toml:1",
        "f.toml:2",
        "f.toml:3",
        "f.toml:4",
        "--training.seq_len",
        "stray",
    ]


def test_rule_is_silent_where_a_key_that_it_reads_is_in_doubt(write: Write) -> None:
    # With a shard degree of 2 the world is 4: the misspelled key is the only mistake.
    path = write("parallelism.data_parallel_shard_degree = 2\nparallelism.tensor_paralel_degree = 2\n")
    (found,) = problems(path, world_size=4)
    assert "did you mean 'parallelism.tensor_parallel_degree'?" in found


def test_rule_runs_though_other_keys_of_its_section_are_wrong(write: Write) -> None:
    path = write("training.steps = 0\ntraining.global_batch_size = 12\n")
    assert len(problems(path)) == 2


def test_error_is_a_config_error(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"f\.toml:1"):
        load_config(write("x = 1"))


# Levels


def test_what_only_a_start_needs_is_noted_in_a_check_and_fails_a_start(write: Write) -> None:
    path = write('model.hf_assets_path = "gone"\n')
    loaded: Loaded = load_config(path)
    assert [(note.level, note.key) for note in loaded.notes] == [("start", "model.hf_assets_path")]
    with pytest.raises(InvalidConfig, match=r"f\.toml:1: model\.hf_assets_path = .*no folder 'gone'"):
        load_config(path, at_start=True)


def test_note_fails_nothing(write: Write) -> None:
    path = write('model.tokenizer = "bytes"\nlr_scheduler.warmup_steps = 20000\n')
    assert [note.level for note in load_config(path, at_start=True).notes] == ["note"]


def test_notes_are_kept_when_there_are_errors(write: Write) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_config(write("compile.enable = true\ntraining.steps = 0\n"))
    assert [note.key for note in caught.value.notes] == ["model.hf_assets_path", "compile.enable"]
