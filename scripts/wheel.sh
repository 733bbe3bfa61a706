#!/usr/bin/env bash
# Builds the source distribution, and the wheel from it; checks what is in both; then installs the wheel into a new
# environment and uses it from an empty directory: the commands, and the quickstart of the source distribution.
#
#   bash scripts/wheel.sh             the new environment borrows the dependencies that are installed in .venv
#   bash scripts/wheel.sh --full      it installs its own dependencies, pinned by constraints.txt; torch is 1 GiB there
#   bash scripts/wheel.sh --out DIR   both files are copied to DIR when everything has passed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)}
full= out=

fail() {
    echo "wheel: failed: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
    --full) full=1 ;;
    --out)
        [ $# -gt 1 ] || { echo "wheel: --out needs a directory" >&2; exit 2; }
        mkdir -p "$2"
        out=$(cd "$2" && pwd)
        shift
        ;;
    *) echo "wheel: '$1' is no option; there are --full and --out DIR" >&2; exit 2 ;;
    esac
    shift
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export PYTHONNOUSERSITE=1 HF_HUB_OFFLINE=1

echo "1. Building both distributions from a copy of the sources ..."
# A copy, since setuptools packs again what an old hf_patrickstar.egg-info lists, also files that were removed.
mkdir "$work/source" "$work/dist"
cp -r benchmarks docs hf_patrickstar recipes scripts tests "$work/source"
cp CHANGELOG.md LICENSE MANIFEST.in README.md constraints.txt pyproject.toml setup.cfg "$work/source"
find "$work/source" -name __pycache__ -prune -exec rm -r {} +
(cd "$work/source" && find . -type f | sort >"$work/expected")
"$python" -m build --no-isolation --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 ||
    { cat "$work/build.log" >&2; fail "the build; its output is above"; }
sdist=$(echo "$work"/dist/*.tar.gz) wheel=$(echo "$work"/dist/*.whl)

echo "2. Checking their contents ..."
mkdir "$work/unpacked"
tar -xzf "$sdist" -C "$work/unpacked" --strip-components=1
(cd "$work/unpacked" && find . -type f ! -name PKG-INFO ! -path '*.egg-info/*' | sort >"$work/packed")
diff "$work/expected" "$work/packed" >&2 ||
    fail "the source distribution: it lacks the files above marked '<', or has those marked '>' too many (MANIFEST.in)"
"$(dirname "$python")/check-wheel-contents" --no-config --package "$work/source/hf_patrickstar" "$wheel" ||
    fail "the contents of the wheel (package_data in setup.cfg)"
"$python" -m zipfile -l "$wheel" >"$work/wheel.txt"
for name in hf_patrickstar/py.typed hf_patrickstar/report/page.html dist-info/licenses/LICENSE; do
    grep -q "$name " "$work/wheel.txt" || fail "the wheel has no $name"
done

echo "3. Installing the wheel into a new environment ..."
"$python" -m venv --without-pip "$work/environment"
install=("$python" -m pip --python "$work/environment/bin/python" install --quiet --disable-pip-version-check)
if [ -n "$full" ]; then
    "${install[@]}" -c constraints.txt "$(grep '^torch==' constraints.txt)"
    "${install[@]}" -c constraints.txt "$wheel" rich
else
    "${install[@]}" --no-deps --no-index "$wheel"
    # Directories that PYTHONPATH names are searched, but their .pth files are not read: an editable install in .venv
    # is not seen. The wheel comes first, since the package itself may be installed in .venv too.
    directories='import sysconfig as s; print(":".join({s.get_path("purelib"), s.get_path("platlib")}))'
    PYTHONPATH=$("$work/environment/bin/python" -c "$directories"):$("$python" -c "$directories")
    export PYTHONPATH
fi

echo "4. Using it from an empty directory ..."
mkdir "$work/empty"
cd "$work/empty"
# The wheel's package is then the only one.
rm -r "$work/unpacked/hf_patrickstar"
PATH=$work/environment/bin:$PATH
found=$(python -c 'import importlib.util as util; print(util.find_spec("hf_patrickstar").origin)')
[[ $found == "$work/environment/"* ]] || fail "python imports $found instead of the wheel"
version=$(hf-patrickstar --version)
[[ $(basename "$wheel") == "hf_patrickstar-$version-"* ]] || fail "the wheel $(basename "$wheel") says it is $version"
hf-patrickstar env
hf-patrickstar plan gpt2:n_layer=2,n_embd=64,n_head=2 --machine rtx4090 --batch-size 2 --seq-len 64 --no-advice \
    --html plan.html
grep -q '</html>' plan.html || fail "the page of the plan is not whole"
python "$work/unpacked/scripts/quickstart.py" --short --output_dir "$work/quickstart"
if [ -n "$out" ]; then
    cp "$sdist" "$wheel" "$out"
    echo "Both distributions are in $out."
fi
echo "wheel: ok"
