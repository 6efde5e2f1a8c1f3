"""The encoder-decoders that the study compares."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ....configuration.configuration_dcbart import DCBartConfig
from ....configuration.configuration_rcmha_seq2seq import RCMHASeq2SeqConfig
from ....modeling.modeling_dcbart import DCBartForConditionalGeneration
from ....modeling.modeling_rcmha_seq2seq import RCMHASeq2SeqForConditionalGeneration
from ..model_training import begin_alike, matched_width

PLACES = ("encoder", "decoder", "cross")
# Pre-norm, as in RCMHA, and embeddings scaled to the size of the positions that are added to them.
DCBART: dict[str, Any] = {"normalize_before": True, "scale_embedding": True}


def composing(*places: str) -> dict[str, bool]:
    """The fields of a DCBart that composes heads in some of its attentions only."""
    stages = {"compose_pre": bool(places), "compose_post": bool(places)}
    return stages | {f"compose_{place}": place in places for place in PLACES}


@dataclass(frozen=True)
class Arm:
    """One model.

    Attributes:
        fields: the fields of its DCBartConfig.
        attention_type: if given, the arm is an RCMHA encoder-decoder of this type instead.
        is_wide: whether MLPs are widened until a plain DCBart has as many parameters as one that composes everywhere.
    """

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    attention_type: str | None = None
    is_wide: bool = False


ARMS = {
    "plain": Arm("DCBart, plain", composing()),
    "encoder": Arm("DCBart, encoder composed", composing("encoder")),
    "decoder": Arm("DCBart, decoder composed", composing("decoder")),
    "cross": Arm("DCBart, cross-attention composed", composing("cross")),
    "all": Arm("DCBart, all composed", composing(*PLACES)),
    "unscaled": Arm("DCBart, plain, embeddings not scaled", {**composing(), "scale_embedding": False}),
    "wide": Arm("DCBart, plain, wider MLP", composing(), is_wide=True),
    "mha": Arm("RCMHA seq2seq, `mha`", attention_type="mha"),
    "rmha": Arm("RCMHA seq2seq, `rmha`", attention_type="rmha"),
    "mdha": Arm("RCMHA seq2seq, `mdha`", attention_type="mdha"),
    "rcmha": Arm("RCMHA seq2seq, `rcmha`", attention_type="rcmha"),
}
CONTRASTS = (
    *((name, "plain") for name in ("encoder", "decoder", "cross", "all", "unscaled")),
    ("all", "wide"),
    *((name, "mha") for name in ("rmha", "mdha", "rcmha")),
    ("rcmha", "rmha"),
    ("rcmha", "mdha"),
)


@dataclass(frozen=True)
class Shape:
    """A small encoder-decoder with as many layers in both halves."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    hidden_dropout: float = 0.0

    def make(self, arm: Arm) -> PreTrainedModel:
        """A model with fresh weights."""
        if arm.attention_type is not None:
            fields = {"intermediate_size": 2 * self.hidden_size, **asdict(self)}
            return RCMHASeq2SeqForConditionalGeneration(RCMHASeq2SeqConfig(**fields, attention_type=arm.attention_type))
        config = self._dcbart(arm)
        if arm.is_wide:
            config.intermediate_size = matched_width(DCBartForConditionalGeneration, self._dcbart(ARMS["all"]), config)
        return DCBartForConditionalGeneration(config)

    def _dcbart(self, arm: Arm) -> DCBartConfig:
        """The configuration of an arm's model, before its MLPs are widened."""
        return DCBartConfig(**{"intermediate_size": 2 * self.hidden_size, **asdict(self), **DCBART, **arm.fields})


def make_model(arm: str, shape: Shape, seed: int) -> PreTrainedModel:
    """A model with fresh weights; all arms of a seed and a kind share those that they have in common."""
    torch.manual_seed(seed)
    baseline = "plain" if ARMS[arm].attention_type is None else "mha"
    plain, model = (shape.make(ARMS[name]) for name in (baseline, arm))
    begin_alike(model, plain)
    return model
