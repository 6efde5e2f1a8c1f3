"""The attentions that the study compares, as fields of configurations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ....configuration.configuration_dcvit import DCViTConfig
from ....configuration.mixers import NO_COMPOSITION, mixer_fields
from ....modeling.modeling_dcvit import DCViTForImageClassification
from ..model_training import begin_alike, matched_width


@dataclass(frozen=True)
class Arm:
    """One attention.

    Attributes:
        fields: its fields of `DCViTConfig` that differ from the defaults, which are the authors' settings.
        is_wide: whether the MLP is widened until the model has as many parameters as the authors'.
    """

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_wide: bool = False


ARMS = {
    "plain": Arm("plain", {**NO_COMPOSITION, "use_qk_norm": False}),
    "norm": Arm("norm of queries and keys", NO_COMPOSITION),
    "static": Arm("norm, static", dict(mixer_fields("talking_heads"))),
    "post": Arm("norm, dynamic, probabilities only", {"compose_static": False, "compose_pre": False}),
    "dynamic": Arm("norm, dynamic", {"compose_static": False}),
    "official": Arm("norm, dynamic and static"),
    "dropout": Arm("norm, dynamic and static, dropout 0.2", {"compose_dropout": 0.2}),
    "wide": Arm("norm, wider MLP", NO_COMPOSITION, is_wide=True),
}
# The arm with which a parent is trained, and the arms that can continue it: they get its weights, and start with its
# outputs.
PARENT = "norm"
CONTINUED = ("norm", "static", "post", "dynamic", "official", "dropout")
# One thing at a time, then the official comparison, then the model beside a plain one of its size.
CONTRASTS = (
    ("norm", "plain"),
    ("static", "norm"),
    ("post", "norm"),
    ("dynamic", "norm"),
    ("official", "norm"),
    ("dropout", "official"),
    ("official", "plain"),
    ("official", "wide"),
)


@dataclass(frozen=True)
class Shape:
    """A small vision transformer: square images of one channel, in square patches."""

    image: int
    patch: int
    hidden_size: int
    layers: int
    heads: int
    labels: int

    def config(self, arm: Arm, **changes: Any) -> DCViTConfig:
        """The configuration of an arm's model, with some fields changed."""
        width = 2 * self.hidden_size
        if arm.is_wide:
            width = matched_width(
                DCViTForImageClassification, *(self.config(ARMS[one]) for one in ("official", "norm"))
            )
        fields: dict[str, Any] = {
            "image_size": self.image,
            "patch_size": self.patch,
            "num_channels": 1,
            "hidden_size": self.hidden_size,
            "intermediate_size": width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_labels": self.labels,
            "representation_size": None,
        }
        return DCViTConfig(**{**fields, **arm.fields, **changes})


def make_model(arm: str, shape: Shape, seed: int) -> DCViTForImageClassification:
    """A model with fresh weights; all arms of a seed share those that they have in common."""
    torch.manual_seed(seed)
    plain, model = (DCViTForImageClassification(shape.config(ARMS[name])) for name in ("plain", arm))
    begin_alike(model, plain)
    return model


def continue_parent(
    arm: str, shape: Shape, seed: int, parent: DCViTForImageClassification
) -> DCViTForImageClassification:
    """A model with the weights of `parent`, of the arm `PARENT`, whose composition starts as the identity."""
    torch.manual_seed(seed)
    model = DCViTForImageClassification(shape.config(ARMS[arm], compose_init_scale=0.0))
    begin_alike(model, parent)
    return model
