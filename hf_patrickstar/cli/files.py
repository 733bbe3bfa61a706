"""Files that a command will write."""

import os
import pathlib

from hf_patrickstar.errors import ConfigError


def check_file(name: str, option: str) -> pathlib.Path:
    """A path that can be written to as far as one can tell: the work before it takes longer than to say so.

    Args:
        name: The path that a user gave.
        option: The option that it was given with.

    Raises:
        ConfigError: If it cannot be written to.
    """
    path = pathlib.Path(name)
    if path.is_dir():
        raise ConfigError(f"{option}: '{path}' is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option}: '{path}' cannot be written: there is no directory '{path.parent}'; make it, or name another "
            "file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option}: '{path}' cannot be written: permission denied; name another file")
    return path
