"""Write the README.md of an exported model. Knows the run folder, no library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mtrain import __version__
from mtrain.config.corpora import Corpus, HubCorpus, corpora_of
from mtrain.config.sections import Config
from mtrain.corpus.formats import paths_of
from mtrain.corpus.reader import FileMark
from mtrain.data import loader, prepare
from mtrain.errors import RunError
from mtrain.io.atomic import sha256_if_readable
from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer.sentencepiece import Tokenizer

_CTRANSLATE2_USE = """\
import ctranslate2
import sentencepiece

source = sentencepiece.SentencePieceProcessor(model_file="source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")
translator = ctranslate2.Translator(".")

lines = [{line!r}]
results = translator.translate_batch(
    source.encode(lines, out_type=str),
    beam_size={beam},
    length_penalty={alpha:g},
    max_input_length=0,
    max_decoding_length={max_length},
)
print(target.decode([result.hypotheses[0] for result in results]))
"""
_CTRANSLATE2_NOTES = """\
- `max_input_length=0` is needed: without it CTranslate2 silently cuts a source after 1,024
  tokens. The model's own limit is {num_positions:,} tokens, and a longer source is an error.
- An empty line gives an empty translation.
- CTranslate2 divides a score by length^alpha, mtrain by ((5 + length) / 6)^alpha, so that their
  beams rank a little differently. Only with `min_decoding_length=0` can the translation of a line
  that is not empty be empty, as in mtrain.
"""
_MARIAN_USE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")

lines = [{line!r}]
batch = tokenizer(lines, return_tensors="pt", padding=True)
outputs = model.generate(**batch)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))
"""
_MARIAN_NOTES = """\
- If the model is on the Hub, use its name there instead of `"."`.
- transformers before version 5 has `pipeline("translation", model=".")` too.
- A source of more than {num_positions:,} tokens is an error; an output ends after {max_length}.
- transformers divides a score by length^alpha, mtrain by ((5 + length) / 6)^alpha, so that
  their beams rank a little differently.
- A blank line does not give an empty translation: remove such lines.
- `>>x<<` at the beginning of a line is read as a language code; mtrain reads it as text.
- "Recommended: pip install sacremoses" is a warning of the tokenizer that can be ignored.
"""


@dataclass(frozen=True)
class Card:
    """The contents of a model card: `example` is a line to translate, `table` the comparison."""

    run: RunDir
    tokenizer: Tokenizer
    num_parameters: int
    example: str
    table: Sequence[str]


def ctranslate2_readme(card: Card, num_positions: int) -> list[str]:
    """Return the lines of a short page: use, limits, and the comparison with the run."""
    config = card.run.config
    notes = _CTRANSLATE2_NOTES.format(num_positions=num_positions)
    use = _use(_CTRANSLATE2_USE, card, config)
    return [*_head(config, "CTranslate2"), *use, "", *notes.splitlines(), *_comparison(card)]


def marian_readme(card: Card, num_positions: int) -> list[str]:
    """Return the lines of a model card: use, limits, sizes, data, and the comparison."""
    config = card.run.config
    limits = {"num_positions": num_positions, "max_length": _max_length(config)}
    return [
        *_front_matter(config),
        *_head(config, "Hugging Face transformers (`MarianMTModel`)"),
        *_use(_MARIAN_USE, card, config),
        "",
        *_MARIAN_NOTES.format(**limits).splitlines(),
        *_sizes(card, config),
        *_data(card, config),
        *_comparison(card),
    ]


def _front_matter(config: Config) -> list[str]:
    tree = {
        "language": [config.data.src_lang, config.data.tgt_lang],
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "tags": ["translation", "marian", "mtrain"],
    }
    lines = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).splitlines()
    return ["---", *lines, "---", ""]


def _head(config: Config, library: str) -> list[str]:
    src, tgt = config.data.src_lang, config.data.tgt_lang
    return [
        f"# {src} to {tgt}",
        "",
        f"A translator from {src} to {tgt} for {library}, trained and exported by mtrain "
        f"{__version__}.",
        "",
    ]


def _use(template: str, card: Card, config: Config) -> list[str]:
    filled = template.format(
        line=card.example,
        beam=config.decoding.beam,
        alpha=config.decoding.length_alpha,
        max_length=_max_length(config),
    )
    return ["## Use", "", "In this folder:", "", "```python", *filled.splitlines(), "```"]


def _max_length(config: Config) -> int:
    return config.data.max_tokens + config.decoding.max_extra_tokens


def _sizes(card: Card, config: Config) -> list[str]:
    model = config.model
    src, tgt = len(card.tokenizer.src), len(card.tokenizer.tgt)
    shared = "shared" if card.tokenizer.src is card.tokenizer.tgt else f"source, {tgt:,} target"
    lines = [
        "",
        "## The model",
        "",
        f"- {card.num_parameters:,} parameters: {model.num_encoder_layers} encoder and "
        f"{model.num_decoder_layers} decoder layers, width {model.d_model}, {model.num_heads} "
        f"heads, feed-forward width {model.d_ff}, {model.norm}-norm, {model.activation}.",
        f"- SentencePiece {config.tokenizer.kind}: {src:,} {shared} pieces.",
    ]
    origin = checkpoint.load_final_weights_info(card.run.model_path)
    if origin is not None:
        lines.append(
            f"- BLEU of the validation text: {origin.bleu:.2f} (sacreBLEU, greedy search)."
        )
    if config.training.init_from is not None:
        lines.append(
            f"- Fine-tuned: the training began with the weights of `{config.training.init_from}`."
        )
    return lines


def _data(card: Card, config: Config) -> list[str]:
    lines = ["", "## The data", "", *_counts(card.run, card.tokenizer)]
    marks = prepare.read_marks(card.run)
    train = corpora_of(config.data.train, "data.train")
    corpora = [("training", named.corpus) for named in train]
    corpora += [("validation", config.data.valid)]
    corpora += [(f"test {name}", corpus) for name, corpus in config.data.tests.items()]
    lines += ["", "| text | file | SHA-256 |", "| --- | --- | --- |"]
    for text, corpus in corpora:
        lines += [_row([text, *file]) for file in _files(corpus, marks)]
    return lines


def _row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table, with escaped cells."""
    escaped = (" ".join(cell.splitlines()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _files(corpus: Corpus, marks: Mapping[str, FileMark]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file and its hash when it was tokenized, or else now."""
    if isinstance(corpus, HubCorpus) and not Path(corpus.hub).is_dir():
        yield f"{corpus.hub}, {corpus.split}", "of the hub"
        return
    for path in paths_of(corpus):
        digest = marks[path].sha256 if path in marks else sha256_if_readable(Path(path))
        yield Path(path).name, f"`{digest}`" if digest else "not there any more"


def _counts(run: RunDir, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield how many training pairs were kept and dropped."""
    try:
        num_kept = len(loader.TrainingData(run.data_dir, tokenizer, seed=0))
        dropped = prepare.read_counts(run)
    except RunError:
        yield "How many training pairs there were is not known any more."
        return
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    total = f"{num_kept:,} training pairs were kept, {sum(dropped.values()):,} dropped"
    yield f"{total} ({reasons})." if reasons else f"{total}."


def _comparison(card: Card) -> list[str]:
    return ["", "## What was checked", "", "```", *card.table, "```"]
