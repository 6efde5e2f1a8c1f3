"""Measures of a composition agree with what `eager` does to maps."""

import pytest
import torch
from cases.composed_op import random_composition

from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import compose
from dynattn.scripts.common.composition_measures import (
    TERMS,
    effective_rank,
    gate_share,
    head_similarity,
    pair_matrices,
    term_sizes,
    without_term,
)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("terms", [frozenset(TERMS), frozenset({"key_gate"}), frozenset({"query_low_rank", "static"})])
def test_the_matrix_of_a_pair_does_what_eager_does(terms: frozenset[str], groups: int) -> None:
    torch.manual_seed(0)
    stage = random_composition(terms, 2, 5, 7, 4, groups=groups)
    maps = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    mixed = torch.einsum("bnts,btsnm->bmts", maps, pair_matrices(stage).expand(2, 5, 7, 4, 4))
    torch.testing.assert_close(mixed, compose(maps, stage))


@pytest.mark.parametrize("term", TERMS)
def test_a_composition_without_a_term_lacks_its_part_of_the_maps(term: str) -> None:
    torch.manual_seed(0)
    stage = random_composition(frozenset(TERMS), 2, 5, 7, 4)
    alone = random_composition(frozenset({term}), 2, 5, 7, 4)
    maps = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    rest = without_term(stage, term)
    assert rest is not None
    assert set(term_sizes(rest)) == set(TERMS) - {term}
    assert without_term(alone, term) is None
    only = Composition(**{name: getattr(stage, name) for name in TERMS[term]})
    torch.testing.assert_close(compose(maps, rest) + compose(maps, only) - maps, compose(maps, stage))


def test_sizes_and_ranks_of_known_matrices() -> None:
    eye = torch.eye(4, dtype=torch.float64)
    assert term_sizes(Composition(static=3 * eye)) == {"static": 3.0}
    gates = torch.tensor([0.5, -0.5, 0.5, -0.5]).expand(1, 3, 4)
    assert term_sizes(Composition(query_gate=gates)) == pytest.approx({"query_gate": 0.5})
    assert effective_rank(eye[None]) == pytest.approx(4)
    assert effective_rank(torch.ones(1, 4, 4)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_terms_size_is_that_of_its_matrix_over_heads(term: str, groups: int) -> None:
    torch.manual_seed(0)
    stage = random_composition(frozenset({term}), 2, 5, 5, 4, groups=groups)
    matrices = pair_matrices(stage) - torch.eye(4)
    expected = (matrices.square().sum((-2, -1)).mean() / 4).sqrt().item()
    assert term_sizes(stage) == pytest.approx({term: expected}, rel=1e-5)


def test_the_share_of_gates_is_of_squares() -> None:
    assert gate_share({"query_low_rank": 2.0, "query_gate": 1.0, "key_gate": 2.0}) == pytest.approx(5 / 9)
    assert gate_share({}) == 0


def test_similarity_is_the_mean_cosine_of_two_heads() -> None:
    maps, visible = torch.randn(4, 5, 5), torch.ones(5, 5, dtype=torch.bool).tril()
    rows = maps[:, visible]
    cosines = [torch.cosine_similarity(rows[i], rows[j], dim=0) for i in range(4) for j in range(4) if i != j]
    assert head_similarity(maps, visible) == pytest.approx(torch.stack(cosines).mean().item(), abs=1e-6)


def test_similarity_reads_visible_pairs_alone() -> None:
    visible = torch.ones(3, 3).tril().bool()
    maps = torch.randn(1, 3, 3).repeat(2, 1, 1)
    maps[1] = torch.where(visible, 2 * maps[1], 100.0)
    assert head_similarity(maps, visible) == pytest.approx(1)
    maps[1] *= -1
    assert head_similarity(maps, visible) == pytest.approx(-1)
