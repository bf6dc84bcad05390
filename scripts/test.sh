#!/usr/bin/env bash
# Sets up what the tests need and runs all checks: format, lint, types, tests. What CI runs.
#
#   scripts/test.sh [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
scripts/setup.sh test
bin=$root/.venv/bin
"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
# One thread per process: ranks share the cores, and sums come out in one order. Two workers, each with whole
# files, so that a file's fixtures and each worker's warm ranks are made once.
OMP_NUM_THREADS=1 exec "$bin/python" -m pytest -n 2 --dist loadfile "$@"
