#!/usr/bin/env bash
# Sets up .venv and runs the linter, the type checker and all tests. Arguments go to pytest, which then runs once.
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
status=0
.venv/bin/python -m pytest -n 2 --dist loadgroup --ignore=tests/distributed || status=$?
# One process, so that those that the tests talk to start once and not for every worker, and have the cores.
.venv/bin/python -m pytest tests/distributed || status=$?
# A part of what `--streams simulated` can run: copies at random legal moments, and races are errors.
.venv/bin/python -m pytest -n 2 --dist loadgroup --streams simulated:1 -k "integration or poisoned" \
    tests/integration/test_{engine,events,evict_all,recovery,tensor_states}.py \
    tests/live/test_live_{changes,gradients,writing}.py || status=$?
# The check of a GPU, with tiny sizes on the CPU tier.
.venv/bin/python scripts/gpu_check.py --rehearse --seconds 900 || status=$?
exit "$status"
