"""Errors that a user can cause and correct; the command line turns them into one line."""

import re
from importlib.util import find_spec
from pathlib import Path

NEEDS_POSIX = "mtrain needs Linux, macOS or another POSIX system; on Windows, WSL is one."

# control characters, line and paragraph separators, overrides of the direction, surrogates
_NOT_SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def on_one_line(text: str) -> str:
    """Return text with escapes for characters of `_NOT_SHOWN`, such as those of a file's name."""
    return _NOT_SHOWN.sub(lambda match: ascii(match[0])[1:-1], text)


class UserError(Exception):
    """An error that the user can correct; its message is one line that names what to change."""

    def __str__(self) -> str:
        """Return the message `on_one_line`."""
        return on_one_line(super().__str__())


class ConfigError(UserError):
    """A config, an option or an argument that is invalid."""


def require_package(package: str, user: str, install: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: as it is imported.
        user: the verb or option that needs it.
        install: the argument of `pip install` that adds it.

    Raises:
        ConfigError: if it is not installed.
    """
    if find_spec(package) is None:
        raise ConfigError(f"`{user}` must have {package}: pip install {install} adds it.")


class DataError(UserError):
    """A corpus that cannot be read, or cannot be used for training."""


class WriteError(UserError):
    """A file that cannot be written; its previous content is unchanged."""


class RunError(UserError):
    """A folder that is not a run, is incomplete, or whose files do not fit together."""


def damaged(path: Path, what: str) -> RunError:
    """Return the error for a damaged file of a run; `what` says what is wrong with it."""
    return RunError(f"{path}: {what}; restore it from a copy of the run.")


class LostError(UserError):
    """A process group that the other ranks did not join in time, or that one has left."""
