"""The `titanish` command: looks up the verb, imports its module and runs it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from titanish import __version__
from titanish.errors import TitanishError

# verb -> (module with `run(words) -> exit code`, help). Imported when called: `config check` needs no torch.
VERBS: dict[str, tuple[str, str]] = {
    "config": ("titanish.cli.config", "check or show a configuration without starting anything"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 0 if all is well, 1 after an error that the user can mend."""
    verbs = "\n".join(f"  {name:<10} {text}" for name, (_, text) in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="titanish",
        description="A PyTorch-native trainer for large language models.",
        epilog=f"verbs:\n{verbs}\n\n`titanish VERB --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"titanish {__version__}")
    parser.add_argument("verb", choices=list(VERBS), metavar="VERB")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...")
    arguments = parser.parse_args(words)
    try:
        code: int = importlib.import_module(VERBS[arguments.verb][0]).run(arguments.words)
        sys.stdout.flush()
    except TitanishError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
