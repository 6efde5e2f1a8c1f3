"""The official configuration of the RCMHA family, and its translation to ours."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from dynattn import RCMHAConfig
from dynattn.configuration.relative_config import ATTENTION_TYPES

from ...common.errors import UserError, last_line
from .arguments import POSITIONS

# The width of the convolutions of unchanged official code, in tokens.
KERNEL_SIZE = 3
ACTIVATIONS = ("relu", "relu2")
KERNELS, TABLES = ".conv.weight", ".key_pos_embeddings"
# Our names of the fields that both sides have.
OURS = {
    "kind": "attention_type",
    "heads": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "vocab": "vocab_size",
    "mem_len": "mem_len",
    "activation": "hidden_act",
}
# Fields that do not change what a model computes.
WITHOUT_MEANING = {"architectures", "dtype", "model_type", "torch_dtype"}


@strict
@dataclass
class OfficialRCMHAConfig:
    """What an official model computes: the fields of its `config.json`, and the kernel size that the weights have."""

    kind: str
    heads: int
    d_model: int
    d_ff: int
    n_layers: int
    vocab: int
    mem_len: int
    P: int = POSITIONS
    activation: str = "relu"
    kernel_size: int = KERNEL_SIZE

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> Self:
        """Reads `config.json`, and what it leaves open from the `shapes` of the weights.

        Raises:
            UserError: it is no official configuration, or disagrees with the weights on the kind of attention.
        """
        check_official(raw)
        check_kind(raw["kind"], shapes)
        found = {name: raw[name] for name in json_fields() if raw.get(name) is not None}
        rows = find_shape(shapes, TABLES)
        if rows:
            found.setdefault("P", rows[0] // 2)
            check_positions(found["P"], rows[0])
        kernel = find_shape(shapes, KERNELS)
        if len(kernel) == 3:
            found["kernel_size"] = kernel[-1]
        try:
            config = cls(**found)
        except StrictDataclassError as error:
            raise UserError(f"config.json: {last_line(error)}") from error
        config._check()
        return config

    @property
    def is_relative(self) -> bool:
        """Whether the scores depend on position tables."""
        return self.kind in ("rcmha", "rmha")

    @property
    def convolves(self) -> bool:
        """Whether queries, keys and values are convolved."""
        return self.kind in ("rcmha", "mdha")

    def to_ours(self, memory_type: str = "segment", max_position_embeddings: int | None = None) -> RCMHAConfig:
        """Returns our configuration, by default of the same function with all positions that it can reach.

        Raises:
            UserError: there are too few or too many positions, or ours refuses a value.
        """
        reach = self.P if self.is_relative else max(self.P, self.mem_len + 1)
        wanted = reach if max_position_embeddings is None else max_position_embeddings
        if max_position_embeddings is not None and wanted <= self.mem_len:
            raise UserError(
                f"--max-position-embeddings {wanted} must be more than mem_len ({self.mem_len}): it holds the memory "
                f"and a segment of at least one token; give {self.mem_len + 1} or more"
            )
        if self.is_relative and wanted > self.P:
            raise UserError(
                f"--max-position-embeddings {wanted} is more than the {self.P} distances that the official tables "
                f"know; give at most {self.P}"
            )
        try:
            return RCMHAConfig(
                **{ours: getattr(self, name) for name, ours in OURS.items()},
                conv_kernel_size=self.kernel_size,
                memory_type=memory_type,
                max_position_embeddings=wanted,
            )
        except (StrictDataclassError, ValueError) as error:
            raise UserError(f"config.json describes an impossible model: {last_line(error)}; correct it") from error

    def to_json(self) -> dict[str, Any]:
        """The official `config.json`."""
        return {name: getattr(self, name) for name in json_fields()}

    def _check(self) -> None:
        for name in ("heads", "d_model", "d_ff", "n_layers", "vocab", "P"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} in config.json is {getattr(self, name)}; it must be positive")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation {self.activation!r} is unknown; it can be {' or '.join(ACTIVATIONS)}")


def json_fields() -> list[str]:
    """The names in an official `config.json`."""
    return [field.name for field in dataclasses.fields(OfficialRCMHAConfig) if field.name != "kernel_size"]


def check_official(raw: Mapping[str, Any]) -> None:
    """Raises UserError unless `config.json` has the official fields."""
    if raw.get("model_type") == "rcmha" and "hidden_size" in raw:
        raise UserError("config.json is in our format already; --reverse turns it into the official one")
    if "kind" not in raw:
        raise UserError(
            "config.json is not of an official RCMHA model: it needs kind (rcmha, rmha, mdha or mha), heads, d_model, "
            "d_ff, n_layers, vocab and mem_len"
        )
    if raw["kind"] not in ATTENTION_TYPES:
        raise UserError(f"kind {raw['kind']!r} is unknown; it can be {', '.join(ATTENTION_TYPES)}")
    needed = [name for name in json_fields() if name not in ("P", "activation")]
    if absent := [name for name in needed if raw.get(name) is None]:
        raise UserError(f"config.json lacks {', '.join(absent)}; add what the model was made with")


def check_kind(kind: str, keys: Iterable[str]) -> None:
    """Raises UserError where the weights are of another kind of attention."""
    keys = list(keys)
    convolves, is_relative = (any(key.endswith(end) for key in keys) for end in (KERNELS, TABLES))
    shown = {(True, True): "rcmha", (False, True): "rmha", (True, False): "mdha", (False, False): "mha"}
    found = shown[convolves, is_relative]
    if kind != found:
        raise UserError(
            f"config.json says {kind}, but the weights are of {found} ({'with' if convolves else 'without'} "
            f"convolutions, {'with' if is_relative else 'without'} position tables); correct it"
        )


def check_positions(positions: Any, rows: int) -> None:
    """Raises UserError where P of `config.json` is not half the `rows` of the position tables."""
    if positions != rows // 2:
        raise UserError(
            f"P in config.json is {positions!r}, but the position tables have {rows} rows, which is twice "
            f"{rows // 2}; set P to that"
        )


def find_shape(shapes: Mapping[str, torch.Size], end: str) -> torch.Size:
    """The shape of the first tensor whose name ends so; `()` if there is none."""
    return next((shape for key, shape in shapes.items() if key.endswith(end)), torch.Size())


def field_warnings(raw: Mapping[str, Any], config: OfficialRCMHAConfig) -> Iterator[str]:
    """Warnings about fields of `config.json` that are absent or ignored, and about unofficial kernel sizes."""
    if unknown := sorted(set(raw) - set(json_fields()) - WITHOUT_MEANING):
        yield f"config.json has fields without meaning: {', '.join(unknown)}"
    if raw.get("activation") is None:
        yield f"config.json has no activation; {config.activation} is what the official code has if nothing is said"
    if config.kernel_size != KERNEL_SIZE:
        yield f"kernels are {config.kernel_size} wide, but unchanged official code only makes {KERNEL_SIZE} wide ones"
