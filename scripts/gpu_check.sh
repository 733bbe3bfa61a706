#!/usr/bin/env bash
# Checks the package on a GPU: two calls of less than ten minutes. See scripts/gpu_check.py, which takes the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$python" scripts/gpu_check.py "$@"
