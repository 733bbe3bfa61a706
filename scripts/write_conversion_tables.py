"""Writes the tables of docs/from_deepspeed.md and docs/from_fsdp.md from the rules of ``hf-patrickstar convert``."""

import pathlib

from hf_patrickstar.integrations.conversion import accelerate, deepspeed, fsdp
from hf_patrickstar.integrations.conversion.tables import MARK, table

DOCS = pathlib.Path(__file__).parent.parent / "docs"
NOT_OF_FSDP = "fsdp_config."
PAGES = {
    "from_deepspeed.md": {"DeepSpeed's configuration": deepspeed.RULES},
    "from_fsdp.md": {
        "`--fsdp_config`, and `fsdp_config` of Accelerate": fsdp.RULES,
        "Other keys of a configuration file of Accelerate": tuple(
            rule for rule in accelerate.RULES if not rule.key.startswith(NOT_OF_FSDP)
        ),
    },
}
"""The tables of each page by their titles."""


def written(name: str, text: str) -> str:
    """A page with new tables below its hand-written part."""
    tables = "".join(f"\n## {title}\n\n{table(rules)}" for title, rules in PAGES[name].items())
    return f"{text.split(MARK)[0]}{MARK}\n{tables}"


def main() -> None:
    """Writes the pages."""
    for name in PAGES:
        path = DOCS / name
        path.write_text(written(name, path.read_text()))


if __name__ == "__main__":
    main()
