"""Sequences that begin short: lengths, and pieces that hold the tokens and targets of the whole."""

import pytest
import torch
from cases.models import make_model

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.length_warmup import LengthWarmup
from dynattn.scripts.pretrain.data.objectives import CausalLM


def test_lengths_double_along_a_line():
    warmup = LengthWarmup.of(PretrainArguments(output="x", sequence_length=64, length_warmup_steps=56))
    assert warmup.lengths == (8, 16, 32, 64)
    assert [warmup(step) for step in range(58)] == [8] * 8 + [16] * 16 + [32] * 32 + [64, 64]
    assert LengthWarmup.of(PretrainArguments(output="x", sequence_length=64))(0) == 64


@pytest.mark.parametrize(
    "options",
    [
        {"shortest_length": 24},
        {"shortest_length": 1},
        {"shortest_length": 64},
        {"sequence_length": 60},
        {"sequence_length": 48, "shortest_length": 16},
    ],
)
def test_lengths_that_do_not_divide_or_grow_are_refused(options: dict[str, int]):
    with pytest.raises(UserError, match="divided by 2, 4, 8 or another power of two"):
        LengthWarmup.of(
            PretrainArguments(**{"output": "x", "sequence_length": 64, "length_warmup_steps": 9, **options})
        )


def test_pieces_have_the_tokens_targets_and_documents_of_the_whole():
    ids = torch.arange(32).reshape(2, 16)
    labels = ids.clone()
    labels[0, 5] = -100
    positions = torch.cat([torch.arange(6), torch.arange(10)])
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions.expand(2, 16)}
    pieces = LengthWarmup((8, 16), 10).cut(batch, 0)
    assert torch.equal(pieces["input_ids"].flatten(), ids.flatten())
    assert CausalLM().count(pieces) == CausalLM().count({"labels": labels})
    expected = [[*row[1:].tolist(), -100] for row in ids]
    expected[0][4] = -100
    assert pieces["shift_labels"].reshape(2, 16).tolist() == expected
    assert pieces["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]] * 2
    assert LengthWarmup((8, 16), 10).cut(batch, 10) is batch


def test_a_model_reads_pieces_as_texts_of_their_own():
    """The loss of pieces is that of each piece by itself, with the next piece's first token as its last target."""
    model = make_model().eval()
    ids = torch.arange(16)[None]
    pieces = LengthWarmup((8, 16), 10).cut({"input_ids": ids, "labels": ids}, 0)
    with torch.no_grad():
        whole = model(**pieces, num_items_in_batch=1).loss
        first = model(input_ids=ids[:, :8], labels=ids[:, :8], shift_labels=ids[:, 1:9], num_items_in_batch=1).loss
        second = model(input_ids=ids[:, 8:], labels=ids[:, 8:], num_items_in_batch=1).loss
    torch.testing.assert_close(whole, first + second)
