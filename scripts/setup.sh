#!/usr/bin/env bash
# Makes .venv and installs the package with pinned versions. torch goes first: on a machine without an accelerator
# that keeps pip from choosing a build with gigabytes of CUDA libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi
stamp=.venv/.hf_patrickstar-installed
if [ ! -f "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "Installing into .venv (a few minutes the first time) ..."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$(grep '^torch==' constraints.txt)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    touch "$stamp"
fi
