"""Every implementation in the table of the op, against the reference implementation in float64."""

from typing import Any

import pytest
import torch
from cases.composed_op import ALL, DYNAMIC, Case, in_dtype, random_inputs, run
from cases.triton_marks import interpreted, on_gpu
from torch import Tensor

from dynattn import dcmha_attention, relative_attention
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS

# Small, since kernels of a GPU are interpreted where there is none.
CASES = [
    Case(1, 1),
    Case(1, 33, heads=(4, 2), window=9, mask="padding"),
    Case(33, 33),
    Case(17, 17, heads=(4, 1), terms=DYNAMIC, rank=1, groups=2, stages=("pre",)),
    Case(20, 20, terms=frozenset({"static"}), stages=("post",), window=5),
    Case(20, 31, terms=frozenset({"query_gate", "key_gate"}), mask="padding"),
    Case(31, 20, is_causal=False, terms=ALL - {"query_low_rank"}),
    Case(31, 20, terms=frozenset({"key_low_rank"})),  # queries before the first key see nothing
    Case(18, 18, window=1),
    Case(12, 12, mask="pairs of heads"),
    Case(12, 12, mask="bias"),
    Case(33, 33, heads=(4, 2), tables=("bias", "gain")),
    Case(20, 20, tables=("bias", "gain"), compose_bias=True, window=5, terms=DYNAMIC),
    Case(12, 31, tables=("bias",), offset=7, mask="padding"),
    Case(17, 17, tables=("gain",), stages=()),
    Case(1, 33, tables=("bias", "gain"), offset=20),
    Case(150, 150, heads=(2, 1), rank=1, tables=("bias", "gain")),
    Case(0, 7),
    Case(7, 0),
    Case(150, 150, heads=(2, 1), rank=1),
]
# Interpreted kernels take seconds for more queries than these, which their own tests have as well.
FEW_QUERIES = 17
NAMED_CASES = [
    pytest.param(
        name,
        "cpu",
        case,
        marks=[interpreted, *[pytest.mark.slow] * (case.queries > FEW_QUERIES)] if name == "triton" else [],
        id=f"{name}-{case}",
    )
    for name in COMPOSING_IMPLEMENTATIONS
    if name != "eager"
    for case in CASES
] + [pytest.param("triton", "cuda", case, marks=on_gpu, id=f"triton-cuda-{case}") for case in CASES]
# A block that is longer than this is never crossed by interpreted kernels, whose own tests make blocks short.
LONGEST_INTERPRETED = 40
# By which factor errors may exceed those that the reference implementation makes in the same precision.
NOISE_MULTIPLE = 4


@pytest.mark.parametrize(("name", "device", "case"), NAMED_CASES)
def test_output_and_all_gradients_are_as_exact_as_the_reference_is(name: str, device: str, case: Case) -> None:
    if (name, device) == ("triton", "cpu") and case.queries > LONGEST_INTERPRETED:
        pytest.skip("too long for Triton's interpreter")
    with torch.device(device):
        tensors, keywords = random_inputs(case)
    exact = run(tensors, keywords, "eager")
    single = in_dtype(torch.float32, tensors, keywords)
    results = run_or_skip(*single, name)
    for ours, plain, true in zip(results, run(*single, "eager"), exact, strict=True):
        assert ours.shape == true.shape
        if true.numel():
            noise = (plain - true).abs().max() + torch.finfo(torch.float32).eps * true.abs().max()
            assert (ours - true).abs().max() <= NOISE_MULTIPLE * noise


def run_or_skip(tensors: list[Tensor], keywords: dict[str, Any], name: str) -> tuple[Tensor, ...]:
    """Runs an implementation; what it does not support it has to refuse by its name, with another to use."""
    try:
        return run(tensors, keywords, name)
    except ValueError as refusal:
        assert f"{name!r}" in str(refusal)
        assert "use '" in str(refusal)
        assert "runs on" not in str(refusal)  # every case is on a device of its implementation
        pytest.skip(str(refusal))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["eager", "chunked", "sdpa"])
def test_additive_masks_may_be_of_any_floating_dtype(name: str, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    bias = torch.randint(-3, 3, (1, 1, 5, 5)).float()
    expected = dcmha_attention(query, key, value, attention_mask=bias, implementation="eager")
    output = dcmha_attention(query, key, value, attention_mask=bias.to(dtype), implementation=name)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("scaling", [0.0, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_attention_takes_any_scaling(dtype: torch.dtype, scaling: float) -> None:
    """PyTorch's kernels multiply the minus infinity of their own causal mask by it."""
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, found = (
        dcmha_attention(query, key, value, scaling=scaling, implementation=name) for name in ("eager", None)
    )
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("implementation", ["eager", "chunked", "sdpa"])
@pytest.mark.parametrize("attend", [dcmha_attention, relative_attention])
def test_a_mask_in_float32_beside_half_precision_tells_far_keys_apart(attend: Any, implementation: str) -> None:
    """ALiBi as the paper's code adds it: with the index of the key, which is large for all near ones."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 900, 8).bfloat16()
    bias = 0.05 * torch.arange(900.0)[None].expand(900, 900)
    output = attend(query, key, value, attention_mask=bias, implementation=implementation)
    exact = attend(query.double(), key.double(), value.double(), attention_mask=bias.double(), implementation="eager")
    assert output.dtype == torch.bfloat16
    assert (output - exact).abs().max() < 0.03
