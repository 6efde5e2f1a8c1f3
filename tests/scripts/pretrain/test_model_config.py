"""Which models a run refuses to make."""

import pytest
from transformers import LlamaConfig

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import model_config
from dynattn.scripts.pretrain.arguments import PretrainArguments


@pytest.mark.parametrize("model_type", ["xlnet", "xlm", "cpmant", "prophetnet", "bart", "marian", "trocr"])
def test_models_whose_loss_is_that_of_copying_are_refused(model_type: str) -> None:
    fields = {"causal": True} if model_type == "xlm" else None
    arguments = PretrainArguments(output="runs", model_type=model_type, model_config=fields)
    with pytest.raises(UserError, match=f"loss of a {model_type} compares .* with this token itself, .* another type"):
        model_config.plan_config(arguments)


def test_an_empty_size_takes_back_that_of_a_recipe() -> None:
    """Models of Transformers have no named sizes, and options cannot be removed from a recipe."""
    with pytest.raises(UserError, match=r"llama has no named sizes; leave model_size=tiny out.*--model_size ''"):
        model_config._choose_size(LlamaConfig, "tiny")
    assert model_config._choose_size(LlamaConfig, "") is None
