#!/usr/bin/env bash
# Runs checks that take minutes and rarely fail, in parts; scripts/test.sh has set up .venv. Arguments are names of parts,
# or `today` for one of them by the day of the year, as .ci/run has it. Without arguments all parts run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
parts=(wheel scripts plans devices processes streams rehearsal oldest)
day=$((10#$(date +%j)))

pytest() {
    .venv/bin/python -m pytest -n 2 --dist loadgroup "$@"
}

run() {
    echo "test_long.sh: $1"
    case $1 in
        # What is installed: its files, its types, and that it needs no extra.
        wheel) pytest -m long tests/integration tests/unit/test_bare_install.py tests/unit/test_typing.py ;;
        # Scripts of other people, recipes, benchmarks and the site.
        scripts) pytest -m long tests/unit/scripts tests/unit/cli tests/recipes ;;
        # Plans with advice, of scripts, and of models of every kind.
        plans) pytest -m long tests/unit/planner tests/unit/schedule ;;
        # The whole engine on a fake device: no operator meets two devices.
        devices) pytest -m long tests/fake ;;
        processes) .venv/bin/python -m pytest -m long tests/distributed ;;
        # A part of what `--streams simulated` can run: copies at random legal moments, and races are errors. Then engines
        # that rest from their first step on, in full and in part.
        streams)
            pytest --streams simulated:1 -k "integration or poisoned" \
                tests/integration/test_recovery.py \
                tests/live/test_live_{changes,gradients,writing}.py &&
                pytest --rest always tests/engine tests/live tests/oracle tests/parity &&
                pytest --rest partly tests/engine tests/live tests/oracle tests/parity
            ;;
        # The check of a GPU, with tiny sizes on the CPU tier.
        rehearsal) .venv/bin/python scripts/gpu_check.py --rehearse ;;
        # The lowest versions that setup.cfg allows.
        oldest) bash scripts/test_oldest.sh tests/integration tests/gpu ;;
        *)
            echo "test_long.sh: there is no part '$1'; the parts are ${parts[*]}, or today" >&2
            exit 2
            ;;
    esac
}

[ $# -gt 0 ] || set -- "${parts[@]}"
status=0
for part in "$@"; do
    [ "$part" != today ] || part=${parts[$((day % ${#parts[@]}))]}
    run "$part" || status=$?
done
exit "$status"
