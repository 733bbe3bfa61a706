"""``python -m hf_patrickstar`` is the command ``hf-patrickstar``."""

import sys

from hf_patrickstar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
