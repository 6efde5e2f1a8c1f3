"""The health of compositions against their definition as matrices over heads."""

import pytest
import torch
from torch import Tensor

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import compose
from dynattn.scripts.pretrain.outputs.composition_health import (
    gate_share,
    head_similarity,
    measure_health,
    term_sizes,
)

B, T, R, H = 2, 5, 2, 6


def factors(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


TERMS = {
    "query_mix": {"query_down": (B, T, R, H), "query_up": (B, T, R, H)},
    "key_mix": {"key_down": (B, T, R, H), "key_up": (B, T, R, H)},
    "query_gate": {"query_gate": (B, T, H)},
    "key_gate": {"key_gate": (B, T, H)},
    "static": {"static": (H, H)},
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("groups", [1, 3])
def test_a_terms_size_is_that_of_its_matrix_over_heads(term: str, groups: int):
    composition = Composition(**{name: factors(*shape) for name, shape in TERMS[term].items()}, groups=groups)
    # One head after the other as the only map shows the rows of the matrix of every pair.
    rows = [compose(one.expand(B, T, T, H).permute(0, 3, 1, 2), composition) for one in torch.eye(H).double()]
    matrices = torch.stack(rows, dim=1) - torch.eye(H).double()[None, :, :, None, None]  # [B, H, H, T, T]
    expected = (matrices.square().sum((1, 2)).mean() / H).sqrt().item()
    assert term_sizes(composition) == pytest.approx({term: expected}, rel=1e-5)


def test_the_share_of_gates_is_of_squares():
    assert gate_share({"query_mix": 2.0, "query_gate": 1.0, "key_gate": 2.0}) == pytest.approx(5 / 9)
    assert gate_share({}) == 0


def test_similarity_is_the_mean_cosine_of_two_heads():
    maps, visible = torch.randn(H, T, T), torch.ones(T, T, dtype=torch.bool).tril()
    rows = maps[:, visible]
    cosines = [torch.cosine_similarity(rows[i], rows[j], dim=0) for i in range(H) for j in range(H) if i != j]
    assert head_similarity(maps, visible) == pytest.approx(torch.stack(cosines).mean().item(), abs=1e-6)
    assert head_similarity(maps[:1].expand(H, T, T), visible) == pytest.approx(1.0, abs=1e-6)


def make(**changes: object) -> tuple[DCFormerForCausalLM, dict[str, Tensor]]:
    model = DCFormerForCausalLM(DCFormerConfig.from_size("tiny", vocab_size=64, **changes)).eval()
    return model, {"input_ids": torch.randint(64, (40,))}


def test_every_layer_of_a_model_is_measured():
    model, item = make()
    found = measure_health(model, lambda batch: model(**batch, use_cache=False), item)
    whats = {name.split(".", 2)[2] for name in found}
    assert whats == {
        "query_mix", "key_mix", "query_gate", "key_gate", "gate_share", "similarity_before", "similarity_after"
    }  # fmt: skip
    assert len(found) == model.config.num_hidden_layers * 2 * len(whats)
    assert all(value == value for value in found.values())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_composition_that_begins_as_the_identity_has_no_size():
    model, item = make(compose_init_scale=0.0)
    found = measure_health(model, lambda batch: model(**batch, use_cache=False), item)
    assert all(found[name] == 0 for name in found if name.endswith(("mix", "query_gate", "key_gate", "share")))
    before, after = ([v for n, v in sorted(found.items()) if n.endswith(when)] for when in ("before", "after"))
    assert before == after


def test_a_plain_model_has_no_health():
    model, item = make(compose_pre=False, compose_post=False)
    assert measure_health(model, lambda batch: model(**batch), item) == {}
