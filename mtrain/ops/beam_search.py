"""Positions of a beam search in one compiled call: decoder, output layer, and choice of tokens.

Shapes: B sentences, W beam width, R = B * W, N open hypotheses, E hypotheses that end, T tokens or
slots of the cache, S source slots, M hypotheses to return, X = 2 * D, L lengths.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mtrain.ops.header import STRUCTURES
from mtrain.ops.packed_weights import Ints, PackedRows, PackedWeights
from mtrain.ops.stacks import CompiledDecoder, pointers
from mtrain.ops.topk import Projection, ids_tensor

Floats = NDArray[np.float64]
MAX_POSITIONS = 16  # of one call, at most; new sentences are admitted between calls
_MIN_POSITIONS = 4  # the limit of a call with many hypotheses
_SHORT_CALL = 80  # hypotheses * positions of a call whose limit is between these two
_WRITTEN = 4  # columns before the tokens, as in `beam_search.c`


class Hypotheses(NamedTuple):
    """Hypotheses of a beam search.

    Attributes:
        sentence_N: the sentence index of each.
        ids_N: the last token of each.
        length_N: the number of tokens of each.
        log_prob_N: the sum of its log-probabilities, in float64.
        written_NT: its tokens, right-aligned, padded with -1.
        log_probs_NT: the log-probability of each token, aligned as `written_NT`.
    """

    sentence_N: Ints
    ids_N: Ints
    length_N: Ints
    log_prob_N: Floats
    written_NT: Ints
    log_probs_NT: Floats


class SearchRules(NamedTuple):
    """The rules of a beam search: its width, what ends a target, and which tokens are ranked.

    Attributes:
        beam: slots of each sentence.
        eos: the id that ends a target.
        never: ids that are not generated.
        max_lengths_B: the most tokens of each target, without eos.
        penalty_T: the length penalty by number of tokens, with eos; it divides the log-probability.
        early_stop: bound the score of an open hypothesis at its present length, not at the longest.
        argmax_only: compute no log-probabilities; they are 0.
        shortlists: the tokens that are ranked for each sentence; empty is all tokens.
    """

    beam: int
    eos: int
    never: list[int]
    max_lengths_B: Ints
    penalty_T: Floats
    early_stop: bool
    argmax_only: bool
    shortlists: Sequence[PackedRows] = ()


class Cache(NamedTuple):
    """The key-value cache.

    Attributes:
        pasts, sources: keys and values of target and source positions, [slots, X] for each layer.
        past_slots_NT, source_slots_NS: row numbers for each hypothesis; -1 is padding.
        free_slots: free rows of `pasts`, which are allocated in this order.
    """

    pasts: Sequence[Tensor]
    sources: Sequence[Tensor]
    past_slots_NT: Ints
    source_slots_NS: Ints
    free_slots: Ints


class SearchSteps(NamedTuple):
    """The state of a search after some positions.

    Attributes:
        rows: the open hypotheses, sorted by sentence.
        cell_N: sentence * W + slot of each.
        past_slots_NT, source_slots_NS: the cache rows of each; -1 is padding.
        num_slots: how many of `Cache.free_slots` were allocated.
        num_places_B: W minus the number of finished hypotheses of each sentence.
        best_BM: the M best finished scores, -inf where there are fewer.
        ended: the hypotheses that ended, the first to end first; `written_NT` and `log_probs_NT`
            are undefined to the left of a row's tokens.
        score_E: their scores.
    """

    rows: Hypotheses
    cell_N: Ints
    past_slots_NT: Ints
    source_slots_NS: Ints
    num_slots: int
    num_places_B: Ints
    best_BM: Floats
    ended: Hypotheses
    score_E: Floats


def search_steps(
    decoder: CompiledDecoder,
    output: Projection,
    encodings_TD: Tensor,
    cache: Cache,
    rows: Hypotheses,
    num_places_B: Ints,
    best_BM: Floats,
    rules: SearchRules,
) -> SearchSteps | None:
    """Decode some positions in one call, until the search of a sentence ends or eos is forced.

    The new keys and values are written to `cache.pasts`; no other argument is modified.

    Returns:
        None if no position can be decoded in this way; the layers must then run one by one.

    Raises:
        IndexError: if a token, a slot or a sentence is out of range.
        MemoryError: if the work space cannot be allocated.
    """
    packed = output.packed_for_search(decoder.table_VD)
    functions = decoder.functions_for(encodings_TD, cache.pasts, cache.sources)
    if packed is None or packed.tiles is None or functions is None:
        return None
    num_sentences = len(num_places_B)
    num_positions = _num_positions(num_sentences, rules.beam)
    is_usable = (
        len(packed.weight) == len(decoder.table_VD)
        and len(rules.max_lengths_B) == len(best_BM) == num_sentences
        and len(rules.shortlists) in (0, num_sentences)
    )
    row_maps = [ranked.row_map for ranked in rules.shortlists if ranked.row_map is not None]
    fewest = min((len(ranked.ids_C) for ranked in rules.shortlists), default=rules.beam)
    if not is_usable or len(row_maps) < len(rules.shortlists) or fewest < rules.beam:
        return None
    num_rows, num_past = cache.past_slots_NT.shape
    buffers = _Buffers(cache, rows, num_sentences * rules.beam, num_positions)
    num_places_B = np.array(num_places_B, np.int64, order="C")  # copies, which the call updates
    best_BM, never_ids = np.array(best_BM, np.float64, order="C"), ids_tensor(*rules.never)
    search_shape = STRUCTURES["search_shape"](
        *(num_sentences, rules.beam, best_BM.shape[1], num_positions, rows.written_NT.shape[1]),
        *(len(cache.free_slots), len(rules.penalty_T), len(rules.never), decoder.window),
        *(rules.eos, rules.early_stop, rules.argmax_only),
    )
    shortlists = (STRUCTURES["shortlist"] * len(row_maps))(*row_maps)
    sizes = (num_rows, num_past, cache.source_slots_NS.shape[1])
    structures = (
        search_shape,
        decoder.shape(*sizes, encodings_TD, cache.pasts, cache.sources),
        decoder.weights,
        pointers(cache.pasts),
        pointers(cache.sources),
        _output_layer(packed, rules.argmax_only, shortlists),
    )
    penalty_T = np.ascontiguousarray(rules.penalty_T, np.float64)
    inputs = [np.ascontiguousarray(x, np.int64) for x in (rules.max_lengths_B, cache.free_slots)]
    arrays = [penalty_T, *inputs, num_places_B, best_BM, *buffers.arrays()]
    addresses = [array.ctypes.data for array in arrays]
    tensors = (decoder.table_VD, encodings_TD, never_ids)
    functions.call("search_steps", tensors, *addresses, structures=structures)
    return buffers.read(num_places_B, best_BM) if buffers.counts[0] else None


def _output_layer(
    packed: PackedWeights, argmax_only: bool, shortlists: ctypes.Array[ctypes.Structure]
) -> ctypes.Structure:
    layer = STRUCTURES["output_layer"](packed.map_with(None))  # other fields are NULL
    scan = packed.scan
    if len(shortlists):
        layer.shortlists = ctypes.addressof(shortlists)
    elif argmax_only and scan is not None:
        layer.scan = scan.packed.map_with(None)
        if scan.weight is not None and scan.bounds_2U is not None:
            layer.weight, layer.bounds = scan.weight.data_ptr(), scan.bounds_2U.data_ptr()
    return layer


class _Buffers:
    """The arrays that `search_steps` of `ops.h` reads and writes; `ops.h` describes their columns.

    Args:
        cache, rows: the open hypotheses and their slots.
        num_cells: the most open hypotheses, R.
        num_positions: the most positions that are decoded, P.
    """

    def __init__(self, cache: Cache, rows: Hypotheses, num_cells: int, num_positions: int) -> None:
        num_rows, num_past = cache.past_slots_NT.shape
        self.num_written, self.num_past = rows.written_NT.shape[1], num_past
        self.past = _WRITTEN + self.num_written + num_positions
        self.source = self.past + num_past + num_positions
        num_ints = self.source + cache.source_slots_NS.shape[1]
        self.ints = np.empty((num_cells, num_ints), np.int64)
        self.reals = np.empty((num_cells, 1 + self.num_written + num_positions))
        self.ended_ints = np.empty((num_cells, 2 + self.num_written + num_positions), np.int64)
        self.ended_reals, self.counts = np.empty(self.ended_ints.shape), np.empty(4, np.int64)
        ints, reals = self.ints[:num_rows], self.reals[:num_rows]
        ints[:, 0], ints[:, 2], ints[:, 3] = rows.sentence_N, rows.ids_N, rows.length_N
        ints[:, _WRITTEN : _WRITTEN + self.num_written] = rows.written_NT
        ints[:, self.past : self.past + num_past] = cache.past_slots_NT
        ints[:, self.source :] = cache.source_slots_NS
        reals[:, 0], reals[:, 1 : 1 + self.num_written] = rows.log_prob_N, rows.log_probs_NT

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in the order of the arguments of the C function."""
        return [self.ints, self.reals, self.ended_ints, self.ended_reals, self.counts]

    def read(self, num_places_B: Ints, best_BM: Floats) -> SearchSteps:
        """Return the results that the call has written to the buffers."""
        num_positions, num_open, num_ended, num_slots = self.counts.tolist()
        num_written, num_past = self.num_written + num_positions, self.num_past + num_positions
        ints, reals = self.ints[:num_open], self.reals[:num_open]
        ended_ints, ended_reals = self.ended_ints[:num_ended], self.ended_reals[:num_ended]
        return SearchSteps(
            Hypotheses(
                ints[:, 0].copy(),
                ints[:, 2].copy(),
                ints[:, 3].copy(),
                reals[:, 0].copy(),
                ints[:, _WRITTEN : _WRITTEN + num_written].copy(),
                reals[:, 1 : 1 + num_written].copy(),
            ),
            ints[:, 1].copy(),
            ints[:, self.past : self.past + num_past].copy(),
            ints[:, self.source :].copy(),
            num_slots,
            num_places_B,
            best_BM,
            Hypotheses(
                ended_ints[:, 0],
                ended_ints[:, -1],
                ended_ints[:, 1],
                ended_reals[:, 0],
                ended_ints[:, 2:],
                ended_reals[:, 2:],
            ),
            ended_reals[:, 1],
        )


def num_slots_for(num_rows: int, num_sentences: int, beam: int) -> int:
    """Return a number of free slots that is enough for any call of `search_steps`."""
    return min(num_rows, num_sentences) * beam * _num_positions(num_sentences, beam)


def _num_positions(num_sentences: int, beam: int) -> int:
    """Return the most positions of a call: the fewer hypotheses, the more positions."""
    return max(_MIN_POSITIONS, min(MAX_POSITIONS, _SHORT_CALL // max(num_sentences * beam, 1)))
