#!/usr/bin/env bash
# Runs the tests with the lowest versions that setup.cfg allows, in build/oldest-3.X. PYTHON chooses the interpreter;
# arguments go to pytest. The tools of the tests have the versions of constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
env=build/oldest-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
stamp=$env/.hf_patrickstar-installed
if [ ! -f "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ setup.cfg -nt "$stamp" ]; then
    echo "Installing into $env (about 5 GiB with CUDA's libraries) ..."
    "$python" -m venv --clear "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
    names='build|check-wheel-contents|hypothesis|mypy|pytest|pytest-timeout|pytest-xdist|rich|schedulefree'
    mapfile -t tools < <(grep -oE "^($names)==[^ ]+" constraints.txt)
    "$env/bin/uv" pip install --no-cache --quiet --python "$env/bin/python" --resolution lowest-direct \
        --only-binary :all: --no-binary hf-patrickstar -e '.[peft,trl]' 'setuptools>=77' "${tools[@]}"
    # If another package, or a missing wheel, needs a higher version than setup.cfg allows, nothing tests that promise.
    "$env/bin/python" - <<'CHECK'
import sys
from importlib.metadata import requires, version

from packaging.requirements import Requirement

wrong = []
for requirement in map(Requirement, requires("hf_patrickstar")):
    marker, extras = requirement.marker, ("", "peft", "trl")
    if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
        floor, installed = str(requirement.specifier).removeprefix(">="), version(requirement.name)
        if not f"{installed}.".startswith(f"{floor}."):
            wrong.append(f"setup.cfg allows {requirement}, but the lowest version that can be installed is {installed}")
sys.exit("\n".join(wrong) or None)
CHECK
    touch "$stamp"
fi
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -eq 0 ]; then
    set -- tests/unit tests/integration tests/parity tests/gpu
fi
exec "$env/bin/python" -m pytest -n 2 --dist loadgroup "$@"
