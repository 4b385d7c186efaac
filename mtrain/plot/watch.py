"""Draw a run again and again while it is trained. Knows when to draw, not what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

from mtrain.errors import UserError
from mtrain.plot import draw
from mtrain.run.run_dir import RunDir


def watch(
    run: RunDir,
    sentence: str | None,
    directory: Path,
    warn: Callable[[str], None],
    every_s: float,
) -> Iterator[Path]:
    """Draw all, the curves whenever more was logged, and all again when the training ends.

    Args:
        run: the run folder.
        sentence: the one whose attention is drawn; None takes a validation sentence.
        directory: of the pictures.
        warn: called with each warning.
        every_s: seconds between two looks at the log.

    Yields:
        The path of each file once it is written.

    Raises:
        UserError: if no process is training and nothing can be drawn, or on a failed write.
    """
    if not run.is_locked():
        warn(f"nobody is training in {run.path}; it is drawn once.")
        yield from draw.draw(run, sentence, directory, warn)
        return
    size = _size(run)
    try:
        yield from draw.draw(run, sentence, directory, warn)
    except UserError as error:
        warn(f"{error} It is tried again when more was logged.")
    while run.is_locked():
        sleep(every_s)
        new_size = _size(run)
        if new_size != size and run.is_locked():
            size = new_size
            try:
                yield from draw.draw_progress(run, directory)
            except UserError as error:
                warn(str(error))
    yield from draw.draw(run, sentence, directory, warn)


def _size(run: RunDir) -> int:
    return run.metrics_path.stat().st_size if run.metrics_path.exists() else 0
