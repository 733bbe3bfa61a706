"""The rules as tables of the documentation."""

from collections.abc import Sequence

from hf_patrickstar.integrations.conversion.rules import Kind, Rule

MARK = "<!-- From here on: python scripts/write_conversion_tables.py -->"
"""What follows this line in a page is written from the rules."""


def table(rules: Sequence[Rule]) -> str:
    """A Markdown table of rules, in their order."""
    rows = ["| there | here | explanation |", "|---|---|---|"]
    rows += [f"| `{rule.key}` | {_here(rule)} | {rule.why.replace('|', '/')} |" for rule in rules]
    return "\n".join(rows) + "\n"


def _here(rule: Rule) -> str:
    if rule.kind is Kind.GONE:
        return "not needed"
    if rule.kind is Kind.MISSING:
        return "not supported"
    return f"`{rule.name}`" if rule.name else "`--bf16`, `--fp16`"
