"""Which implementation composes heads where none is asked for, and why."""

import pytest
import torch

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops.dcmha import attention
from dynattn.modeling.ops.dcmha.attention import default_implementation, resolve_implementation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0, with Triton, that needs not be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "HAS_TRITON", True)


def test_triton_is_the_default_where_a_record_shows_it_to_be_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    name, reason = default_implementation(CUDA)
    assert name == "triton" and "on record on compute capability 9.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    name, reason = default_implementation(CUDA)
    assert name == "chunked" and "no record shows that 'triton' is faster on compute capability 8.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert default_implementation(CPU).name == "chunked"
    monkeypatch.setattr(attention, "HAS_TRITON", False)
    assert default_implementation(CUDA) == ("chunked", "'triton' needs Triton: pip install 'dynattn[gpu]'")


def test_the_device_decides_only_where_no_name_is_given() -> None:
    assert resolve_implementation(None, composed=True, device=CUDA) == "triton"
    assert resolve_implementation(None, composed=False, device=CUDA) == "sdpa"
    assert resolve_implementation(None, composed=True) == "chunked"
    assert resolve_implementation("eager", composed=True, device=CUDA) == "eager"


@pytest.mark.parametrize(("dtype", "heads_of_mask"), [(torch.float64, 1), (torch.float32, 2)])
def test_what_triton_does_not_serve_goes_to_chunked(
    dtype: torch.dtype, heads_of_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "resolve_implementation", lambda name, **_: name or "triton")
    rows = torch.randn(1, 2, 5, 4, dtype=dtype)
    given = {
        "pre": Composition(static=torch.eye(2, dtype=dtype)),
        "attention_mask": torch.rand(1, heads_of_mask, 5, 5) > 0.5,
    }
    output = dcmha_attention(rows, rows, rows, **given)
    assert torch.equal(output, dcmha_attention(rows, rows, rows, **given, implementation="chunked"))
    with pytest.raises(ValueError, match="use 'chunked'"):
        dcmha_attention(rows, rows, rows, **given, implementation="triton")
