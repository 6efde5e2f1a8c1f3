"""Checks and choices that every conversion makes before it reads a weight."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from dynattn.families import FAMILIES

from ...common.errors import UserError, refusal_of
from .tensor_source import TensorSource, common_dtype
from .weight_map import Step, WeightMap, foreign_shapes, plan_export


def choose_dtype(name: str, source: TensorSource, steps: Sequence[Step]) -> torch.dtype:
    """The dtype to write: `name`, or for "auto" the narrowest that holds everything exactly that the steps read."""
    if name != "auto":
        return getattr(torch, name)
    return common_dtype({key: source.headers[key] for step in steps for key in step.reads})


def meta_model(config: PreTrainedConfig, auto_class: str = "AutoModelForCausalLM") -> PreTrainedModel:
    """Our model with shapes only: its weights have no storage.

    Raises:
        UserError: there can be no such model.
    """
    try:
        with torch.device("meta"):
            return getattr(transformers, auto_class).from_config(config)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"config.json describes an impossible model: {refusal_of(error)}; correct it") from error


def shapes_of(model: PreTrainedModel) -> dict[str, torch.Size]:
    """The shapes of its weights."""
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def check_import(
    config: PreTrainedConfig, source: TensorSource, steps: Sequence[Step], auto_class: str = "AutoModelForCausalLM"
) -> None:
    """Names the architecture in our `config`, and checks that the foreign tensors have the shapes that it asks for.

    Raises:
        UserError: a tensor has another shape.
    """
    model = meta_model(config, auto_class)
    config.architectures = config.architectures or [type(model).__name__]
    check_shapes(source, foreign_shapes(steps, shapes_of(model)))


def authors_steps(source: TensorSource, weight_map: WeightMap, config: PreTrainedConfig) -> list[Step]:
    """The steps from our checkpoint, of a model with a head and our `config`, to the authors' format.

    Raises:
        UserError: there is no head, or a weight is missing, has no place there, or has another shape than the model's.
    """
    refuse_headless(source, [name for rule in weight_map.rules for name in rule.ours], head_advice(config))
    steps = plan_export(weight_map, source.headers)
    check_shapes(source, shapes_of(meta_model(config)))
    return steps


def check_shapes(source: TensorSource, expected: Mapping[str, torch.Size]) -> None:
    """Raises UserError where tensors do not have the shapes that the configuration asks for."""
    for key, shape in expected.items():
        if source.shapes[key] != shape:
            raise UserError(
                f"{key} has shape {tuple(source.shapes[key])}, but config.json asks for {tuple(shape)}; "
                "use the configuration that belongs to the weights"
            )


def in_file_order(steps: Sequence[Step], source: TensorSource) -> list[Step]:
    """The steps in the order of the files that they read first, so that each file is gone through once."""
    return sorted(steps, key=lambda step: source.headers[step.reads[0]].path.name if step.reads else "")


def auto_class_with_head(config: PreTrainedConfig) -> str:
    """The Auto class of our model in `architectures`; the family's main one where that is a model without a head.

    Weights have the names of a model with a head in either case.
    """
    family, (name, *_) = FAMILIES[config.model_type], config.architectures or [""]
    heads = {cls: auto for auto, cls in family.model_names.items() if auto != "AutoModel"}
    return heads.get(name, family.main_auto_class)


def refuse_headless(source: TensorSource, names: Iterable[str], fix: str) -> None:
    """Raises UserError where the weights lack the first part of `names`, which models without a head do not write.

    A format whose models with a head may lack it, too, has the bare names among `names`.
    """
    names = set(names)
    for name in sorted(names):
        bare = name.partition(".")[2]
        if name not in source.headers and bare in source.headers and bare not in names:
            raise UserError(f"the weights have {bare} and no {name}, so they are of a model without a head; {fix}")


def head_advice(config: PreTrainedConfig) -> str:
    """How a user of weights without a head gets those of a model with one; `config` is of our model."""
    return (
        f"give the checkpoint with its head, or load this one with {auto_class_with_head(config)} and save it; a head "
        "that is not tied to the embedding is then new"
    )
