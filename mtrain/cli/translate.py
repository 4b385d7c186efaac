"""The verb `mtrain translate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mtrain import api
from mtrain.cli import console, interactive, options
from mtrain.cli.loading import load_options
from mtrain.cli.ranks import load_together, refuse_ranks
from mtrain.errors import ConfigError

if TYPE_CHECKING:
    from mtrain.config.sections import DecodingConfig
    from mtrain.decode.formats import Format, TranslatedLine
    from mtrain.decode.pipeline import LineTranslator
    from mtrain.decode.translator import DecodeRequest, Translator
    from mtrain.run.load_model import LoadOptions
    from mtrain.run.run_dir import RunDir


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
    loading, seed = (
        load_options(device, precision, checkpoint),
        1 if seed is None else seed,
    )
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


def _wanted(n_best: int, drawing: dict[str, Any] | None) -> DecodeRequest:
    from mtrain.decode.sampling import Sampling
    from mtrain.decode.translator import DecodeRequest

    return DecodeRequest(n_best, None if drawing is None else Sampling(**drawing))


def _loaded(
    context: typer.Context,
    runs: list[RunDir],
    decoding: DecodingConfig,
    loading: LoadOptions,
    wanted: DecodeRequest,
    max_tokens: int,
) -> AbstractContextManager[Translator | None]:
    if context.params["engine"] is options.Engine.CTRANSLATE2:
        return _load_ctranslate2(context, runs, decoding, max_tokens)
    return load_together(runs, decoding, loading, wanted)


def _translated(
    stream: LineTranslator,
    file: Path | None,
    typed: Iterable[list[str]] | None,
    prefix: Path | None,
    output: Path | None,
) -> Iterable[TranslatedLine]:
    """Yield what becomes of the lines of a file, of stdin, or of those that are typed."""
    from mtrain.decode.pipeline import BLOCK_LINES
    from mtrain.io.lines import read_blocks, read_lines

    prefixes = read_lines(prefix) if prefix is not None else None
    if typed is not None:
        return stream.translate(typed, prefixes)
    blocks = read_blocks(file, console.warn, BLOCK_LINES)
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
    lines: Iterable[TranslatedLine], format_: Format, num_best: int, alignments: Path | None
) -> Iterator[str]:
    """Yield lines as they are written, and write their alignments beside."""
    from mtrain.decode.formats import as_pharaoh, write
    from mtrain.io.atomic import resolve_links, whole_file

    with ExitStack() as stack:
        links = None
        if alignments is not None:
            beside = stack.enter_context(whole_file(resolve_links(alignments)))
            links = stack.enter_context(beside.open("w", encoding="utf-8", newline="\n"))
        for line in lines:
            if links is not None:
                links.write(as_pharaoh(line.best[0].alignment) + "\n")
            yield from write(line, format_, num_best)
