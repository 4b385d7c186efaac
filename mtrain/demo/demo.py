"""Train and score a small model on the corpus that ships with mtrain, in minutes."""

from __future__ import annotations

import lzma
import shlex
import shutil
import sys
from itertools import chain
from pathlib import Path

from mtrain.config import config_file
from mtrain.config.config_file import dump_inline, write_schema_beside
from mtrain.data.prepare import prepare
from mtrain.decode import translator
from mtrain.decode.pipeline import Warn
from mtrain.errors import RunError
from mtrain.evaluation import evaluation
from mtrain.evaluation.report import format_scores
from mtrain.io.atomic import whole_dir, whole_file
from mtrain.run.logger import Console
from mtrain.run.run_dir import RunDir
from mtrain.training.trainer import train

_CONFIG = """\
# The demo: a small Transformer on a small grammar, minutes on a laptop.
run_dir: "{run_dir}"
data:
  src_lang: en
  tgt_lang: de
  train: {{src: ["{corpus}/train.en"], tgt: ["{corpus}/train.de"]}}
  valid: {{src: ["{corpus}/valid.en"], tgt: ["{corpus}/valid.de"]}}
  tests:
    demo: {{src: ["{corpus}/test.en"], tgt: ["{corpus}/test.de"]}}
tokenizer: {{vocab_size: 1200}}
model: {{d_model: 128, d_ff: 256, num_encoder_layers: 2, num_decoder_layers: 2, dropout: 0.0}}
training:
  max_steps: 2500
  batch_tokens: 1024
  schedule: linear
  lr: 0.003
  warmup_steps: 300
  validate_every: 500
  log_every: 50
  keep_last: 3
  average: 3
  save_every: 50
"""


def config_text(corpus: str, run_dir: str) -> str:
    """Return the YAML text of the demo's config, without the line that names its schema."""
    corpus, run_dir = (dump_inline(path)[1:-1] for path in (corpus, run_dir))  # without quotes
    return _CONFIG.format(corpus=corpus, run_dir=run_dir)


def write_corpus(directory: Path) -> None:
    """Unpack the demo corpus into `directory`: `{train,valid,test}.{en,de}`."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(__file__).with_name("corpus").glob("*.xz")):
        (directory / path.stem).write_bytes(lzma.decompress(path.read_bytes()))


def demo(directory: Path, console: Console) -> None:
    """Write corpus and config into `directory` and train there; a stopped demo is resumed.

    Raises:
        ConfigError: if the name of the folder is not UTF-8.
        RunError: if the folder holds another run.
    """
    config_file.check_utf8([directory])
    corpus, config_path = directory / "corpus", directory / "demo.yaml"
    run = RunDir(directory)
    if run.config_path.is_file() and not config_path.is_file():
        raise RunError(
            f"{directory}: must be new, or hold a demo, but holds another run instead; name "
            "another DIR."
        )
    if not corpus.is_dir():
        with whole_dir(corpus) as partial_dir:
            write_corpus(partial_dir)
    if not config_path.is_file():
        with whole_file(config_path) as partial_path:
            text = write_schema_beside(config_path) + config_text(str(corpus), str(directory))
            partial_path.write_text(text, encoding="utf-8")
    config = config_file.load(config_path)
    prepare(config, run, console)
    if run.model_path.exists():
        console.say(f"{directory}: trained already")
    else:
        train(config, run)


def report(directory: Path, warn: Warn) -> list[str]:
    """Score the test sets; return the scores, five translations of the first, and what is next."""
    run = RunDir(directory)
    results = evaluation.evaluate(run, translator.load(run), warn)
    lines, result = [*chain.from_iterable(map(format_scores, results))], results[0]
    for row in (number * len(result.hypotheses) // 5 for number in range(5)):
        lines.append(f"source       {result.lines.src[row]}")
        lines.append(f"reference    {result.lines.refs[0][row]}")
        lines.append(f"translation  {result.hypotheses[row]}")
    lines.append(f"The run folder is {directory}. Translate a sentence with it:")
    is_on_path = Path(sys.argv[0]).name != "mtrain" or shutil.which("mtrain") is not None
    program = "mtrain" if is_on_path else sys.argv[0]  # as it was started
    words = shlex.join([program, "translate", str(directory)])
    lines.append(f'  echo "The old farmer is tired." | {words}')
    lines.append("Translate on a page in the browser:")
    lines.append(f"  {shlex.join([program, 'serve', str(directory)])}")
    return lines
