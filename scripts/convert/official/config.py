"""The official configurations of DCFormer and DCPythia, and their translation to ours."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from dynattn import DCFormerConfig, DCPythiaConfig
from dynattn.configuration.composed_config import repeat_layer_types

from ...common.errors import UserError, last_line

# Model types of ours that have an official format.
OFFICIAL_TYPES = ("dcformer", "dcpythia")
# The window of local layers in the official patterns, which ignore window_size; released models have both equal.
PATTERN_WINDOW = 256
PATTERNS = {None: "LG", "LG": "LG", "LGLL": "LGLL", "LGL6": "LGLLLLLL"}
# Fields that must be positive and finite.
POSITIVE = ("block_size", "vocab_size", "n_layer", "n_head", "dim", "intermediate_size", "norm_eps", "rope_base")
# Fields of one family only; the first version of DCFormer had none of them.
PYTHIA_FIELDS = ("use_parallel_residual", "use_linear_bias", "rotary_pct")
DCFORMER_FIELDS = ("mgate", "mgate_dim", "prefill_pad")
# Our names of fields that both sides have.
OURS = {
    **{name: name for name in ("vocab_size", "intermediate_size", "use_qk_norm")},
    **{name: name for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "dim": "hidden_size",
}
# Fields that do not change what a model computes, or that the official code computes from others.
WITHOUT_MEANING = {
    *("architectures", "auto_map", "dtype", "head_dim", "is_training", "model_type", "prefill_pad", "q_chunk_size"),
    *("torch_dtype", "transformers_version", "use_cache", "use_gradient_checkpointing", "_name_or_path"),
}


@strict
@dataclass
class OfficialConfig:
    """The fields of an official `config.json` that say what the model computes, with the official defaults."""

    family: str
    block_size: int = 2048
    vocab_size: int = 32000
    n_layer: int = 32
    n_head: int = 32
    dim: int = 2560
    intermediate_size: int | None = None
    n_local_heads: int | None = None
    rope_base: float | int | None = None
    norm_eps: float | int = 1e-5
    use_dcmha: bool = True
    use_qk_norm: bool = False
    window_size: int | None = 256
    window_type: str | None = None
    query_wise: bool = False
    use_parallel_residual: bool = True
    use_linear_bias: bool = True
    rotary_pct: float | int = 0.25
    mgate: bool = False
    mgate_dim: int = 44
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], keys: Collection[str], family: str = "auto") -> Self:
        """Reads `config.json`, and what it leaves open from the `keys` of the weights.

        Raises:
            UserError: it is no official configuration, or one that the official code cannot run.
        """
        check_official(raw)
        family = find_family(raw, keys, family)
        fields = {field.name: raw[field.name] for field in dataclasses.fields(cls) if field.name in raw}
        if raw.get("use_qk_norm") is None:
            fields["use_qk_norm"] = any(key.endswith("attention.q_norm.scale") for key in keys)
        try:
            config = cls(**{**fields, "family": family})
        except StrictDataclassError as error:
            raise UserError(f"config.json: {last_line(error)}") from error
        config = dataclasses.replace(config, **config._derived(raw))
        config._check()
        if not config.use_dcmha and any(".dyn_w_proj." in key for key in keys):
            raise UserError(
                "use_dcmha is false, but the weights have dyn_w_proj, with which official inference composes anyway; "
                "set use_dcmha to true, or take these tensors out"
            )
        return config

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.n_head

    @property
    def layer_types(self) -> list[str]:
        """Our layer type for each layer."""
        return repeat_layer_types("G" if self.window_size is None else PATTERNS[self.window_type], self.n_layer)

    def to_ours(self, sliding_window: int | None, *, compose_static: bool = False) -> PreTrainedConfig:
        """Returns our configuration, with `sliding_window` keys in local layers.

        Raises:
            UserError: ours refuses a value.
        """
        shared: dict[str, Any] = {
            **{ours: getattr(self, name) for name, ours in OURS.items()},
            "sliding_window": sliding_window,
            "layer_types": self.layer_types,
            "compose_pre": self.use_dcmha,
            "compose_post": self.use_dcmha,
            "compose_static": compose_static,
            "compose_key_wise": not self.query_wise,
        }
        rope, epsilon = {"rope_type": "default", "rope_theta": float(self.rope_base or 0)}, float(self.norm_eps)
        try:
            if self.family == "dcformer":
                mgate_dim = self.mgate_dim if self.mgate else None
                return DCFormerConfig(**shared, rms_norm_eps=epsilon, rope_parameters=rope, mgate_dim=mgate_dim)
            return DCPythiaConfig(
                **shared,
                layer_norm_eps=epsilon,
                rope_parameters={**rope, "partial_rotary_factor": self.rotary_pct},
                use_parallel_residual=self.use_parallel_residual,
                attention_bias=self.use_linear_bias,
                mlp_bias=self.use_linear_bias,
            )
        except (StrictDataclassError, ValueError) as error:
            raise UserError(f"config.json describes an impossible model: {last_line(error)}; correct it") from error

    def _derived(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What the official code computes where a field is absent."""
        derived: dict[str, Any] = {}
        if self.intermediate_size is None:
            swiglu = -(-int(8 * self.dim / 3) // 256) * 256
            derived["intermediate_size"] = 4 * self.dim if self.family == "dcpythia" else swiglu
        if self.rope_base is None:
            is_head = self.family == "dcformer" and any(name in raw for name in DCFORMER_FIELDS)
            derived["rope_base"] = 500000.0 if is_head else 10000.0
        if self.n_local_heads in (None, -1):
            derived["n_local_heads"] = self.n_head
        return derived

    def _check(self) -> None:
        for name in POSITIVE:
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} in config.json is {getattr(self, name)}; it must be positive and finite")
        if self.n_local_heads != self.n_head:
            raise UserError(
                f"n_local_heads ({self.n_local_heads}) differs from n_head ({self.n_head}): the official code gives "
                "grouped-query attention no meaning, so there is nothing to convert it to"
            )
        if self.n_head % 2 or self.dim % self.n_head:
            raise UserError(
                f"n_head ({self.n_head}) must be even and divide dim ({self.dim}), as the official composition needs it"
            )
        if self.window_type not in PATTERNS:
            raise UserError(f"window_type {self.window_type!r} is unknown; it can be {', '.join(map(repr, PATTERNS))}")
        if self.tie_word_embeddings:
            raise UserError("tie_word_embeddings is true, but the official models do not tie them; set it to false")


def check_official(raw: Mapping[str, Any]) -> None:
    """Raises UserError unless `config.json` has the official fields."""
    if "dim" in raw and "n_layer" in raw and str(raw.get("model_type", "dcformer")).lower() in OFFICIAL_TYPES:
        return
    if "hidden_size" in raw and raw.get("model_type") in OFFICIAL_TYPES:
        raise UserError("config.json is in our format already; --reverse turns it into the official one")
    raise UserError(
        f"config.json (model_type {raw.get('model_type')!r}) is not of an official DCFormer or DCPythia, "
        "which has the fields dim, n_layer and n_head"
    )


def find_family(raw: Mapping[str, Any], keys: Collection[str], asked: str) -> str:
    """Returns "dcformer" or "dcpythia".

    Raises:
        UserError: configuration, weights and what is asked for disagree.
    """
    name = f"{raw.get('model_type', '')} {raw.get('architectures', '')}".lower()
    said = [family for family in OFFICIAL_TYPES if family in name]
    said = said or [
        family for family, own in zip(OFFICIAL_TYPES, (DCFORMER_FIELDS, PYTHIA_FIELDS), strict=True) if {*own} & {*raw}
    ]
    swiglu = any(key.endswith("feed_forward.w3.weight") for key in keys)
    shown = "dcformer" if swiglu else "dcpythia"
    claims = {asked} if asked != "auto" else set(said)
    if claims - {shown}:
        source = "--family" if asked != "auto" else "config.json"
        raise UserError(
            f"{source} says {' and '.join(sorted(claims))}, but the weights are of {shown} "
            f"({'with' if swiglu else 'without'} feed_forward.w3); correct it"
        )
    return shown


def field_warnings(raw: Mapping[str, Any], config: OfficialConfig) -> Iterator[str]:
    """Warnings about fields of `config.json` that are absent, ignored or contradicted by the official code."""
    known = {field.name for field in dataclasses.fields(config)} | WITHOUT_MEANING
    own, foreign = PYTHIA_FIELDS, DCFORMER_FIELDS
    if config.family == "dcformer":
        own, foreign = foreign, own
    if unknown := sorted((set(raw) - known - set(own)) | (set(raw) & set(foreign))):
        yield f"config.json has fields without meaning for {config.family}: {', '.join(unknown)}"
    if raw.get("rope_base") is None:
        yield f"config.json has no rope_base; {config.rope_base:g} is the default of that version of the official code"
    if raw.get("use_qk_norm") is None:
        found = "have" if config.use_qk_norm else "lack"
        yield f"config.json has no use_qk_norm; it is {config.use_qk_norm}, as the weights {found} q_norm scales"
    yield from pattern_warnings(config)
    if config.query_wise:
        yield "query_wise: key-side terms are left out, as in official decoding; official prefill does not obey it"


def pattern_warnings(config: OfficialConfig) -> Iterator[str]:
    """A warning where the unchanged official code ignores `window_size`."""
    if config.window_type is not None and config.window_size not in (None, PATTERN_WINDOW):
        yield (
            f"window_size {config.window_size} was taken at its word; with window_type {config.window_type!r} the "
            f"unchanged official code sees {PATTERN_WINDOW} keys instead (--window {PATTERN_WINDOW})"
        )


def length_warnings(config: OfficialConfig) -> Iterator[str]:
    """A warning where the official DCFormer, which masks whole windows, has no masks for so few positions."""
    if config.family == "dcformer" and config.window_size and config.block_size < 3 * config.window_size:
        yield (
            f"the official code cannot decode with {config.block_size} positions and windows of {config.window_size}: "
            f"it needs three windows; raise block_size in its config.json to {3 * config.window_size} or more"
        )
