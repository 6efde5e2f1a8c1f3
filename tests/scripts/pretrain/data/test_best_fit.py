"""Best-fit packing: every token once, few documents cut, no room wasted that something would have fitted in."""

import numpy as np
import pytest

from dynattn.modeling.ops.chunked_loss import IGNORED
from dynattn.scripts.pretrain.data.best_fit import pack_best_fit
from dynattn.scripts.pretrain.data.packing import BestFitSequences
from dynattn.scripts.pretrain.data.token_stream import TokenStream


def make(lengths: list[int], length: int, mask_documents: bool = True) -> BestFitSequences:
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    starts = np.cumsum(lengths) - np.array(lengths)
    return BestFitSequences(TokenStream(tokens, starts, 0), length, pad=0, mask_documents=mask_documents)


@pytest.mark.parametrize("length", [4, 16, 64])
def test_every_token_is_read_once(length: int):
    lengths = np.random.default_rng(0).integers(2, 100, 300)
    packs = pack_best_fit(lengths, length)
    # A rest of one token is left out.
    expected = sum(size - (size % length == 1) for size in lengths.tolist())
    covered = {(d, o + i) for d, o, s in zip(packs.document, packs.offset, packs.size, strict=True) for i in range(s)}
    assert len(covered) == packs.size.sum() == expected
    filled = np.add.reduceat(packs.size, packs.first[:-1])
    assert filled.max() <= length
    assert packs.cut == (lengths > length).sum()


def test_each_piece_goes_where_least_room_is_left():
    packs = pack_best_fit(np.array([5, 4, 3, 6, 2, 4]), 8)
    contents = [sorted(packs.document[piece] for piece in packs.pieces(row)) for row in range(len(packs.first) - 1)]
    # 6 | 5 | 4 + 4 | then 3 beside 5 and 2 beside 6: three full sequences.
    assert sorted(contents) == [[0, 2], [1, 5], [3, 4]]
    assert packs.size.sum() == 24


def test_documents_of_a_single_token_fill_no_sequence():
    assert len(make([1, 1], 8)) == 0


def test_it_cuts_fewer_documents_than_concatenation():
    lengths = np.random.default_rng(1).integers(10, 120, 400)
    packs = pack_best_fit(lengths, 128)
    ends = np.cumsum(lengths)
    cut_by_concatenation = ((ends - 1) // 128 != (ends - lengths) // 128).sum()
    assert packs.cut == 0 < cut_by_concatenation
    assert packs.size.sum() / ((len(packs.first) - 1) * 128) > 0.95


@pytest.mark.parametrize("mask_documents", [True, False])
def test_no_piece_predicts_from_another_document(mask_documents: bool):
    sequences = make([5, 3, 7, 2, 19], 8, mask_documents)
    for index in range(len(sequences)):
        item = sequences[index]
        begins = np.cumsum([0, *(sequences.packs.size[piece] for piece in sequences.packs.pieces(index))])
        assert (item["labels"][begins[:-1]] == IGNORED).all()
        assert (item["labels"][begins[-1] :] == IGNORED).all()
        is_target = item["labels"] != IGNORED
        assert (item["labels"][is_target] == item["input_ids"][is_target]).all()
        assert is_target.sum() == begins[-1] - (len(begins) - 1)
        if mask_documents:
            assert (item["position_ids"][begins[begins < 8]] == 0).all()
        else:
            assert "position_ids" not in item
