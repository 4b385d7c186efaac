"""Arguments and options of the verbs, their help, and which options exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mtrain import api
from mtrain.config import sections
from mtrain.decode.options import RERANK_WEIGHT
from mtrain.errors import ConfigError

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
    typer.Option("-o", "--output", help="Write to a file, whole or not at all; `.gz` is gzipped."),
]
BeamOption = Annotated[
    int | None,
    typer.Option(min=1, max=sections.MAX_BEAM, help="Beam width; 1 is greedy search."),
]
AlphaOption = Annotated[
    float | None, typer.Option(min=0.0, max=10.0, help="Length normalisation; 0 is none.")
]
EarlyStopOption = Annotated[
    bool | None,
    typer.Option(
        "--early-stop/--exact-stop", help="Stop early: faster, but may miss a better one."
    ),
]
NoRepeatOption = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Write no N subwords in a row twice.")
]
ShortlistOption = Annotated[
    api.Shortlist | None,
    typer.Option(help="Rank only tokens that the training text makes likely: faster, not exact."),
]
MbrOption = Annotated[
    Literal["chrf", "bleu", "none"] | None,
    typer.Option(
        help="Take the one of --beam hypotheses, or samples, that agrees most with the others."
    ),
]
RerankWithOption = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Rank hypotheses by this run of the other direction, too."),
]
RerankWeightOption = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=100.0, help=f"Of the run of --rerank-with; {RERANK_WEIGHT} if absent."
    ),
]
CheckpointOption = Annotated[
    int | None, typer.Option(min=0, metavar="STEP", help="Take this checkpoint's weights.")
]
BatchOption = Annotated[
    int | None, typer.Option(min=1, help="Source tokens times beam of a batch.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
PrecisionOption = Annotated[
    api.Precision,
    typer.Option(help="Of products; auto is float32, int8 is faster with AVX2 or VNNI."),
]
EngineOption = Annotated[
    api.Engine,
    typer.Option(help="ctranslate2 exports once, into RUN/ctranslate2; text only."),
]
TranslateArguments = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN... [FILE]",
        help="A run folder, or several as an ensemble; then the text, stdin if absent.",
        show_default=False,
    ),
]
UsingOption = Annotated[
    list[Path],
    typer.Option(
        "--using",
        metavar="RUN",
        help="A trained run. Several are an ensemble; with --again each works alone.",
        show_default=False,
    ),
]
CorpusOutputOption = Annotated[
    Path,
    typer.Option("-o", "--output", metavar="DIR", help="The corpus folder.", show_default=False),
]
BackOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text in the target language, for sources; repeatable."),
]
ForwardOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text in the source language, for targets; repeatable."),
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Translate the training text, by each model.")
]
WriteScoresOption = Annotated[
    bool, typer.Option("--score", help="Write the log-probability of each translation.")
]
KeepBestOption = Annotated[
    float | None,
    typer.Option(min=0.01, max=1.0, metavar="SHARE", help="Keep this share, of the best score."),
]
AgreeOption = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="With --keep-best: the score of this model of the other way."),
]
WriteConfigOption = Annotated[
    Path | None, typer.Option(metavar="NEW", help="Write CONFIG with the new corpus in it.")
]
WeightOption = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="Relative to all others; 1 if they have weights, else each pair once."
    ),
]
TagOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A reserved token before the sources of the corpus."),
]
UntilOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Use the corpus only in this first share of the training budget."
    ),
]
NBestOption = Annotated[int, typer.Option(min=1, metavar="N", help="Translations of each line.")]
FormatOption = Annotated[
    Literal["text", "tsv", "jsonl"],
    typer.Option("--format", help="tsv is line, rank, score, log-probability, flags, text."),
]
AlignmentsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write which words belong together, as 0-0 1-2."),
]
PrefixOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="How each translation must begin, by line.")
]
SampleOption = Annotated[bool, typer.Option("--sample", help="Draw instead of searching.")]
TemperatureOption = Annotated[
    float | None, typer.Option(min=0.01, max=100.0, help="With --sample: below 1 is safer.")
]
TopKOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="K", help="With --sample: only the K likeliest subwords."),
]
TopPOption = Annotated[
    float | None,
    typer.Option(min=0.01, max=1.0, metavar="P", help="With --sample: only the likeliest share P."),
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="With --sample: 1 if absent.")]
MaxInputOption = Annotated[
    int | None,
    typer.Option(
        min=2, metavar="N", help="Cut lines of more tokens than this; data.max_tokens if absent."
    ),
]
OnLongOption = Annotated[
    Literal["split", "truncate", "error"],
    typer.Option(help="How those are cut; split is at the ends of sentences."),
]
EvalArguments = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="A run folder, or several: a mean and a deviation, or with --ensemble one system.",
        show_default=False,
    ),
]
TokenizeOption = Annotated[
    str | None,
    typer.Option(help="sacreBLEU's: 13a, intl, char, ...; by target language if absent."),
]
EnsembleOption = Annotated[
    bool, typer.Option("--ensemble", help="Translate with all runs together, as one system.")
]
DetailsOption = Annotated[
    bool, typer.Option("--details", help="By length, by rare words, and the best and worst lines.")
]
TestsOption = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Only these test sets of the run.")
]
TestSrcOption = Annotated[
    Path | None, typer.Option("--src", metavar="FILE", help="Translate this text instead.")
]
TestRefsOption = Annotated[
    list[Path] | None,
    typer.Option("--ref", metavar="FILE", help="A translation of --src to score by; repeatable."),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="Of bleu, chrf, chrf++, ter; bleu,chrf if absent."),
]
CometOption = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Score with this model of COMET too.")
]
ResamplesOption = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="For intervals; 1000 if absent, 0 is none."),
]
CompareOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="RUN_OR_FILE",
        help="Test the difference to this run, or file of translations; repeatable.",
    ),
]


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are given, without their None values."""
    return {key: value for key, value in options.items() if value is not None}


def require(needed: str, options: Mapping[str, Any]) -> None:
    """Refuse options that have no effect without `needed`."""
    for key in given(options):
        raise ConfigError(f"`{_as_option(key)}` needs `{needed}`.")


def refuse(other: str, options: Mapping[str, Any]) -> None:
    """Refuse options that have no effect beside `other`."""
    for key in given(options):
        raise ConfigError(f"`{_as_option(key)}` has no effect with `{other}`; leave it out.")


def weight_of_reverse(
    rerank_with: Path | None, rerank_weight: float | None, beam: int
) -> float | None:
    """Return the weight of the run of `--rerank-with`; None without it."""
    require("--rerank-with", {} if rerank_with else {"rerank_weight": rerank_weight})
    if rerank_with is None:
        return None
    if beam == 1:
        raise ConfigError("`--rerank-with` has no effect with a beam of 1; leave it out.")
    return RERANK_WEIGHT if rerank_weight is None else rerank_weight


def mbr_change(mbr: Literal["chrf", "bleu", "none"] | None) -> dict[str, Any]:
    """Return the change of `DecodingOptions` by `--mbr`, which is empty if it is not given."""
    return {} if mbr is None else {"mbr": None if mbr == "none" else mbr}


def check_shortlist(shortlist: str | None, beam: int) -> None:
    """Raise ConfigError for a shortlist of a greedy search."""
    if shortlist is not None and beam == 1:
        raise ConfigError(
            "`--shortlist` has no effect with a beam of 1, which ranks all tokens; leave it out."
        )


def _as_option(key: str) -> str:
    return "--" + key.rstrip("_").replace("_", "-")
