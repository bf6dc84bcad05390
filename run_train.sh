#!/usr/bin/env bash
# Trains: one torchrun line around `python -m titanish.train`.
#
#   ./run_train.sh [--section.key=value ...]
#
# NGPU         ranks on this machine            (default: the GPUs found, else 1)
# CONFIG_FILE  the TOML to train                (default: train_configs/debug_model.toml)
# LOG_RANK     ranks that report, e.g. 0,3      (default: 0)
# OMP_NUM_THREADS is kept if set; otherwise the cores are shared out among the ranks.
#
# An active environment that has titanish is used as it is; otherwise .venv, which is made once.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; exit ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Asked from / : the folder that this is started in must not pass for an installed titanish.
find_titanish='import sys, importlib.util as u
sys.exit(not (u.find_spec("titanish") and u.find_spec("torch")))'
if command -v python >/dev/null && (cd / && python -c "$find_titanish") 2>/dev/null; then
    python=python
else
    "$root/scripts/setup.sh"
    python=$root/.venv/bin/python
fi

if [ -z "${NGPU:-}" ]; then
    NGPU=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
    [ "$NGPU" -gt 0 ] || NGPU=1
fi
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    threads=$(($(getconf _NPROCESSORS_ONLN) / NGPU))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
export LOG_RANK=${LOG_RANK:-0}

# Port 0: torchrun takes a free one.
exec "$python" -m torch.distributed.run --nproc_per_node="$NGPU" --rdzv_backend=c10d \
    --rdzv_endpoint=localhost:0 -m titanish.train \
    --job.config_file "${CONFIG_FILE:-$root/train_configs/debug_model.toml}" "$@"
