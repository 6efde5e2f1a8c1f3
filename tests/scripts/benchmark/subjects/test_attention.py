"""Plain attention beside our op: what is prepared before the clock starts computes the same."""

from dataclasses import replace

import pytest
import torch
from cases.benchmark import inputs_of

from dynattn.scripts.benchmark.baselines.dcmha import attend_sdpa
from dynattn.scripts.benchmark.harness.inputs import PLAIN, attend_by_reference
from dynattn.scripts.benchmark.subjects.attention import attend_flex, candidates, flex_blocks, with_window_mask


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (40, 150)])
def test_masks_and_blocks_of_keys_are_those_of_the_op(
    queries: int, keys: int, window: int | None, is_causal: bool
) -> None:
    inputs = replace(inputs_of(PLAIN, queries, keys, window), is_causal=is_causal)
    expected = attend_by_reference(inputs)
    torch.testing.assert_close(attend_flex(inputs, blocks=flex_blocks(inputs)), expected)
    masked = with_window_mask(inputs)
    assert masked.window is None and (masked.visible is None) == (window is None)
    if window is not None or queries == keys:  # else nothing is measured: SDPA aligns the first query to the first key
        torch.testing.assert_close(attend_sdpa(masked), expected)


def test_gpus_have_more_candidates() -> None:
    usual, on_gpus = ({one.name for one in candidates(torch.device(name))} for name in ("cpu", "cuda"))
    assert on_gpus - usual == {"triton-graph", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flex"}
