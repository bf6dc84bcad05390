"""What a rank needs of the launcher that started it, before torch is imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

from titanish.errors import TitanishError

PR_SET_PDEATHSIG = 1  # prctl(2)


def launcher_number(
    name: str, default: int, *, low: int = 0, environment: Mapping[str, str] = os.environ
) -> int:
    """The number in the launcher's variable `name`, or `default` where it is not set.

    Raises:
        TitanishError: the variable is not a number of at least `low`.
    """
    text = environment.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal() or int(text) < low:
        raise TitanishError(
            f"{name} = {text!r}: must be a number of at least {low}; start ranks with run_train.sh or "
            "torchrun, which set it"
        )
    return int(text)


def end_with_launcher() -> None:
    """Have the system end this rank when torchrun dies, which otherwise leaves ranks training (Linux
    only)."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
