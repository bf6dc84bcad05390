"""Every command and every file of the README is run, with runs cut short."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.jobs.launch import ROOT

README = (ROOT / "README.md").read_text()
SHORT = (
    "--training.steps={steps} --metrics.log_freq=1 --validation.steps=1 --sample.max_new_tokens=3"
    " --model.override.n_layers=1 --model.override.dim=64"
)


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """All shell commands; one that reads lines up to END is one command."""
    text = "".join(blocks("bash"))
    return [
        match[0].rstrip() for match in re.finditer(r"^(.*<<'END'\n(?:.*\n)*?END$|.+$)", text, re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a fresh clone with its environment made: links, and outputs of its own."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in {".git", "outputs", "my_outputs"}:
            (folder / path.name).symlink_to(path)
    for text in blocks("toml"):
        if named := re.match(r"# (\S+\.toml)\n", text):
            (folder / named[1]).write_text(text)
    return folder


def shortened(command: str) -> str:
    """Training commands keep their meaning and lose their length: 20 and 40 steps become 2 and 4."""
    if "run_train.sh" not in command:
        return command
    asked = re.search(r"--training.steps=(\d+)", command)
    steps = int(asked[1]) // 10 if asked else 1
    command = re.sub(r"--training.steps=\d+", "", command).replace("interval=10", "interval=1")
    return f"{command} {SHORT.format(steps=steps)}"


def test_every_command_of_the_readme_works(clone: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = {}
    found = commands()
    assert len(found) >= 14, found
    for command in found:
        done = subprocess.run(
            shortened(command), shell=True, executable="/bin/bash", cwd=clone, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        outputs[command] = done.stdout
    resumed = [
        output
        for command, output in outputs.items()
        if "steps=40 --opt" not in command and "steps=40" in command
    ]
    assert "resumed from step 2" in resumed[0]
    assert (clone / "my_outputs/metrics.jsonl").exists()


def test_readme_shows_messages_that_are_given(tmp_path: Path) -> None:
    shown = next(text for text in blocks("text") if text.startswith("bad.toml:1:"))
    (tmp_path / "bad.toml").write_text(
        '[trainning]\nsteps = 3\n[training]\nseq_lenn = 5\nsteps = "10"\nbatch_size = 4\n'
    )
    check = [ROOT / ".venv/bin/titanish", "config", "check", "bad.toml"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    for line in shown.splitlines():
        assert line in done.stderr
