"""The attentions of a DCFormer that studies compare: full composition, what is left without its terms, and none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...configuration.mixers import NO_COMPOSITION, mixer_fields


@dataclass(frozen=True)
class ComparedAttention:
    """One attention: what tables call it, and the fields of `DCFormerConfig` that make it."""

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)


# The first is the baseline.
ATTENTIONS = {
    "plain": ComparedAttention("plain", NO_COMPOSITION),
    "full": ComparedAttention("DCMHA"),
    "talking-heads": ComparedAttention("talking heads (static)", dict(mixer_fields("talking_heads"))),
    "differential": ComparedAttention("differential attention", dict(mixer_fields("differential"))),
    "query-only": ComparedAttention("DCMHA, query-wise only", {"compose_key_wise": False}),
    "key-only": ComparedAttention("DCMHA, key-wise only", {"compose_query_wise": False}),
    "pre-only": ComparedAttention("DCMHA, scores only", {"compose_post": False}),
    "post-only": ComparedAttention("DCMHA, probabilities only", {"compose_pre": False}),
    "low-rank-only": ComparedAttention("DCMHA, no gates", {"compose_gate": False}),
    "gates-only": ComparedAttention("DCMHA, gates only", {"compose_low_rank": False}),
    "rank-1": ComparedAttention("DCMHA, rank 1", {"compose_rank": 1}),
    "rank-4": ComparedAttention("DCMHA, rank 4", {"compose_rank": 4}),
}
