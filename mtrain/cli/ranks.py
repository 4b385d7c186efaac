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
from mtrain.runtime.process_group import ALONE, Team
from mtrain.runtime.torchrun_env import launched

if TYPE_CHECKING:
    from mtrain.config.sections import DecodingConfig
    from mtrain.decode.distributed import Load
    from mtrain.decode.translator import Translator, Wanted
    from mtrain.run.load_model import Loading
    from mtrain.run.run_dir import RunDir


def rank() -> str:
    """Return this process's name, where there are several and it has one."""
    try:
        launch = launched()
    except ConfigError:
        return ""
    return f"rank {launch.rank}: " if launch is not None else ""


def complain(error: UserError) -> None:
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
    launch = launched()
    if launch is not None:
        raise ConfigError(
            f"`{what}` must run in one process, but torchrun started {launch.size}; leave torchrun "
            "out."
        )


@contextmanager
def one_of_many() -> Iterator[None]:
    """Keep every rank but the first silent until all have met.

    The first has the same command line, and says what is wrong with it.
    """
    launch = launched()
    if launch is None or launch.rank == 0:
        yield
        return
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Nowhere(out), _Nowhere(err)
    try:
        yield
    except LostError:
        raise
    except (UserError, SystemExit):
        if isinstance(sys.stderr, _Nowhere):
            sys.exit(0)
        raise
    finally:
        sys.stdout, sys.stderr = out, err


class _Nowhere(io.StringIO):
    """Takes what nobody is to hear, in the place of another stream."""

    def __init__(self, instead_of: TextIO) -> None:
        super().__init__()
        self.instead_of = instead_of

    def write(self, text: str) -> int:
        """Forget it."""
        return len(text)


@contextmanager
def together(advice: str) -> Iterator[Team]:
    """Meet the ranks that torchrun started. Of all that goes wrong, one rank says one thing.

    Args:
        advice: how to go on where a rank has ended without a word.
    """
    launch = launched()
    if launch is None:
        yield ALONE
        return
    from mtrain.runtime import torch_process_group  # and with it torch

    team = torch_process_group.join(launch)
    if isinstance(sys.stderr, _Nowhere):
        sys.stderr = sys.stderr.instead_of
    try:
        yield team
        team.leave()
    except (UserError, OSError):
        _leave_unless_first_to_speak(team)
        raise
    except RuntimeError as error:
        _leave_unless_first_to_speak(team)
        if torch_process_group.is_lost(error):
            raise LostError(
                f"another rank has ended without a word: killed, or its machine is gone; {advice}"
            ) from None
        print(f"mtrain: {rank()}has failed, and all ranks end; where it failed:", file=sys.stderr)
        raise


def _leave_unless_first_to_speak(team: Team) -> None:
    """End silently if another rank has said why all end."""
    if not team.may_speak():
        sys.exit(2)


@contextmanager
def load_together(
    runs: list[RunDir], decoding: DecodingConfig, loading: Loading, wanted: Wanted
) -> Iterator[Translator | None]:
    """Load runs on every rank; only the first is given a translator, for which the others work."""
    from mtrain.decode.distributed import follow, leading
    from mtrain.decode.translator import load

    with together("run it again.") as team:
        own = load(runs, decoding, replace(loading, team=team), wanted)
        if team.is_first:
            with leading(own) as translator:
                yield translator
        else:
            follow(own)
            yield None


@contextmanager
def load_each(
    runs: list[RunDir], load: Callable[[RunDir, Team], Translator]
) -> Iterator[Load | None]:
    """Give the first rank what loads one run after the other, on every rank.

    The others load them as the first one does, and work for it.

    Args:
        runs: all that the first will load, in that order.
        load: loads one for a rank.
    """
    with together("run it again.") as team:
        from mtrain.decode.distributed import follow, leading

        if team.is_first:
            yield lambda run: leading(load(run, team))
        else:
            for run in runs:
                follow(load(run, team))
            yield None


@contextmanager
def exit_when_stopped(run_dir: Path | str, team: Team = ALONE) -> Iterator[None]:
    """Turn a training that a signal stopped into the exit code that shells expect."""
    from mtrain.runtime.signals import Stopped

    try:
        yield
    except Stopped as stopped:
        if team.is_first:
            console.warn(
                f"stopped; all is saved in {run_dir}, and the same command goes on from there."
            )
        team.leave()  # torchrun ends all when one has ended
        sys.exit(128 + stopped.signal_number)
