"""The few errors that a user can cause. Only the command line catches them."""

import re
from pathlib import Path

NEEDS_POSIX = "mtrain needs Linux, macOS or another POSIX system; on Windows, WSL is one."

_NOT_SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # line ends among them


class UserError(Exception):
    """Something that the user must change; its text is one line that says what."""

    def __str__(self) -> str:
        """Return the line, with escapes for what a file name or a value has smuggled in."""
        return _NOT_SHOWN.sub(lambda match: ascii(match[0])[1:-1], super().__str__())


class ConfigError(UserError):
    """A config file, or a `--set`, that cannot be used as it stands."""


class DataError(UserError):
    """A corpus that cannot be read, or cannot be used for training."""


class WriteError(UserError):
    """A file that cannot be written; its previous content is unchanged."""


class RunError(UserError):
    """A run folder that is none, is incomplete, or whose parts do not fit each other."""


def damaged(path: Path, what: str) -> RunError:
    """Return the error for a file that must be restored; `what` is wrong with it."""
    return RunError(f"{path}: {what}; restore it from a copy of the run.")


class LostError(UserError):
    """Ranks that cannot join their process group, or have left it."""
