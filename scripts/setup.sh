#!/usr/bin/env bash
# Makes .venv with titanish in it, once, and again only after pyproject.toml or constraints.txt changed.
#
#   scripts/setup.sh [EXTRA]     EXTRA: "test" adds what the tests need
#
# PYTHON: the interpreter to make it with (default: python3), 3.10 or newer.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-}
venv=$root/.venv
stamp=$venv/.titanish-setup
wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)

done_for() { [ -x "$venv/bin/python" ] && grep -qxF "$1: $wanted" "$stamp" 2>/dev/null; }
if done_for "$extra"; then exit 0; fi

# Two starts at once: one sets up, the other waits and finds it done.
if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    flock 9
    if done_for "$extra"; then exit 0; fi
fi

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "setup: '$python' is not Python 3.10 or newer; name one with PYTHON=/path/to/python3" >&2
    exit 1
fi
echo "setup: making $venv (once; this installs PyTorch)" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$root/constraints.txt" --editable "$root${extra:+[$extra]}"
# What was set up before under the same files still stands.
{ grep -F ": $wanted" "$stamp" 2>/dev/null || true; echo ": $wanted"; [ -z "$extra" ] || echo "$extra: $wanted"; } \
    | sort -u > "$stamp.new"
mv "$stamp.new" "$stamp"
