"""What the models of all families share: fields that are taken as they are, and a change of attention."""

import pytest
from torch import nn

import dynattn

FAMILIES = ["DCFormer", "DCPythia", "RCMHA", "DCViT", "DCModernBert", "DCBart", "RCMHASeq2Seq"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_initializer_range_of_zero_makes_zeros(family: str) -> None:
    """Transformers would take 0 for no value, and draw with a standard deviation of 0.02."""
    config = getattr(dynattn, f"{family}Config").from_size("tiny", initializer_range=0.0)
    model = getattr(dynattn, f"{family}Model")(config)
    drawn = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)]
    assert drawn and not any(module.weight.any() for module in drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_without_source_changes_its_attention(family: str) -> None:
    """A class that is defined in a notebook has no source, in which Transformers would look for how it attends."""
    base = getattr(dynattn, f"{family}Model")
    model = type("Variant", (base,), {"__module__": "notebook"})(base.config_class.from_size("tiny"))
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "DCFormer"])  # which has other norms
def test_norms_of_tokens_add_the_epsilon_of_the_configuration(family: str) -> None:
    field = "norm_eps" if family == "DCModernBert" else "layer_norm_eps"
    config = getattr(dynattn, f"{family}Config").from_size("tiny", **{field: 0.125})
    norms = [each for each in getattr(dynattn, f"{family}Model")(config).modules() if isinstance(each, nn.LayerNorm)]
    of_tokens = [norm for norm in norms if norm.normalized_shape == (config.hidden_size,)]
    assert {norm.eps for norm in of_tokens} == {0.125}
