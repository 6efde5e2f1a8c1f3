"""Options of a run about its updates: how many there are, of what, and how large they are."""

from dataclasses import dataclass
from typing import Literal

from ...common.arguments import option


@dataclass(kw_only=True)
class OptimizationOptions:
    """How many updates are made, of what, and how large they are."""

    batch_size: int = option(8, "sequences in one forward pass of one process")
    gradient_accumulation_steps: int = option(1, "forward passes that make one update")
    max_steps: int | None = option(None, "number of updates; give this or epochs")
    epochs: float | None = option(None, "passes over the data; 1 by default, unless max_steps is given")
    learning_rate: float = option(1e-3, "peak of the schedule")
    composition_learning_rate: float | None = option(
        None, "peak for the weights that compose heads; learning_rate by default"
    )
    freeze_parent_steps: int = option(0, "first updates in which only the weights that compose heads learn")
    schedule: Literal["cosine", "wsd"] = option(
        "cosine", "how the learning rate falls: cosine, or wsd: stable, then down in the last decay_share"
    )
    decay_share: float = option(0.2, "share of the updates in which the schedule wsd lowers the rate; 0 keeps it")
    min_learning_rate_ratio: float = option(0.1, "end of the schedule, as a fraction of the peak")
    warmup_steps: int | None = option(
        None,
        "updates of linear warmup, at the start (with init_from too) and when frozen weights begin to "
        "learn; a fiftieth of all updates by default",
    )
    weight_decay: float = option(0.1, "decay of matrices; embeddings, biases and norms have none")
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "adamw, or muon: Muon for matrices of hidden layers and AdamW for all other weights, with the same "
        "learning_rate and weight_decay",
    )
    muon_momentum: float = option(0.95, "Muon's momentum")
    adam_beta1: float = option(0.9, "decay of AdamW's first moment")
    adam_beta2: float = option(0.95, "decay of AdamW's second moment")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    z_loss: float = option(
        0.0, "factor of the z-loss, the squared log of the softmax's denominator, in the loss of each target"
    )
    ema_decay: float | None = option(
        None, "keep a moving average of the weights with this decay, and save it as a second model"
    )
    base_width: int | None = option(
        None,
        "muP: hidden size for which learning_rate was chosen; initial weights and learning rates of a "
        "wider model are scaled so that the same learning_rate suits it",
    )
    length_warmup_steps: int = option(
        0, "first updates in which sequences are cut into shorter ones, of growing length"
    )
    shortest_length: int | None = option(
        None, "length warmup: sequence length in the first update; sequence_length / 8 by default"
    )
