"""Dropout that a conversion does not keep, which matters only where the result is trained."""

from collections.abc import Iterator

from transformers import PreTrainedConfig

# What the families on either side of a conversion call dropout: of probabilities, of activations and embeddings, of
# the factors of a composition, and of whole layers.
NAMES = (
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"),
    *("hidden_dropout", "activation_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"),
    *("compose_dropout", "encoder_layerdrop", "decoder_layerdrop"),
)
# Names of BART and of vision transformers, by ours.
RENAMED = {"hidden_dropout": ("dropout", "hidden_dropout_prob")}


def warn_of_dropout(source: PreTrainedConfig, result: PreTrainedConfig | None = None) -> Iterator[str]:
    """Warnings about dropout of the source that the result does not have.

    Args:
        result: the configuration of the result; None if its format has no fields for dropout.
    """
    for name in NAMES:
        value = getattr(source, name, 0.0)
        if value and value not in [getattr(result, other, None) for other in (name, *RENAMED.get(name, ()))]:
            yield f"{name} {value} is not kept: config.json of the result does not have it"
