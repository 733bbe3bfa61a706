#!/usr/bin/env bash
# Makes .venv and installs the package with pinned versions, and with the extras named as the argument ("dev" by default).
# Which build of torch that is, with or without CUDA, is what your pip configuration offers first for the pinned version.
# torch goes first, so that no other requirement chooses.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: $("$python" --version) is too old, the pinned packages need Python 3.11; set PYTHON=/path/to/python" >&2
    exit 1
fi
if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi
extras=${1:-dev}
stamp=.venv/.hf_patrickstar-installed-$extras
if [ -f .venv/.hf_patrickstar-installed-dev ]; then
    stamp=.venv/.hf_patrickstar-installed-dev extras=dev  # it has all others
fi
if [ ! -f "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ setup.cfg -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "Installing into .venv (a few minutes the first time) ..."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$(grep '^torch==' constraints.txt)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
    touch "$stamp"
fi
