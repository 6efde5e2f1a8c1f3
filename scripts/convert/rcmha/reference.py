"""Logits of the official RCMHA family from the official tensors, by the formulas alone.

It shares no code with the models and the weight map, so that it can reveal their errors. It holds one layer at a time.
Letters: `T` tokens of a segment, `S` keys (memory and segment), `E` hidden size, `N` heads, `D` head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import OfficialRCMHAConfig


@dataclass(frozen=True)
class OfficialRCMHA:
    """The tensors of an official checkpoint, and how to read them.

    Args:
        config: the official configuration.
        read: gives a tensor by its official name.
    """

    config: OfficialRCMHAConfig
    read: Callable[[str], Tensor]

    @torch.no_grad()
    def logits(self, segments: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns logits `[sum of T, V]` of consecutive segments of token ids `[T]`, computed in `dtype` throughout."""
        outer = ReferencePart(self, "", dtype)
        memory = [torch.empty(0, self.config.d_model, dtype=dtype)] * self.config.n_layers
        results = []
        for ids in segments:
            x = outer.get("src_embed.weight")[ids]
            for index, old in enumerate(memory):
                rows = torch.cat((old, x))
                memory[index] = rows[max(0, len(rows) - self.config.mem_len) :]
                x = ReferencePart(self, f"transformer.layers.{index}.", dtype).forward(x, rows)
            results.append(outer.linear("generator", outer.norm("transformer.norm", x)))
        return torch.cat(results)


class ReferencePart:
    """The tensors under one prefix, and what they do to hidden states."""

    def __init__(self, model: OfficialRCMHA, prefix: str, dtype: torch.dtype) -> None:
        self.model, self.config, self.prefix, self.dtype = model, model.config, prefix, dtype

    def get(self, name: str) -> Tensor:
        """The tensor `name` under the prefix, `[...]`, in the dtype of the computation."""
        return self.model.read(self.prefix + name).to(self.dtype)

    def linear(self, name: str, x: Tensor, *, bias: bool = True) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        result = x @ self.get(f"{name}.weight").T
        return result + self.get(f"{name}.bias") if bias else result

    def norm(self, name: str, x: Tensor) -> Tensor:
        """LayerNorm: `[T, E]` to `[T, E]`."""
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return x * self.get(f"{name}.weight") + self.get(f"{name}.bias")

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """A layer: from a segment `[T, E]`, and memory and segment `[S, E]`, to the next segment."""
        x = x + self.attention(self.norm("norm_self_attn", x), self.norm("norm_self_attn", rows))
        inner = self.linear("feed_forward.layer1", self.norm("norm_ff", x)).clamp(min=0)
        if self.config.activation == "relu2":
            inner = inner**2
        return x + self.linear("feed_forward.layer2", inner)

    def attention(self, x: Tensor, rows: Tensor) -> Tensor:
        """The attention of a segment `[T, E]` to memory and segment `[S, E]`; gives `[T, E]`."""
        query, key, value = self.project("query", x), self.project("key", rows), self.project("value", rows)
        scores = self.scores(query, key) / query.shape[-1] ** 0.5
        future = distances(len(x), len(rows)) < 0
        probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.linear("self_attn.output", torch.einsum("nts,snd->tnd", probabilities, value).flatten(1))

    def project(self, name: str, x: Tensor) -> Tensor:
        """Projects `[rows, E]` to `[rows, N, D]`; the convolution sees zeros before the first row."""
        name = f"self_attn.{name}"
        has_bias = name.endswith("value") or not self.config.is_relative
        if not self.config.convolves:
            return self.linear(f"{name}.linear", x, bias=has_bias).unflatten(1, (self.config.heads, -1))
        heads = self.linear(f"{name}.0.linear", x, bias=has_bias).unflatten(1, (self.config.heads, -1))
        kernel = self.get(f"{name}.1.conv.weight")  # [D, 1, W]
        padded = F.pad(heads.permute(1, 2, 0), (kernel.shape[-1] - 1, 0))  # [N, D, W - 1 + rows]
        result = F.conv1d(padded, kernel, self.get(f"{name}.1.conv.bias"), groups=len(kernel))
        return result.permute(2, 0, 1)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores `[N, T, S]` of `[T, N, D]` and `[S, N, D]`; the table's row of distance `d` is `P - d`."""
        if not self.config.is_relative:
            return torch.einsum("tnd,snd->nts", query, key)
        content = torch.einsum("tnd,snd->nts", query + self.get("self_attn.query_pos_bias"), key)
        # Only the rows of keys at or before a query are needed: the scores of later keys are masked.
        first = self.config.P + 1 - len(key)
        embeddings = self.get("self_attn.key_pos_embeddings")[first : self.config.P + 1]
        biases = self.get("self_attn.key_pos_bias")[first : self.config.P + 1]
        by_row = torch.einsum("tnd,rnd->ntr", query, embeddings) + biases.T[:, None]
        row = self.config.P - distances(len(query), len(key)).clamp(min=0) - first
        return content + by_row.gather(2, row.expand(len(by_row), -1, -1))


def distances(queries: int, keys: int) -> Tensor:
    """How far key `s` is before query `t`, `[T, S]`, where both end at the same token."""
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
