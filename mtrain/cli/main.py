"""The verbs, and the exit codes of errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from mtrain import __version__
from mtrain.cli import console
from mtrain.cli.check import check
from mtrain.cli.demo import demo
from mtrain.cli.doctor import doctor
from mtrain.cli.evaluate import evaluate
from mtrain.cli.export import export
from mtrain.cli.init import init
from mtrain.cli.plot import plot
from mtrain.cli.ranks import refuse_ranks, report_error, silence_other_ranks
from mtrain.cli.tokenize import tokenize
from mtrain.cli.train import train
from mtrain.cli.translate import translate
from mtrain.errors import UserError
from mtrain.runtime.process_group import read_torchrun_env
from mtrain.runtime.signals import unwind_when_stopped

app = typer.Typer(
    help="Train a translator from parallel text, and measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_SHARED = {"train", "translate", "eval"}  # verbs that several processes may share
_GOING_ON = {"train", "tokenize", "demo"}  # and those that leave what the same command goes on from


def main() -> NoReturn:
    """Run the command line; a user's error is one line on stderr and exit code 2.

    So is an OSError that names a file: a full disk, no permission, no such file.
    """
    console.open_closed_streams()
    try:
        with silence_other_ranks():
            app(prog_name="mtrain")  # whatever started it: completion goes by the name
    except UserError as error:
        report_error(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        report_error(UserError(f"{error.filename}: {error.strerror}."))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _show_version(is_asked: bool) -> None:
    if not is_asked:
        return
    print(f"mtrain     {__version__}", flush=True)  # at once: PyTorch takes its time
    try:
        from mtrain.runtime import versions
    except (ImportError, OSError) as error:
        print(f"torch      cannot be loaded: {error}")
        raise typer.Exit(2) from None
    console.put(versions.describe(), None)
    raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show it, and what it runs on."
        ),
    ] = False,
) -> None:
    launch, verb = read_torchrun_env(), context.invoked_subcommand
    if launch is not None and verb not in _SHARED:
        refuse_ranks(f"mtrain {verb}")
    if launch is None and verb not in _GOING_ON:  # ranks may wait where no signal is seen
        unwind_when_stopped()


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
}
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)
