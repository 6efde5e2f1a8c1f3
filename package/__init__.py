"""The entry point: `import dynattn` makes every model family known to the Auto classes of Transformers.

The import itself is light: what the package offers is imported when it is first asked for, and the families are
registered when the Auto classes are imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .families import FAMILIES
from .registration import register_with_transformers

if TYPE_CHECKING:  # for type checkers, which do not follow `__getattr__`
    from dynattn.configuration.configuration_dcbart import DCBartConfig
    from dynattn.configuration.configuration_dcformer import DCFormerConfig
    from dynattn.configuration.configuration_dcmodernbert import DCModernBertConfig
    from dynattn.configuration.configuration_dcpythia import DCPythiaConfig
    from dynattn.configuration.configuration_dcvit import DCViTConfig
    from dynattn.configuration.configuration_rcmha import RCMHAConfig
    from dynattn.configuration.configuration_rcmha_seq2seq import RCMHASeq2SeqConfig
    from dynattn.configuration.mixers import mixer_fields
    from dynattn.modeling.common.activation_checkpointing import keep_attention_outputs
    from dynattn.modeling.generation.cache_edit import edit_cache
    from dynattn.modeling.generation.prepacking import prepack
    from dynattn.modeling.inspection.map_hooks import add_map_hooks, remove_map_hooks
    from dynattn.modeling.layers.attention_interface import register_implementation
    from dynattn.modeling.modeling_dcbart import DCBartForConditionalGeneration, DCBartModel
    from dynattn.modeling.modeling_dcformer import (
        DCFormerForCausalLM,
        DCFormerForQuestionAnswering,
        DCFormerForSequenceClassification,
        DCFormerForTokenClassification,
        DCFormerModel,
    )
    from dynattn.modeling.modeling_dcmodernbert import (
        DCModernBertForMaskedLM,
        DCModernBertForMultipleChoice,
        DCModernBertForQuestionAnswering,
        DCModernBertForSequenceClassification,
        DCModernBertForTokenClassification,
        DCModernBertModel,
    )
    from dynattn.modeling.modeling_dcpythia import (
        DCPythiaForCausalLM,
        DCPythiaForQuestionAnswering,
        DCPythiaForSequenceClassification,
        DCPythiaForTokenClassification,
        DCPythiaModel,
    )
    from dynattn.modeling.modeling_dcvit import DCViTForImageClassification, DCViTModel
    from dynattn.modeling.modeling_rcmha import (
        RCMHAForCausalLM,
        RCMHAForQuestionAnswering,
        RCMHAForSequenceClassification,
        RCMHAForTokenClassification,
        RCMHAModel,
    )
    from dynattn.modeling.modeling_rcmha_seq2seq import RCMHASeq2SeqForConditionalGeneration, RCMHASeq2SeqModel
    from dynattn.modeling.ops.dcmha.attention import dcmha_attention
    from dynattn.modeling.ops.dcmha.composition import Composition
    from dynattn.modeling.ops.dcmha.eager import AttentionMaps
    from dynattn.modeling.ops.relative.attention import relative_attention
    from dynattn.modeling.other_models.compose_heads import compose_heads_of
    from dynattn.modeling.other_models.composed_classes import with_composed_heads
    from dynattn.modeling.other_models.multihead_attention import ComposedMultiheadAttention
    from dynattn.modeling.parallel.context_parallel import ContextParallel

__version__ = "0.2.0"

__all__ = [
    "AttentionMaps",
    "ComposedMultiheadAttention",
    "Composition",
    "ContextParallel",
    "DCBartConfig",
    "DCBartForConditionalGeneration",
    "DCBartModel",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerForQuestionAnswering",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCModernBertConfig",
    "DCModernBertForMaskedLM",
    "DCModernBertForMultipleChoice",
    "DCModernBertForQuestionAnswering",
    "DCModernBertForSequenceClassification",
    "DCModernBertForTokenClassification",
    "DCModernBertModel",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
    "DCPythiaForQuestionAnswering",
    "DCPythiaForSequenceClassification",
    "DCPythiaForTokenClassification",
    "DCPythiaModel",
    "DCViTConfig",
    "DCViTForImageClassification",
    "DCViTModel",
    "RCMHAConfig",
    "RCMHAForCausalLM",
    "RCMHAForQuestionAnswering",
    "RCMHAForSequenceClassification",
    "RCMHAForTokenClassification",
    "RCMHAModel",
    "RCMHASeq2SeqConfig",
    "RCMHASeq2SeqForConditionalGeneration",
    "RCMHASeq2SeqModel",
    "__version__",
    "add_map_hooks",
    "compose_heads_of",
    "dcmha_attention",
    "edit_cache",
    "keep_attention_outputs",
    "mixer_fields",
    "prepack",
    "register_implementation",
    "relative_attention",
    "remove_map_hooks",
    "with_composed_heads",
]

# Where each public name is defined.
_MODULES = {
    "AttentionMaps": "dynattn.modeling.ops.dcmha.eager",
    "ComposedMultiheadAttention": "dynattn.modeling.other_models.multihead_attention",
    "Composition": "dynattn.modeling.ops.dcmha.composition",
    "ContextParallel": "dynattn.modeling.parallel.context_parallel",
    "add_map_hooks": "dynattn.modeling.inspection.map_hooks",
    "compose_heads_of": "dynattn.modeling.other_models.compose_heads",
    "with_composed_heads": "dynattn.modeling.other_models.composed_classes",
    "dcmha_attention": "dynattn.modeling.ops.dcmha.attention",
    "edit_cache": "dynattn.modeling.generation.cache_edit",
    "keep_attention_outputs": "dynattn.modeling.common.activation_checkpointing",
    "mixer_fields": "dynattn.configuration.mixers",
    "prepack": "dynattn.modeling.generation.prepacking",
    "register_implementation": "dynattn.modeling.layers.attention_interface",
    "relative_attention": "dynattn.modeling.ops.relative.attention",
    "remove_map_hooks": "dynattn.modeling.inspection.map_hooks",
    **{family.config_name: family.configuration for family in FAMILIES.values()},
    **{name: family.modeling for family in FAMILIES.values() for name in family.model_names.values()},
}
# Sub-packages that are imported when they are first used as attributes of the package.
_FOLDERS = ("configuration", "modeling")


def __getattr__(name: str) -> object:
    """Imports what `name` stands for (PEP 562)."""
    if name in _FOLDERS:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
