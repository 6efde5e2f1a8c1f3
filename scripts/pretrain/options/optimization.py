"""Options of a run about its updates: how many there are, of what, and how large they are."""

from dataclasses import dataclass, field
from typing import Literal

OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["cosine", "wsd"]


@dataclass(kw_only=True)
class OptimizationOptions:
    """How many updates are made, of what, and how large they are."""

    batch_size: int = field(default=8, metadata={"help": "sequences in one forward pass of one process"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "forward passes that make one update"})
    max_steps: int | None = field(default=None, metadata={"help": "number of updates; give this or epochs"})
    epochs: float | None = field(
        default=None, metadata={"help": "passes over the data; 1 by default, unless max_steps is given"}
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "peak of the schedule"})
    composition_learning_rate: float | None = field(
        default=None, metadata={"help": "peak for the weights that compose heads; learning_rate by default"}
    )
    freeze_parent_steps: int = field(
        default=0, metadata={"help": "first updates in which only the weights that compose heads learn"}
    )
    schedule: Schedule = field(
        default="cosine",
        metadata={"help": "how the learning rate falls: cosine, or wsd: stable, then down in the last decay_share"},
    )
    decay_share: float = field(
        default=0.2, metadata={"help": "share of the updates in which the schedule wsd lowers the learning rate"}
    )
    min_learning_rate_ratio: float = field(
        default=0.1, metadata={"help": "end of the schedule, as a fraction of the peak"}
    )
    warmup_steps: int | None = field(
        default=None,
        metadata={
            "help": "updates of linear warmup, at the start (with init_from too) and when frozen weights begin to "
            "learn; a fiftieth of all updates by default"
        },
    )
    weight_decay: float = field(
        default=0.1, metadata={"help": "decay of matrices; embeddings, biases and norms have none"}
    )
    optimizer: OptimizerName = field(
        default="adamw",
        metadata={
            "help": "adamw, or muon: Muon for matrices of hidden layers and AdamW for all other weights, with the same "
            "learning_rate and weight_decay"
        },
    )
    muon_momentum: float = field(default=0.95, metadata={"help": "Muon's momentum"})
    adam_beta1: float = field(default=0.9, metadata={"help": "decay of AdamW's first moment"})
    adam_beta2: float = field(default=0.95, metadata={"help": "decay of AdamW's second moment"})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "AdamW's epsilon"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})
    z_loss: float = field(
        default=0.0,
        metadata={
            "help": "factor of the z-loss, the squared log of the softmax's denominator, in the loss of each target"
        },
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "keep a moving average of the weights with this decay, and save it as a second model"},
    )
    base_width: int | None = field(
        default=None,
        metadata={
            "help": "muP: hidden size for which learning_rate was chosen; initial weights and learning rates of a "
            "wider model are scaled so that the same learning_rate suits it"
        },
    )
    length_warmup_steps: int = field(
        default=0, metadata={"help": "first updates in which sequences are cut into shorter ones, of growing length"}
    )
    shortest_length: int | None = field(
        default=None,
        metadata={"help": "length warmup: sequence length in the first update; sequence_length / 8 by default"},
    )
