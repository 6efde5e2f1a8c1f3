"""Which models Transformers' server loads: those of this package and with composed heads, too."""

from typing import Any

import transformers
from huggingface_hub.errors import CacheNotFound
from starlette.exceptions import HTTPException
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cli.serving import utils
from transformers.cli.serving.model_manager import ModelManager, split_revision
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from dynattn.modeling.layers.attention_interface import registered_implementations
from dynattn.modeling.other_models.composed_classes import composed_name, with_composed_heads
from dynattn.remote_code import plain_classes

from ..common.checkpoint_loading import find_device
from ..common.errors import first_line

check_manager, load_model = ModelManager._validate_args, ModelManager._load_model


def check_model_options(manager: ModelManager) -> None:
    """In the place of `ModelManager._validate_args`, whose list of attention implementations lacks this package's.

    Raises:
        ValueError: Transformers does not know the implementation or the quantization.
        UserError: the device is not there.
    """
    if manager.device not in ("auto", "balanced", "balanced_low_0", "sequential"):
        find_device(f"cuda:{manager.device}" if isinstance(manager.device, int) else manager.device)
    name = manager.attn_implementation
    manager.attn_implementation = None if name in registered_implementations() else name
    check_manager(manager)
    manager.attn_implementation = name


def load_language_model(manager: ModelManager, name: str, *args: Any, **options: Any) -> Any:
    """In the place of `ModelManager._load_model`, which looks for the model's class in the module `transformers` alone.

    Raises:
        ValueError: the class is not there, or is one that Transformers would load without its composed heads.
    """
    show_composed_model_to_server(manager, name)
    try:
        return load_model(manager, name, *args, **options)
    except AttributeError as error:
        if not str(error).startswith("module transformers has no attribute"):
            raise
        raise ValueError(
            f"the class {first_line(error).rpartition(' ')[2]} that {name} names is no language model of Transformers "
            "or of this package; serve one that is, or give the module that registers yours with --import"
        ) from error


def show_models_to_server() -> None:
    """Makes registered language models attributes of the module `transformers`, in this process alone.

    The server looks there for the class that a configuration names. It does not use the Auto classes, which know the
    models of this package and those of modules that `--import` names.
    """
    for model_class in AutoModelForCausalLM._model_mapping._extra_content.values():
        setattr(transformers, model_class.__name__, model_class)


def show_composed_model_to_server(manager: ModelManager, name: str) -> None:
    """Makes the class of a model of Transformers with composed heads, if `name` is one, such an attribute, too.

    Raises:
        ValueError: it also reads pictures or sound, which the server would not know of it by the name of its class.
    """
    place, revision = split_revision(name)
    config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=manager.trust_remote_code)
    for plain in plain_classes(config).values():
        if config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
            raise ValueError(f"{name} also reads pictures or sound; with composed heads only models of text are served")
        setattr(transformers, composed_name(plain.__name__), with_composed_heads(plain))


def load_unless_pinned(manager: Any, name: str, gguf_file: str | None = None) -> Any:
    """In the place of `ModelManager.load_model_streaming`, which would load any model into a server of one.

    Raises:
        HTTPException: the server was started with another model.
    """
    if manager.force_model is not None:
        pinned, file = utils.split_model_id(manager.force_model)
        if (name, gguf_file) != (manager.process_model_name(pinned), file):
            raise HTTPException(400, f"Server is pinned to {manager.force_model!r}; requested {name!r}.")
    return type(manager).load_model_streaming(manager, name, gguf_file=gguf_file)


def list_models(manager: Any) -> list[dict[str, Any]]:
    """The model that the server was started with, or else those in the Hub's cache; empty if there is no cache."""
    if manager.force_model is not None:
        return [{"id": manager.force_model, "object": "model", "created": 0, "owned_by": ""}]
    try:
        return type(manager).get_gen_models()
    except CacheNotFound:
        return []
