"""Adds composed heads to the attention of other models: of PyTorch, Transformers and timm."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import (
    USER_REGISTERED_MAPPINGS,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ...configuration.multihead_config import MultiheadConfig
from ...configuration.portable_config import PortableConfig, writes_its_code
from ..layers.head_composition import DynamicComposition, init_composition
from ..layers.tensor_parallel import plan_composed_attention
from ..serving.batched_generation import BatchedGeneration
from .adapters import ADAPTERS, adapter_of, plan_composition
from .multihead_attention import ComposedMultiheadAttention
from .side_generators import SideGenerators

logger = logging.get_logger(__name__)

# Options that would change a module's projections, or with which its composition would not start as the identity.
# Differential attention is never the identity, because it normalizes the outputs of its pairs.
FIXED_OPTIONS = (
    "num_key_value_heads",
    "q_norm",
    "k_norm",
    "compose_init_scale",
    "device",
    "dtype",
    "differential_heads",
    "layer_idx",
)
# Options that a model may have otherwise than the one whose configuration and weights it loads.
OWN_OPTIONS = ("implementation", "dropout", "compose_dropout", "compose_init_scale")
# Options that change outputs, but no weights by which a difference would be noticed.
UNSEEN_OPTIONS = ("compose_act", "compose_norm_eps")
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def compose_heads_of(model: nn.Module, *, names: Iterable[str] | None = None, **options: Any) -> list[str]:
    """Replaces every `torch.nn.MultiheadAttention` of `model`, in place, by a `ComposedMultiheadAttention`.

    Attention of Transformers gets composed heads, too, if it calls a function of the attention interface, as in most
    of its models; and that of timm's vision transformers. Such a module stays the same object; generators of factors
    are added to it. Its factors are generated from what its queries and keys are projected from, and those of keys are
    kept in the model's cache.

    The composition starts as the identity: outputs do not change. Up factors, gates and static matrices start at zero
    and get gradients from the first step on; down factors do not start at zero, and get gradients as soon as the up
    factors are not zero. Parameters stay the same objects, so that an optimizer or tied weights keep them; device,
    dtype, training mode and `requires_grad` stay too. Add the new parameters to the optimizer. Sub-classes of
    `torch.nn.MultiheadAttention` are left alone. If any module cannot be replaced, none is.

    PyTorch's fused inference path of encoders would ignore the composition, so it is switched off where modules are
    replaced. That path gives zeros at padded positions, where the usual path gives the same values as in training.

    To load a checkpoint of the result, apply this function with the same options to a new model first, or use
    `with_composed_heads`.

    Args:
        names: the modules to replace, by their names in `model.named_modules()`; by default all.
        options: keywords of `ComposedMultiheadAttention`: `compose_*`, or those of `mixer_fields(...)`,
            `cross_attention` (a generator for each side, the default where an attention of Transformers is seen to be
            cross-attention), `implementation`, and `dropout=0.0` to switch off the dropout of probabilities, which
            composed heads cannot have. `compose_init_scale` is always 0, and may be given as that.

    Returns:
        The names of the replaced modules.

    Raises:
        TypeError: an option does not exist.
        ValueError: there is nothing to replace, or a module cannot be replaced.

    ```python
    >>> model = torch.nn.Transformer(512, 8, dropout=0.0)
    >>> names = dynattn.compose_heads_of(model, compose_rank=2)
    >>> new = [p for name in names for p in model.get_submodule(name).composition.parameters()]
    ```
    """
    if options.get("compose_init_scale") == 0:  # as the fields of most mixers have it
        del options["compose_init_scale"]
    chosen = _find_attention(model, names)
    composed: dict[nn.Module, nn.Module] = {}
    changes: dict[nn.Module, Callable[[], None]] = {}
    for name, attention in chosen.items():
        if isinstance(attention, nn.MultiheadAttention):
            composed.setdefault(attention, _composed_from(name, attention, options))
        else:
            changes.setdefault(attention, _plan_from(name, attention, options))
    for name, attention in chosen.items():
        if attention in composed:
            model.set_submodule(name, composed[attention])
    for change in changes.values():
        change()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and set(module.modules()) & set(composed.values()):
            # Otherwise the encoder would pass padded batches to its layers as nested tensors in inference.
            module.use_nested_tensor = False
    return list(chosen)


def with_composed_heads(model_class: type[PreTrainedModel], **options: Any) -> type[PreTrainedModel]:
    """Returns a subclass of a model class of Transformers, to whose models `compose_heads_of` adds composed heads.

    Its `from_pretrained` loads checkpoints that its `save_pretrained` wrote, and plain ones of `model_class`: then the
    composition starts as the identity, and Transformers names its weights as new. The field `composed_heads` of the
    configuration keeps the options, but for `implementation`.

    Args:
        options: as those of `compose_heads_of`, `names` included. Those in the configuration need not be given, and may
            not be changed, apart from `OWN_OPTIONS`.

    ```python
    >>> ComposedLlama = dynattn.with_composed_heads(LlamaForCausalLM, compose_rank=2)
    >>> model = ComposedLlama.from_pretrained("a/llama")  # doctest: +SKIP
    ```
    """
    if (names := options.get("names")) is not None:
        options["names"] = _listed(names)  # for several models, and for the configuration's file
    served = (BatchedGeneration,) if issubclass(model_class, GenerationMixin) else ()

    class Composed(*served, model_class):  # type: ignore[misc, valid-type]
        _auto_class = None  # code that came with `model_class` has no composed heads
        supports_paged_cache = attends_to_paged_cache = True
        code_registered = False
        composed_before = False  # whether the configuration says so of the checkpoint
        plain_class = model_class

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            kept = getattr(config, "composed_heads", None)
            chosen = _chosen_options(options, kept)
            config = copy.copy(config)  # the caller may make a plain model of it, too
            super().__init__(config, *args, **kwargs)
            self.composed_before = kept is not None
            self._tp_plan = _plan_with_generators(self, compose_heads_of(self, **chosen))
            chosen.pop("implementation", None)  # of this machine, which others may not have
            self.config.composed_heads = chosen

        @classmethod
        def from_config(cls, config: Any, **kwargs: Any) -> PreTrainedModel:
            """A new model, as the Auto classes make it."""
            return cls._from_config(config, **kwargs)

        @classmethod
        def is_custom_code(cls) -> bool:
            """As the plain class: Transformers fills no buffers of other code from modules that have no weights."""
            return model_class.is_custom_code()

        @classmethod
        def _can_set_experts_implementation(cls) -> bool:
            """As the plain class, whose module Transformers searches for experts; here it would search this module."""
            return model_class._can_set_experts_implementation()

        @classmethod
        def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
            """As in Transformers: models are saved with their code; that of the installed package is written below."""
            if writes_its_code(cls):
                cls.code_registered = True
            else:
                super().register_for_auto_class(auto_class)

        def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
            """As in Transformers; with an `auto_map`, the code that it names is written, too."""
            writer = PortableConfig.code_writer
            with_code = self.code_registered or getattr(self.config, "auto_map", None)
            if writer is not None and is_main_process and with_code:
                self.config.architectures = [composed_name(model_class.__name__)]
                writer(self.config, Path(save_directory))
            super().save_pretrained(save_directory, is_main_process, **kwargs)

        def initialize_weights(self) -> None:
            """Draws the weights that a checkpoint lacks; the models within draw theirs without those of composition."""
            if self.composed_before and _only_plain_weights_loaded(self):
                logger.warning(
                    f"The configuration of {self.config.name_or_path} has composed_heads, but its files lack all "
                    "weights of the composition, as if a program had saved it that knows only the plain model. The "
                    "composition starts as the identity."
                )
            super().initialize_weights()
            for module in self.modules():
                if isinstance(module, DynamicComposition):
                    init_composition(module, scale=0.0)

    Composed.__name__ = Composed.__qualname__ = composed_name(model_class.__name__)
    Composed.__doc__ = f"A `{model_class.__name__}` with composed heads."
    _share_what_names_tell(model_class, Composed.__name__)
    return Composed


def _share_what_names_tell(model_class: type[PreTrainedModel], composed: str) -> None:
    """Gives the class named `composed` what Transformers looks up by the name of its plain class.

    That is how files of checkpoints name its weights, and whether the Trainer shifts labels that it smooths.
    """
    plain = model_class.__name__
    conversions = get_checkpoint_conversion_mapping(plain)
    # Code of others may use the name of a class of Transformers, whose names of weights are not those of its own files.
    is_meant = not model_class.is_custom_code() or plain in USER_REGISTERED_MAPPINGS
    if conversions is not None and is_meant:
        register_checkpoint_conversion_mapping(composed, conversions, overwrite=True)
    if plain in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[composed] = composed


def _only_plain_weights_loaded(model: nn.Module) -> bool:
    """Whether a checkpoint has filled weights of `model`, but none of its composition."""
    filled = {name: getattr(one, "_is_hf_initialized", False) for name, one in model.named_parameters()}
    new = [name for name in filled if "composition." in name]
    return bool(new) and any(filled.values()) and not any(filled[name] for name in new)


def _plan_with_generators(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The plan for tensor parallelism of a model whose attention modules `names` now compose heads."""
    plan = model.tp_plan or {}
    for name in names:
        plan = plan_composed_attention(plan, name, model.get_submodule(name))
    return plan


def _chosen_options(given: dict[str, Any], kept: Any) -> dict[str, Any]:
    """The options of a model: those `kept` in its configuration, if there are any, and those `given` besides.

    Raises:
        ValueError: the configuration has something else than options, or others than are given.
    """
    if kept is None:
        return dict(given)
    if not isinstance(kept, dict):
        raise ValueError(f"composed_heads ({kept}) must be options of compose_heads_of, or {{}} for its defaults")
    known = {**{name: getattr(MultiheadConfig, name) for name in UNSEEN_OPTIONS}, **kept}
    if changed := [name for name in given if name not in OWN_OPTIONS and given[name] != known.get(name, given[name])]:
        asked = {name: given[name] for name in changed}
        raise ValueError(
            f"options {asked} differ from composed_heads ({kept}) of the configuration, with which its weights were "
            "trained; leave them out"
        )
    return {**kept, **given}


def composed_name(plain: str) -> str:
    """The name of the class that `with_composed_heads` makes of one called `plain`."""
    return f"Composed{plain}"


def composing_class(auto_class: Any, config: Any) -> Any:
    """The Auto class itself, or for a configuration with `composed_heads` the class of its models, with those heads.

    Both have `from_pretrained` and `from_config`. An Auto class that does not know the configuration refuses it there.
    """
    if getattr(config, "composed_heads", None) is None or type(config) not in auto_class._model_mapping:
        return auto_class
    classes = plain_models(auto_class, type(config))
    named = [one for one in classes if composed_name(one.__name__) in (config.architectures or ())]
    return with_composed_heads([*named, *classes][0])


def plain_models(auto_class: Any, config_class: type) -> list[Any]:
    """What an Auto class returns for a configuration, or the plain class of one with composed heads."""
    known = auto_class._model_mapping[config_class]
    return [getattr(one, "plain_class", one) for one in (known if isinstance(known, tuple | list) else [known])]


def _find_attention(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Module]:
    """The modules to replace, by name; a module that the model holds under several names is listed under each.

    Raises:
        ValueError: there are none, the model is itself one, or `names` has others, has none or is no list of strings.
    """
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.MultiheadAttention or adapter_of(module) is not None
    }
    if "" in found:
        raise ValueError(
            f"the model is a {type(model).__name__} itself; give a module that contains it, or make a "
            "ComposedMultiheadAttention instead"
        )
    if not found and (
        composed := [name for name, module in model.named_modules() if isinstance(module, SideGenerators)]
    ):
        raise ValueError(
            f"{type(model).__name__} has composed heads already, in {composed[0]}; make them of a plain model"
        )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.MultiheadAttention (sub-classes are left alone), no attention "
            f"that uses Transformers' interface, and none of {', '.join(sorted(ADAPTERS))}"
        )
    wanted = list(found) if names is None else _listed(names)
    if not wanted:
        raise ValueError(f"names is empty; leave it out for every attention, or choose from {list(found)}")
    if unknown := sorted(set(wanted) - found.keys()):
        raise ValueError(f"names has {unknown}, which are no attention that can be replaced; choose from {list(found)}")
    return {name: found[name] for name in wanted}


def _listed(names: Any) -> list[str]:
    """The list of some names of modules, which may be readable only once.

    Raises:
        ValueError: it is one string, or has something else than strings.
    """
    if isinstance(names, str):
        raise ValueError(f"names is the string {names!r}; give a list of names, [{names!r}]")
    listed = list(names) if isinstance(names, Iterable) else names
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"names={listed!r} must be a list of strings, such as ['encoder.layers.0.self_attn']")
    return listed


def _plan_from(name: str, attention: nn.Module, options: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that adds composed heads to `attention`, whose class has an adapter."""
    adapter = adapter_of(attention)
    assert adapter is not None
    _check_options(options, ())
    if any("forward" in vars(part) or hasattr(part, "_hf_hook") for part in attention.modules()):
        raise ValueError(
            f"{name} or a part of it has a `forward` of its own, such as Accelerate and tensor parallelism place; "
            "compose heads before that"
        )
    try:
        return plan_composition(adapter, name, attention, options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_options(options: dict[str, Any], given: Iterable[str]) -> None:
    """Raises ValueError for options that would change the plain attention of a module.

    These are `FIXED_OPTIONS`, and the constructor arguments `given`, which are copied from the module; `dropout` is
    allowed.
    """
    if fixed := sorted(options.keys() & ({*given, *FIXED_OPTIONS} - {"dropout"})):
        raise ValueError(f"options {fixed} would change what the modules compute; leave them out")


def _refuse_hooks(name: str, attention: nn.MultiheadAttention) -> None:
    """Raises ValueError if `attention` has hooks or a `forward` of its own, which the module in its place lacks."""
    hooks = [kind for kind in HOOKS if getattr(attention, kind)]
    if hooks or "forward" in vars(attention):
        what = f"hooks ({', '.join(hooks)})" if hooks else "a `forward` of its own"
        raise ValueError(f"{name} has {what}, which would be lost; remove them first, or leave it out by `names`")


def _composed_from(name: str, attention: nn.MultiheadAttention, options: dict[str, Any]) -> ComposedMultiheadAttention:
    """Returns a new module with the parameters of `attention` and composed heads that start as the identity."""
    _refuse_hooks(name, attention)
    weight = attention.in_proj_weight if attention.in_proj_weight is not None else attention.q_proj_weight
    given = {
        "dropout": attention.dropout,
        "bias": attention.in_proj_bias is not None,
        "add_bias_kv": attention.bias_k is not None,
        "add_zero_attn": attention.add_zero_attn,
        "kdim": None if attention.kdim == attention.embed_dim else attention.kdim,
        "vdim": attention.vdim,
        "batch_first": attention.batch_first,
    }
    _check_options(options, given)
    try:
        composed = ComposedMultiheadAttention(
            attention.embed_dim,
            attention.num_heads,
            **{**given, **options},
            device="meta",
            dtype=weight.dtype,
            compose_init_scale=0.0,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for generator in composed.generators():
        generator.to_empty(device=weight.device)
        init_composition(generator, scale=0.0)
    composed.train(attention.training)
    composed.out_proj = attention.out_proj
    for kind, parameter in attention.named_parameters(recurse=False, remove_duplicate=False):
        setattr(composed, kind, parameter)
    return composed
