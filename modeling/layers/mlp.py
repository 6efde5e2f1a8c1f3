"""The feed-forward part of a layer: two projections with an activation between them, or three with a gate."""

from torch import Tensor, nn
from transformers.activations import ACT2FN


class MLP(nn.Module):
    """`down(dropout(act(up(x))))`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn, self.dropout = ACT2FN[hidden_act], nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps hidden states `[B, T, E]` to `[B, T, E]`."""
        return self.down_proj(self.dropout(self.act_fn(self.up_proj(hidden_states))))


class GatedMLP(nn.Module):
    """`down(dropout(act(gate(x)) * up(x)))`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn, self.dropout = ACT2FN[hidden_act], nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps hidden states `[B, T, E]` to `[B, T, E]`."""
        return self.down_proj(self.dropout(self.activations(hidden_states)))

    def activations(self, hidden_states: Tensor) -> Tensor:
        """What is projected down, `[B, T, intermediate_size]`, from hidden states `[B, T, E]`."""
        return self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
