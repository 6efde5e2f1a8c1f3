"""Every transform of the weight maps, in both directions."""

from collections.abc import Sequence

import pytest
import torch

from dynattn.scripts.convert.common.transforms import (
    KEEP,
    CausalKernel,
    Chain,
    Interleaved,
    Reshape,
    Select,
    Split,
    Stack,
    Transform,
)

TRANSFORMS: list[tuple[Transform, list[tuple[int, ...]]]] = [
    (KEEP, [(3, 4)]),
    (Split((2, 3), dim=1), [(4, 5)]),
    (Reshape(((4, 6),), ((4, 2, 3),)), [(4, 6)]),
    (Stack(), [(2, 3), (2, 3)]),
    (Chain((Split((2, 4), dim=1), Reshape(((3, 2), (3, 4)), ((3, 1, 2), (3, 2, 2))))), [(3, 6)]),
]


@pytest.mark.parametrize(("transform", "shapes"), TRANSFORMS, ids=lambda value: type(value).__name__)
def test_transforms_are_reversible_and_work_without_storage(
    transform: Transform, shapes: Sequence[tuple[int, ...]]
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    forward = transform.forward(tensors)
    for back, tensor in zip(transform.backward(forward), tensors, strict=True):
        assert torch.equal(back, tensor)
    meta = transform.forward([tensor.to("meta") for tensor in tensors])
    assert [tensor.shape for tensor in meta] == [tensor.shape for tensor in forward]


def test_select_fills_what_it_left_out_with_zeros() -> None:
    select, tensor = Select(1, (0, 2), 4), torch.randn(2, 4, 3)
    (kept,) = select.forward([tensor])
    (filled,) = select.backward([kept])
    assert torch.equal(filled, tensor * torch.tensor([1, 0, 1, 0])[:, None])


def test_causal_kernels_are_reversed_in_both_directions_and_without_storage() -> None:
    kernel = torch.randn(8, 1, 3)
    (ours,) = CausalKernel().forward([kernel])
    assert torch.equal(ours[0], kernel[:, 0, 2])
    assert torch.equal(CausalKernel().backward([ours])[0], kernel)
    assert CausalKernel().backward([torch.empty(5, 8, device="meta")])[0].shape == (8, 1, 5)


def test_interleaved_rows_go_there_and_back() -> None:
    joined = torch.arange(24.0).reshape(12, 2)
    transform = Interleaved(heads=2, parts=3)
    query, key, value = transform.forward([joined])
    assert torch.equal(key, torch.cat([joined[2:4], joined[8:10]]))
    assert torch.equal(transform.backward([query, key, value])[0], joined)
