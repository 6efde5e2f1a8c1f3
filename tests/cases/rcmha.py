"""The weights of the official RCMHA code under our names."""

import re

from torch import Tensor


def our_attention(key: str, value: Tensor, *, later: bool = False) -> tuple[str, Tensor]:
    """One official attention tensor, or its gradient, under our name and in our layout.

    Tables go by distance from 0, or with `later` from the farthest later key.
    """
    half = value.shape[0] // 2
    if key in ("key_pos_embeddings", "key_pos_bias"):
        return key.replace("key_pos", "position"), value.flip(0) if later else value[1 : half + 1].flip(0)
    if key == "query_pos_bias":
        return "content_bias", value
    if key.startswith("output."):
        return key.replace("output", "o_proj"), value
    name, stage, kind = re.fullmatch(r"(query|key|value)\.(?:\d\.)?(linear|conv)\.(weight|bias)", key).groups()  # type: ignore[union-attr]
    value = value[:, 0].T.flip(0) if (stage, kind) == ("conv", "weight") else value
    return f"{name[0]}_{'proj' if stage == 'linear' else 'conv'}.{kind}", value
