"""Random positions: the papers' rules, borders that stay, runs that resume bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.training import assert_same_run, killed_run, run
from transformers import LlamaConfig

from dynattn import DCFormerConfig
from dynattn.modeling.common.packed_documents import starts_by_positions
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.position_sampling import PositionSampler

IDS = torch.zeros(40, dtype=torch.long)
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "sliding_window": 8,
}


def test_jitter_is_the_sum_of_random_steps_and_stays_below_the_limit() -> None:
    for place in range(7, 10):
        found = PositionSampler("jitter", 10**6, seed=3).draw({"input_ids": IDS}, place)["position_ids"]
        steps = 2 * np.random.default_rng((3, place)).random(40)
        np.testing.assert_allclose(found, np.concatenate([[0.0], np.cumsum(steps[1:])]), atol=1e-9)
        limited = PositionSampler("jitter", 12, seed=3).draw({"input_ids": IDS}, place)["position_ids"]
        assert limited.max() < 12
        torch.testing.assert_close(limited * (found[-1] / limited[-1]), found)


def test_a_subset_holds_whole_numbers_below_the_limit_in_order() -> None:
    sampler = PositionSampler("subset", 200, seed=3)
    found = torch.stack([sampler.draw({"input_ids": IDS}, place)["position_ids"] for place in range(3)])
    assert found.dtype == torch.long
    assert (found.diff() > 0).all()
    assert found.max() < 200
    assert len({tuple(row) for row in found.tolist()}) == 3


@pytest.mark.parametrize("sampler", [PositionSampler("jitter", 40, 1), PositionSampler("subset", 400, 1)])
def test_documents_and_anchors_stay_where_they_are(sampler: PositionSampler) -> None:
    restarting = torch.cat([torch.arange(15), torch.arange(1), torch.arange(24)])
    anchored = torch.arange(40).masked_fill(torch.tensor([place in (0, 9, 30) for place in range(40)]), 0)
    for given in (restarting, anchored):
        drawn = sampler.draw({"input_ids": IDS, "position_ids": given}, place=5)["position_ids"]
        assert torch.equal(starts_by_positions(drawn[None]), starts_by_positions(given[None]))
        assert torch.equal(drawn == 0, given == 0)


@pytest.mark.parametrize("skipped", [0, 5])
def test_every_sequence_of_a_run_has_its_own_place(
    skipped: int, monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    places: list[int] = []
    draw = PositionSampler.draw

    def watch(self: PositionSampler, item: Any, place: int) -> Any:
        places.append(place)
        return draw(self, item, place)

    monkeypatch.setattr(PositionSampler, "draw", watch)
    options = {"position_sampling": "subset", "position_limit": 99, "batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {"skip_sequences": skipped}
    run(tmp_path / "run", corpus, model_type="dcformer", model_config=SMALL, max_steps=3, **options)
    assert places == [skipped + place for place in range(12)]


def test_a_run_with_random_positions_resumes_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    options = {"model_type": "dcformer", "model_config": SMALL, "position_sampling": "jitter", "packing": "anchor"}
    straight = run(tmp_path / "straight", corpus, **options)
    killed_run(tmp_path / "killed", corpus, 7, **options)
    resumed = run(tmp_path / "killed", corpus, **options)
    assert_same_run(resumed.output, straight.output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_limit": 100}, "position_limit=100 is for sampled positions"),
        ({"position_sampling": "subset"}, "give a greater position_limit"),
        ({"position_sampling": "subset", "position_limit": 64, "sequence_length": 64}, "greater position_limit"),
        ({"position_sampling": "jitter", "length_warmup_steps": 4}, "counts positions anew"),
        ({"position_sampling": "jitter", "carry_memory": True, "mask_documents": False}, "from update to update"),
        ({"position_sampling": "random"}, "position_sampling"),
        ({"shortest_length": 16}, "shortest_length=16 is for length_warmup_steps; give it, too"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PretrainArguments(output="x", **options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (DCFormerConfig.from_size("tiny", position_scheme="t5"), {}, r"position_scheme=\['t5'\] counts places"),
        (DCFormerConfig.from_size("tiny", position_scheme="learned"), {}, "learned positions lack"),
        (
            DCFormerConfig.from_size("tiny", position_scheme="learned", max_position_embeddings=300),
            {"position_sampling": "subset", "position_limit": 301},
            "position_limit=301 is above the max_position_embeddings=300",
        ),
        (LlamaConfig(), {}, "this is a llama"),
        (
            DCFormerConfig.from_size("tiny", position_scheme={"sliding_attention": "t5", "full_attention": "alibi"}),
            {},
            r"position_scheme=\['alibi', 't5'\] counts places",
        ),
    ],
)
def test_models_that_cannot_read_them_are_refused(config: Any, options: dict[str, Any], message: str) -> None:
    arguments = PretrainArguments(**{"output": "x", "position_sampling": "jitter", **options})
    with pytest.raises(UserError, match=message):
        PositionSampler.of(arguments, config)
