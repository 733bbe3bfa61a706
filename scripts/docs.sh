#!/usr/bin/env bash
# Builds the documentation into build/site; a link that leads nowhere is an error. It needs no network. Arguments go to
# `mkdocs build`. Open build/site/index.html to read it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
if [ ! -x "$python" ] || ! "$python" -c 'import material' 2>/dev/null; then
    bash scripts/setup.sh
fi
# With --quiet mkdocs would count no warnings, and --strict would never fail. The variable hides a notice of the theme
# about versions of mkdocs that are not used here.
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict -f scripts/site/mkdocs.yml "$@"
echo "Built build/site: open build/site/index.html"
