"""The format of a result, from those of the tensors that make it."""

from itertools import permutations
from pathlib import Path

import pytest
import torch

from dynattn.scripts.convert.common.tensor_source import Header, common_dtype


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float32, torch.bfloat16), torch.float32),
        ((torch.float16, torch.bfloat16), torch.float32),
        ((), torch.float32),
    ],
)
def test_the_result_has_the_narrowest_format_that_holds_every_tensor(
    dtypes: tuple[torch.dtype, ...], expected: torch.dtype
) -> None:
    for order in permutations(dtypes):
        headers = {f"tensor-{n}": Header(Path("file"), torch.Size([1]), dtype) for n, dtype in enumerate(order)}
        assert common_dtype(headers) == expected
