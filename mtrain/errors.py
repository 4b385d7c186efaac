"""The few errors that a user can cause. Only the command line catches them."""


class UserError(Exception):
    """Something that the user must change; its text is one line that says what."""


class ConfigError(UserError):
    """A config file, or a `--set`, that cannot be used as it stands."""


class DataError(UserError):
    """A corpus that cannot be read, or cannot be used for training."""


class WriteError(UserError):
    """A file that the disk does not take; what was there before is as it was."""


class RunError(UserError):
    """A run folder that is not one, is incomplete, or does not fit its own parts."""
