"""The optimizer of a run, AdamW alone or with Muon, and the groups of weights that it treats alike."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from ..common.errors import UserError
from .arguments import PretrainArguments
from .model import composition_weights
from .width_transfer import rate_factors


class JoinedOptimizer(Optimizer):
    """Several optimizers as one; each updates its own groups of weights."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update by each optimizer; there is no closure."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the state of all parts."""
        super().load_state_dict(dict(state_dict))
        self._share()

    def _share(self) -> None:
        """Makes the parts use the groups and states of this optimizer instead of their own."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def build_optimizer(model: nn.Module, arguments: PretrainArguments) -> Optimizer:
    """The optimizer that the arguments name, over the groups of `parameter_groups`.

    Raises:
        UserError: Muon is asked for, and the model has no matrices for it.
    """
    groups = parameter_groups(model, arguments)
    adamw = AdamW(
        [group for group in groups if not group["orthogonalize"]],
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=next(model.parameters()).is_cuda,
    )
    if arguments.optimizer == "adamw":
        return adamw
    matrices = [group for group in groups if group["orthogonalize"]]
    if not matrices:
        raise UserError(f"optimizer=muon: {type(model).__name__} has no linear layers to learn; use adamw")
    # With this adjustment Muon's updates are as large as AdamW's, so one learning rate and weight decay serve both.
    muon = Muon(matrices, lr=arguments.learning_rate, momentum=arguments.muon_momentum, adjust_lr_fn="match_rms_adamw")
    return JoinedOptimizer([muon, adamw])


def parameter_groups(model: nn.Module, arguments: PretrainArguments) -> list[dict[str, Any]]:
    """Groups of weights that are treated alike. Beside `weight_decay` a group has what other functions here read:

    * `composes`: whether they follow the schedule of the composition, if the arguments have one.
    * `rate_factor`: their learning rate as a multiple of the schedule's (see `width_transfer.rate_factors`).
    * `orthogonalize`: whether Muon updates them.

    Matrices decay, while embeddings (and a head tied to them), tables of positions, biases and norms do not: a row of
    an embedding gets a gradient only when its token occurs, but would be decayed at every step. The decay is divided by
    `rate_factor`, with which the optimizer multiplies it again as a part of the learning rate.
    """
    embeddings = embedding_weights(model)
    apart = set(composition_weights(model)) if arguments.treats_composition_apart else set()
    orthogonal = set(hidden_matrices(model)) if arguments.optimizer == "muon" else set()
    factors = rate_factors(model, arguments.base_width, orthogonal)
    groups: defaultdict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_matrix = weight.ndim >= 2 and not name.endswith(("bias", "position_embeddings"))
            decays = is_matrix and weight not in embeddings
            groups[weight in apart, not decays, weight in orthogonal, factors.get(weight, 1.0)].append(weight)
    return [
        {
            "params": groups[composes, is_kept, orthogonalize, factor],
            "weight_decay": 0.0 if is_kept else arguments.weight_decay / factor,
            "composes": composes,
            "rate_factor": factor,
            "orthogonalize": orthogonalize,
        }
        for composes, is_kept, orthogonalize, factor in sorted(groups)
    ]


def embedding_weights(model: nn.Module) -> set[Tensor]:
    """The weights of all embeddings, and so of a head that is tied to them."""
    return {weight for module in model.modules() if isinstance(module, nn.Embedding) for weight in module.parameters()}


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of all linear layers but the output head, if they learn."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    return [layer.weight for layer in layers if layer.weight.requires_grad]


def moment_bytes(model: nn.Module, arguments: PretrainArguments) -> int:
    """Bytes of the optimizer's state: two float32 moments of each weight, or Muon's one."""
    groups = parameter_groups(model, arguments)
    return sum(
        weight.numel() * 4 * (1 if group["orthogonalize"] else 2) for group in groups for weight in group["params"]
    )
