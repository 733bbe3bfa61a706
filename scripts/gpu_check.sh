#!/usr/bin/env bash
# On a machine with a GPU: parity, budgets, races, out-of-memory recovery and overhead in under eight minutes; with
# --long also the offload benchmark, beside FSDP2 and DeepSpeed. See scripts/gpu_check.py, which takes the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$python" scripts/gpu_check.py "$@"
