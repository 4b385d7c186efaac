"""The verb `mtrain translate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mtrain.cli import console, options
from mtrain.cli.console import is_at_terminal, read_typed, with_prompt
from mtrain.cli.ranks import joined_process_group, refuse_ranks
from mtrain.errors import ConfigError
from mtrain.io.atomic import resolve_links, whole_text
from mtrain.io.lines import read_blocks, read_lines
from mtrain.run.run_dir import RunDir

if TYPE_CHECKING:
    from mtrain.decode.formats import Format, TranslatedLine
    from mtrain.decode.options import DecodingOptions
    from mtrain.decode.pipeline import LineTranslator, SearchEngine
    from mtrain.run.load_model import LoadOptions


_OF_CTRANSLATE2 = {
    *("paths", "output", "beam", "length_alpha", "no_repeat_ngram", "max_input_tokens"),
    *("on_long", "engine"),
}


def translate(
    context: typer.Context,
    paths: options.TranslateArguments,
    output: options.OutputOption = None,
    beam: options.BeamOption = None,
    length_alpha: options.AlphaOption = None,
    early_stop: options.EarlyStopOption = None,
    n_best: options.NBestOption = 1,
    format_: options.FormatOption = "text",
    alignments: options.AlignmentsOption = None,
    prefix: options.PrefixOption = None,
    no_repeat_ngram: options.NoRepeatOption = None,
    mbr: options.MbrOption = None,
    rerank_with: options.RerankWithOption = None,
    rerank_weight: options.RerankWeightOption = None,
    sample: options.SampleOption = False,
    temperature: options.TemperatureOption = None,
    top_k: options.TopKOption = None,
    top_p: options.TopPOption = None,
    seed: options.SeedOption = None,
    max_input_tokens: options.MaxInputOption = None,
    on_long: options.OnLongOption = "split",
    checkpoint: options.CheckpointOption = None,
    batch_tokens: options.BatchOption = None,
    device: options.DeviceOption = "auto",
    precision: options.PrecisionOption = "auto",
    shortlist: options.ShortlistOption = None,
    engine: options.EngineOption = "mtrain",
) -> None:
    """Translate line by line: as many lines out as in.

    At a terminal, without FILE, it asks for a line and answers it.

    Example: echo "The old farmer is tired." | mtrain translate runs/demo
    """
    search_options: dict[str, Any] = {"beam": beam, "length_alpha": length_alpha}
    search_options |= {"early_stop": early_stop, "shortlist": shortlist}
    sampling_options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options.require("--sample", {} if sample else sampling_options | {"seed": seed})
    console.check_outputs(output, alignments, read=[*paths, *([prefix] if prefix else [])])
    file = paths[-1] if len(paths) > 1 and not paths[-1].is_dir() else None
    runs = [RunDir(path) for path in (paths if file is None else paths[:-1])]
    config, is_text = runs[0].config, format_ == "text"
    measure = options.mbr_change(mbr) or {"mbr": config.decoding.mbr}
    _check_samples(search_options if sample else {}, measure["mbr"], rerank_with, is_text)
    from mtrain.decode.options import DecodingOptions, Sampling
    from mtrain.run.load_model import LoadOptions

    other_options = {"no_repeat_ngram": no_repeat_ngram, "batch_tokens": batch_tokens, "seed": seed}
    other_options |= {"num_best": n_best, "max_input_tokens": max_input_tokens}
    width = beam or config.decoding.beam
    _check_beam(width, n_best, shortlist, sample)
    decoding = replace(
        DecodingOptions.from_config(config),
        **options.given(search_options | other_options | {"on_long": on_long}) | measure,
        sampling=Sampling(**options.given(sampling_options)) if sample else None,
        rerank_weight=options.weight_of_reverse(rerank_with, rerank_weight, width),
        with_alignment=alignments is not None or format_ == "jsonl",
        with_scores=not is_text,
    )
    if engine == "ctranslate2":
        _check_ctranslate2(context, runs)
    with joined_process_group("run it again.") as process_group:
        reverse = RunDir(rerank_with) if rerank_with else None
        loading = LoadOptions(device, precision, checkpoint, process_group, reverse)
        line_translator = _load(engine, runs, decoding, loading)
        if not process_group.is_first:
            deque(line_translator.translate([]), maxlen=0)  # decodes its share; rank 0 writes
            return
        prefixes = None if prefix is None else read_lines(prefix)
        is_typed = file is None and is_at_terminal()
        blocks = read_typed(config.data.src_lang) if is_typed else _read(file)
        with ExitStack() as stack:
            lines = stack.enter_context(closing(line_translator.translate(blocks, prefixes)))
            shown = lines if is_typed else console.with_progress(lines, output)
            texts = stack.enter_context(closing(_formatted(shown, format_, n_best, alignments)))
            is_answer = is_typed and is_text and output is None
            console.put(with_prompt(texts, config.data.tgt_lang) if is_answer else texts, output)
            if process_group.size > 1:
                _end_ranks(lines, blocks, prefixes)


def _end_ranks(
    lines: Iterable[TranslatedLine],
    blocks: Generator[list[str], None, None],
    prefixes: Generator[str, None, None] | None,
) -> None:
    """Read no more, and translate the rest with the other ranks; stdout may be closed."""
    blocks.close()
    if prefixes is not None:
        prefixes.close()
    deque(lines, maxlen=0)


def _check_samples(
    search_options: dict[str, Any], mbr: str | None, rerank_with: Path | None, is_text: bool
) -> None:
    """Refuse options of a search that neither the choice among samples nor the output uses."""
    used = {"beam"} if mbr or rerank_with else set()
    used |= {"length_alpha"} if rerank_with or not is_text else set()  # of scores
    unused = {key: value for key, value in search_options.items() if key not in used}
    options.refuse("--sample", unused)


def _check_beam(beam: int, num_best: int, shortlist: str | None, is_sampled: bool) -> None:
    options.check_shortlist(shortlist, beam)
    if num_best > beam and not is_sampled:
        raise ConfigError(
            f"`--n-best` must be at most the beam ({beam}), but is {num_best} instead."
        )


def _read(file: Path | None) -> Generator[list[str], None, None]:
    from mtrain.decode.pipeline import BLOCK_LINES

    return read_blocks(file, console.warn, BLOCK_LINES)


def _load(
    engine: str, runs: list[RunDir], decoding: DecodingOptions, loading: LoadOptions
) -> LineTranslator:
    from mtrain.corpus import length_stats
    from mtrain.decode import pipeline

    search_engine: SearchEngine
    if engine == "ctranslate2":
        from mtrain.exporters.export import load_ctranslate2

        search_engine = load_ctranslate2(runs[0], decoding, console.warn)
    else:
        from mtrain.decode import translator

        search_engine = translator.load(runs, decoding, loading)
    return pipeline.LineTranslator(search_engine, length_stats.load(runs[0].data_dir), console.warn)


def _check_ctranslate2(context: typer.Context, runs: list[RunDir]) -> None:
    """Refuse ranks, ensembles, and every option that CTranslate2 does not honour."""
    refuse_ranks("mtrain translate --engine ctranslate2")
    for key in context.params:
        is_given = getattr(context.get_parameter_source(key), "name", "") == "COMMANDLINE"
        value = context.params[key]
        is_default = value is False or value in ("none", "auto", "cpu")
        if is_given and not is_default and key not in _OF_CTRANSLATE2:
            options.refuse("--engine ctranslate2", {key: True})
    if len(runs) > 1:
        raise ConfigError(f"`--engine ctranslate2` must have one run, but has {len(runs)} instead.")


def _formatted(
    lines: Iterable[TranslatedLine], format_: Format, num_best: int, alignments: Path | None
) -> Generator[str, None, None]:
    """Yield the text of each translation; write the alignments to their file meanwhile."""
    from mtrain.decode.formats import as_pharaoh, write

    with ExitStack() as stack:
        alignment_file = None
        if alignments is not None:
            alignment_file = stack.enter_context(whole_text(resolve_links(alignments)))
        try:
            for line in lines:
                if alignment_file is not None:
                    alignment_file.write(as_pharaoh(line.best[0].alignment) + "\n")
                yield from write(line, format_, num_best)
        except GeneratorExit:
            if alignments is not None:
                console.warn(f"{alignments}: not written, because stdout was closed before the end")
            raise
