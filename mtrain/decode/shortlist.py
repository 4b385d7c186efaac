"""A shortlist of the target vocabulary for each source: the tokens that the search ranks.

Shapes: S source vocabulary, V target vocabulary, K likely targets of a source token, N source
tokens with a target token that occurs together with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mtrain.errors import RunError, damaged
from mtrain.io.atomic import whole_file
from mtrain.ops.packed_weights import Ints
from mtrain.run.checkpoint import save_tensors
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer.sentencepiece import Tokenizer

if TYPE_CHECKING:
    from mtrain.data.arrow_shards import ShardSet

NUM_LIKELY = 40  # targets of each source token, at most
NUM_FREQUENT = 150  # tokens that are ranked for every source
_MAX_PAIRS = 200_000  # of the training text that are counted, at even distances
_BLOCK_PAIRS = 2_000  # that are counted at once

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Shortlist:
    """The likely targets of each source token, and those that are ranked for every source.

    Attributes:
        likely_SK: the likely targets, -1 where there are fewer.
        is_always_V: the frequent tokens and eos.
        is_shared: source and target have one vocabulary, so that a token can be copied.
    """

    likely_SK: Ints
    is_always_V: NDArray[np.bool_]
    is_shared: bool

    def tokens(self, src_ids: Sequence[int], never: Sequence[int]) -> Ints:
        """Return the target tokens that are ranked for a source, sorted, without `never`."""
        is_ranked_V = np.append(self.is_always_V, False)  # index -1, the last, is padding
        is_ranked_V[self.likely_SK[src_ids].ravel()] = True
        if self.is_shared:
            is_ranked_V[src_ids] = True
        is_ranked_V[[*never, -1]] = False
        return np.flatnonzero(is_ranked_V)


def learn(pairs: Iterable[Pair], num_src: int, num_tgt: int, always: Sequence[int]) -> Shortlist:
    """Count which tokens co-occur in pairs, and keep the likely targets of each source token.

    Targets t of a source token s are ranked by n(s, t) log(n(s, t) P / (n(s) n(t))), where n counts
    pairs, and P is the number of all pairs.

    Args:
        pairs: ids of both sides.
        num_src, num_tgt: sizes of the vocabularies.
        always: tokens that are ranked for every source.
    """
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    count_S, count_V, num_pairs = np.zeros(num_src), np.zeros(num_tgt), 0
    iterator = iter(pairs)
    while block := list(islice(iterator, _BLOCK_PAIRS)):
        key_blocks = [keys]
        for src, tgt in block:
            src_ids, tgt_ids = np.unique(np.asarray(src)), np.unique(np.asarray(tgt))
            count_S[src_ids] += 1
            count_V[tgt_ids] += 1
            key_blocks.append((src_ids.astype(np.int64)[:, None] * num_tgt + tgt_ids).ravel())
        num_pairs += len(block)
        weights = np.concatenate([counts, np.ones(sum(map(len, key_blocks[1:])), np.int64)])
        keys, places = np.unique(np.concatenate(key_blocks), return_inverse=True)
        counts = np.bincount(places, weights).astype(np.int64)
    src_N, tgt_N = np.divmod(keys, num_tgt)
    expected_N = count_S[src_N] * count_V[tgt_N] / max(num_pairs, 1)
    score_N = counts * np.log(counts / expected_N)
    order = np.lexsort((-score_N, src_N))
    src_N, tgt_N, score_N = src_N[order], tgt_N[order], score_N[order]
    rank_N = np.arange(len(src_N)) - np.searchsorted(src_N, src_N)
    is_kept_N = (rank_N < NUM_LIKELY) & (score_N > 0)
    likely_SK = np.full((num_src, NUM_LIKELY), -1)
    likely_SK[src_N[is_kept_N], rank_N[is_kept_N]] = tgt_N[is_kept_N]
    is_always_V = np.zeros(num_tgt, np.bool_)
    is_always_V[np.argsort(-count_V, kind="stable")[:NUM_FREQUENT]] = True
    is_always_V[list(always)] = True
    return Shortlist(likely_SK, is_always_V, False)


def load(run: RunDir, tokenizer: Tokenizer) -> Shortlist:
    """Return the shortlist of a run; learn it from the training text if there is none yet.

    Raises:
        RunError: if there is none and no training text, or it is damaged.
    """
    if stored := read(run, tokenizer):
        return stored
    from mtrain.data.arrow_shards import ShardSet, are_in  # pyarrow takes a tenth of a second

    if not are_in(run.data_dir):
        raise RunError(
            f"{run.path}: must have the training text in {run.data_dir.name}/ to learn a "
            "shortlist from, but has none; leave `--shortlist` out."
        )
    pairs = _sampled_pairs(ShardSet(run.data_dir, tokenizer))
    sizes = len(tokenizer.src), len(tokenizer.tgt)
    learned = learn(pairs, *sizes, [tokenizer.tgt.eos])
    tensors = {
        "likely": torch.from_numpy(learned.likely_SK),
        "always": torch.from_numpy(learned.is_always_V),
    }
    with whole_file(run.shortlist_path) as unfinished:
        save_tensors(unfinished, tensors, {"tokenizer": tokenizer.fingerprint()})
    return replace(learned, is_shared=tokenizer.src.model == tokenizer.tgt.model)


def read(run: RunDir, tokenizer: Tokenizer) -> Shortlist | None:
    """Return the stored shortlist of a run; None if there is none for this tokenizer.

    Raises:
        RunError: if it is damaged.
    """
    path = run.shortlist_path
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            likely, always = (file.get_tensor(name).numpy() for name in ("likely", "always"))
            is_current = (file.metadata() or {}).get("tokenizer") == tokenizer.fingerprint()
    except (OSError, SafetensorError) as error:
        raise damaged(path, "must be a file of safetensors, but is not") from error
    if not _is_sound(likely, always):
        raise damaged(path, "must have ids of target tokens, but has others")
    if not is_current or (len(likely), len(always)) != (len(tokenizer.src), len(tokenizer.tgt)):
        return None
    return Shortlist(likely, always, tokenizer.src.model == tokenizer.tgt.model)


def _is_sound(likely: NDArray[Any], always: NDArray[Any]) -> bool:
    """Return whether arrays of a file have the shapes, types and values of a `Shortlist`."""
    has_types = likely.dtype == np.int64 and always.dtype == np.bool_
    if not has_types or (likely.ndim, always.ndim) != (2, 1):
        return False
    return bool(((likely >= -1) & (likely < len(always))).all())


def _sampled_pairs(shards: ShardSet) -> Iterator[Pair]:
    """Yield all pairs of the training text, or about `_MAX_PAIRS` at even distances."""
    total = sum(shard.num_pairs for shard in shards.manifest.shards)
    step = max(1, -(-total // _MAX_PAIRS))
    for table in shards.all():
        rows = np.arange(0, len(table), step)
        for first in range(0, len(rows), _BLOCK_PAIRS):
            yield from zip(*table.take(rows[first : first + _BLOCK_PAIRS]), strict=True)
