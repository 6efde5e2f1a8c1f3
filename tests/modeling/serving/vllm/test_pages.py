"""The rows of vLLM's pages that requests read and write."""

from types import SimpleNamespace
from typing import Any

import torch

from dynattn.modeling.serving.vllm.backend import ComposedMetadata


def test_tokens_without_a_slot_are_written_to_the_block_that_no_request_has() -> None:
    """Row -1, as vLLM marks them, would be the last row of the last block."""
    common: Any = SimpleNamespace(
        num_reqs=1,
        num_actual_tokens=4,
        seq_lens=torch.tensor([6]),
        query_start_loc_cpu=torch.tensor([0, 4]),
        block_table_tensor=torch.tensor([[3, 2]]),
        slot_mapping=torch.tensor([14, 15, 8, -1, -1]),
    )
    requests = ComposedMetadata(common).rows(4, None)
    assert requests.table.tolist() == [12, 13, 14, 15, 8, 9]
    assert requests.new_rows.tolist() == [14, 15, 8, 0]
