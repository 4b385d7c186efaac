"""The verbs, and the exit codes of errors."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from typer.core import TyperCommand

from mtrain import __version__
from mtrain.cli import console
from mtrain.cli.ranks import refuse_ranks, report_error, silence_other_ranks
from mtrain.cli.verbs.augment import augment
from mtrain.cli.verbs.check import check
from mtrain.cli.verbs.demo import demo
from mtrain.cli.verbs.distill import distill
from mtrain.cli.verbs.doctor import doctor
from mtrain.cli.verbs.evaluate import evaluate
from mtrain.cli.verbs.export import export
from mtrain.cli.verbs.init import init
from mtrain.cli.verbs.plot import plot
from mtrain.cli.verbs.serve import serve
from mtrain.cli.verbs.tokenize import tokenize
from mtrain.cli.verbs.train import train
from mtrain.cli.verbs.translate import translate
from mtrain.config import config_file
from mtrain.config.sections import format_value
from mtrain.errors import NEEDS_POSIX, ConfigError, UserError
from mtrain.io.atomic import write_stdout
from mtrain.runtime.process_group import read_torchrun_env
from mtrain.runtime.process_settings import own_process
from mtrain.runtime.signals import STOPPING, unwind_when_stopped

_SHARED = {"train", "translate", "eval", "augment"}  # verbs that several processes may share
_GOING_ON = {"train", "tokenize", "demo", "augment"}  # verbs that resume if run again
_PATH_ERRORS = (  # of a path that cannot be used; with any other errno, an OSError is a bug
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.EBUSY, errno.EIO, errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT),
)
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # the base of all mistakes in options


def main() -> NoReturn:
    """Run the command line; a user's error is one line on stderr and exit code 2."""
    if os.name != "posix":
        print(f"mtrain: {NEEDS_POSIX}", file=sys.stderr)
        sys.exit(2)
    console.open_closed_streams()
    own_process()
    try:
        with silence_other_ranks(), console.log_on_stderr():
            _run()
    except UserError as error:
        report_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> NoReturn:
    """Run the verb of the command line.

    A mistake in its options is a user's error, and so is an OSError that names a path which is
    missing or cannot be used. Any other OSError is a bug.
    """
    named = [name for name in sys.argv[1:2] if name in VERBS]
    try:
        # the same name however it is started: shell completion depends on it
        sys.exit(command_line(named or VERBS)(prog_name="mtrain", standalone_mode=False))
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else " ".join(["mtrain", *named])
        message = _what_is_wrong(error)
        see = " See" if message.endswith("?") else "; see"
        raise ConfigError(f"{message}{see} `{verb} --help`.") from None
    except OSError as error:
        write_stdout(b"")  # raises if the error is that of stdout: its text is buffered still
        if not isinstance(error.filename, str | os.PathLike) or error.errno not in _PATH_ERRORS:
            raise
        raise UserError(f"{os.fspath(error.filename)}: {error.strerror}.") from None


def _what_is_wrong(error: Exception) -> str:
    """Return typer's message without its full stop; for a wrong value, worded as for the config."""
    param, cause = getattr(error, "param", None), error.__cause__
    message = str(getattr(error, "message", "")).removesuffix(".")
    if isinstance(error, typer.BadParameter) and param is not None and message:
        is_option = param.param_type_name == "option"
        name = max(param.opts, key=len) if is_option else param.metavar
        if choice := re.search(r"('.*') is not one of (.*)", message):
            return f"`{name}` must be one of {choice[2]}, but is {choice[1]} instead"
        if isinstance(cause, ValidationError):
            finding = cause.errors()[0]
            expected, value = config_file.requirement(finding), format_value(finding["input"])
            return f"`{name}` must be {expected}, but is {value} instead"
        return f"`{name}`: {message}"
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    message = message.removesuffix(".")
    return message[0].lower() + message[1:]


def _show_version(is_asked: bool) -> None:
    if not is_asked:
        return
    print(f"mtrain     {__version__}", flush=True)  # before the slow import of PyTorch
    try:
        from mtrain.ops import native
        from mtrain.runtime import device
    except (ImportError, OSError) as error:
        print(f"torch      cannot be loaded: {error}")
        raise typer.Exit(2) from None
    console.put(device.describe(native.describe), None)
    raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show versions, device, precision.",
        ),
    ] = False,
) -> None:
    launch, verb = read_torchrun_env(), context.invoked_subcommand
    if verb is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    if launch is not None and verb not in _SHARED:
        refuse_ranks(f"mtrain {verb}")
    # other ranks may block in C, where no handler runs; when they end, rank 0 blocks no longer
    if launch is None or launch.rank == 0:
        unwind_when_stopped(STOPPING[:1] if verb in _GOING_ON else STOPPING)


VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "init": init,
    "check": check,
    "tokenize": tokenize,
    "train": train,
    "translate": translate,
    "eval": evaluate,
    "plot": plot,
    "doctor": doctor,
    "export": export,
    "augment": augment,
    "distill": distill,
    "serve": serve,
}


class _VerbCommand(TyperCommand):
    """A verb that refuses the name of an option as the value of another, whose own is missing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options: dict[str, Any] = {
            name: param
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        index = len(args) if ctx.resilient_parsing else 0  # shell completion may lack values
        while index < len(args) and args[index] != "--":
            option = options.get(args[index])
            num_values = option.nargs if option is not None and not option.is_flag else 0
            for value in args[index + 1 : index + 1 + num_values]:
                if value in options:
                    needs = "an argument" if num_values == 1 else f"{num_values} arguments"
                    raise ConfigError(
                        f"option '{args[index]}' requires {needs}, but '{value}' is an option; see "
                        f"`{ctx.command_path} --help`."
                    )
            index += 1 + num_values
        return super().parse_args(ctx, args)


def command_line(names: Iterable[str]) -> typer.Typer:
    """Return the command line with these of the verbs, each of which takes milliseconds."""
    app = typer.Typer(
        help="Train a translator from parallel text, and measure it.",
        invoke_without_command=True,
        callback=_options,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name in names:
        app.command(name, cls=_VerbCommand)(VERBS[name])
    return app
