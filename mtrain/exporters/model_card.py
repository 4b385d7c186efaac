"""Write the README.md of an exported model. Knows the run folder, no library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from mtrain import __version__
from mtrain.config.corpora import Corpus, HubCorpus, corpora_of
from mtrain.corpus import dropped
from mtrain.corpus.formats import paths_of
from mtrain.corpus.reader import FileMark
from mtrain.data import loader, prepare
from mtrain.decode.translator import Translator
from mtrain.errors import RunError
from mtrain.exporters.parity import Exporter
from mtrain.io.atomic import sha256_if_readable
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

In this folder:

```python
{use}```

{notes}
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
    run: RunDir, translator: Translator, exporter: Exporter, example: str, table: Sequence[str]
) -> str:
    """Return the model card: use, limits, sizes, data, and the comparison with the run.

    Args:
        run: what was exported.
        translator: the loaded run.
        exporter: what has written the model.
        example: a line to translate.
        table: the comparison.
    """
    config = run.config
    src, tgt = config.data.src_lang, config.data.tgt_lang
    tree = {
        "language": [src, tgt],
        "library_name": exporter.PACKAGE,
        "pipeline_tag": "translation",
        "tags": ["translation", exporter.TAG, "mtrain"],
    }
    fields = {
        "line": example,
        "beam": config.decoding.beam,
        "alpha": config.decoding.length_alpha,
        "max_length": config.data.max_tokens + config.decoding.max_extra_tokens,
        "num_positions": exporter.num_positions(config),
    }
    return _CARD.format(
        front=yaml.safe_dump(tree, sort_keys=False, allow_unicode=True),
        src=src,
        tgt=tgt,
        title=exporter.TITLE,
        version=__version__,
        use=exporter.USE.format(**fields),
        notes=exporter.NOTES.format(**fields),
        sizes="\n".join(_sizes(run, translator)),
        data="\n".join(_data(run, translator.tokenizer)),
        table="\n".join(table),
    )


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
        yield f"- BLEU of the validation text: {origin.bleu:.2f} (sacreBLEU, greedy search)."
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
    yield from ("", "| text | file | SHA-256 |", "| --- | --- | --- |")
    corpora = [("training", named.corpus) for named in corpora_of(config.data.train, "data.train")]
    corpora += [("validation", config.data.valid)]
    corpora += [(f"test {name}", corpus) for name, corpus in config.data.tests.items()]
    for text, corpus in corpora:
        for cells in _files(corpus, marks):
            escaped = (" ".join(cell.splitlines()).replace("|", "\\|") for cell in (text, *cells))
            yield f"| {' | '.join(escaped)} |"


def _files(corpus: Corpus, marks: Mapping[str, FileMark]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file and its hash when it was tokenized, or else now."""
    if isinstance(corpus, HubCorpus) and not Path(corpus.hub).is_dir():
        yield f"{corpus.hub}, {corpus.split}", "of the hub"
        return
    for path in paths_of(corpus):
        digest = marks[path].sha256 if path in marks else sha256_if_readable(Path(path))
        yield Path(path).name, f"`{digest}`" if digest else "not there any more"
