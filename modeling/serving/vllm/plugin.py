"""The function that vLLM calls when it starts, in each of its processes, by the entry point `vllm.general_plugins`.

vLLM calls it for whatever model it serves, so it must be light and must not fail.
"""

import logging

# The versions that the tests were run with: vLLM changes its interfaces of models and backends in every version.
SUPPORTED_VERSIONS = ("0.32.", "0.33.")
SERVING = "dynattn.modeling.serving.vllm"

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes vLLM know causal models of DCMHA families, those of Transformers with composed heads, and their backend.

    With another version of vLLM it only warns. vLLM then falls back to its support for models of Transformers, which
    runs plain models; models with composed heads refuse it.
    """
    import vllm

    if vllm.__version__.startswith(SUPPORTED_VERSIONS):
        _register_models()
        return
    supported = " or ".join(f"{version}*" for version in SUPPORTED_VERSIONS)
    logger.warning("dynattn cannot serve models with vllm %s; install vllm %s", vllm.__version__, supported)


def _register_models() -> None:
    """Registers the attention backend, and the model class and option checks of every composed causal model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from dynattn.families import FAMILIES
    from dynattn.modeling.other_models.composed_classes import composed_name

    from .options import ComposedOptions

    register_backend(AttentionBackendEnum.CUSTOM, f"{SERVING}.backend.ComposedBackend")
    families = [family for family in FAMILIES.values() if family.attention == "dcmha"]
    known = {family.model_names.get("AutoModelForCausalLM"): "ComposedForCausalLM" for family in families}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known |= dict.fromkeys(
            map(composed_name, [name] if isinstance(name, str) else name), "ComposedInPlaceForCausalLM"
        )
    for architecture, model_class in known.items():
        if architecture is not None:
            ModelRegistry.register_model(architecture, f"{SERVING}.model:{model_class}")
            MODELS_CONFIG_MAP[architecture] = ComposedOptions
