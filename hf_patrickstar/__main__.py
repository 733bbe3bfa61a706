"""The command ``hf-patrickstar``, which is ``python -m hf_patrickstar`` too."""

import gc
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

        status = run()
        if sys.argv[1:2] == ["plan"]:  # objects that a script of ``run`` has made may need a last collection
            gc.freeze()  # or Python looks at all objects of libraries as it ends, which takes 0.6 seconds
        return status
    except KeyboardInterrupt:
        print("\nhf-patrickstar: interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
