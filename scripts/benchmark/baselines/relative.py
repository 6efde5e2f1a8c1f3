"""Baseline: relative convolutional attention (arXiv 2308.03429) in the official style, sequence first and unchunked.

The algorithm of the released training code, written anew: a depthwise `Conv1d` over padded rows that is cropped
afterwards, position scores against every row of the table that a segment could reach, and the relative shift by padding
and viewing. Parameters have the released names and shapes, so that released checkpoints load.
"""

import torch
from torch import Tensor, nn

CONVOLUTIONAL, RELATIVE = ("rcmha", "mdha"), ("rcmha", "rmha")
KERNEL = 3
# The released names of our parameters.
TABLES = {"position_embeddings": "key_pos_embeddings", "position_bias": "key_pos_bias"}
PROJECTIONS = {"q": "query", "k": "key", "v": "value"}


class HeadProjection(nn.Module):
    """A projection from `[S, B, E]` to `[S, B, H, D]`."""

    def __init__(self, hidden: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Maps `[S, B, E]` to `[S, B, H, D]`."""
        return self.linear(rows).unflatten(-1, (self.heads, -1))


class HeadConvolution(nn.Module):
    """A causal kernel for each channel of `[S, B, H, D]`, the same for all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, KERNEL, padding=KERNEL - 1, groups=width)

    def forward(self, rows: Tensor) -> Tensor:
        """Convolves `[S, B, H, D]` along `S`; the shape stays."""
        length, batch, heads, width = rows.shape
        channels = rows.permute(1, 2, 3, 0).reshape(batch * heads, width, length)
        convolved = self.conv(channels)[:, :, : -(KERNEL - 1)]
        return convolved.view(batch, heads, width, length).permute(3, 0, 1, 2)


class OfficialRelativeAttention(nn.Module):
    """Any of the four attention types, with position tables for distances up to `positions`."""

    query: nn.Module
    key: nn.Module
    value: nn.Module

    def __init__(self, attention_type: str, hidden: int, heads: int, positions: int) -> None:
        super().__init__()
        self.positions, width = positions, hidden // heads
        self.is_relative = attention_type in RELATIVE
        for name in ("query", "key", "value"):
            projection: nn.Module = HeadProjection(hidden, heads, bias=name == "value" or not self.is_relative)
            if attention_type in CONVOLUTIONAL:
                projection = nn.Sequential(projection, HeadConvolution(width))
            self.add_module(name, projection)
        self.output = nn.Linear(hidden, hidden)
        if self.is_relative:
            self.key_pos_embeddings = nn.Parameter(torch.zeros(2 * positions, heads, width))
            self.key_pos_bias = nn.Parameter(torch.zeros(2 * positions, heads))
            self.query_pos_bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, segment: Tensor, rows: Tensor) -> Tensor:
        """Attention of a segment `[T, B, E]` over memory and segment, `rows` `[M + T, B, E]`. Returns `[T, B, E]`."""
        query, key, value = self.query(segment), self.key(rows), self.value(rows)
        length, keys = query.shape[0], key.shape[0]
        scores = self._scores(query, key) * query.shape[-1] ** -0.5  # [T, S, B, H]
        visible = torch.ones(length, keys, dtype=torch.bool, device=scores.device).tril(keys - length)
        probs = torch.softmax(scores.masked_fill(~visible[:, :, None, None], -torch.inf), dim=1)
        return self.output(torch.einsum("tsbh,sbhd->tbhd", probs, value).flatten(2))

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Unscaled scores `[T, S, B, H]` of queries `[T, B, H, D]` and keys `[S, B, H, D]`."""
        if not self.is_relative:
            return torch.einsum("tbhd,sbhd->tsbh", query, key)
        length, keys = query.shape[0], key.shape[0]
        reachable = slice(self.positions - keys, self.positions + length)
        content = torch.einsum("tbhd,sbhd->tsbh", query + self.query_pos_bias, key)
        positions = torch.einsum("tbhd,lhd->tlbh", query, self.key_pos_embeddings[reachable])
        return content + shift_right(positions + self.key_pos_bias[reachable][:, None])[:, length:]


def shift_right(scores: Tensor) -> Tensor:
    """Shifts row `t` of `[T, L, B, H]` by `t` places to the right; elements that leave a row enter the next one."""
    length, width, *rest = scores.shape
    padded = torch.cat([scores, scores.new_zeros(length, 1, *rest)], dim=1)
    return padded.view(width + 1, length, *rest)[:-1].view(length, width, *rest)


def as_official(state: dict[str, Tensor], positions: int) -> dict[str, Tensor]:
    """Our attention layer's parameters under the released names and in the released shapes.

    Position tables get `[2 * positions, ...]` rows, and convolution kernels are `[D, 1, KERNEL]`.
    """
    convolves = any("_conv." in name for name in state)
    official = {}
    for name, value in state.items():
        if name in TABLES:
            table = value.new_zeros(2 * positions, *value.shape[1:])
            table[_reached(positions, value.shape[0])] = value.flip(0)
            official[TABLES[name]] = table
        else:
            official[_official_name(name, convolves)] = value.flip(0).T[:, None] if "conv.weight" in name else value
    return official


def from_official(official: dict[str, Tensor], like: dict[str, Tensor], positions: int) -> dict[str, Tensor]:
    """The inverse of `as_official`, for parameters or gradients.

    Kernels `[D, 1, KERNEL]` and tables `[2 * positions, ...]` get the names and shapes of `like`, our parameters.
    """
    convolves = any("_conv." in name for name in like)
    state = {}
    for name, ours in like.items():
        if name in TABLES:
            state[name] = official[TABLES[name]][_reached(positions, ours.shape[0])].flip(0)
        else:
            value = official[_official_name(name, convolves)]
            state[name] = value[:, 0].T.flip(0) if "conv.weight" in name else value
    return state


def _official_name(name: str, convolves: bool) -> str:
    if name == "content_bias":
        return "query_pos_bias"
    module, kind = name.split(".")
    if module == "o_proj":
        return f"output.{kind}"
    letter, part = module.split("_")
    if part == "conv":
        return f"{PROJECTIONS[letter]}.1.conv.{kind}"
    return f"{PROJECTIONS[letter]}{'.0' if convolves else ''}.linear.{kind}"


def _reached(positions: int, rows: int) -> slice:
    """Rows of the official table for the distances `rows - 1` to 0; distance `d` is at row `positions - d`."""
    return slice(positions - rows + 1, positions + 1)
