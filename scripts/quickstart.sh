#!/usr/bin/env bash
# From a fresh clone to a fine-tuned checkpoint: installs into .venv, then trains with and without --patrickstar.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh quickstart
exec .venv/bin/python scripts/quickstart.py "$@"
