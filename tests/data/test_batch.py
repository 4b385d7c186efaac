"""A batch has the ids, masks and counts of the sequences that it was made of."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from mtrain.data.batch import Batch, collate, keep_first, pad_right

PAD, BOS, EOS = 90, 91, 92  # arbitrary ids: a batch assumes none
SRC = [[5, 6, EOS], [7, EOS], [8, 9, 10, 11, EOS]]
TGT = [[15], [16, 17, 18], []]


def batch():
    return collate(SRC, TGT, PAD, BOS, EOS)


def test_a_batch_is_padded_on_the_right():
    assert batch().src_BS.tolist() == [
        [5, 6, EOS, PAD, PAD],
        [7, EOS, PAD, PAD, PAD],
        [8, 9, 10, 11, EOS],
    ]


def test_decoder_inputs_begin_with_bos_and_expected_outputs_end_with_eos():
    assert batch().tgt_in_BT.tolist() == [
        [BOS, 15, PAD, PAD],
        [BOS, 16, 17, 18],
        [BOS, PAD, PAD, PAD],
    ]
    assert batch().tgt_out_BT.tolist() == [
        [15, EOS, PAD, PAD],
        [16, 17, 18, EOS],
        [EOS, PAD, PAD, PAD],
    ]


def test_masks_keep_everything_but_padding():
    made = batch()
    assert torch.equal(made.src_keep_BS, made.src_BS != PAD)
    assert torch.equal(made.tgt_keep_BT, made.tgt_in_BT != PAD)
    assert torch.equal(made.tgt_keep_BT, made.tgt_out_BT != PAD)


def test_a_real_token_with_the_padding_id_is_not_masked():
    made = collate([[PAD, 5, EOS]], [[PAD]], PAD, BOS, EOS)
    assert made.src_keep_BS.all()
    assert made.tgt_keep_BT.all()


def test_the_token_count_equals_the_sum_of_the_mask():
    made = batch()
    assert made.num_tgt_tokens == made.tgt_keep_BT.sum() == 7


def test_ids_are_int64_and_masks_are_bool_with_the_expected_shapes():
    made = batch()
    ids = [made.src_BS, made.tgt_in_BT, made.tgt_out_BT]
    keeps = [made.src_keep_BS, made.tgt_keep_BT]
    assert [tensor.shape for tensor in ids] == [(3, 5), (3, 4), (3, 4)]
    assert [tensor.shape for tensor in keeps] == [(3, 5), (3, 4)]
    assert {tensor.dtype for tensor in ids} == {torch.int64}
    assert {tensor.dtype for tensor in keeps} == {torch.bool}


def test_arrays_and_lists_give_the_same_batch():
    src, tgt = ([np.array(ids, dtype=np.int32) for ids in side] for side in (SRC, TGT))
    of_arrays, of_lists = collate(src, tgt, PAD, BOS, EOS), batch()
    for name in ("src_BS", "src_keep_BS", "tgt_in_BT", "tgt_out_BT", "tgt_keep_BT"):
        assert torch.equal(getattr(of_arrays, name), getattr(of_lists, name))


def test_to_moves_every_tensor_of_a_batch_to_the_device():
    moved = batch().to(torch.device("meta"))
    for name in ("src_BS", "src_keep_BS", "tgt_in_BT", "tgt_out_BT", "tgt_keep_BT"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(batch(), name).shape
    assert moved.num_tgt_tokens == 7


@pytest.mark.parametrize("lengths", [[1], [3, 1, 2], [0, 2]])
def test_pad_right_and_keep_first_agree_on_the_sequence_lengths(lengths):
    rows = [[1] * length for length in lengths]
    assert torch.equal(pad_right(rows, 0) == 1, keep_first(lengths))
    assert keep_first(lengths).sum(1).tolist() == lengths


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [(1, [7]), (2, [4, 3]), (3, [3, 3, 1]), (4, [2, 2, 2, 1]), (7, [1] * 7), (50, [1] * 7)],
)
def test_split_keeps_all_pairs_in_order_and_pads_each_part_to_its_own_longest_sequence(
    parts, sizes
):
    src = [[5, EOS], [5, 6, 7, EOS], [EOS], [5, 6, EOS], [9, EOS], [8, 8, EOS], [7, EOS]]
    tgt = [[1, 2, 3], [], [1], [1, 2, 3, 4], [2], [], [3, 3]]
    whole = collate(src, tgt, PAD, BOS, EOS)
    pieces = whole.split(parts)
    assert [len(piece.src_BS) for piece in pieces] == sizes
    start = 0
    for piece, size in zip(pieces, sizes, strict=True):
        rows = slice(start, start + size)
        alone, start = collate(src[rows], tgt[rows], PAD, BOS, EOS), start + size
        assert_same(piece, alone)
    assert start == len(src)


def assert_same(found: Batch, expected: Batch) -> None:
    for field in fields(Batch):
        mine, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert torch.equal(mine, other)
            assert mine.dtype == other.dtype
        else:
            assert (mine, type(mine)) == (other, int)


def test_the_token_counts_of_the_parts_add_up_to_those_of_the_batch():
    pieces = batch().split(2)
    assert sum(int(piece.src_keep_BS.sum()) for piece in pieces) == batch().src_keep_BS.sum()
    assert sum(piece.num_tgt_tokens for piece in pieces) == batch().num_tgt_tokens


def test_splitting_a_batch_into_one_part_gives_an_equal_batch():
    (only,) = batch().split(1)
    assert_same(only, batch())
