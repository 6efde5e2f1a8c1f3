"""The official models' logits from the official tensors, by the formulas alone.

It shares no code with the models and the weight map, so that it can reveal their errors. It holds one layer at a time.
Letters: `T` queries, `S` keys, `E` hidden size, `N` heads, `D` head width, `R` = 2 rank.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import OfficialConfig

RANK = 2
EPS = 1e-6  # of the norms inside the attention


class ReferenceSide(NamedTuple):
    """The factors of one stage (before or after the softmax) on one side (query or key), for all tokens."""

    first: Tensor  # [T, R, N]
    second: Tensor  # [T, R, N]
    gate: Tensor  # [T, N]


@dataclass(frozen=True)
class OfficialModel:
    """The tensors of an official checkpoint, and how to read them.

    Args:
        config: the official configuration.
        keys: the names of the tensors.
        read: gives one of them.
        window: keys that a token of a local layer sees, itself included.
        prefer_merged: whether the merged copies of the composition count.
        keep_static: whether the static matrices count.
    """

    config: OfficialConfig
    keys: Collection[str]
    read: Callable[[str], Tensor]
    window: int | None
    prefer_merged: bool = False
    keep_static: bool = False

    @torch.no_grad()
    def logits(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns logits `[T, V]` for token ids `[T]`, computed in `dtype` throughout."""
        table = self.read("tok_embeddings.weight")
        x = table[ids].to(dtype)
        for index, kind in enumerate(self.config.layer_types):
            window = self.window if kind == "sliding_attention" else None
            x = Layer(self, f"layers.{index}.", dtype).forward(x, window)
        return Layer(self, "", dtype).norm("norm", x) @ self.read("output.weight").to(dtype).T


class Layer:
    """The tensors under one prefix, and what they do to hidden states `[T, E]`."""

    def __init__(self, model: OfficialModel, prefix: str, dtype: torch.dtype) -> None:
        self.model, self.config, self.prefix, self.dtype = model, model.config, prefix, dtype

    def get(self, name: str) -> Tensor:
        """The tensor `name` under the prefix, `[...]`, in the dtype of the computation."""
        return self.model.read(self.prefix + name).to(self.dtype)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.model.keys

    def linear(self, name: str, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`, with a bias where there is one."""
        result = x @ self.get(f"{name}.weight").T
        return result + self.get(f"{name}.bias") if self.has(f"{name}.bias") else result

    def norm(self, name: str, x: Tensor) -> Tensor:
        """LayerNorm of DCPythia, RMSNorm of DCFormer: `[T, E]` to `[T, E]`."""
        if self.config.family == "dcpythia":
            x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.norm_eps) * self.get(f"{name}.weight")
        return x + self.get(f"{name}.bias") if self.config.family == "dcpythia" else x

    def forward(self, x: Tensor, window: int | None) -> Tensor:
        """The layer: `[T, E]` to `[T, E]`."""
        attended = self.attention(self.norm("attention_norm", x), window)
        if self.config.family == "dcpythia" and self.config.use_parallel_residual:
            return x + attended + self.feed_forward(self.norm("ffn_norm", x))
        x = x + attended
        return x + self.feed_forward(self.norm("ffn_norm", x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The MLP: `[T, E]` to `[T, E]`."""
        inner = self.linear("feed_forward.w1", x)
        if self.config.family == "dcpythia":
            return self.linear("feed_forward.w2", F.gelu(inner))
        inner = inner * torch.sigmoid(inner) * self.linear("feed_forward.w3", x)
        if self.config.mgate:
            gates = torch.softmax(self.linear("feed_forward.mg", x), dim=-1)  # [T, groups]
            inner = inner * gates.repeat_interleave(inner.shape[-1] // gates.shape[-1], dim=-1)
        return self.linear("feed_forward.w2", inner)

    def attention(self, x: Tensor, window: int | None) -> Tensor:
        """The attention of `[T, E]`, where a token sees `window` keys, or all earlier ones, to `[T, E]`."""
        query, key, value = (part.view(len(x), self.config.n_head, -1) for part in self.projections(x))
        if self.config.use_qk_norm:
            query, key = (
                head / torch.sqrt((head * head).mean(-1, keepdim=True) + EPS) * self.get(f"attention.{name}_norm.scale")
                for head, name in ((query, "q"), (key, "k"))
            )
        query, key = self.rotate(query), self.rotate(key)
        scores = torch.einsum("tnd,snd->nts", query, key) / self.config.head_dim**0.5
        sides = self.sides(x) if self.config.use_dcmha else []
        scores = self.compose(scores, sides[:2], "pre_proj")
        hidden = ~visible(len(x), window)
        composed = self.compose(scores.masked_fill(hidden, -torch.inf).softmax(-1), sides[2:], "post_proj")
        return self.linear("attention.wo", torch.einsum("nts,snd->tnd", composed, value).flatten(1))

    def projections(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, `[T, E]` each."""
        if self.has("attention.wqkv.weight"):
            return self.linear("attention.wqkv", x).chunk(3, dim=-1)
        return [self.linear(f"attention.w{name}", x) for name in "qkv"]

    def rotate(self, heads: Tensor) -> Tensor:
        """Turns pairs (i, i + W/2) of the first `W` dimensions of `[T, N, D]` by the position."""
        share = self.config.rotary_pct if self.config.family == "dcpythia" else 1.0
        width = int(self.config.head_dim * share)
        pairs = torch.arange(width // 2, dtype=self.dtype)
        frequencies = (self.config.rope_base or 0) ** (-2 * pairs / width)
        angles = torch.arange(len(heads), dtype=self.dtype)[:, None, None] * frequencies
        first, second, rest = heads.split((width // 2, width // 2, heads.shape[-1] - width), dim=-1)
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat((*turned, rest), dim=-1)

    def sides(self, x: Tensor) -> list[ReferenceSide]:
        """Pre-query, pre-key, post-query, post-key, from the attention's input `[T, E]`."""
        name, heads = "attention.dyn_w_proj.", self.config.n_head
        if self.model.prefer_merged:
            hidden, gates = (x @ self.get(name + "dw_m")).split((16 * heads, 4 * heads), dim=-1)
            weight = self.get(name + "qkw_m")
        else:
            hidden, gates = x @ self.get(name + "dw1").flatten(1), x @ self.get(name + "dd").flatten(1)
            weight = self.get(name + "qkw")
        hidden = F.gelu(hidden).view(-1, 4, 4 * heads)  # [T, component, K]
        weight = weight.reshape(4, 4 * heads, 2 * RANK, heads)
        factors = torch.einsum("tck,ckrn->ctrn", hidden, weight)
        first, second = factors[:, :, :RANK], factors[:, :, RANK:]
        first = first / torch.sqrt((first * first).mean(-1, keepdim=True) + EPS)
        return [ReferenceSide(*parts) for parts in zip(first, second, torch.tanh(gates).chunk(4, dim=-1), strict=True)]

    def compose(self, a: Tensor, sides: Sequence[ReferenceSide], static: str) -> Tensor:
        """Mixes the heads of `a` `[N, T, S]`; every term reads `a` itself, not the sum so far."""
        out = a
        if self.model.keep_static and self.has(f"attention.dyn_w_proj.{static}.w"):
            out = out + torch.einsum("nts,nm->mts", a, self.get(f"attention.dyn_w_proj.{static}.w")[0])
        # The first side belongs to the queries t, the second to the keys s; with query_wise only the first counts.
        for side, token in list(zip(sides, "ts", strict=False))[: 1 if self.config.query_wise else 2]:
            out = out + torch.einsum(f"nts,{token}n->nts", a, side.gate)
            for i in range(RANK):
                mixed = torch.einsum(f"nts,{token}n->ts", a, side.first[:, i])
                out = out + torch.einsum(f"ts,{token}m->mts", mixed, side.second[:, i])
        return out


def visible(length: int, window: int | None) -> Tensor:
    """Which keys `s` a query `t` sees, `[T, S]`."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))
