"""The resolved configuration as TOML is the same configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from titanish.config.keys import field_defaults, flat_values
from titanish.config.load import load_config
from titanish.config.render import to_toml
from titanish.config.schema import Config
from titanish.config.spelling import shown, split_key, toml_key, toml_value

RECOMPUTED = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
OTHERS = [
    "--training.max_norm=inf",
    "--optimizer.lr=1e-5",
    '--job.description="quotes \\" and \\\\ and\\nlines # no comment"',
    "--model.override.dim=64",
    "--model.override.rope_theta=5e5",
    "--model.override.tied_embeddings=true",
    "--validation.seq_len=7",
    "--training.dataloader.num_workers=2",
    f'--{RECOMPUTED}=["a", "é"]',
]


@pytest.mark.parametrize("overrides", [[], OTHERS], ids=["defaults", "others"])
@pytest.mark.parametrize("commented", [False, True])
def test_rendered_configuration_loads_as_the_same(
    overrides: list[str], commented: bool, tmp_path: Path
) -> None:
    loaded = load_config(None, overrides)
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(loaded.config, loaded.sources if commented else None))
    assert load_config(path).config == loaded.config


def test_what_cannot_be_written_is_what_is_there_without_it() -> None:
    # TOML has no null, so a key that may be absent must be absent by default.
    config = Config()
    absent = {key for key, value in flat_values(config).items() if value is None}
    assert absent
    optional = {key for key, default in field_defaults().items() if default is None}
    assert absent == optional


def test_every_key_with_a_value_is_written() -> None:
    written = tomli.loads(to_toml(Config()))
    assert written["training"]["dataloader"]["num_workers"] == 0
    expected = sum(
        value is not None for key, value in flat_values(Config()).items() if key != "model.override"
    )
    assert sum(line.count(" = ") for line in to_toml(Config()).splitlines()) == expected
    assert set(written) == set(Config.model_fields)


def test_source_follows_what_is_not_the_default(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[training]\nsteps = 5\nseq_len = 2048\n[model.override]\ndim = 64\n")
    loaded = load_config(path, ["--optimizer.lr=1e-3"])
    lines = to_toml(loaded.config, loaded.sources).splitlines()
    assert f"steps = 5  # {path}:2" in lines
    assert "seq_len = 2048" in lines
    assert f"dim = 64  # {path}:5" in lines
    assert "lr = 0.001  # --optimizer.lr" in lines


@pytest.mark.parametrize(
    "value",
    [
        True,
        -1,
        1e-08,
        1e22,
        float("inf"),
        float("-inf"),
        "",
        '\x7f\x00\t"\\\n',
        "é",
        [1, 2],
        [["a"], []],
        {"a b": 1},
    ],
    ids=repr,
)
def test_value_is_spelled_so_that_toml_reads_it(value: object) -> None:
    assert tomli.loads(f"v = {toml_value(value)}") == {"v": value}


def test_toml_has_no_none() -> None:
    with pytest.raises(TypeError, match="TOML has no NoneType"):
        toml_value(None)


def test_long_value_is_cut_where_it_is_shown() -> None:
    assert shown("x" * 100) == '"' + "x" * 56 + "..."


@pytest.mark.parametrize("name", ["plain", "with-dash_1", "a.b", 'quo"te', "ünï", ""])
def test_key_is_split_where_it_was_joined(name: str) -> None:
    assert split_key(f"table.sub.{toml_key(name)}") == ("table.sub", toml_key(name))
    assert split_key(toml_key(name)) == ("", toml_key(name))
