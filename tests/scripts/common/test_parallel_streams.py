"""Contiguous streams: every token is predicted once, after the token before it, in the order that memory needs."""

import pytest
import torch

from dynattn.scripts.common.parallel_streams import ParallelStreams


def test_streams_are_successive_pieces_of_the_text_and_segments_follow_each_other():
    streams = ParallelStreams.cut(torch.arange(15), streams=2, segment=3)
    assert [(inputs.tolist(), targets.tolist()) for inputs, targets in streams] == [
        ([[0, 1, 2], [7, 8, 9]], [[1, 2, 3], [8, 9, 10]]),
        ([[3, 4, 5], [10, 11, 12]], [[4, 5, 6], [11, 12, 13]]),
        ([[6], [13]], [[7], [14]]),
    ]
    assert len(streams) == 3


@pytest.mark.parametrize(("tokens", "streams", "segment"), [(100, 1, 7), (101, 4, 5), (103, 4, 1), (103, 4, 200)])
def test_every_token_but_the_first_is_a_target_once(tokens: int, streams: int, segment: int):
    cut = ParallelStreams.cut(torch.arange(tokens), streams, segment)
    targets = torch.cat([targets.flatten() for _, targets in cut]).sort().values
    assert targets.tolist() == list(range(1, len(targets) + 1))
    assert tokens - 1 - len(targets) < streams
    assert all(torch.equal(inputs + 1, targets) for inputs, targets in cut)


def test_segments_share_the_memory_of_the_text():
    tokens = torch.zeros(1000, dtype=torch.long)
    inputs, _ = ParallelStreams.cut(tokens, 4, 10)[3]
    assert inputs.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("streams", "segment", "message"),
    [(0, 4, "must be positive"), (2, 0, "must be positive"), (10, 4, "too few for 10 streams")],
)
def test_impossible_cuts_are_refused(streams: int, segment: int, message: str):
    with pytest.raises(ValueError, match=message):
        ParallelStreams.cut(torch.arange(10), streams, segment)


def test_two_tokens_for_each_stream_suffice():
    assert [part.tolist() for part in ParallelStreams.cut(torch.arange(3), 2, 4)[0]] == [[[0], [1]], [[1], [2]]]


@pytest.mark.parametrize("index", [-1, 3])
def test_there_is_no_segment_outside_the_text(index: int):
    with pytest.raises(IndexError, match=f"segment {index} of 3"):
        ParallelStreams.cut(torch.arange(10), 1, 3)[index]
