"""Which tokens RCMHA's convolutions read, from masks in the forms that callers give."""

import torch

from dynattn.modeling.layers.segment import real_token_mask


def test_a_complete_mask_tells_padding_among_the_new_tokens():
    """Two new tokens after three of the memory, all of which count; in the second row the first new one is padding."""
    visible = torch.ones(2, 1, 2, 5, dtype=torch.bool).tril(3)
    visible[1, :, 0] = False  # [T, S]: the padded query sees nothing
    visible[1, :, :, 3] = False  # and no query sees it as a key
    expected = [[True] * 5, [True, True, True, False, True]]
    for mask in (visible, torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)):
        found = real_token_mask(mask, mask, length=2, read=5, query_offset=None, end=5)
        assert found is not None and found.tolist() == expected
    static = torch.nn.functional.pad(visible, (0, 3))  # a static cache has keys behind the new tokens
    found = real_token_mask(static, static, length=2, read=5, query_offset=torch.tensor(3), end=5)
    assert found is not None and found.tolist() == expected
    of_keys = visible[:, :, 1:]  # the same for all queries
    found = real_token_mask(of_keys, of_keys, length=2, read=5, query_offset=None, end=5)
    assert found is not None and found.tolist() == expected
