"""The attentions that the study compares, as fields of configurations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from ....configuration.configuration_dcformer import DCFormerConfig
from ....configuration.configuration_rcmha import RCMHAConfig
from ....modeling.modeling_dcformer import DCFormerForCausalLM
from ....modeling.modeling_rcmha import RCMHAForCausalLM
from ...common.errors import last_line
from ..attentions import ATTENTIONS
from .arguments import QUESTION

# The families' own defaults are for wide models; with them these small ones learn nothing for thousands of updates.
INITIALIZER_RANGE = 0.02


@dataclass(frozen=True)
class Size:
    """The models of one preset.

    Attributes:
        heads: of every arm but those with twice as many.
        head_dim: width of each head, except in RCMHA's attention types, which divide the hidden size by the heads.
    """

    hidden_size: int
    heads: int
    head_dim: int
    layers: int


@dataclass(frozen=True)
class Arm:
    """One attention: the fields that make it, and how many times the heads it has."""

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    times_heads: int = 1
    attention_type: str | None = None

    def config(self, size: Size, vocabulary: int, length: int) -> PreTrainedConfig:
        """The configuration of a model for sequences of `length` tokens."""
        common: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": size.hidden_size,
            "intermediate_size": 2 * size.hidden_size,
            "num_hidden_layers": size.layers,
            "num_attention_heads": self.times_heads * size.heads,
            "max_position_embeddings": length,
            "initializer_range": INITIALIZER_RANGE,
        }
        if self.attention_type is not None:
            reach = {"mem_len": length, "max_position_embeddings": 2 * length}  # a token sees all tokens before it
            return RCMHAConfig(**{**common, **reach}, attention_type=self.attention_type, **self.fields)
        return DCFormerConfig(**common, head_dim=size.head_dim, **self.fields)

    def make(self, size: Size, vocabulary: int, length: int) -> PreTrainedModel:
        """A model with fresh weights."""
        config = self.config(size, vocabulary, length)
        return RCMHAForCausalLM(config) if isinstance(config, RCMHAConfig) else DCFormerForCausalLM(config)

    def refusal(self, size: Size) -> str | None:
        """Why a model of this size cannot have this attention, for example a rank above its heads; else None."""
        try:
            self.config(size, vocabulary=2, length=1)
        except (StrictDataclassError, ValueError) as error:  # some checks of RCMHA raise the latter as it is
            return last_line(error)
        return None


PLAIN, TWICE, FULL = QUESTION
ARMS = {
    PLAIN: Arm(ATTENTIONS["plain"].label, ATTENTIONS["plain"].fields),
    TWICE: Arm("plain, twice the heads", ATTENTIONS["plain"].fields, times_heads=2),
    **{name: Arm(one.label, one.fields) for name, one in ATTENTIONS.items() if name != PLAIN},
    "mdha": Arm("MDHA", attention_type="mdha"),
    "rcmha": Arm("RCMHA", attention_type="rcmha"),
}
# Their runs come first, so that a study that ends early has answered its question.
FIRST = (*QUESTION, "talking-heads")
