"""The direction of imports as a table, and which modules may not pull in torch.

A package may import those of its row, itself, `errors` and third parties. The table is checked against
planted violations too: a check that nobody saw fail is none.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import titanish

PACKAGE = Path(titanish.__file__).parent
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "runtime": {"config"},
    "models": set(),
    "data": {"config", "runtime"},
    "optim": {"config"},
    "observe": {"config", "runtime"},
    "parallel": {"config", "models"},
    "checkpoint": {"config", "runtime", "models"},
    "generate": {"config", "runtime", "models", "data", "checkpoint"},
    "train": {
        "config",
        "runtime",
        "models",
        "data",
        "optim",
        "observe",
        "parallel",
        "checkpoint",
        "generate",
    },
    "testing": {"config", "runtime", "data", "models", "parallel", "train"},
    "cli": {"config", "models", "data", "checkpoint", "generate", "train", "testing", "runtime"},
}
EVERYBODYS = {"errors", "__init__"}  # the root holds the version
# These import torch's part when it is its turn: mistakes in config and data are found before.
LAZY = {"cli", "train/__main__.py"}
# Importable in milliseconds: what `titanish config check` and the builders of token files need.
TORCH_FREE = {
    "errors",
    "config",
    "cli",
    "models/registry.py",
    "models/plan.py",
    "parallel/dims.py",
    "train/__main__.py",
}
TORCH_FREE_NAMES = {"sizes.py", "__init__.py"}
DATA_WITH_TORCH = {"data/loader.py"}


def violations(package: Path) -> list[str]:
    """One line per import that goes against the table or brings torch into a torch-free module."""
    found = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package).as_posix()
        owner = where.split("/")[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        for line, target, lazy in imports(tree, package.name, path.relative_to(package).parts):
            root, _, rest = target.partition(".")
            imported = rest.split(".")[0] or "__init__"
            if root == package.name and owner not in {"__init__", "__main__"}:
                if owner not in ALLOWED:
                    found.append(f"{where}:{line}: the table has no row for {owner}")
                elif imported not in ALLOWED[owner] | EVERYBODYS | {owner}:
                    found.append(f"{where}:{line}: {owner} may not import {imported}")
                elif lazy and not {owner, where} & LAZY:
                    found.append(f"{where}:{line}: {target} is imported inside a function")
            elif root == "torch" and not lazy and is_torch_free(where, owner, path.name):
                found.append(f"{where}:{line}: torch at module level")
    return found


def is_torch_free(where: str, owner: str, name: str) -> bool:
    if owner == "data":
        return where not in DATA_WITH_TORCH
    return bool({where, owner} & TORCH_FREE) or name in TORCH_FREE_NAMES


def imports(tree: ast.Module, root: str, parts: tuple[str, ...]) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, whether inside a function) of each import that runs."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                for other in child.orelse:
                    yield from walk(ast.Module([other], []), lazy)
                # Annotations bind packages together too; only torch is free there.
                ours = walk(ast.Module(child.body, []), lazy)
                yield from (entry for entry in ours if entry[1].split(".")[0] == root)
            elif isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = [root, *parts[: len(parts) - child.level]] if child.level else []
                stem = ".".join([*base, child.module] if child.module else base)
                # `from .. import x` and `from titanish import x` name a module by the imported name
                whole = not child.module or stem == root
                names = [f"{stem}.{alias.name}" for alias in child.names] if whole else [stem]
                yield from ((child.lineno, name, lazy) for name in names)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, lazy or inside)

    for line, name, lazy in walk(tree, False):
        # a plain name of the root package, such as its version, is no module
        is_name = name.startswith(f"{root}.__")
        yield line, root if is_name else name, lazy


def test_imports_go_down_the_table() -> None:
    assert violations(PACKAGE) == []


def test_every_package_has_a_row() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= ALLOWED.keys()


@pytest.mark.parametrize(
    ("where", "line", "complaint"),
    [
        ("config/load.py", "import titanish.models.registry", "config may not import models"),
        ("config/load.py", "from titanish.runtime import device", "config may not import runtime"),
        ("config/load.py", "from ..runtime import device", "config may not import runtime"),
        ("config/load.py", "from .. import runtime", "config may not import runtime"),
        ("config/load.py", "from titanish import data", "config may not import data"),
        ("models/layers.py", "from titanish.parallel.mesh import Mesh", "models may not import parallel"),
        ("optim/build.py", "def f():\n    import titanish.train.job", "optim may not import train"),
        (
            "optim/build.py",
            "if TYPE_CHECKING:\n    from titanish.train.job import Job",
            "optim may not import train",
        ),
        ("optim/build.py", "def f():\n    import titanish.config.load", "is imported inside a function"),
        ("news/load.py", "import titanish.config", "the table has no row for news"),
        ("errors.py", "import titanish.config.load", "errors may not import config"),
        ("errors.py", "import torch", "torch at module level"),
        ("cli/main.py", "from torch import nn", "torch at module level"),
        ("data/indexed.py", "import torch.distributed as dist", "torch at module level"),
        ("models/llama3/sizes.py", "import torch", "torch at module level"),
        (
            "models/registry.py",
            "try:\n    import torch\nexcept ImportError:\n    pass",
            "torch at module level",
        ),
        ("train/__init__.py", "import torch", "torch at module level"),
        ("parallel/dims.py", "class A:\n    import torch", "torch at module level"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, where: str, line: str, complaint: str) -> None:
    path = tmp_path / "titanish" / where
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    (found,) = violations(tmp_path / "titanish")
    assert found.startswith(f"{where}:")
    assert complaint in found


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("config/load.py", "from titanish.errors import ConfigError\nfrom titanish import __version__"),
        ("data/loader.py", "import torch"),
        ("data/windows.py", "def f():\n    import torch"),
        ("models/spec.py", "import torch\nfrom titanish.models.plan import Style"),
        ("parallel/dims.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("cli/main.py", "def verb():\n    import titanish.train.assemble"),
    ],
)
def test_what_is_allowed_is_not_complained_about(tmp_path: Path, where: str, line: str) -> None:
    path = tmp_path / "titanish" / where
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert violations(tmp_path / "titanish") == []


def test_torch_free_modules_really_import_without_torch() -> None:
    # The table sees what a module says itself; this sees what its imports bring along.
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if is_torch_free(
            (where := path.relative_to(PACKAGE).as_posix()),
            where.split("/")[0].removesuffix(".py"),
            path.name,
        )
        and not where.startswith("cli/__main__")
    ]
    assert len(modules) > 20
    script = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
