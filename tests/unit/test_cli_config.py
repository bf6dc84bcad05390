"""`titanish config check` and `show` as a user meets them: output, exit codes, no torch and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from titanish.cli import main as command
from titanish.cli.main import main
from titanish.config.load import load_config
from titanish.errors import DataError
from titanish.models.registry import resolve_size

ROOT = Path(__file__).parents[2]

EIGHT_MISTAKES = """\
[training]
seq_lenn = 2048
steps = "10"
dataset = "txt"
lr = 1e-3

[trainning]
gc_freq = 5

[optimizer]
name = "adamw"

[parallelism]
tensor_parallel_degree = 3

[model.override]
n_layer = 4
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> str:
    Path("f.toml").write_text(text)
    return "f.toml"


def test_eight_mistakes_are_eight_problems_without_torch() -> None:
    code = (
        "import sys; from titanish.cli.main import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = ["config", "check", write(EIGHT_MISTAKES), "--world-size", "8"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "f.toml:2: unknown key 'training.seq_lenn' (2048); did you mean 'training.seq_len'?",
        'f.toml:3: training.steps = "10": must be an integer; write 10 without quotes',
        'f.toml:4: training.dataset = "txt" is no dataset; known: python_stdlib, text, megatron, mock;'
        " did you mean 'text'?",
        "f.toml:5: unknown key 'training.lr' (0.001); 'lr' belongs in [optimizer]: write 'optimizer.lr'",
        "f.toml:7: unknown section [trainning] (gc_freq); did you mean [training]?",
        "f.toml:11: optimizer.name = \"adamw\": must be 'AdamW', 'Adam' or 'SGD'; did you mean 'AdamW'?",
        "f.toml:14: parallelism.tensor_parallel_degree = 3: dp_replicate 1 x tp 3 = 3 does not divide"
        " world size 8; run on 6 or 9 ranks, or choose degrees whose product is 1, 2, 4 or 8",
        "f.toml:17: model.override.n_layer = 4: unknown size field; known: dim, n_layers, n_heads,"
        " n_kv_heads, hidden_dim, vocab_size, head_dim, max_seq_len, rope_theta, rope_factor,"
        " rope_low_freq_factor, rope_high_freq_factor, rope_original_max_seq_len, norm_eps,"
        " tied_embeddings, init_std; did you mean 'n_layers'?",
    ]


def test_python_m_titanish_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "titanish", "config", "check", "none.toml"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "none.toml: no such file\n")


def test_valid_file_prints_notes_and_equations(capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        'model.tokenizer = "bytes"\nparallelism.tensor_parallel_degree = 2\ntraining.seq_len = 256\n'
        "training.global_batch_size = 48\ncompile.enable = true\n"
    )
    assert main(["config", "check", path, "--world-size", "4"]) == 0
    parameters = resolve_size("llama3", "debugmodel").num_parameters
    assert capsys.readouterr() == (
        "f.toml:5: note: compile.enable = true: not in this version: comes with compilation;"
        " training runs uncompiled\n"
        "world 4 = pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2\n"
        "global batch 48 = 2 batch ranks x 8 local x 3 accumulation; 12288 tokens a step\n"
        f"model llama3 debugmodel: {parameters:,} parameters\n"
        "f.toml: valid\n",
        "",
    )


def test_check_without_a_world_size_says_that_it_assumes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", write("parallelism.tensor_parallel_degree = 2\n")]) == 0
    assert "world 2 = pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 (the smallest world that fits;" in (
        capsys.readouterr().out
    )


def test_check_says_what_would_fail_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", write('model.hf_assets_path = "gone"\n')]) == 0
    out = capsys.readouterr().out
    assert "f.toml:1: fails a start: model.hf_assets_path = \"gone\": there is no folder 'gone'" in out
    assert out.endswith("f.toml: valid, but 1 thing above would fail a start\n")


@pytest.mark.parametrize(
    "words",
    [["--training.steps", "0", "--world-size", "2"], ["--world-size=2", "--training.steps=0"]],
    ids=["before", "after"],
)
def test_overrides_are_checked_wherever_they_stand(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", write('training.dataset = "mock"\n'), *words]) == 1
    assert capsys.readouterr().err == "--training.steps: training.steps = 0: must be at least 1\n"


def test_notes_and_errors_are_one_list_in_line_order(capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        'compile.enable = true\nmodel.tokenizer = "bytes"\ntraining.steps = 0\n'
        'checkpoint.async_mode = "async"\n'
    )
    assert main(["config", "check", path]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "f.toml:1: note: compile.enable = true: not in this version: comes with compilation;"
        " training runs uncompiled\n"
        "f.toml:3: training.steps = 0: must be at least 1\n"
        'f.toml:4: note: checkpoint.async_mode = "async": asynchronous saves come later;'
        " saves are synchronous\n"
    )


def test_shown_configuration_is_toml_with_sources_and_loads_as_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write("[training]\nsteps = 5\n[model.override]\ndim = 64\n")
    assert main(["config", "show", path, "--training.seq_len=16"]) == 0
    out, err = capsys.readouterr()
    assert "\nsteps = 5  # f.toml:2\n" in out
    assert "\nseq_len = 16  # --training.seq_len\n" in out
    assert err.startswith("f.toml: fails a start: dataset 'python_stdlib' needs a tokenizer")
    Path("shown.toml").write_text(out)
    assert load_config(Path("shown.toml")).config == load_config(Path(path), ["--training.seq_len=16"]).config


def test_show_of_a_wrong_file_prints_its_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", write("x = 1\n")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("f.toml:1: unknown key 'x' (1)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["confg"], "invalid choice: 'confg'"),
        (["config"], "the following arguments are required: ACTION"),
        (["config", "check"], "the following arguments are required: FILE"),
        (["config", "check", "f.toml", "--world-size", "0"], "invalid number of ranks value: '0'"),
    ],
)
def test_wrong_use_of_the_command_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_error_of_a_verb_is_shown_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Verb:
        @staticmethod
        def run(words: list[str]) -> int:
            raise DataError("tokens.bin: too short")

    monkeypatch.setattr(command.importlib, "import_module", lambda name: Verb)
    assert main(["config"]) == 1
    assert capsys.readouterr() == ("", "tokens.bin: too short\n")


def test_output_may_be_cut_short_by_its_reader() -> None:
    write("")
    show = subprocess.Popen(
        [sys.executable, "-m", "titanish", "config", "show", "f.toml"],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert show.stdout is not None
    assert show.stderr is not None
    show.stdout.close()
    error = show.stderr.read()
    show.stderr.close()
    assert show.wait() == 1
    assert "Traceback" not in error
    assert "BrokenPipe" not in error
