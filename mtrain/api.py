"""What `import mtrain` offers to a notebook or a program, and the command line itself uses.

Mistakes are exceptions (`UserError` and its kinds), never an exit. Imports nothing heavy until
something is trained or loaded. Knows no options of a command line and prints no results.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.errors import DataError
from mtrain.run import finetune
from mtrain.run.logger import Board, check_installed
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE, ProcessGroup

if TYPE_CHECKING:
    from mtrain.corpus.length_stats import CorpusStats
    from mtrain.decode.translator import Translator
    from mtrain.evaluate.evaluation import TestResult
    from mtrain.evaluate.metrics import ScoringOptions

AnyPath = str | os.PathLike[str]
AnyConfig = Config | Mapping[str, Any] | AnyPath
_LINE_BREAK = re.compile(r"\r?\n")
_HALF = re.compile("[\ud800-\udfff]")  # of a character: no text that can be written


@dataclass(frozen=True)
class Model:
    """A trained run, or several as an ensemble, ready to translate.

    Attributes:
        run: the run folder, the first of several.
        config: of that run.
        translator: the models, their tokenizer, and how to search.
        profile: what is usual in the training pairs, if the run folder says.
    """

    run: RunDir
    config: Config
    translator: Translator
    profile: CorpusStats | None

    def translate(self, lines: Iterable[str]) -> list[str]:
        """Return one translation for each line, in order, as `mtrain translate` writes them.

        A blank line gives an empty one. A line's own end is not part of it, so that an open file
        will do; a line break within is read as a space. Lines longer than any training pair are
        translated in parts. What looks wrong is a Python warning with the line's number.

        Raises:
            DataError: if `lines` is one text instead of several, or holds something else.
        """
        from mtrain.decode.pipeline import translate_lines

        return translate_lines(self.translator, _clean(lines), self.profile, _warn)


def load_config(
    config: AnyConfig, overrides: Iterable[str] = (), run_dir: AnyPath | None = None
) -> Config:
    """Return the config of a YAML file, or of a mapping in its form, checked and complete.

    Args:
        config: the file, the mapping, or a config that was loaded before.
        overrides: `key.key=value`, as after `--set`.
        run_dir: instead of the config's own.

    Raises:
        ConfigError: with the key, in one line.
    """
    own_dir = None if run_dir is None else os.fspath(run_dir)
    if isinstance(config, str | os.PathLike):
        return finetune.complete_config(
            config_file.load(Path(config), overrides, own_dir), str(config)
        )
    tree = config.model_dump(exclude_unset=True) if isinstance(config, Config) else config
    return finetune.complete_config(
        config_file.from_tree(tree, "config", overrides, own_dir), "config"
    )


def train(config: AnyConfig, *, tensorboard: bool = False) -> Path:
    """Train a translator, or go on if it was stopped; return its run folder.

    Tokenizes first if that is not done, and resumes from the newest checkpoint. Says on stderr how
    it goes, and with `tensorboard` writes the numbers for it into the run folder.

    Raises:
        UserError: if the config, the corpora or the run folder must change.
        Stopped: on SIGINT (a notebook's stop button), SIGTERM or SIGHUP, after saving.
    """
    return train_together(load_config(config), SINGLE, tensorboard=tensorboard)


def train_together(config: Config, process_group: ProcessGroup, *, tensorboard: bool) -> Path:
    """Train as one of several ranks that were started together, each with the same config."""
    from mtrain.train import checkpoint_manager, trainer
    from mtrain.train.compilation import device_of

    run_dir, board = RunDir(Path(config.run_dir)), None
    device_of(config, process_group)  # refused now, and not when all is tokenized
    if tensorboard:
        check_installed()
    if process_group.is_first:
        checkpoint_manager.check_unfinished(run_dir)  # before tokenizing writes anything
        finetune.check_weights(config)
        _prepare(config, run_dir)
        board = Board(run_dir.board_dir) if tensorboard else None
    process_group.barrier()
    trainer.train(config, run_dir, process_group, board)
    return run_dir.path


def tokenize(config: AnyConfig) -> RunDir:
    """Train the tokenizer and encode the corpora into the run folder, unless that is done.

    Raises:
        UserError: if the config, the corpora or the run folder must change.
    """
    config = load_config(config)
    return _prepare(config, RunDir(Path(config.run_dir)))


def _prepare(config: Config, run_dir: RunDir) -> RunDir:
    from mtrain.data.prepare import prepare
    from mtrain.run.logger import Stderr

    prepare(config, run_dir, Stderr())
    return run_dir


def load(
    runs: AnyPath | Sequence[AnyPath],
    *,
    beam: int | None = None,
    length_alpha: float | None = None,
    device: str = "auto",
) -> Model:
    """Load a trained run, or several as an ensemble, ready to translate.

    From then on the process keeps the memory that it frees.

    Args:
        runs: a run folder, or several.
        beam: its width; 1 is greedy search, None as the run's config says.
        length_alpha: length normalisation; 0 is none, None as the run's config says.
        device: auto, cpu, cuda, cuda:1, ...

    Raises:
        RunError: if a folder is no run, has no trained model, or its parts do not fit.
        ConfigError: if a setting cannot be used.
    """
    from mtrain.data.prepare import read_profile
    from mtrain.decode import translator as translating
    from mtrain.decode.options import DecodingOptions
    from mtrain.run.load_model import LoadOptions

    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    if not paths:
        raise DataError("`runs` must have a run folder, but is empty.")
    folders = [RunDir(Path(path)) for path in paths]
    config = folders[0].config
    given = {"beam": beam, "length_alpha": length_alpha}
    asked = {key: value for key, value in given.items() if value is not None}
    tree = config.model_dump()
    changed = tree | {"decoding": tree["decoding"] | asked}
    checked = config_file.from_tree(changed, "mtrain.load")
    options = replace(DecodingOptions.from_config(checked), with_scores=False)
    translator = translating.load(folders, options, LoadOptions(device))
    return Model(folders[0], config, translator, read_profile(folders[0]))


def evaluate(run: Model | AnyPath, options: ScoringOptions | None = None) -> list[TestResult]:
    """Translate the test sets of a run and score them by sacreBLEU, as `mtrain eval` does.

    What looks wrong is a Python warning with the test set and the line's number.

    Raises:
        UserError: if the run cannot be loaded, has no test sets, or their text is gone.
    """
    from mtrain.evaluate import evaluation

    model = run if isinstance(run, Model) else load(run)
    return evaluation.evaluate(model.run, model.translator, _warn, options)


def _warn(text: str) -> None:
    warnings.warn(f"mtrain: {text}", stacklevel=2)


def _clean(lines: Iterable[str]) -> Iterator[str]:
    if isinstance(lines, str | bytes):
        raise DataError("`lines` must be a list of lines, but is one text; put it in a list.")
    return (_as_line(number, line) for number, line in enumerate(lines, start=1))


def _as_line(number: int, line: object) -> str:
    """Return a line as a file would hold it."""
    if not isinstance(line, str):
        raise DataError(f"line {number}: must be text, but is {line!r:.60} instead.")
    whole = _HALF.sub("\ufffd", line.removesuffix("\n").removesuffix("\r"))
    return _LINE_BREAK.sub(" ", whole)
