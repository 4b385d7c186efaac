"""Encode Multi30k with mtrain's tokenizer, once, and write it in the form that each system reads.

    python -m peers.encode MULTI30K_FOLDER OUT_FOLDER VOCAB_SIZE

Lines of `train.en` and `train.de` are ids as decimal words, without bos and eos; with eos, and as
sources, they are `train.eos.en`. Decimal words pass through any tokenizer that splits at spaces.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from datasets import Dataset
from peers.worker import NUM_SPECIAL

from mtrain.config import config_file
from mtrain.data import prepare
from mtrain.data.arrow_shards import shard_path
from mtrain.io.atomic import write_lines
from mtrain.run.logger import Stderr
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

_NUM_VALID = 10  # JoeyNMT wants a validation set, and is stopped before it is used


def main() -> None:
    source, out, vocab_size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    tree = {
        "run_dir": str(out / "run"),
        "data": {
            "src_lang": "en",
            "tgt_lang": "de",
            "train": {"src": [str(source / "train.en")], "tgt": [str(source / "train.de")]},
            "valid": {"src": [str(source / "val.en")], "tgt": [str(source / "val.de")]},
        },
        "tokenizer": {"vocab_size": vocab_size},
    }
    (out / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    run = RunDir(out / "run")
    run.path.mkdir()
    prepare.prepare(config_file.load(out / "config.yaml"), run, Stderr())
    table = Dataset.from_file(str(shard_path(run.data_dir, 0)))
    eos = sentencepiece.load(run.tokenizer_dir).tgt.eos
    src_ids = [ids[:-1] for ids in table["src"]]  # stored with eos
    tgt_ids = list(table["tgt"])
    write_corpus(out, src_ids, tgt_ids, eos)
    valid = (source / "val.en").read_text("utf-8").splitlines()
    write_lines(out / "val.en", map(words, sentencepiece.load(run.tokenizer_dir).src.encode(valid)))
    write_vocabularies(out, vocab_size)
    (out / "counts.json").write_text(json.dumps(count(src_ids, tgt_ids)), encoding="utf-8")


def write_corpus(out: Path, src_ids: list[list[int]], tgt_ids: list[list[int]], eos: int) -> None:
    """Write both sides as lines of words."""
    write_lines(out / "train.en", map(words, src_ids))
    write_lines(out / "train.de", map(words, tgt_ids))
    write_lines(out / "train.eos.en", (f"{words(ids)} </s>" for ids in src_ids))
    write_lines(out / "valid.en", map(words, src_ids[:_NUM_VALID]))
    write_lines(out / "valid.de", map(words, tgt_ids[:_NUM_VALID]))


def words(ids: list[int]) -> str:
    """Return ids as a line of decimal words."""
    return " ".join(map(str, ids))


def write_vocabularies(out: Path, vocab_size: int) -> None:
    """Write the words in the order of their ids, once with and once without the special ones."""
    plain = [str(index) for index in range(NUM_SPECIAL, vocab_size)]
    write_lines(out / "plain.vocab", plain)  # JoeyNMT puts its own four before them
    write_lines(out / "whole.vocab", ["<blank>", "<unk>", "<s>", "</s>", *plain])


def count(src_ids: list[list[int]], tgt_ids: list[list[int]]) -> dict[str, int]:
    """Count an epoch, and the sums that the number of its operations follows from."""
    src_lengths = [len(ids) + 1 for ids in src_ids]
    tgt_lengths = [len(ids) + 1 for ids in tgt_ids]
    lengths = list(zip(src_lengths, tgt_lengths, strict=True))
    all_ids = [index for ids in (*src_ids, *tgt_ids) for index in ids]
    assert min(all_ids) >= NUM_SPECIAL, "a line holds a special id"
    return {
        "pairs": len(lengths),
        "src_tokens": sum(src_lengths),
        "tgt_tokens": sum(tgt_lengths),
        "id_sum": sum(all_ids),
        "src_squares": sum(s * s for s in src_lengths),
        "tgt_squares": sum(t * t for t in tgt_lengths),
        "products": sum(s * t for s, t in lengths),
    }


if __name__ == "__main__":
    main()
