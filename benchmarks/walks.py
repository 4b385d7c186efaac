"""Count the files of the package that a command passes through, by tracing real commands.

    python benchmarks/walks.py [--list]

Four walks: from `mtrain train` to the first batch, from the first update to the end of the first
checkpoint, from the first look at the text of `mtrain translate` to the end, and from `mtrain eval`
to its scores without loading and translating. A file counts if one of its functions is called
on the way, on any thread; what runs while a module is imported does not count. The walks use a tiny
model of the demo corpus in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import mtrain

PACKAGE = str(Path(mtrain.__file__).parent) + os.sep
CONFIG = """\
run_dir: run
data:
  src_lang: en
  tgt_lang: de
  train: {src: [train.en], tgt: [train.de]}
  valid: {src: [test.en], tgt: [test.de]}
  tests: {demo: {src: [test.en], tgt: [test.de]}}
tokenizer: {vocab_size: 500}
model: {d_model: 16, num_heads: 2, d_ff: 32, num_encoder_layers: 1, num_decoder_layers: 1}
training: {max_steps: 4, batch_tokens: 512, save_every: 2, validate_every: 4, warmup_steps: 2}
"""


class Trace:
    """The files of the package in which functions were called.

    Args:
        starts: name of a function, as `file.py name`, whose first call opens the trace.
        ends: name of a function, likewise, whose first return closes it.
        skips: qualified names of functions inside which nothing counts; other threads than the
            main one do not count either, if there are any.
    """

    def __init__(self, starts: str = "", ends: str = "", skips: tuple[str, ...] = ()) -> None:
        self.files: set[str] = set()
        self.starts, self.ends, self.skips = starts, ends, skips
        self.is_open = not starts
        self.local = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note one event of the interpreter's profiler."""
        code = frame.f_code
        if self.skips and threading.current_thread() is not threading.main_thread():
            return
        is_hidden = code.co_name == "<module>" or code.co_qualname in self.skips
        if event == "call":
            hidden = getattr(self.local, "hidden", 0) + is_hidden
            self.local.hidden = hidden
            if self.starts and f"{Path(code.co_filename).name} {code.co_name}" == self.starts:
                self.is_open, self.starts = True, ""
            if self.is_open and not hidden and code.co_filename.startswith(PACKAGE):
                self.files.add(code.co_filename.removeprefix(PACKAGE))
        elif event == "return":
            if is_hidden:
                self.local.hidden = max(0, getattr(self.local, "hidden", 0) - 1)
            if code.co_filename.startswith(PACKAGE):
                name = f"{Path(code.co_filename).name} {code.co_name}"
                if name == self.ends and self.is_open:
                    self.is_open, self.ends = False, ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Trace all threads."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def command_line() -> Callable[[], None]:
    """Return the function behind the `mtrain` command."""
    from mtrain.cli.main import main

    return main


def trace(arguments: list[str], traced: Trace) -> set[str]:
    """Run a command and return the files that it passed through."""
    sys.argv = ["mtrain", *arguments]
    main = command_line()
    with (
        tempfile.TemporaryFile("w") as out,
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(out),
        traced.running(),
        contextlib.suppress(SystemExit),
    ):
        main()
    return traced.files


def main() -> None:
    """Print the number of files of each walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="Name the files, too.")
    with_list = parser.parse_args().list
    corpus = Path(__file__).resolve().parent.parent / "data" / "demo"
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for split, count in (("train", 2000), ("test", 20)):
            for side in ("en", "de"):
                lines = (corpus / f"{split}.{side}").read_text("utf-8").splitlines()[:count]
                Path(f"{split}.{side}").write_text("\n".join(lines) + "\n", "utf-8")
        Path("config.yaml").write_text(CONFIG, "utf-8")
        Path("line.en").write_text("The old farmer is tired.\n", "utf-8")
        translates = ("LineTranslator.translate", "Stream.translate", "load")
        walks = {
            "config to the first batch": (["train", "config.yaml"], Trace(ends="batch.py collate")),
            "batch to a checkpoint": (
                ["train", "config.yaml", "--run", "other"],
                Trace(starts="trainer.py _update", ends="checkpoint.py save"),
            ),
            "line to stdout": (
                ["translate", "run", "line.en"],
                Trace(starts="lines.py read_blocks"),
            ),
            "run to its scores": (["eval", "run"], Trace(skips=translates)),
        }
        for name, (arguments, traced) in walks.items():
            files = sorted(trace(arguments, traced))
            print(f"{name:<27}{len(files):>4} files")
            if with_list:
                print("    " + "\n    ".join(files))
        os.chdir("/")


if __name__ == "__main__":
    main()
