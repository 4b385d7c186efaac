"""The verbs that users type. The only room that catches a user's errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mtrain import __version__
from mtrain import config as configs
from mtrain.errors import ConfigError, UserError

if TYPE_CHECKING:
    from mtrain.config import Config, DecodingConfig
    from mtrain.rundir import RunDir

app = typer.Typer(
    help="Train a translator from parallel text, and measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The config, one YAML file.", show_default=False)
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the config; repeatable."),
]
RunOption = Annotated[str | None, typer.Option("--run", metavar="DIR", help="Override run_dir.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write to a file, whole or not at all."),
]
BeamOption = Annotated[int | None, typer.Option(min=1, help="Beam width; 1 is greedy search.")]
AlphaOption = Annotated[
    float | None, typer.Option(min=0.0, max=10.0, help="Length normalisation; 0 is none.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]


def main() -> NoReturn:
    """Run the command line; a user's error is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"mtrain: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"mtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Go the whole path on mtrain's own corpus, in minutes.

    Example: mtrain demo runs/demo
    """
    from mtrain import demo as demonstrating
    from mtrain.runlog import Stderr

    with _saving(directory):
        demonstrating.demo(directory, Stderr())
    _put(demonstrating.report(directory), None)


@app.command()
def tokenize(config: ConfigArgument, set_: SetOption = None, run: RunOption = None) -> None:
    """Train the tokenizer and encode the corpora into the run folder.

    Example: mtrain tokenize configs/demo.yaml --set tokenizer.vocab_size=1000
    """
    settings = configs.load(config, set_ or [], run)
    _prepare(settings)


@app.command()
def train(config: ConfigArgument, set_: SetOption = None, run: RunOption = None) -> None:
    """Train a translator; go on if it was stopped.

    Tokenizes first if that is not done, and resumes from the newest checkpoint.

    Example: mtrain train configs/demo.yaml --set training.max_steps=500
    """
    settings = configs.load(config, set_ or [], run)
    run_dir = _prepare(settings)
    from mtrain import train as training

    with _saving(run_dir.path):
        training.train(settings, run_dir)


def _prepare(settings: Config) -> RunDir:
    from mtrain.prepare import prepare
    from mtrain.rundir import RunDir
    from mtrain.runlog import Stderr

    run_dir = RunDir(Path(settings.run_dir))
    prepare(settings, run_dir, Stderr())
    return run_dir


@contextmanager
def _saving(run_dir: Path) -> Iterator[None]:
    """Turn a training that a signal stopped into the exit code that shells expect."""
    from mtrain.train import Stopped

    try:
        yield
    except Stopped as stopped:
        _warn(f"stopped; all is saved in {run_dir}, and the same command goes on from there.")
        sys.exit(128 + stopped.signal_number)


@app.command()
def translate(
    run: RunArgument,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Text to translate; stdin if absent.")
    ] = None,
    output: OutputOption = None,
    beam: BeamOption = None,
    length_alpha: AlphaOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Translate line by line: as many lines out as in.

    Example: echo "The old farmer is tired." | mtrain translate runs/demo
    """
    from mtrain import files
    from mtrain import translate as translating
    from mtrain.rundir import RunDir

    run_dir = RunDir(run)
    decoding = _decoding(run_dir, beam, length_alpha)
    translator = translating.load(run_dir, decoding, device)
    _put(translator.stream(files.read_forgiving(file, _warn), _warn), output)


def _warn(text: str) -> None:
    print(f"mtrain: {text}", file=sys.stderr)


def _decoding(run_dir: RunDir, beam: int | None, length_alpha: float | None) -> DecodingConfig:
    decoding = run_dir.load_config().decoding
    changes = {"beam": beam, "length_alpha": length_alpha}
    given = {key: value for key, value in changes.items() if value is not None}
    return decoding.model_copy(update=given)


@app.command(name="eval")
def evaluate(
    run: RunArgument,
    output: OutputOption = None,
    tokenize: Annotated[
        str | None, typer.Option(help="sacreBLEU's tokenizer: 13a (default), none, intl, char, ...")
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    beam: BeamOption = None,
    length_alpha: AlphaOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Translate the test sets and score them with BLEU and chrF.

    Example: mtrain eval runs/demo --json
    """
    from mtrain import evaluate as evaluating
    from mtrain import translate as translating
    from mtrain.rundir import RunDir

    run_dir = RunDir(run)
    options = evaluating.ScoringOptions(tokenize, lowercase)
    translator = translating.load(run_dir, _decoding(run_dir, beam, length_alpha), device)
    results = evaluating.evaluate(run_dir, translator, options)
    _put(evaluating.as_json(results) if json else evaluating.as_text(results), output)


@app.command()
def plot(
    run: RunArgument,
    sentence: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Whose attention to draw.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder; RUN/plots if absent.")
    ] = None,
) -> None:
    """Draw the training and the model, as PNG and SVG.

    Example: mtrain plot runs/demo --sentence "The old farmer is tired."
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("`mtrain plot` must have matplotlib: pip install 'mtrain[plot]' adds it.")
    from mtrain import plots
    from mtrain.rundir import RunDir

    _put(
        (str(path) for path in plots.draw(RunDir(run), sentence, out or run / "plots", _warn)), None
    )


def _put(lines: Iterable[str], output: Path | None) -> None:
    from mtrain import files

    if output is None:
        files.print_lines(lines)
    else:
        files.write_lines(output, lines)
