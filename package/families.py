"""The table of model families: registration, FLOPs, cards, conversion and publishing read it.

Light to import: a family names its modules and classes, and loads them only when asked to. A new family is one entry
here, its configuration, its modeling file, its card in `model_cards` and its tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Literal

# For each Auto class, what follows the family's prefix in the name of its class.
HEADS = MappingProxyType(
    {
        "AutoModel": "Model",
        "AutoModelForCausalLM": "ForCausalLM",
        "AutoModelForSequenceClassification": "ForSequenceClassification",
        "AutoModelForTokenClassification": "ForTokenClassification",
        "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    }
)
VISION_HEADS = MappingProxyType({"AutoModel": "Model", "AutoModelForImageClassification": "ForImageClassification"})
ENCODER_HEADS = MappingProxyType(
    {
        "AutoModel": "Model",
        "AutoModelForMaskedLM": "ForMaskedLM",
        "AutoModelForMultipleChoice": "ForMultipleChoice",
        "AutoModelForSequenceClassification": "ForSequenceClassification",
        "AutoModelForTokenClassification": "ForTokenClassification",
        "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    }
)
SEQ2SEQ_HEADS = MappingProxyType({"AutoModel": "Model", "AutoModelForSeq2SeqLM": "ForConditionalGeneration"})


@dataclass(frozen=True)
class Family:
    """One model type and where its parts are.

    Attributes:
        model_type: the name in `config.json`, in the names of the modules and of the model card.
        prefix: what the names of the family's classes begin with.
        attention: which attention op the layers call.
        paper: arXiv identifier of the paper that introduced the architecture.
        heads: for each Auto class, what follows `prefix` in the name of the family's class.
    """

    model_type: str
    prefix: str
    attention: Literal["dcmha", "relative"]
    paper: str
    heads: Mapping[str, str] = field(default_factory=lambda: HEADS)

    @property
    def configuration(self) -> str:
        """Full name of the module that defines the configuration."""
        return f"dynattn.configuration.configuration_{self.model_type}"

    @property
    def modeling(self) -> str:
        """Full name of the module that defines the models."""
        return f"dynattn.modeling.modeling_{self.model_type}"

    @property
    def config_name(self) -> str:
        """Name of the configuration class."""
        return f"{self.prefix}Config"

    @property
    def model_names(self) -> dict[str, str]:
        """Name of the model class behind each Auto class."""
        return {auto: f"{self.prefix}{suffix}" for auto, suffix in self.heads.items()}

    @property
    def main_auto_class(self) -> str:
        """The Auto class of the family's main head: the first one of `heads` after `AutoModel`."""
        return next(auto for auto in self.heads if auto != "AutoModel")

    def load_config_class(self) -> type:
        """Imports and returns the configuration class."""
        return getattr(import_module(self.configuration), self.config_name)

    def load_model_class(self, auto_class: str) -> type:
        """Imports the models and returns the class behind an Auto class."""
        return getattr(import_module(self.modeling), self.model_names[auto_class])


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family("dcformer", "DCFormer", attention="dcmha", paper="2405.08553"),
            Family("dcpythia", "DCPythia", attention="dcmha", paper="2405.08553"),
            Family("dcbart", "DCBart", attention="dcmha", paper="2405.08553", heads=SEQ2SEQ_HEADS),
            Family("dcmodernbert", "DCModernBert", attention="dcmha", paper="2405.08553", heads=ENCODER_HEADS),
            Family("dcvit", "DCViT", attention="dcmha", paper="2405.08553", heads=VISION_HEADS),
            Family("rcmha", "RCMHA", attention="relative", paper="2308.03429"),
            Family("rcmha_seq2seq", "RCMHASeq2Seq", attention="relative", paper="2308.03429", heads=SEQ2SEQ_HEADS),
        )
    }
)


def family_of(config: object) -> Family | None:
    """The family of a configuration or, for a subclass that somebody else registered, the family that it derives from.

    None for a configuration of another package.
    """
    families = (FAMILIES.get(getattr(base, "model_type", "")) for base in type(config).__mro__)
    return next(filter(None, families), None)
