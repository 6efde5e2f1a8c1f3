"""Reads a plain model, or one of ours that composes nothing, and plans its conversion."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from dynattn.configuration.mixers import NO_COMPOSITION
from dynattn.families import FAMILIES

from ...common.errors import UserError
from ..common.decoder_probe import TEXT
from ..common.driver import ConversionPlan, convert
from ..common.dropout import warn_of_dropout
from ..common.hub import locate
from ..common.model_loading import load_for_probe
from ..common.planning import (
    auto_class_with_head,
    check_import,
    check_shapes,
    choose_dtype,
    head_advice,
    in_file_order,
    meta_model,
    refuse_headless,
    shapes_of,
)
from ..common.probe import Comparison, Probe, compare_answers
from ..common.tensor_source import TensorSource
from ..common.weight_map import plan_export, plan_import
from .arguments import UpcycleArguments
from .by_model_type import write_generation_settings, write_preprocessors
from .config import check_parent, chosen_fields, make_config, read_family, starts_as_parent
from .identity import require_identity
from .new_parameters import generators_of, new_steps
from .parents.interface import Parent


@dataclass(kw_only=True)
class Upcycling(ConversionPlan):
    """A conversion between a plain model and ours.

    Args:
        config: of what is written.
        twin: the configuration with which the written weights compute what the source computes; `config` itself
            unless the result is meant to differ.
        probe: how both models are run for the comparison.
        effect: the comparison of the source with the result under `config`; None if both are meant to be equal.
    """

    arguments: UpcycleArguments
    config: PreTrainedConfig
    twin: PreTrainedConfig
    probe: Probe
    effect: Comparison | None = None

    @property
    def same_model(self) -> bool:
        """Whether the result should answer as the source does from the start."""
        return self.config is self.twin

    def write_config(self, folder: Path) -> Sequence[str]:
        self.config.dtype = self.dtype
        self.config.save_pretrained(folder)
        if self.probe.generates:
            write_generation_settings(self.source.folder, folder)
        return list(write_preprocessors(self.source.folder, folder))

    def verify(self, written: Path) -> str:
        """Checks that the written weights give the source's logits when run with the source's settings.

        If the result is meant to differ, also measures by how much.

        Raises:
            UserError: logits differ by more than rounding, where they should not.
        """
        probe = self.probe
        inputs = probe.make(self.source.folder, self.config, self.twin)
        theirs = probe.ask(self._load(self.source.folder, dtype=self.dtype), inputs)
        twin = None if self.same_model else self.twin
        proof = compare_answers(theirs, probe.ask(self._load(written, config=twin), inputs))
        if not proof.equal:
            what = f"'s logits differ from the source's by {proof.difference:.1e}; rounding explains {proof.limit:.1e}"
            if proof.difference <= proof.limit:
                what = " has the source's logits, but generates other tokens"
            raise UserError(f"the written model{what}. Nothing was written")
        if not self.same_model:
            self.effect = compare_answers(theirs, probe.ask(self._load(written), inputs))
        return proof.describe()

    def _load(self, folder: Path, **options: Any) -> PreTrainedModel:
        """Loads either side with the head that both have, even where the source's `config.json` names no class."""
        return load_for_probe(folder, self.probe, architectures=self.config.architectures, **options)

    def describe_source(self) -> str:
        return (
            f"{self.config.num_hidden_layers} layers, {self.config.num_attention_heads} heads, "
            f"{self.source.elements:,} elements"
        )

    def effects(self) -> Iterator[tuple[str, str]]:
        if self.effect is not None:
            yield "effect", self.effect.describe_effect()

    def describe_result(self) -> str:
        return f"{self.arguments.destination} ({self.config.model_type})"


def upcycle_checkpoint(arguments: UpcycleArguments, parent: Parent) -> Upcycling:
    """Converts one checkpoint; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    source = locate(arguments.source, arguments.revision)
    return convert(
        arguments, source, forward=partial(plan_upcycling, parent=parent), reverse=partial(plan_plain, parent=parent)
    )


def plan_upcycling(
    arguments: UpcycleArguments, raw: dict[str, Any], source: TensorSource, *, parent: Parent
) -> Upcycling:
    """Reads a plain model: configuration and names, but not yet the weights.

    Raises:
        UserError: it is none of the family, is damaged, or would lose something.
    """
    theirs = read_family(source.folder, raw, parent.model_types, parent.lacking)
    config_class, fields = FAMILIES[parent.ours].load_config_class(), parent.fields(theirs)
    plain = make_config(config_class, **{**fields, **NO_COMPOSITION})
    config = make_config(config_class, **{**fields, **chosen_fields(arguments, plain)})
    check_parent(arguments, plain)
    weight_map = parent.weight_map(plain)
    may_lack_head = parent.probe is not TEXT and not theirs.architectures
    fix = "name its class in architectures of config.json" if may_lack_head else head_advice(config)
    refuse_headless(source, [name for rule in weight_map.rules for name in rule.theirs], fix)
    steps, dropped = plan_import(weight_map, source.headers)
    check_import(config, source, steps, auto_class_with_head(config))
    check_copies(source, {drop.theirs: drop.copy_of for drop in weight_map.drops if drop.copy_of is not None})
    written = [key for step in steps for key in step.writes]
    absent = [name for name in parent.needs if not (source.folder / name).is_file()]
    return Upcycling(
        arguments=arguments,
        source=source,
        steps=[*in_file_order(steps, source), *new_steps(config, written, arguments.seed)],
        dtype=choose_dtype(arguments.dtype, source, steps),
        dropped=dropped,
        warnings=[*warn_of_dropout(theirs, config), *(f"there is no {name} to copy" for name in absent)],
        config=config,
        twin=config if starts_as_parent(config, plain) else plain,
        probe=parent.probe,
    )


def plan_plain(arguments: UpcycleArguments, raw: dict[str, Any], source: TensorSource, *, parent: Parent) -> Upcycling:
    """Reads one of our models to write the plain model that it contains: configuration, names and composition.

    Raises:
        UserError: it is none of ours, composes heads, or the parent's code cannot run it.
    """
    ours = read_family(source.folder, raw, (parent.ours,))
    config = make_config(parent.restore, ours)
    model = meta_model(ours, auto_class_with_head(ours))
    weight_map = parent.weight_map(ours)
    refuse_headless(source, [name for rule in weight_map.rules for name in rule.ours], head_advice(ours))
    expected = shapes_of(model)
    generators = generators_of(model)
    composition = sorted(f"{name}.{part}" for name, module in generators.items() for part in module.state_dict())
    if absent := [key for key in composition if key not in source.headers]:
        raise UserError(f"the weights lack {absent[0]} ({len(absent)} in all); config.json asks for it")
    tied: dict[str, str] = model.all_tied_weights_keys
    own = source.headers.keys() - tied.keys()
    steps = plan_export(weight_map, own - set(composition))
    check_shapes(source, {key: shape for key, shape in expected.items() if key in own})
    check_copies(source, tied)
    require_identity(source, generators)
    return Upcycling(
        arguments=arguments,
        source=source,
        steps=in_file_order(steps, source),
        dtype=choose_dtype(arguments.dtype, source, steps),
        dropped={"a composition that is the identity": composition} if composition else {},
        warnings=list(warn_of_dropout(ours, config)),
        config=config,
        twin=config,
        probe=parent.probe,
    )


def check_copies(source: TensorSource, originals: Mapping[str, str]) -> None:
    """Raises UserError where a tensor that is dropped as a copy differs from the one that `originals` names for it."""
    for copy, original in originals.items():
        if copy not in source.headers:
            continue
        if original not in source.headers or not torch.equal(source.read(copy), source.read(original)):
            raise UserError(f"config.json ties {copy} to {original}, but they differ; set tie_word_embeddings to false")
