"""What validation reports."""

import math

import pytest

from dynattn.scripts.pretrain.validation import Validation


def test_bits_per_byte_by_hand():
    # Four targets with probability 1/2 and two with 1/8 are 4 + 6 bits; the text has 5 bytes.
    nats = 4 * math.log(2) + 2 * math.log(8)
    validation = Validation.from_sums(nats, targets=6, text_bytes=5)
    assert validation.bits_per_byte == pytest.approx(10 / 5)
    assert validation.loss == pytest.approx(nats / 6)
    assert validation.perplexity == pytest.approx(2 ** (10 / 6))
    assert validation.targets == 6


def test_targets_that_spell_no_text_have_no_bits_per_byte():
    """Such as the ends of empty answers, where these are all that is held out."""
    validation = Validation.from_sums(math.log(2), targets=1, text_bytes=0)
    assert (validation.bits_per_byte, validation.perplexity) == (None, pytest.approx(2))
