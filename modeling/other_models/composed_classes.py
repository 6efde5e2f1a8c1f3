"""Classes of models of Transformers with composed heads, and which one a configuration asks for."""

import copy
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import (
    USER_REGISTERED_MAPPINGS,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from ...configuration.multihead_config import MultiheadConfig
from ...configuration.portable_config import PortableConfig, writes_its_code
from ..layers.head_composition import DynamicComposition, init_composition
from ..layers.tensor_parallel import plan_composed_attention
from ..serving.batched_generation import BatchedGeneration
from .compose_heads import compose_heads_of, listed_names

logger = logging.get_logger(__name__)

# Options that a model may have otherwise than the one whose configuration and weights it loads.
OWN_OPTIONS = ("implementation", "dropout", "compose_dropout", "compose_init_scale")
# The defaults of options that change outputs, but no weights by which a difference would be noticed.
UNSEEN_OPTIONS = {name: getattr(MultiheadConfig, name) for name in ("compose_act", "compose_norm_eps")}
PREFIX = "Composed"  # of the names of classes with composed heads
# The classes that this process has made, or got with a pickled model, by their keys.
MADE: WeakValueDictionary[str, type] = WeakValueDictionary()


def with_composed_heads(model_class: type[PreTrainedModel], **options: Any) -> type[PreTrainedModel]:
    """Returns a subclass of a model class of Transformers, to whose models `compose_heads_of` adds composed heads.

    Its `from_pretrained` loads checkpoints that its `save_pretrained` wrote, and plain ones of `model_class`: then the
    composition starts as the identity, and Transformers names its weights as new. The field `composed_heads` of the
    configuration keeps the options, but for `implementation`.

    Args:
        options: as those of `compose_heads_of`, `names` included. Those in the configuration need not be given, and may
            not be changed, apart from `OWN_OPTIONS`. They are checked when a model is made.

    Raises:
        ValueError: `names` is no list of strings.

    ```python
    >>> ComposedLlama = dynattn.with_composed_heads(LlamaForCausalLM, compose_rank=2)
    >>> model = ComposedLlama.from_pretrained("a/llama")  # doctest: +SKIP
    ```
    """
    if (names := options.get("names")) is not None:
        options["names"] = listed_names(names)  # for several models, and for the configuration's file
    served = (BatchedGeneration,) if issubclass(model_class, GenerationMixin) else ()
    name = composed_name(model_class.__name__)
    members: dict[str, Any] = {
        "__doc__": f"A `{model_class.__name__}` with composed heads.",
        "plain_class": model_class,
        "given_options": options,
        "class_key": uuid.uuid4().hex,
    }
    _share_what_names_tell(model_class, name)
    made = MADE[members["class_key"]] = type(name, (ComposedModel, *served, model_class), members)
    return made


class ComposedModel(PreTrainedModel):
    """What `with_composed_heads` adds to a class of models: it composes heads, and keeps the options of that."""

    plain_class: ClassVar[type[PreTrainedModel]]
    given_options: ClassVar[dict[str, Any]]
    class_key: ClassVar[str]  # in `MADE`
    _auto_class = None  # code that came with the plain class has no composed heads
    supports_paged_cache = attends_to_paged_cache = True
    code_registered = False
    composed_before = False  # whether the configuration says so of the checkpoint

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        kept = getattr(config, "composed_heads", None)
        chosen = _chosen_options(self.given_options, kept)
        # An implementation is of this machine, and others may not have it.
        saved = {name: value for name, value in chosen.items() if name != "implementation"}
        # A configuration that has these options already stays the same object, because a model around this one may hold
        # it, too, and change it later. Any other is copied, because the caller may also make a plain model of it.
        if saved != kept:
            config = copy.copy(config)
        config.composed_heads = None  # heads of models within are composed below, and not when an Auto class makes them
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.composed_heads = saved
        self.config.composed_heads = saved  # some classes copy the configuration
        self.composed_before = kept is not None
        self._tp_plan = _plan_with_generators(self, compose_heads_of(self, **chosen))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As in Python, but `pickle` cannot find a class that was made in a function, so it gets what it is made of."""
        made = type(self)
        if "class_key" not in vars(made):  # a subclass, which has a name in a module
            return super().__reduce_ex__(protocol)
        return _empty_model, (made.class_key, made.plain_class, made.given_options), self.__getstate__()

    @classmethod
    def is_custom_code(cls) -> bool:
        """As the plain class: Transformers fills no buffers of other code from modules that have no weights."""
        return cls.plain_class.is_custom_code()

    def _get_dtype_plan(self, dtype: Any) -> dict[str, Any]:
        """As in Transformers, which searches the names of weights for those that stay in float32.

        It takes their dots for any character, so that `gate.weight` of experts would be `gate_weight` of a composition.
        """
        return {name.replace(".", r"\."): kept for name, kept in super()._get_dtype_plan(dtype).items()}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the plain class, whose module Transformers searches for experts; here it would search this module."""
        return cls.plain_class._can_set_experts_implementation()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """As in Transformers: models are saved with their code; that of the installed package is written below."""
        if writes_its_code(cls):
            cls.code_registered = True
        else:
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """As in Transformers; with an `auto_map`, the code that it names is written, too."""
        writer = PortableConfig.code_writer
        with_code = self.code_registered or getattr(self.config, "auto_map", None)
        if writer is not None and is_main_process and with_code:
            self.config.architectures = [composed_name(self.plain_class.__name__)]
            writer(self.config, Path(save_directory))
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def initialize_weights(self) -> None:
        """Draws the weights that a checkpoint lacks."""
        _tell_of_other_writers(self)
        super().initialize_weights()

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """As in Transformers, which calls it for this model after all modules, also within another model.

        Only now those of composition are drawn, because models within this one would not know them. A model that had
        its weights before another one took it in keeps them.
        """
        has_weights = getattr(self, "_is_hf_initialized", False)
        super()._initialize_weights(module, *args, **kwargs)
        if module is self and not has_weights:
            for generator in self.modules():
                if isinstance(generator, DynamicComposition):
                    init_composition(generator, scale=0.0)

    def _init_weights(self, module: nn.Module) -> None:
        """As the plain class, which does not know the modules of composition."""
        if not isinstance(module, DynamicComposition):
            super()._init_weights(module)


def _empty_model(key: str, plain_class: type[PreTrainedModel], options: dict[str, Any]) -> Any:
    """An empty object of the class with this key, for `pickle` and `copy`; another process makes the class once."""
    made = MADE.get(key)
    if made is None:
        made = MADE[key] = with_composed_heads(plain_class, **options)
        made.class_key = key  # type: ignore[attr-defined]
    return object.__new__(made)


def _share_what_names_tell(model_class: type[PreTrainedModel], composed: str) -> None:
    """Gives the class named `composed` what Transformers looks up by the name of its plain class.

    By that name Transformers finds how checkpoint files name the weights, which pipelines a class is for, and whether
    the Trainer shifts labels that it smooths.
    """
    plain = model_class.__name__
    conversions = get_checkpoint_conversion_mapping(plain)
    # Code of others may use the name of a class of Transformers, whose names of weights are not those of its own files.
    is_meant = not model_class.is_custom_code() or plain in USER_REGISTERED_MAPPINGS
    if conversions is not None and is_meant:
        register_checkpoint_conversion_mapping(composed, conversions, overwrite=True)
    for table, classes in vars(modeling_auto).items():
        # Of a copy, because another thread may add a class meanwhile.
        if table.endswith("_MAPPING_NAMES") and any(plain in _listed(names) for names in list(classes.values())):
            classes[composed] = composed


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    """The names of the classes that an Auto class knows for a configuration; most have one, which is no list."""
    return [names] if isinstance(names, str) else names


def _tell_of_other_writers(model: ComposedModel) -> None:
    """Warns if the checkpoint that `model` is loaded from holds only one of options and weights of the composition."""
    new, plain = _filled(model, composing=True), _filled(model, composing=False)
    folder = model.config.name_or_path
    if model.composed_before and new and any(plain) and not any(new):
        logger.warning(
            f"The configuration of {folder} has composed_heads, but its files lack all weights of the composition, as "
            "if a program had saved it that knows only the plain model. The composition starts as the identity."
        )
    if not model.composed_before and any(new) and not set(model.given_options) - set(OWN_OPTIONS):
        logger.warning(
            f"The files of {folder} have weights of a composition, but its configuration lacks composed_heads, as if "
            "compose_heads_of had changed a plain model. The defaults are taken; give other options of that call here."
        )


def _filled(model: nn.Module, composing: bool) -> list[bool]:
    """For each weight of the composition of `model`, or for each other one, whether a checkpoint has filled it."""
    chosen = (one for name, one in model.named_parameters() if ("composition." in name) == composing)
    return [getattr(one, "_is_hf_initialized", False) for one in chosen]


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
    known = {**UNSEEN_OPTIONS, **kept}
    if changed := [name for name in given if name not in OWN_OPTIONS and given[name] != known.get(name, given[name])]:
        asked = {name: given[name] for name in changed}
        raise ValueError(
            f"options {asked} differ from composed_heads ({kept}) of the configuration, with which its weights were "
            "trained; leave them out"
        )
    return {**kept, **given}


def composed_name(plain: str) -> str:
    """The name of the class that `with_composed_heads` makes of one called `plain`."""
    return PREFIX + plain


def composing_class(find: Callable[[Any, Any], Any], config: Any, models: Any) -> Any:
    """The class that an Auto class returns for a configuration that has `composed_heads`, or whose part for texts has.

    Some models get that part alone as their configuration. If it lacks the field, their class has the options of the
    whole.

    Args:
        find: the function of Transformers that finds a class.
        models: the classes that the Auto class knows, by configuration class.
    """
    plain_config = copy.copy(config)
    plain_config.architectures = [name.removeprefix(PREFIX) for name in config.architectures or ()]
    found = find(plain_config, models)
    gets_part = found.config_class is config.sub_configs.get("text_config")
    if getattr(config.text_config if gets_part else config, "composed_heads", None) is not None:
        return with_own_options(found)
    if not gets_part:
        return found  # the model makes another one of its part for texts, which has the field and composes by itself
    if hasattr(found, "plain_class"):
        return found  # the class was made to compose
    return _class_with_options(found, json.dumps(UNSEEN_OPTIONS | _chosen_options({}, config.composed_heads)))


def with_own_options(model_class: Any) -> Any:
    """The class with the options of the configuration that its model gets, or the same if it composes heads already."""
    return model_class if hasattr(model_class, "plain_class") else _class_with_options(model_class, "{}")


@cache
def _class_with_options(model_class: type, options: str) -> type:
    """The one class of this process for all models that Auto classes return for a plain class and options, as JSON."""
    return with_composed_heads(model_class, **json.loads(options))


def __getattr__(name: str) -> type:
    """The class called `name`, which PEFT looks up in this module for an adapter that was made without a task."""
    plain = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if not isinstance(plain, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class_with_options(plain, "{}")


def plain_models(auto_class: Any, config_class: type) -> list[Any]:
    """What an Auto class returns for a configuration, or the plain class of one with composed heads."""
    known = auto_class._model_mapping[config_class]
    return [getattr(one, "plain_class", one) for one in (known if isinstance(known, tuple | list) else [known])]
