"""Shapes as text, and the pairs in them."""

import pytest

from dynattn.scripts.benchmark.harness.shapes import Shape, parse_shape, visible_pairs
from dynattn.scripts.common.errors import UserError


@pytest.mark.parametrize(("window", "memory"), [(None, 0), (3, 0), (None, 4), (3, 4), (100, 2)])
def test_visible_pairs_are_those_counted_one_by_one(window: int | None, memory: int) -> None:
    counted = sum(
        1
        for query in range(memory, memory + 9)
        for key in range(memory + 9)
        if key <= query and (window is None or query - key < window)
    )
    assert visible_pairs(9, window, memory) == counted


def test_a_shape_is_read_and_written_as_text() -> None:
    assert parse_shape("16x64@2048") == Shape(16, 64, 2048)
    assert str(parse_shape("8x16@2+32")) == "8x16@2+32"


@pytest.mark.parametrize("text", ["16x64", "0x64@10", "16x00@10", "16x64@0+4", "\N{ARABIC-INDIC DIGIT ZERO}x64@10"])
def test_a_shape_without_three_positive_numbers_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not HEADSxWIDTH@LENGTH with positive numbers"):
        parse_shape(text)
