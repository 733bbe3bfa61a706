"""The command ``hf-patrickstar``, which is ``python -m hf_patrickstar`` too."""

import sys

_INTERRUPTED = 130
"""The status that a shell gives for a program which Ctrl-C has ended."""


def main() -> int:
    """Runs the command; Ctrl-C ends it with one line, also while libraries are imported.

    Returns:
        The exit status; see ``hf_patrickstar.cli.main``.
    """
    try:
        from hf_patrickstar.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("\nhf-patrickstar: interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
