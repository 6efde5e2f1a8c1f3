"""The parts of differential attention (arXiv 2410.05258) that are not in the attention op."""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from ..ops.dcmha.composition import Composition, pack_factors, unpack_factors
from ..ops.dcmha.mixers import difference_of_pairs
from ..ops.dtypes import at_least_float32
from .rms_norm import RMSNorm

LAMBDA_STD = 0.1


class DifferentialHeads(nn.Module):
    """The learned scalar of a layer (lambda, equations 2 and 3) and the norm of the pairs' outputs.

    Heads `i` and `i + H/2` are a pair, as in Transformers' DiffLlama.

    Weights:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: `[D]` each.
        norm.weight: `[2D]`, the scale that all pairs share.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        if not isinstance(layer_idx, int) or layer_idx < 0:
            raise ValueError(f"layer_idx is {layer_idx!r}; it must be the number of the layer, an integer from 0")
        self.num_heads: int = config.num_attention_heads
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)  # layers count from 0 here, from 1 in the paper
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(config.head_dim)) for _ in range(4)
        )
        self.norm = RMSNorm(2 * config.head_dim, config.head_norm_eps)

    def forward(self, post: Composition) -> Composition:
        """Returns `post` with a static term that subtracts lambda times the probabilities of a pair's second head."""
        difference = difference_of_pairs(self._weight(), self.num_heads)
        query, key, static = pack_factors(post)
        static = difference if static is None else static + difference
        return unpack_factors({"query": query, "key": key}, static, post.groups)

    def normalize(self, output: Tensor) -> Tensor:
        """Normalizes the output of each pair.

        Args:
            output: of the attention op, `[B, T, H, D]`.

        Returns:
            `[B, T, H/2, 2D]`.
        """
        pairs = output.unflatten(2, (2, -1)).transpose(2, 3).flatten(3)
        return self.norm(pairs) * (1 - self.lambda_init)

    def _weight(self) -> Tensor:
        """Lambda (equation 2), a scalar in the dtype of the weights, computed in at least float32."""
        dtype = at_least_float32(self.lambda_q1.dtype)
        first = torch.sum(self.lambda_q1 * self.lambda_k1, dtype=dtype).exp()
        second = torch.sum(self.lambda_q2 * self.lambda_k2, dtype=dtype).exp()
        return (first - second + self.lambda_init).to(self.lambda_q1.dtype)


@torch.no_grad()
def init_differential(module: DifferentialHeads) -> None:
    """Draws the initial weights of lambda as in the paper; the norm keeps its own."""
    for weight in (module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2):
        init.normal_(weight, std=LAMBDA_STD)
