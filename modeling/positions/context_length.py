"""How long texts may be, by a model's configuration."""

from typing import Any

# Types of Transformers that count positions from the number behind that of the padding token, as RoBERTa does.
BEHIND_PADDING = frozenset({
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip


def context_length(config: Any) -> int | None:
    """How many tokens a model is made to read, or its decoder, if it has other parts; None if nothing says so."""
    config = config.get_text_config(decoder=True)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None or config.model_type not in BEHIND_PADDING:
        return positions
    return positions - config.pad_token_id - 1


def longest_readable(config: Any) -> int | None:
    """The most tokens that a model with this configuration can read; None if its position scheme sets no limit."""
    config = config.get_text_config(decoder=True)
    scheme = getattr(config, "position_scheme", None)
    unlimited = scheme != "learned" if scheme is not None else getattr(config, "rope_parameters", None) is not None
    # Tables of relative positions have a row for each distance in a window; without a window texts outgrow them.
    outgrows_tables = getattr(config, "is_relative", False) and config.sliding_window is None
    return context_length(config) if outgrows_tables or not unlimited else None
