"""The process that ``hf-patrickstar check`` starts for one training; stock scripts can be checked, too.

The classes of [Note: unchanged scripts] have to be put before transformers' Trainer is imported, and ``short_training``
imports it.
"""

import os
import sys

from hf_patrickstar.integrations.unchanged import Defaults, install

if __name__ == "__main__":
    os.dup2(2, 1)  # what the script prints is not what the command says
    install(Defaults())
    from hf_patrickstar.integrations.short_training import main

    sys.exit(main(sys.argv[1:]))
