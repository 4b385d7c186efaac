"""A verb under torchrun: joining the process group, and one error message for all ranks.

Imports torch only where there are several ranks.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mtrain.cli import console
from mtrain.errors import ConfigError, LostError, UserError
from mtrain.run.logger import Stderr
from mtrain.runtime.process_group import SINGLE, ProcessGroup, read_torchrun_env
from mtrain.runtime.signals import Stopped

_HEAD_START_S = 3.0  # in which rank 0 reports a mistake before the other ranks exit


def _rank_prefix() -> str:
    """Return the rank of this process for messages; empty without torchrun."""
    try:
        launch = read_torchrun_env()
    except ConfigError:
        return ""
    return f"rank {launch.rank}: " if launch is not None else ""


def report_error(error: UserError) -> None:
    """Print an error on stderr, and write it to the error file that torchrun prints at its end."""
    message = f"mtrain: {_rank_prefix()}{error}"
    Stderr().say(message)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and _rank_prefix():
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        tree = {"message": {"message": message, "extraInfo": details}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(tree), encoding="utf-8")


def refuse_ranks(what: str) -> None:
    """Raise ConfigError under torchrun, for a verb that runs in one process."""
    launch = read_torchrun_env()
    if launch is not None:
        raise ConfigError(
            f"`{what}` must run in one process, but torchrun started {launch.size}; leave torchrun "
            "out."
        )


@contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Silence all ranks but 0 until the process group is joined.

    All ranks have the same command line; rank 0 reports what is wrong with it. The others exit with
    the same code, but later, because torchrun ends all ranks when the first one has failed.
    """
    launch = read_torchrun_env()
    if launch is None or launch.rank == 0:
        yield
        return
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _NullStream(out), _NullStream(err)
    try:
        yield
    except LostError:
        raise
    except (UserError, SystemExit) as error:
        if not isinstance(sys.stderr, _NullStream):
            raise
        code = error.code if isinstance(error, SystemExit) else 2
        if code:
            time.sleep(_HEAD_START_S)
        sys.exit(code)
    finally:
        sys.stdout, sys.stderr = out, err


class _NullStream(io.TextIOWrapper):
    """A replacement for another stream; the text written to it is not shown."""

    def __init__(self, instead_of: TextIO) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="replace")
        self.instead_of = instead_of


@contextmanager
def joined_process_group(advice: str) -> Iterator[ProcessGroup]:
    """Join the process group of torchrun, if any; one rank reports an error for all.

    Args:
        advice: what to do after a rank was killed, for the error message.
    """
    launch = read_torchrun_env()
    if launch is None:
        yield SINGLE
        return
    from mtrain.runtime import torch_process_group  # imports torch

    process_group = torch_process_group.join(launch)
    if isinstance(sys.stderr, _NullStream):
        sys.stderr = sys.stderr.instead_of
    try:
        yield process_group
        process_group.close()
    except Exception as error:
        if not process_group.claim_error_report():
            sys.exit(2)  # silently: another rank has reported an error
        if torch_process_group.is_lost(error):
            raise LostError(
                "another rank ended without an error message: it was killed, or its machine is "
                f"gone; {advice}"
            ) from None
        if not isinstance(error, UserError | OSError):
            print(
                f"mtrain: {_rank_prefix()}has failed, and all ranks end; where it failed:",
                file=sys.stderr,
            )
        raise


@contextmanager
def exit_when_stopped(run_dir: Path | str, process_group: ProcessGroup = SINGLE) -> Iterator[None]:
    """Exit with 128 plus the signal's number if a signal stopped the training."""
    try:
        yield
    except Stopped as stopped:
        if process_group.is_first:
            console.warn(
                f"stopped; all is saved in {run_dir}, and the same command goes on from there."
            )
        process_group.close()  # torchrun ends all ranks when one has ended
        sys.exit(128 + stopped.signal_number)
