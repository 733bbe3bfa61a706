"""The process that ``hf-patrickstar check`` starts for one training; stock scripts can be checked, too.

The classes of [Note: unchanged scripts] have to be put before transformers' Trainer is imported, and ``short_training``
imports it.
"""

import sys

from hf_patrickstar.integrations.unchanged import Defaults, install

if __name__ == "__main__":
    install(Defaults())
    from hf_patrickstar.integrations.short_training import record_training

    record_training(sys.argv[1])
