"""Published attentions that mix heads, by name: the fields of `CompositionConfig` that make each of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# The fields that switch composition off: what is left is plain attention, the baseline of every comparison.
NO_COMPOSITION: dict[str, Any] = {"compose_pre": False, "compose_post": False}
_STATIC_ONLY = {"compose_low_rank": False, "compose_gate": False, "compose_static": True, "compose_init_scale": 0.0}

# docs/guides/mixers.md has the formulas, what each setting does not cover, and how each was compared with the authors'
# code.
MIXERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # DCMHA, arXiv 2405.08553: the defaults.
        "dcmha": {},
        # Talking heads, arXiv 2003.02436: one learned matrix before the softmax, and one after it.
        "talking_heads": _STATIC_ONLY,
        # The head convolution of multi-token attention, arXiv 2504.00927: after the softmax, in groups.
        "head_convolution": {**_STATIC_ONLY, "compose_pre": False},
        # Differential attention, arXiv 2410.05258.
        "differential": {
            "compose_pre": False,
            "compose_low_rank": False,
            "compose_gate": False,
            "differential_heads": True,
        },
        # The DCMHA of the modded-nanogpt speed record of 2026-05-27.
        "modded_nanogpt": {
            "compose_pre": False,
            "compose_key_wise": False,
            "compose_gate": False,
            "compose_rank": 1,
            "compose_init_scale": 0.0,
        },
    }
)
# Attentions that sound like a mixing of heads but are none: the end of the sentence "mixer=NAME ...", which tells why.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "key_query_convolution": (
            "mixes the scores of neighbouring queries and keys, where composition mixes heads of one query and key"
        ),
        "multi_token_attention": (
            "contains a key-query convolution, which mixes the scores of neighbouring queries and keys; its mixing of "
            "heads is mixer='head_convolution'"
        ),
        "knocking_heads": (
            "mixes the features of queries, keys and values before the scores exist; no mixing of attention maps gives "
            "the same"
        ),
    }
)


def mixer_fields(name: str) -> dict[str, Any]:
    """Returns the fields of a configuration with the attention `name`, one of `MIXERS`.

    Raises:
        ValueError: the attention is unknown, or cannot be expressed as a mixing of heads.

    ```python
    >>> config = dynattn.DCPythiaConfig(hidden_size=768, **dynattn.mixer_fields("talking_heads"))
    ```
    """
    if name in REFUSED:
        raise ValueError(f"mixer={name!r} {REFUSED[name]}")
    if name not in MIXERS:
        raise ValueError(f"mixer={name!r} does not exist; choose from {sorted(MIXERS)}")
    return dict(MIXERS[name])
