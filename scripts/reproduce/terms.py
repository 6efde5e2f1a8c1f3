"""The attentions of a DCFormer that studies compare: full composition, what is left without its terms, and none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...configuration.mixers import NO_COMPOSITION, mixer_fields


@dataclass(frozen=True)
class Term:
    """One attention: what tables call it, and the fields of `DCFormerConfig` that make it."""

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)


# The first is the baseline.
TERMS = {
    "plain": Term("plain", NO_COMPOSITION),
    "full": Term("DCMHA"),
    "talking-heads": Term("talking heads (static)", dict(mixer_fields("talking_heads"))),
    "differential": Term("differential attention", dict(mixer_fields("differential"))),
    "query-only": Term("DCMHA, query-wise only", {"compose_key_wise": False}),
    "key-only": Term("DCMHA, key-wise only", {"compose_query_wise": False}),
    "pre-only": Term("DCMHA, scores only", {"compose_post": False}),
    "post-only": Term("DCMHA, probabilities only", {"compose_pre": False}),
    "low-rank-only": Term("DCMHA, no gates", {"compose_gate": False}),
    "gates-only": Term("DCMHA, gates only", {"compose_low_rank": False}),
    "rank-1": Term("DCMHA, rank 1", {"compose_rank": 1}),
    "rank-4": Term("DCMHA, rank 4", {"compose_rank": 4}),
}
