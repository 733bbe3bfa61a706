#!/usr/bin/env bash
# Sets up .venv and runs the linter, the type checker and all tests that are not long; scripts/test_long.sh runs those.
# Arguments go to pytest, which then runs once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest -n 2 --dist loadgroup "$@"
fi
# Two for the cores, and one for tests/distributed, which is one group and mostly waits for its own processes.
exec .venv/bin/python -m pytest -n 3 --dist loadgroup
