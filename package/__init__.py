"""The front door: `import dynattn` registers every model family with the Auto classes of Transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from dynattn.configuration.configuration_dcformer import DCFormerConfig
from dynattn.modeling.modeling_dcformer import (
    DCFormerForCausalLM,
    DCFormerForSequenceClassification,
    DCFormerForTokenClassification,
    DCFormerModel,
)
from dynattn.modeling.ops.dcmha import Composition, dcmha_attention

__version__ = "0.1.0"

AutoConfig.register("dcformer", DCFormerConfig, exist_ok=True)
AutoModel.register(DCFormerConfig, DCFormerModel, exist_ok=True)
AutoModelForCausalLM.register(DCFormerConfig, DCFormerForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(DCFormerConfig, DCFormerForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(DCFormerConfig, DCFormerForTokenClassification, exist_ok=True)

__all__ = [
    "Composition",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "__version__",
    "dcmha_attention",
]
