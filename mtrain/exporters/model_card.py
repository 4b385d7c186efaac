"""Write the README.md of an exported model. Imports none of the libraries."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from mtrain import __version__
from mtrain.config.corpora import Corpus, corpora_of
from mtrain.config.sections import Config, DecodingConfig
from mtrain.corpus import dropped
from mtrain.corpus.formats import is_of_the_hub, paths_of
from mtrain.corpus.reader import FileMark
from mtrain.data import loader, prepare
from mtrain.decode.translator import Translator
from mtrain.errors import RunError
from mtrain.evaluation.evaluation import TestResult
from mtrain.evaluation.metrics import Score, language_tokenizer
from mtrain.exporters.exporter import Exporter, longest
from mtrain.model.transformer import num_parameters
from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer.sentencepiece import Tokenizer

_CARD = """\
---
{front}---

# {src} to {tgt}

A translator from {src} to {tgt} for {title}, trained and exported by mtrain {version}.

## Use

{use}
{notes}
## Licence

{licence}
The texts that it was trained on have licences of their own.

## Scores

{scores}

## The model

{sizes}

## The data

{data}

## What was checked

```
{table}
```
"""


def readme(
    run: RunDir,
    translator: Translator,
    exporter: Exporter,
    export_name: str,
    example: str,
    table: Sequence[str],
    results: Sequence[TestResult] = (),
    licence: str | None = None,
) -> str:
    """Return the model card: use, limits, licence, scores, sizes, data, comparison with the run.

    `export_name` is the name of the folder or the file, `example` a line to translate, `table` the
    lines of the comparison with the run, `results` the scores of the run on its test sets, and
    `licence` an identifier of the Hugging Face Hub, such as cc-by-4.0.
    """
    config = run.config
    src, tgt = config.data.src_lang, config.data.tgt_lang
    tree: dict[str, object] = {
        **_languages([src, tgt]),
        "license": licence or "unknown",
        "library_name": exporter.PACKAGE,
        "pipeline_tag": "translation",
        "tags": ["translation", exporter.TAG, "mtrain"],
    }
    corpora = [named.corpus for named in corpora_of(config.data.train)]
    if hubs := [corpus.hub for corpus in corpora if is_of_the_hub(corpus)]:
        tree["datasets"] = list(dict.fromkeys(hubs))
    if results:
        tree["metrics"] = list(
            dict.fromkeys(_metric_type(score) for result in results for score in result.scores)
        )
        name = run.path.resolve().name
        tree["model-index"] = [{"name": name, "results": _model_index(config, results)}]
    fields = {
        "name": export_name,
        "name_in_shell": shlex.quote(export_name),
        "src": src.lower(),
        "tgt": tgt.lower(),
        "src_in_shell": shlex.quote(src.lower()),
        "tgt_in_shell": shlex.quote(tgt.lower()),
        "line": example,
        "line_in_shell": shlex.quote(example),
        "beam": config.decoding.beam,
        "alpha": config.decoding.length_alpha,
        "max_length": config.data.max_tokens + config.decoding.max_extra_tokens,
        "num_positions": longest(config, exporter.MIN_POSITIONS),
    }
    published = "Not stated. Whoever publishes this model names one in `license` above."
    if licence is not None:
        published = f"This model is published under `{licence}`."
    return _CARD.format(
        front=yaml.safe_dump(tree, sort_keys=False, allow_unicode=True),
        src=src,
        tgt=tgt,
        title=exporter.TITLE,
        version=__version__,
        use=exporter.USE.format(**fields),
        notes=exporter.NOTES.format(**fields),
        licence=published,
        scores="\n".join(_scores(config, results)),
        sizes="\n".join(_sizes(run, translator)),
        data="\n".join(_data(run, translator.tokenizer)),
        table="\n".join(table),
    )


def _languages(codes: Sequence[str]) -> dict[str, list[str]]:
    """Return the Hub's language fields: ISO 639 codes, and all other codes as BCP 47."""
    primary = [re.split("[-_]", code.lower())[0] for code in codes]
    fields = {"language": list(dict.fromkeys(code for code in primary if 2 <= len(code) <= 3))}
    longer = [code for code in codes if code not in fields["language"]]
    return fields | ({"language_bcp47": longer} if longer else {})


def _scores(config: Config, results: Sequence[TestResult]) -> Iterator[str]:
    if not results:
        yield "No test set was scored."
        return
    decoding, defaults = config.decoding.model_dump(), DecodingConfig().model_dump()
    changed = [
        f"`{yaml.safe_dump({key: value}).strip()}`"
        for key, value in decoding.items()
        if value != defaults[key] and key not in ("beam", "length_alpha", "batch_tokens")
    ]
    yield (
        f"Of the run in float32, translated by mtrain with a beam of {config.decoding.beam} and a "
        f"length exponent of {config.decoding.length_alpha:g}{', and with ' * bool(changed)}"
        f"{', '.join(changed)}, before it was exported; intervals of 95% by bootstrap."
    )
    yield from ("", "| test set | lines | score | signature |", "| --- | --: | --- | --- |")
    for result in results:
        for score in result.scores:
            text = f"{score.metric} {score.format()}"
            signature = score.signature.replace("|", "\\|")
            name = _escaped(result.name)
            yield f"| {name} | {len(result.lines.src):,} | {text} | `{signature}` |"


def _model_index(config: Config, results: Sequence[TestResult]) -> list[dict[str, object]]:
    """Return the scores as the Hugging Face Hub reads them."""
    src, tgt = config.data.src_lang, config.data.tgt_lang
    entries = []
    for result in results:
        text = "".join(
            f"{line}\n" for side in (result.lines.src, *result.lines.refs) for line in side
        )
        corpus = config.data.tests.get(result.name)
        kind = corpus.hub if corpus is not None and is_of_the_hub(corpus) else "text"
        digest = hashlib.sha256(text.encode()).hexdigest()
        dataset_args = {"src": src, "tgt": tgt, "lines": len(result.lines.src), "sha256": digest}
        metrics = []
        for score in result.scores:
            args: dict[str, object] = {"signature": score.signature}
            if score.mean is not None and score.half_width is not None:
                low, high = score.mean - score.half_width, score.mean + score.half_width
                args["interval_95"] = [round(low, 4), round(high, 4)]
            metric = {"type": _metric_type(score), "name": score.metric}
            metrics.append(metric | {"value": round(score.value, 4), "args": args})
        entries.append(
            {
                "task": {"type": "translation", "name": f"Translation {src} to {tgt}"},
                "dataset": {"type": kind, "name": result.name, "args": dataset_args},
                "metrics": metrics,
            }
        )
    return entries


def _metric_type(score: Score) -> str:
    return score.metric.lower().rstrip("+0123456789")


def _escaped(cell: str) -> str:
    return " ".join(cell.splitlines()).replace("|", "\\|")


def _sizes(run: RunDir, translator: Translator) -> Iterator[str]:
    config, tokenizer = run.config, translator.tokenizer
    model = config.model
    yield (
        f"- {num_parameters(translator.model):,} parameters: {model.num_encoder_layers} encoder "
        f"and {model.num_decoder_layers} decoder layers, width {model.d_model}, "
        f"{model.num_heads} heads, feed-forward width {model.d_ff}, {model.norm}-norm, "
        f"{model.activation}."
    )
    src, tgt = len(tokenizer.src), len(tokenizer.tgt)
    shared = "shared" if tokenizer.src is tokenizer.tgt else f"source, {tgt:,} target"
    yield f"- SentencePiece {config.tokenizer.kind}: {src:,} {shared} pieces."
    origin = checkpoint.load_final_weights_info(run.model_path)
    if origin is not None:
        name = language_tokenizer(config.data.tgt_lang)
        how = "sacreBLEU, greedy search" if name is None else f"sacreBLEU, {name}, greedy search"
        yield f"- BLEU of the validation text: {origin.bleu:.2f} ({how})."
    if config.training.init_from is not None:
        yield f"- Fine-tuned: the training began with the weights of `{config.training.init_from}`."


def _data(run: RunDir, tokenizer: Tokenizer) -> Iterator[str]:
    config, marks = run.config, prepare.read_marks(run)
    try:
        num_kept = len(loader.TrainingData(run.data_dir, tokenizer, seed=0))
        counts = dropped.read_counts(run.data_dir)
    except RunError:
        yield "How many training pairs there were is not known any more."
    else:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in counts.items())
        total = f"{num_kept:,} training pairs were kept, {sum(counts.values()):,} dropped"
        yield f"{total} ({reasons})." if reasons else f"{total}."
        if config.training.replay:
            yield (
                f"{config.training.replay:.1%} of the pairs of an epoch are training pairs of "
                f"`{config.training.init_from}`."
            )
    yield from ("", "| text | file | SHA-256 |", "| --- | --- | --- |")
    corpora = [("training", named.corpus) for named in corpora_of(config.data.train)]
    corpora += [("validation", config.data.valid)]
    corpora += [(f"test {name}", corpus) for name, corpus in config.data.tests.items()]
    for text, corpus in corpora:
        for cells in _files(corpus, marks):
            yield f"| {' | '.join(map(_escaped, (text, *cells)))} |"


def _files(corpus: Corpus, marks: Mapping[str, FileMark]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file, and its SHA-256 when it was tokenized, if known."""
    if is_of_the_hub(corpus):
        yield f"{corpus.hub}, {corpus.split}", "of the hub"
        return
    for path in paths_of(corpus):
        yield Path(path).name, f"`{marks[path].sha256}`" if path in marks else "not known"
