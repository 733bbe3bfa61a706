#!/usr/bin/env bash
# On a machine with a CUDA device: the parity tests on it, and the overhead benchmark. The last line of standard output
# is one JSON object with the outcome; details go to standard error.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # runs are compared bit for bit
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: torch sees no CUDA device here" >&2
    echo '{"gpu_check": "no CUDA device"}'
    exit 2
fi
"$python" -m pytest tests/gpu -m gpu -p no:cacheprovider >&2
tests=$?
for dtype in fp32 bf16; do
    "$python" benchmarks/bench_overhead.py --device cuda --dtype "$dtype" --layers 12 --hidden 1024 --batch_size 8 \
        --length 512 --warmup 5 --steps 20 --output "$output/overhead_$dtype.json" >&2
done
"$python" - "$tests" "$output" <<'PYTHON'
import json, pathlib, sys

results = {file.stem: json.loads(file.read_text()) for file in sorted(pathlib.Path(sys.argv[2]).glob("*.json"))}
ok = sys.argv[1] == "0" and len(results) == 2
print(json.dumps({"gpu_check": "ok" if ok else "failed", "pytest_exit_code": int(sys.argv[1]), **results}))
sys.exit(not ok)
PYTHON
