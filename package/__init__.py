"""The front door: `import dynattn` registers every model family with the Auto classes of Transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from dynattn.configuration.configuration_dcformer import DCFormerConfig
from dynattn.configuration.configuration_dcpythia import DCPythiaConfig
from dynattn.configuration.configuration_rcmha import RCMHAConfig
from dynattn.configuration.portable_config import PortableConfig
from dynattn.modeling.common.activation_checkpointing import keep_attention_outputs
from dynattn.modeling.modeling_dcformer import (
    DCFormerForCausalLM,
    DCFormerForSequenceClassification,
    DCFormerForTokenClassification,
    DCFormerModel,
)
from dynattn.modeling.modeling_dcpythia import (
    DCPythiaForCausalLM,
    DCPythiaForSequenceClassification,
    DCPythiaForTokenClassification,
    DCPythiaModel,
)
from dynattn.modeling.modeling_rcmha import (
    RCMHAForCausalLM,
    RCMHAForSequenceClassification,
    RCMHAForTokenClassification,
    RCMHAModel,
)
from dynattn.modeling.ops.dcmha.attention import dcmha_attention
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.relative.attention import relative_attention
from dynattn.remote_code import write_code

__version__ = "0.1.0"

for _config, _models in (
    (
        DCFormerConfig,
        (
            (AutoModel, DCFormerModel),
            (AutoModelForCausalLM, DCFormerForCausalLM),
            (AutoModelForSequenceClassification, DCFormerForSequenceClassification),
            (AutoModelForTokenClassification, DCFormerForTokenClassification),
        ),
    ),
    (
        DCPythiaConfig,
        (
            (AutoModel, DCPythiaModel),
            (AutoModelForCausalLM, DCPythiaForCausalLM),
            (AutoModelForSequenceClassification, DCPythiaForSequenceClassification),
            (AutoModelForTokenClassification, DCPythiaForTokenClassification),
        ),
    ),
    (
        RCMHAConfig,
        (
            (AutoModel, RCMHAModel),
            (AutoModelForCausalLM, RCMHAForCausalLM),
            (AutoModelForSequenceClassification, RCMHAForSequenceClassification),
            (AutoModelForTokenClassification, RCMHAForTokenClassification),
        ),
    ),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto, _model in _models:
        _auto.register(_config, _model, exist_ok=True)

# What was loaded from a folder with code is saved with code.
PortableConfig.code_writer = write_code

__all__ = [
    "Composition",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
    "DCPythiaForSequenceClassification",
    "DCPythiaForTokenClassification",
    "DCPythiaModel",
    "RCMHAConfig",
    "RCMHAForCausalLM",
    "RCMHAForSequenceClassification",
    "RCMHAForTokenClassification",
    "RCMHAModel",
    "__version__",
    "dcmha_attention",
    "keep_attention_outputs",
    "relative_attention",
]
