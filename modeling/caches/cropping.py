"""Refuses to take tokens back from a cache where earlier ones that a window needs are lost."""

from typing import Any


def refuse_lost_tokens(layer: Any, tokens_to_remove: int) -> None:
    """Raises RuntimeError if a layer has grown beyond its window, and what is left of it would not fill the window.

    Transformers itself does not check that the past was recorded for long enough. To be called before the layer crops.
    """
    removed = abs(tokens_to_remove)
    if not (layer.record_past and layer.is_initialized):  # then Transformers knows whether tokens are lost
        return
    if layer.keys.shape[2] - removed < min(layer.get_seq_length() - removed, layer.sliding_window - 1):
        raise RuntimeError(
            f"{removed} tokens cannot be taken back: the window would lack tokens, because fewer have been added since "
            "the last crop, or since activate_past_recording()"
        )


def refuse_moved_window(layer: Any, tokens_to_remove: int) -> None:
    """Raises RuntimeError if a static layer cannot take tokens back: they overwrote others that its window needs.

    Transformers itself does not check that. Call this before the layer crops.
    """
    if tokens_to_remove and layer.get_seq_length() > layer.max_cache_len:
        raise RuntimeError("a static cache whose window has moved cannot take tokens back; use a DynamicCache")
