"""The depthwise convolution against PyTorch's, causal and centred."""

import pytest
import torch

from dynattn.modeling.layers.headwise_conv import HeadwiseConv, init_conv

LENGTH, HEADS, WIDTH = 9, 2, 4


@pytest.mark.parametrize(("kernel_size", "later"), [(1, 0), (3, 0), (3, 1), (5, 2), (4, 3)])
def test_it_is_a_correlation_with_the_kernel_turned_around(kernel_size: int, later: int) -> None:
    conv = HeadwiseConv(WIDTH, kernel_size, later).double()
    init_conv(conv, std=1.0)
    x = torch.randn(2, LENGTH, HEADS * WIDTH, dtype=torch.float64)
    output = conv(conv.pad(x).unflatten(-1, (HEADS, WIDTH)))

    padded = torch.nn.functional.pad(x.transpose(1, 2), (kernel_size - 1 - later, later))
    kernel = conv.weight.T.flip(1).repeat(HEADS, 1)[:, None]
    expected = torch.nn.functional.conv1d(padded, kernel, conv.bias.repeat(HEADS), groups=HEADS * WIDTH)
    torch.testing.assert_close(output.flatten(2), expected.transpose(1, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize("later", [0, 1, 2])
def test_it_starts_as_the_identity_without_noise(later: int) -> None:
    conv = HeadwiseConv(WIDTH, 3, later)
    init_conv(conv, std=0.0)
    x = torch.randn(1, LENGTH, HEADS * WIDTH)
    torch.testing.assert_close(conv(conv.pad(x).unflatten(-1, (HEADS, WIDTH))).flatten(2), x, atol=0, rtol=0)
