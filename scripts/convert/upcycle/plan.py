"""Reading a plain model, or one of ours that composes nothing, and planning what becomes of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from dynattn.configuration.composed_config import repeat_layer_types

from ...common.errors import UserError, last_line
from ..common.driver import ConversionPlan
from ..common.model_loading import load_config, load_for_probe
from ..common.planning import check_import, check_shapes, choose_dtype, in_file_order, meta_model, shapes_of
from ..common.probe import Comparison, ask, compare_answers, make_probe
from ..common.tensor_source import TensorSource, count_elements
from ..common.weight_map import WeightMap, plan_export, plan_import
from ..common.writing import write_transformers_config
from .arguments import UpcycleArguments
from .identity import require_identity
from .new_parameters import COMPOSITION, new_steps
from .parents.interface import EMBEDDING, HEAD, Parent

OFF = {"compose_pre": False, "compose_post": False}


@dataclass(kw_only=True)
class Upcycling(ConversionPlan):
    """A conversion between a plain model and ours.

    Args:
        config: of what is written.
        twin: the configuration with which the written weights compute what the source computes; `config` itself
            unless the result is meant to differ.
        proof: the comparison of the source with the written weights under `twin`; None until it is made.
        effect: the comparison of the source with the result as it is; None where both are meant to be equal.
    """

    arguments: UpcycleArguments
    config: PreTrainedConfig
    twin: PreTrainedConfig
    proof: Comparison | None = None
    effect: Comparison | None = None

    @property
    def same_model(self) -> bool:
        """Whether the result should answer as the source does from the start."""
        return self.config is self.twin

    def write_config(self, folder: Path) -> Sequence[str]:
        write_transformers_config(folder, self.config, self.dtype)
        return ()

    def verify(self, written: Path) -> None:
        """Checks that the written weights give the source's logits when run with the source's settings.

        If the result is meant to differ, also measures by how much.

        Raises:
            UserError: logits differ by more than rounding, where they should not.
        """
        ids = make_probe(self.source.folder, self.config, self.twin)
        theirs = ask(load_for_probe(self.source.folder, dtype=self.dtype), ids)
        twin = None if self.same_model else self.twin
        proof = compare_answers(theirs, ask(load_for_probe(written, config=twin), ids))
        if not proof.equal:
            raise UserError(
                f"the written model's logits differ from the source's by {proof.difference:.1e}; rounding explains "
                f"{proof.limit:.1e}. Nothing was written"
            )
        self.proof = proof
        if not self.same_model:
            self.effect = compare_answers(theirs, ask(load_for_probe(written), ids))

    def describe_source(self) -> str:
        return (
            f"{self.config.num_hidden_layers} layers, {self.config.num_attention_heads} heads, "
            f"{count_elements(self.source.shapes.values()):,} numbers"
        )

    def describe_check(self) -> str:
        return self.proof.describe() if self.proof else ""

    def effects(self) -> Iterator[tuple[str, str]]:
        if self.effect is not None:
            yield "effect", self.effect.describe_effect()

    def describe_result(self) -> str:
        return f"{self.arguments.destination} ({self.config.model_type})"


def plan_upcycling(arguments: UpcycleArguments, raw: dict[str, Any], folder: Path, *, parent: Parent) -> Upcycling:
    """Reads a plain model: configuration and names, but not yet the weights.

    Raises:
        UserError: it is none of the family, is damaged, or would lose something.
    """
    theirs = read_family(folder, raw, parent.model_types)
    source = TensorSource(folder)
    config_class, fields = CONFIG_MAPPING[parent.ours], parent.fields(theirs)
    plain = make_config(config_class, **{**fields, **OFF})
    config = make_config(config_class, **{**fields, **chosen_fields(arguments, plain)})
    check_parent(arguments, plain)
    weight_map = parent.weight_map(plain)
    steps, dropped = plan_import(weight_map, source.headers)
    check_import(config, source, steps)
    check_tied(source, plain, weight_map)
    written = [key for step in steps for key in step.writes]
    return Upcycling(
        arguments=arguments,
        source=source,
        steps=[*in_file_order(steps, source), *new_steps(config, written, arguments.seed)],
        dtype=choose_dtype(arguments.dtype, source, steps),
        dropped=dropped,
        warnings=list(warn_of_dropout(theirs)),
        config=config,
        twin=config if starts_as_parent(config, plain) else plain,
    )


def plan_plain(arguments: UpcycleArguments, raw: dict[str, Any], folder: Path, *, parent: Parent) -> Upcycling:
    """Reads one of our models likewise, to write the plain model that it contains.

    Raises:
        UserError: it is none of ours, composes heads, or the parent's code cannot run it.
    """
    ours = read_family(folder, raw, (parent.ours,))
    source = TensorSource(folder)
    config = make_config(parent.restore, ours)
    expected = shapes_of(meta_model(ours))
    composition = sorted(key for key in expected if COMPOSITION in key)
    if absent := [key for key in composition if key not in source.headers]:
        raise UserError(f"the weights lack {absent[0]} ({len(absent)} in all); config.json asks for it")
    tied = {HEAD} if ours.tie_word_embeddings else set()
    steps = plan_export(parent.weight_map(ours), source.headers.keys() - tied - set(composition))
    check_shapes(source, {key: shape for key, shape in expected.items() if key not in tied})
    require_identity(source, ours)
    return Upcycling(
        arguments=arguments,
        source=source,
        steps=in_file_order(steps, source),
        dtype=choose_dtype(arguments.dtype, source, steps),
        dropped={"a composition that is the identity": composition} if composition else {},
        config=config,
        twin=config,
    )


def read_family(folder: Path, raw: dict[str, Any], model_types: Sequence[str]) -> PreTrainedConfig:
    """The configuration in `folder`, whose `config.json` holds `raw` and must be of one of these types."""
    found = raw.get("model_type")
    if found not in model_types:
        raise UserError(f"{folder} holds a {found!r} model, but only {', '.join(model_types)} can be converted here")
    return load_config(folder)


def make_config(make: Callable[..., PreTrainedConfig], *values: Any, **fields: Any) -> Any:
    """A configuration.

    Raises:
        UserError: its fields do not fit each other.
    """
    try:
        return make(*values, **fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UserError(f"there can be no such model: {last_line(error)}") from error


def chosen_fields(arguments: UpcycleArguments, plain: Any) -> dict[str, Any]:
    """The fields in which the result is meant to differ from the plain model.

    Raises:
        UserError: a window without layers that have one, or the other way round.
    """
    fields: dict[str, Any] = {
        "compose_rank": arguments.rank,
        "compose_pre": arguments.only != "post",
        "compose_post": arguments.only != "pre",
        "compose_static": arguments.static,
        "compose_init_scale": 0.0 if arguments.init == "identity" else 1.0,
        "use_qk_norm": plain.use_qk_norm or arguments.qk_norm,
    }
    if arguments.layer_types is not None:
        fields["layer_types"] = repeat_layer_types(arguments.layer_types, plain.num_hidden_layers)
    slides = "sliding_attention" in fields.get("layer_types", plain.layer_types)
    if slides and not (arguments.sliding_window or plain.sliding_window):
        raise UserError("--layer-types has L, but the model has no window; say how many keys with --sliding-window")
    if arguments.sliding_window is not None:
        if not slides:
            raise UserError("--sliding-window, but no layer has one; say which with --layer-types, such as LG")
        fields["sliding_window"] = arguments.sliding_window
    return fields


def starts_as_parent(config: Any, plain: Any) -> bool:
    """Whether a new model of `config` gives the plain model's logits."""
    same = ("layer_types", "sliding_window", "use_qk_norm")
    return config.compose_init_scale == 0 and all(getattr(config, name) == getattr(plain, name) for name in same)


def check_parent(arguments: UpcycleArguments, plain: Any) -> None:
    """Raises UserError where ours cannot embed the padding token, or a query-key norm is asked for that is there."""
    if plain.pad_token_id is not None and not 0 <= plain.pad_token_id < plain.vocab_size:
        raise UserError(
            f"pad_token_id {plain.pad_token_id} is none of the {plain.vocab_size} rows of the embedding; correct it or "
            "set it to null, in config.json"
        )
    if arguments.qk_norm and plain.use_qk_norm:
        raise UserError("--qk-norm, but the model has a query-key norm, which is kept; leave it out")


def check_tied(source: TensorSource, plain: Any, weight_map: WeightMap) -> None:
    """Raises UserError where a tied head is stored and is not the embedding."""
    if not plain.tie_word_embeddings:
        return
    (embedding,) = next(rule.theirs for rule in weight_map.rules if rule.ours == (EMBEDDING,))
    for key in (drop.theirs for drop in weight_map.drops if drop.theirs in source.headers):
        if not torch.equal(source.read(key), source.read(embedding)):
            raise UserError(f"config.json ties {key} to {embedding}, but they differ; set tie_word_embeddings to false")


def warn_of_dropout(theirs: PreTrainedConfig) -> Iterator[str]:
    """What to tell about dropout, which ours does not have."""
    for name in ("attention_dropout", "hidden_dropout"):
        if value := getattr(theirs, name, 0.0):
            yield f"{name} {value} is not kept: our models have no dropout"
