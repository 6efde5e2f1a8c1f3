"""Packed documents: which positions and borders separate them."""

import pytest
import torch

from dynattn.modeling.common.packed_documents import starts_by_borders, starts_by_positions


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([0, 1, 2, 0, 1], [0, 0, 0, 3, 3]),
        ([0, 0, 0], [0, 1, 2]),
        ([5, 6, 7, 3, 4], [0, 0, 0, 3, 3]),
        # An anchor at position 0 belongs to the document that goes on after it, and so do tokens after a gap.
        ([0, 1, 2, 3, 0, 5, 6, 7, 0, 9], [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]),
        ([0, 2, 3, 5, 6, 9], [0, 0, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_document_starts_where_positions_restart(positions: list[int], starts: list[int]) -> None:
    assert starts_by_positions(torch.tensor([positions])).tolist() == [starts]


def test_a_document_starts_at_each_border() -> None:
    starts = starts_by_borders(torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.zeros(1, 5, 8))
    assert starts.tolist() == [[0, 0, 2, 2, 2]]
    assert starts_by_borders(torch.tensor([0, 5]), torch.zeros(1, 5, 8)).tolist() == [[0] * 5]


def test_borders_of_several_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="a single packed row; it goes from 0 to 5 for 2 rows of 5 tokens"):
        starts_by_borders(torch.tensor([0, 2, 5]), torch.zeros(2, 5, 8))


@pytest.mark.parametrize("borders", [[0, 4, 2, 5], [0, 4], [0, 6]], ids=str)
def test_borders_that_do_not_rise_from_the_first_token_to_the_last_are_refused(borders: list[int]) -> None:
    with pytest.raises(ValueError, match="must rise from 0 to the length of a single packed row"):
        starts_by_borders(torch.tensor(borders), torch.zeros(1, 5, 8))


def test_a_single_border_is_refused_and_the_message_says_how_a_trainer_keeps_all() -> None:
    with pytest.raises(ValueError, match=r"shape \(1,\) must be \[documents \+ 1\].*'dispatch_batches': False"):
        starts_by_borders(torch.tensor([0]), torch.zeros(1, 5, 8))
