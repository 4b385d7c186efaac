"""A verb in several processes: how they meet, who writes, and who says what went wrong.

Part of the command line, and as light: a process that is alone loads nothing for it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mtrain.cli import console
from mtrain.errors import ConfigError, LostError, UserError
from mtrain.io.text_width import fitted
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.runtime.torchrun_env import read_torchrun_env

if TYPE_CHECKING:
    from mtrain.config.sections import DecodingConfig
    from mtrain.decode.distributed import Load
    from mtrain.decode.translator import DecodeRequest, Translator
    from mtrain.run.load_model import LoadOptions
    from mtrain.run.run_dir import RunDir


def rank() -> str:
    """Return this process's name, where there are several and it has one."""
    try:
        launch = read_torchrun_env()
    except ConfigError:
        return ""
    return f"rank {launch.rank}: " if launch is not None else ""


def report_error(error: UserError) -> None:
    """Say on stderr what the user must change, and let torchrun say it again at its end."""
    said = f"mtrain: {rank()}{error}"
    print(fitted(said, sys.stderr), file=sys.stderr)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and rank():
        details = {"py_callstack": said, "timestamp": str(int(time.time()))}
        tree = {"message": {"message": said, "extraInfo": details}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(tree), encoding="utf-8")


def refuse_ranks(what: str) -> None:
    """Refuse to do in several processes what only one can do."""
    launch = read_torchrun_env()
    if launch is not None:
        raise ConfigError(
            f"`{what}` must run in one process, but torchrun started {launch.size}; leave torchrun "
            "out."
        )


@contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Keep every rank but the first silent until all have met.

    The first has the same command line, and says what is wrong with it.
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
    except (UserError, SystemExit):
        if isinstance(sys.stderr, _NullStream):
            sys.exit(0)
        raise
    finally:
        sys.stdout, sys.stderr = out, err


class _NullStream(io.StringIO):
    """Takes what nobody is to hear, in the place of another stream."""

    def __init__(self, instead_of: TextIO) -> None:
        super().__init__()
        self.instead_of = instead_of

    def write(self, text: str) -> int:
        """Forget it."""
        return len(text)


@contextmanager
def joined_process_group(advice: str) -> Iterator[ProcessGroup]:
    """Meet the ranks that torchrun started. Of all that goes wrong, one rank says one thing.

    Args:
        advice: how to go on where a rank has ended without a word.
    """
    launch = read_torchrun_env()
    if launch is None:
        yield SINGLE
        return
    from mtrain.runtime import torch_process_group  # and with it torch

    process_group = torch_process_group.join(launch)
    if isinstance(sys.stderr, _NullStream):
        sys.stderr = sys.stderr.instead_of
    try:
        yield process_group
        process_group.close()
    except (UserError, OSError):
        _leave_unless_first_to_speak(process_group)
        raise
    except RuntimeError as error:
        _leave_unless_first_to_speak(process_group)
        if torch_process_group.is_lost(error):
            raise LostError(
                f"another rank has ended without a word: killed, or its machine is gone; {advice}"
            ) from None
        print(f"mtrain: {rank()}has failed, and all ranks end; where it failed:", file=sys.stderr)
        raise


def _leave_unless_first_to_speak(process_group: ProcessGroup) -> None:
    """End silently if another rank has said why all end."""
    if not process_group.claim_error_report():
        sys.exit(2)


@contextmanager
def load_together(
    runs: list[RunDir], decoding: DecodingConfig, loading: LoadOptions, wanted: DecodeRequest
) -> Iterator[Translator | None]:
    """Load runs on every rank; only the first is given a translator, for which the others work."""
    from mtrain.decode.distributed import follow, leading
    from mtrain.decode.translator import load

    with joined_process_group("run it again.") as process_group:
        own = load(runs, decoding, replace(loading, process_group=process_group), wanted)
        if process_group.is_first:
            with leading(own) as translator:
                yield translator
        else:
            follow(own)
            yield None


@contextmanager
def load_each(
    runs: list[RunDir], load: Callable[[RunDir, ProcessGroup], Translator]
) -> Iterator[Load | None]:
    """Give the first rank what loads one run after the other, on every rank.

    The others load them as the first one does, and work for it.

    Args:
        runs: all that the first will load, in that order.
        load: loads one for a rank.
    """
    with joined_process_group("run it again.") as process_group:
        from mtrain.decode.distributed import follow, leading

        if process_group.is_first:
            yield lambda run: leading(load(run, process_group))
        else:
            for run in runs:
                follow(load(run, process_group))
            yield None


@contextmanager
def exit_when_stopped(run_dir: Path | str, process_group: ProcessGroup = SINGLE) -> Iterator[None]:
    """Turn a training that a signal stopped into the exit code that shells expect."""
    from mtrain.runtime.signals import Stopped

    try:
        yield
    except Stopped as stopped:
        if process_group.is_first:
            console.warn(
                f"stopped; all is saved in {run_dir}, and the same command goes on from there."
            )
        process_group.close()  # torchrun ends all when one has ended
        sys.exit(128 + stopped.signal_number)
