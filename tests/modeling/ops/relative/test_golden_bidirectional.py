"""Relative attention without a causal mask: outputs and all gradients of the official code, in float64."""

import pytest
import torch
from cases.golden import read_case, tensors_under
from torch import Tensor

from dynattn import relative_attention
from dynattn.modeling.layers.headwise_conv import HeadwiseConv
from dynattn.modeling.ops.relative import chunked


def projected(weights: dict[str, Tensor], name: str, x: Tensor, heads: int) -> Tensor:
    """Queries, keys or values `[B, H, T, D]` of `x` `[B, T, E]`, convolved if the case has kernels for them."""
    linear = f"{name}.linear" if f"{name}.linear.weight" in weights else f"{name}.0.linear"
    x = torch.nn.functional.linear(x, weights[f"{linear}.weight"], weights.get(f"{linear}.bias"))
    kernel = weights.get(f"{name}.1.conv.weight")
    if kernel is None:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)
    conv = HeadwiseConv(kernel.shape[0], kernel.shape[2]).double()
    parts = {"weight": kernel[:, 0].T.flip(0), "bias": weights[f"{name}.1.conv.bias"]}
    padded = conv.pad(x).unflatten(-1, (heads, -1))
    return torch.func.functional_call(conv, parts, (padded,)).transpose(1, 2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
@pytest.mark.parametrize("name", ["rcmha_bidirectional_q9", "rmha_bidirectional_q9"])
def test_outputs_and_gradients_are_those_of_the_official_code(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta, tensors = read_case(name)
    weights = {key: value.requires_grad_() for key, value in tensors_under(tensors, "sd.").items()}
    monkeypatch.setattr(chunked, "FEW_PAIRS", 0)
    x = tensors["x"].transpose(0, 1).requires_grad_()
    query, key, value = (projected(weights, part, x, meta["heads"]) for part in ("query", "key", "value"))
    output = relative_attention(
        query,
        key,
        value,
        # The official row of distance `d` is `P - d`; ours begin with the farthest later key.
        position_embeddings=weights["key_pos_embeddings"].flip(0),
        position_bias=weights["key_pos_bias"].flip(0),
        content_bias=weights["query_pos_bias"],
        is_causal=False,
        later_rows=meta["P"] - 1,
        implementation=implementation,
    )
    output = torch.nn.functional.linear(output.flatten(2), weights["output.weight"], weights["output.bias"])
    torch.testing.assert_close(output.transpose(0, 1), tensors["out"], atol=1e-13, rtol=0)
    (output.transpose(0, 1) * tensors["weight_of_output"]).sum().backward()
    torch.testing.assert_close(x.grad.transpose(0, 1), tensors["grad.x"], atol=1e-12, rtol=0)
    for weight, expected in tensors_under(tensors, "grad.sd.").items():
        torch.testing.assert_close(weights[weight].grad, expected, atol=1e-12, rtol=0)
