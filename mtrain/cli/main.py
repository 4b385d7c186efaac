"""The verbs that users type. The only room that catches a user's errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from mtrain import __version__, api
from mtrain.cli import console, interactive, options
from mtrain.cli.ranks import complain, load_each, load_together, one_of_many, refuse_ranks, together
from mtrain.errors import ConfigError, DataError, UserError
from mtrain.runtime.process_group import ALONE, Team
from mtrain.runtime.signals import unwind_when_stopped
from mtrain.runtime.torchrun_env import launched

if TYPE_CHECKING:
    from mtrain.config.sections import DecodingConfig
    from mtrain.decode import formats
    from mtrain.decode.distributed import Load
    from mtrain.decode.formats import Line
    from mtrain.decode.pipeline import Stream
    from mtrain.decode.translator import Loading, Translator, Wanted
    from mtrain.evaluate.metrics import ScoringOptions
    from mtrain.run.run_dir import RunDir

app = typer.Typer(
    help="Train a translator from parallel text, and measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_SHARED = {"train", "translate", "eval"}  # verbs that several processes may share
_GOING_ON = {"train", "tokenize", "demo"}  # and those that leave what the same command goes on from
_OF_CTRANSLATE2 = {
    "paths",
    "output",
    "beam",
    "length_alpha",
    "max_input_tokens",
    "on_long",
    "engine",
}


class RunsAndFile(NamedTuple):
    """What stands on the command line: run folders, and the text if it is a file."""

    runs: list[RunDir]
    file: Path | None


def main() -> NoReturn:
    """Run the command line; a user's error is one line on stderr and exit code 2.

    So is what the system says about a file that it names: no room, no permission, no such name.
    """
    console.open_closed_streams()
    try:
        with one_of_many():
            app(prog_name="mtrain")  # whatever started it: completion goes by the name
    except UserError as error:
        complain(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        complain(UserError(f"{error.filename}: {error.strerror}."))
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
    launch, verb = launched(), context.invoked_subcommand
    if launch is not None and verb not in _SHARED:
        refuse_ranks(f"mtrain {verb}")
    if launch is None and verb not in _GOING_ON:  # ranks may wait where no signal is seen
        unwind_when_stopped()


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Go the whole path on mtrain's own corpus, in minutes.

    Example: mtrain demo runs/demo
    """
    from mtrain.demo import demo as demonstrating
    from mtrain.run.logger import Stderr

    with _saving(directory):
        demonstrating.demo(directory, Stderr())
    console.put(demonstrating.report(directory, console.warn), None)


@app.command()
def init(
    src: options.SrcOption,
    tgt: options.TgtOption,
    src_lang: options.SrcLangOption,
    tgt_lang: options.TgtLangOption,
    budget: options.BudgetOption = "30m",
    device: options.DeviceOption = "auto",
    valid: options.HeldOutOption = None,
    test: options.HeldOutOption = None,
    output: options.NewConfigOption = None,
    run: options.NewRunOption = None,
) -> None:
    """Write a config that fits a corpus, a machine and a budget.

    Tries a few updates of models of several sizes, and chooses. Without --valid and --test, pairs
    of the corpus are held out, and written beside the config.

    Example: mtrain init --src a.en --tgt a.de --src-lang en --tgt-lang de --budget 20m
    """
    from mtrain.autoconfig import write_config
    from mtrain.autoconfig.write_config import Files
    from mtrain.run.logger import Stderr

    name = f"{src_lang}-{tgt_lang}"
    wanted = write_config.Wanted(
        Files(src, tgt),
        src_lang,
        tgt_lang,
        write_config.parse_budget(budget),
        device,
        output or Path(f"{name}.yaml"),
        run or f"runs/{name}",
        Files(*valid) if valid else None,
        Files(*test) if test else None,
    )
    is_plain = src.is_file() and tgt.is_file() and ".gz" not in (src.suffix, tgt.suffix)
    with console.reading(src.stat().st_size + tgt.stat().st_size if is_plain else None) as bar:

        def turn_to(what: str) -> None:
            bar.bar_format = "{desc}"
            bar.set_description_str(what)

        lines = write_config.init(wanted, Stderr(), bar.update, turn_to)
    console.put(lines, None)


@app.command()
def check(
    config: options.ConfigArgument,
    set_: options.SetOption = None,
    run: options.RunOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
) -> None:
    """Audit the corpora before training; train nothing.

    Lists every line that it finds in RUN/check. Exits with 2 on errors.

    Example: mtrain check configs/demo.yaml --strict
    """
    settings = api.load_config(config, set_ or [], run)
    from mtrain.audit.audit import REPORT_FILE, audit, num_bytes
    from mtrain.audit.report import as_json, as_text
    from mtrain.audit.rules import Severity
    from mtrain.io.atomic import whole_dir, write_lines
    from mtrain.run.run_dir import RunDir
    from mtrain.tokenizer import sentencepiece

    run_dir = RunDir(Path(settings.run_dir))
    vocabulary = (
        sentencepiece.load(run_dir.tokenizer_dir) if run_dir.tokenizer_dir.is_dir() else None
    )
    replaced = whole_dir(run_dir.check_dir, REPORT_FILE)
    with replaced as directory, console.reading(2 * num_bytes(settings)) as bar:
        report = audit(settings, vocabulary, directory, bar.update)
        write_lines(directory / REPORT_FILE, as_json(report))
    text = as_text(report, run_dir.check_dir)
    console.put(as_json(report) if json else text, None)
    errors, warnings = report.count(Severity.ERROR), report.count(Severity.WARNING)
    if strict and errors + warnings:
        raise DataError(
            f"{config}: must have no errors and no warnings, but has {errors} and {warnings} "
            f"instead; {run_dir.check_dir} lists them."
        )
    if errors:
        raise DataError(
            f"{config}: must have no errors, but has {errors} instead; {run_dir.check_dir} "
            "lists them."
        )


@app.command()
def tokenize(
    config: options.ConfigArgument, set_: options.SetOption = None, run: options.RunOption = None
) -> None:
    """Train the tokenizer and encode the corpora into the run folder.

    Example: mtrain tokenize configs/demo.yaml --run runs/small --set tokenizer.vocab_size=1000
    """
    api.tokenize(api.load_config(config, set_ or [], run))


@app.command()
def train(
    config: options.ConfigArgument,
    set_: options.SetOption = None,
    run: options.RunOption = None,
    log: Annotated[
        options.Log | None, typer.Option(help="Write the numbers for it too, into RUN/tensorboard.")
    ] = None,
) -> None:
    """Train a translator; go on if it was stopped.

    Tokenizes first if that is not done, and resumes from the newest checkpoint.

    Example: mtrain train configs/demo.yaml --run runs/short --set training.max_steps=500
    """
    with together("the same command goes on from the last checkpoint.") as team:
        settings = api.load_config(config, set_ or [], run)
        with _saving(settings.run_dir, team):
            api.train_together(settings, team, tensorboard=log is options.Log.TENSORBOARD)


@contextmanager
def _saving(run_dir: Path | str, team: Team = ALONE) -> Iterator[None]:
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


@app.command()
def translate(
    context: typer.Context,
    paths: options.TranslateArguments,
    output: options.OutputOption = None,
    beam: options.BeamOption = None,
    length_alpha: options.AlphaOption = None,
    early_stop: options.EarlyStopOption = None,
    n_best: options.NBestOption = 1,
    format_: options.FormatOption = options.Format.TEXT,
    alignments: options.AlignmentsOption = None,
    prefix: options.PrefixOption = None,
    no_repeat_ngram: options.NoRepeatOption = None,
    sample: options.SampleOption = False,
    temperature: options.TemperatureOption = None,
    top_k: options.TopKOption = None,
    top_p: options.TopPOption = None,
    seed: options.SeedOption = None,
    max_input_tokens: options.MaxInputOption = None,
    on_long: options.OnLongOption = options.OnLong.SPLIT,
    checkpoint: options.CheckpointOption = None,
    batch_tokens: options.BatchOption = None,
    device: options.DeviceOption = "auto",
    precision: options.PrecisionOption = options.Precision.AUTO,
    quantize: options.QuantizeOption = None,
    engine: options.EngineOption = options.Engine.MTRAIN,
) -> None:
    """Translate line by line: as many lines out as in.

    At a terminal, without FILE, it asks for a line and answers it.

    Example: echo "The old farmer is tired." | mtrain translate runs/demo
    """
    searching = {"beam": beam, "length_alpha": length_alpha, "early_stop": early_stop}
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options.refuse("--sample", searching if sample else {})
    options.require("--sample", {} if sample else drawing | {"seed": seed})
    console.check_outputs(output, alignments, read=[*paths, *([prefix] if prefix else [])])
    runs, file = _runs_and_file(paths)
    config = runs[0].load_config()
    others = {"no_repeat_ngram": no_repeat_ngram, "batch_tokens": batch_tokens}
    decoding = config.decoding.model_copy(update=options.given(searching | others))
    _check_n_best(n_best, decoding, sample)
    max_tokens = max_input_tokens or config.data.max_tokens
    from mtrain.decode.pipeline import LongLines, Options

    wanted = _wanted(n_best, options.given(drawing) if sample else None)
    loading, seed = _loading(device, precision, quantize, checkpoint), 1 if seed is None else seed
    with_alignment = alignments is not None or format_ is options.Format.JSONL
    is_text = format_ is options.Format.TEXT
    reading = Options(LongLines(max_tokens, on_long.value), with_alignment, seed, not is_text)
    with _loaded(context, runs, decoding, loading, wanted, max_tokens) as translator:
        if translator is None:
            return
        stream = api.as_model(runs[0], config, translator).stream(reading, console.warn)
        typed = (
            interactive.ask(config.data.src_lang)
            if file is None and interactive.is_asked()
            else None
        )
        lines = _translated(stream, file, typed, prefix, output)
        texts = _written(lines, format_.value, n_best, alignments)
        is_answer = typed is not None and output is None and is_text
        console.put(
            interactive.answers(texts, config.data.tgt_lang) if is_answer else texts, output
        )


def _wanted(n_best: int, drawing: dict[str, Any] | None) -> Wanted:
    from mtrain.decode.beam import Sampling
    from mtrain.decode.translator import Wanted

    return Wanted(n_best, None if drawing is None else Sampling(**drawing))


def _loaded(
    context: typer.Context,
    runs: list[RunDir],
    decoding: DecodingConfig,
    loading: Loading,
    wanted: Wanted,
    max_tokens: int,
) -> AbstractContextManager[Translator | None]:
    if context.params["engine"] is options.Engine.CTRANSLATE2:
        return _load_ctranslate2(context, runs, decoding, max_tokens)
    return load_together(runs, decoding, loading, wanted)


def _translated(
    stream: Stream,
    file: Path | None,
    typed: Iterable[list[str]] | None,
    prefix: Path | None,
    output: Path | None,
) -> Iterable[Line]:
    """Yield what becomes of the lines of a file, of stdin, or of those that are typed."""
    from mtrain.decode.pipeline import BLOCK_LINES
    from mtrain.io import atomic

    prefixes = atomic.read_lines(prefix) if prefix is not None else None
    if typed is not None:
        return stream.translate(typed, prefixes)
    blocks = atomic.read_blocks(file, console.warn, BLOCK_LINES)
    return console.with_progress(stream.translate(blocks, prefixes), output)


def _check_n_best(n_best: int, decoding: DecodingConfig, sample: bool) -> None:
    if n_best > decoding.beam and not sample:
        raise ConfigError(
            f"`--n-best` must be at most the beam ({decoding.beam}), but is {n_best} instead."
        )


def _load_ctranslate2(
    context: typer.Context, runs: list[RunDir], decoding: DecodingConfig, max_tokens: int
) -> nullcontext[Translator]:
    """Load a run for CTranslate2, and refuse every option that it does not honour."""
    from mtrain.export.engine import load_ctranslate2

    refuse_ranks("mtrain translate --engine ctranslate2")
    for key in context.params:
        is_given = getattr(context.get_parameter_source(key), "name", "") == "COMMANDLINE"
        if is_given and key not in _OF_CTRANSLATE2:
            options.refuse("--engine ctranslate2", {key: True})
    if len(runs) > 1:
        raise ConfigError(f"`--engine ctranslate2` must have one run, but has {len(runs)} instead.")
    return nullcontext(load_ctranslate2(runs[0], decoding, max_tokens, console.warn))


def _runs_and_file(paths: list[Path]) -> RunsAndFile:
    """Tell run folders from the text, which comes last and is no folder."""
    from mtrain.run.run_dir import RunDir

    *others, last = paths
    if others and not last.is_dir():
        return RunsAndFile([RunDir(path) for path in others], last)
    return RunsAndFile([RunDir(path) for path in paths], None)


def _written(
    lines: Iterable[Line], format_: formats.Format, num_best: int, alignments: Path | None
) -> Iterator[str]:
    """Yield lines as they are written, and write their alignments beside."""
    from mtrain.decode import formats
    from mtrain.io import atomic

    with ExitStack() as stack:
        links = None
        if alignments is not None:
            beside = stack.enter_context(atomic.whole_file(atomic.followed(alignments)))
            links = stack.enter_context(beside.open("w", encoding="utf-8", newline="\n"))
        for line in lines:
            if links is not None:
                links.write(formats.as_pharaoh(line.best[0].alignment) + "\n")
            yield from formats.write(line, format_, num_best)


def _loading(
    device: str,
    precision: options.Precision,
    quantize: options.Quantize | None,
    step: int | None = None,
) -> Loading:
    from mtrain.decode.translator import Loading

    return Loading(device, precision.value, quantize.value if quantize else None, step)


@app.command(name="eval")
def evaluate(
    runs: options.EvalArguments,
    output: options.OutputOption = None,
    tests: options.TestsOption = None,
    metrics: options.MetricsOption = None,
    tokenize: options.TokenizeOption = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    comet: options.CometOption = None,
    resamples: options.ResamplesOption = None,
    compare: options.CompareOption = None,
    details: options.DetailsOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    score: Annotated[
        bool, typer.Option("--score", help="Print how likely the model finds each reference.")
    ] = False,
    beam: options.BeamOption = None,
    length_alpha: options.AlphaOption = None,
    early_stop: options.EarlyStopOption = None,
    no_repeat_ngram: options.NoRepeatOption = None,
    checkpoint: options.CheckpointOption = None,
    batch_tokens: options.BatchOption = None,
    device: options.DeviceOption = "auto",
    precision: options.PrecisionOption = options.Precision.AUTO,
    quantize: options.QuantizeOption = None,
) -> None:
    """Translate the test sets and score them, with 95% intervals.

    With --score: test set, line, score, log-probability and tokens of every reference instead.

    Example: mtrain eval runs/demo --compare runs/wide
    """
    from mtrain.evaluate import scoreboard
    from mtrain.evaluate.report import as_json, as_text
    from mtrain.run.run_dir import RunDir

    console.check_outputs(output, read=compare or [])
    folders, names = [RunDir(run) for run in runs], _listed(tests)
    searching = {"beam": beam, "early_stop": early_stop, "no_repeat_ngram": no_repeat_ngram}
    changes = searching | {"length_alpha": length_alpha, "batch_tokens": batch_tokens}
    load = _loader(changes, _loading(device, precision, quantize, checkpoint))
    if score:
        scoring: dict[str, Any] = {"metrics": metrics, "tokenize": tokenize, "comet": comet}
        scoring |= {"resamples": resamples, "compare": compare or None}
        flags = {"lowercase": lowercase, "details": details, "json": json}
        options.refuse("--score", searching | scoring | {key: True for key in flags if flags[key]})
        if len(folders) > 1:
            raise ConfigError(f"`--score` must have one run, but has {len(folders)} instead.")
    others = [RunDir(path) for path in compare or [] if path.is_dir()]
    with load_each([*folders, *others], load) as loading:
        if loading is None:
            return
        if score:
            console.put(_reference_scores(folders[0], loading, names), output)
            return
        given = {"metrics": _listed(metrics), "num_resamples": resamples}
        scoring_options = _scoring_options(tokenize, lowercase, given, comet, device)
        plan = scoreboard.Plan(folders, compare or [], names, scoring_options, details)
        reports = scoreboard.measure(plan, loading, console.warn)
        console.put(as_json(reports) if json else as_text(reports), output)


def _loader(changes: Mapping[str, Any], loading: Loading) -> Callable[[RunDir, Team], Translator]:
    """Return what loads a run, with its own settings of the search but for `changes`."""
    from mtrain.decode import translator as translating

    def load(run: RunDir, team: Team) -> Translator:
        decoding = run.load_config().decoding.model_copy(update=options.given(changes))
        return translating.load(run, decoding, replace(loading, team=team))

    return load


def _reference_scores(run: RunDir, load: Load, names: list[str] | None) -> Iterator[str]:
    from mtrain.evaluate.evaluation import reference_scores

    with load(run) as translator:
        yield from reference_scores(run, translator, names)


def _scoring_options(
    tokenize: str | None,
    lowercase: bool,
    given: Mapping[str, Any],
    comet: Path | None,
    device: str,
) -> ScoringOptions:
    from mtrain.evaluate.comet import CometModel
    from mtrain.evaluate.metrics import ScoringOptions
    from mtrain.runtime.device import pick_device

    model = None
    if comet is not None:
        model = CometModel(comet, int(pick_device(device).type == "cuda"))
    return ScoringOptions(tokenize, lowercase, **options.given(given), comet=model)


def _listed(names: str | None) -> list[str] | None:
    return names.split(",") if names is not None else None


@app.command()
def plot(
    run: options.RunArgument,
    sentence: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Whose attention to draw.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder; RUN/plots if absent.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Draw again and again, until the training ends.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Of --watch; 10 if absent."),
    ] = None,
) -> None:
    """Draw the training and the model, as PNG and SVG.

    Example: mtrain plot runs/demo --sentence "The old farmer is tired."
    """
    options.require("--watch", {} if watch else {"every": every})
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("`mtrain plot` must have matplotlib: pip install 'mtrain[plot]' adds it.")
    from mtrain.plot import draw
    from mtrain.plot import watch as watching
    from mtrain.run.run_dir import RunDir

    directory = out or run / "plots"
    drawn = draw.draw(RunDir(run), sentence, directory, console.warn)
    if watch:
        drawn = watching.watch(RunDir(run), sentence, directory, console.warn, every or 10.0)
    console.put(map(str, drawn), None)


@app.command()
def doctor(
    run: options.RunArgument,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay/--no-replay", help="Make the last updates again, and compare the bytes."
        ),
    ] = True,
) -> None:
    """Check that a run folder is whole, and change nothing in it.

    A line for each part; the exit code is 2 if one is damaged.

    Example: mtrain doctor runs/demo --no-replay
    """
    from mtrain.doctor.doctor import examine
    from mtrain.run.logger import Stderr
    from mtrain.run.run_dir import RunDir

    verdicts = []

    def lines() -> Iterator[str]:
        for finding in examine(RunDir(run), Stderr(), replay):
            verdicts.append(finding.verdict)
            yield finding.line()

    console.put(lines(), None)
    if "FAILED" in verdicts:
        raise typer.Exit(2)


@app.command()
def export(
    run: options.RunArgument,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The folder to write, new.", show_default=False),
    ],
    to: Annotated[options.Target, typer.Option("--to", help="The library.", show_default=False)],
    quantize: Annotated[
        options.Stored | None,
        typer.Option(help="Store fewer bits of each weight; int8 for ctranslate2 only."),
    ] = None,
    check_lines: Annotated[
        int, typer.Option(min=1, metavar="N", help="Compare on N lines of the validation text.")
    ] = 100,
) -> None:
    """Write the model for another library, and check it there.

    What it prints is how the copy compares with the model. One that is not quantised and does not
    translate as the model does is an error, and nothing is written.

    Example: mtrain export runs/demo demo-ct2 --to ctranslate2 --quantize int8
    """
    from mtrain.export import export as exporting
    from mtrain.run.run_dir import RunDir

    wanted = exporting.Wanted(to.value, quantize.value if quantize else None, check_lines)
    report = exporting.export(RunDir(run), directory, wanted, console.warn)
    console.put(exporting.as_text(report), None)
