"""The study of DCViT: its arms, its images, and a run from end to end."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dynattn.scripts import cli
from dynattn.scripts.reproduce.paired_study.job import Run
from dynattn.scripts.reproduce.vision import training
from dynattn.scripts.reproduce.vision.arms import ARMS, CONTINUED, CONTRASTS, PARENT, continue_parent, make_model
from dynattn.scripts.reproduce.vision.digits import FOLDS, load_digits, splits
from dynattn.scripts.reproduce.vision.glyphs import CHARACTERS, SEEN, UNSEEN, Distortions, draw_glyphs, draw_one
from dynattn.scripts.reproduce.vision.job import VISION
from dynattn.scripts.reproduce.vision.training import SIZES, run_one

SHAPE = SIZES[True]["digits"].shape
STILL = Distortions(points=(20, 20), shift=0, degrees=0, noise=0)


@pytest.mark.parametrize(
    ("arm", "norm", "terms"),
    [
        ("plain", False, set()),
        ("norm", True, set()),
        ("static", True, {"static"}),
        ("post", True, {"dynamic"}),
        ("dynamic", True, {"dynamic"}),
        ("official", True, {"dynamic", "static"}),
        ("dropout", True, {"dynamic", "static"}),
        ("wide", True, set()),
    ],
)
def test_an_arm_has_what_its_name_says(arm: str, norm: bool, terms: set[str]):
    model = make_model(arm, SHAPE, 0)
    names = [name for name, _ in model.named_parameters()]
    composition = [name for name in names if ".composition." in name]
    found = {"static" if "static" in name else "dynamic" for name in composition}
    assert any("q_norm" in name for name in names) == norm
    assert found == terms
    assert model.config.compose_pre == (bool(terms) and arm != "post")
    assert model.config.compose_dropout == (0.2 if arm == "dropout" else 0)


def test_arms_of_a_seed_begin_alike_and_the_wide_one_has_as_many_parameters():
    models = {arm: make_model(arm, SHAPE, 3) for arm in ARMS}
    plain, official = (dict(models[arm].named_parameters()) for arm in ("plain", "official"))
    assert all(torch.equal(weight, official[name]) for name, weight in plain.items())
    assert not torch.equal(next(make_model("plain", SHAPE, 4).parameters()), next(iter(plain.values())))
    wide = dict(models["wide"].named_parameters())
    assert all(torch.equal(weight, wide[name]) for name, weight in plain.items() if ".mlp." not in name)
    sizes = {arm: models[arm].num_parameters() for arm in ("official", "wide")}
    assert abs(sizes["wide"] / sizes["official"] - 1) < 0.01
    assert set(VISION.arms) == set(ARMS) and {name for pair in CONTRASTS for name in pair} == set(ARMS)


def test_folds_test_on_every_image_once_and_never_on_what_they_train_on():
    labels = load_digits().labels
    [(trained, kept)] = splits(labels, seed=1, tuning=True)
    assert sorted(torch.cat([trained, kept]).tolist()) == list(range(1797))
    tested = []
    for train, test in splits(labels, seed=1, tuning=False):
        assert sorted(torch.cat([train, test]).tolist()) == sorted(trained.tolist()), "without what chooses rates"
        assert labels[test].bincount().min() >= 27
        tested += test.tolist()
    assert sorted(tested) == sorted(trained.tolist())
    others = splits(labels, seed=2, tuning=False)
    assert len(others) == FOLDS and others[0][1].tolist() != tested[: len(others[0][1])]
    assert torch.equal(splits(labels, seed=2, tuning=True)[0][1], kept), "the same images for all seeds"
    pixels = load_digits().pixels
    assert (pixels.min(), pixels.max()) == (-1, 1)


@pytest.mark.parametrize("task", ["glyphs", "upcycled"])
def test_what_chooses_a_learning_rate_is_not_what_is_measured(task: str, monkeypatch: pytest.MonkeyPatch):
    sizes = SIZES[True][task]
    schedule = replace(sizes.schedule, steps=2, batch=8, images=16, tests=62)
    monkeypatch.setitem(SIZES[True], task, replace(sizes, schedule=schedule))
    tested: list[torch.Tensor] = []
    whole = training.losses_and_hits
    monkeypatch.setattr(
        training, "losses_and_hits", lambda model, images: (tested.append(images.pixels), whole(model, images))[1]
    )
    for seed, tuning in ((0, True), (1, True), (2, False), (3, False)):
        run_one(Run(task, "norm", seed, 1e-3, tuning=tuning, quick=True))
    chosen, measured = tested[:4], tested[4:]
    assert all(torch.equal(a, b) for group in (chosen, measured) for a, b in zip(group[:2], group[2:], strict=True))
    assert not any(torch.equal(a, b) for a in chosen for b in measured)


def test_fonts_of_the_test_are_not_trained_on_and_all_have_all_characters():
    assert not set(SEEN) & set(UNSEEN)
    rng = np.random.default_rng(0)
    for font in SEEN + UNSEEN:
        drawings = [draw_one(font, character, rng, STILL) for character in CHARACTERS]
        missing = draw_one(font, "\N{CJK UNIFIED IDEOGRAPH-4E00}", rng, STILL)
        assert all((drawing > 0).sum() > 8 for drawing in drawings)
        assert not any(np.array_equal(drawing, missing) for drawing in drawings)
        assert len({drawing.tobytes() for drawing in drawings}) >= len(CHARACTERS) - 3


def test_drawings_are_repeatable_and_balanced():
    first, again, other = (draw_glyphs(UNSEEN, 372, seed) for seed in (5, 5, 6))
    assert first.pixels.shape == (372, 1, 28, 28)
    assert torch.equal(first.pixels, again.pixels) and not torch.equal(first.pixels, other.pixels)
    assert first.labels.bincount().tolist() == [6] * len(CHARACTERS)


@pytest.mark.parametrize("arm", CONTINUED)
def test_what_is_trained_on_starts_with_the_outputs_of_its_parent(arm: str):
    parent = make_model(PARENT, SHAPE, 0).eval()
    model = continue_parent(arm, SHAPE, 1, parent).eval()
    pixels = torch.randn(3, 1, SHAPE.image, SHAPE.image)
    torch.testing.assert_close(model(pixels).logits, parent(pixels).logits, rtol=0, atol=1e-6)
    assert model.config.composes == (arm != PARENT)


def test_a_parent_is_trained_once_for_the_arms_of_a_seed(monkeypatch: pytest.MonkeyPatch):
    sizes = SIZES[True]["upcycled"]
    schedule = replace(sizes.schedule, steps=2, batch=8, images=16, tests=62)
    monkeypatch.setitem(SIZES[True], "upcycled", replace(sizes, schedule=schedule))
    trained: list[tuple[int, float]] = []
    monkeypatch.setattr(training, "fit", lambda model, images, schedule, rate, seed: trained.append((seed, rate)))
    for arm in ("norm", "official"):
        run_one(Run("upcycled", arm, 7, 1e-2, tuning=False, quick=True))
    assert trained == [(7, 3e-3), (7 + training.MORE_DRAWINGS, 1e-2), (7 + training.MORE_DRAWINGS, 1e-2)]


@pytest.mark.parametrize("task", ["digits", "glyphs", "upcycled"])
def test_a_run_tells_costs_and_metrics(task: str, monkeypatch: pytest.MonkeyPatch):
    sizes = SIZES[True][task]
    schedule = replace(sizes.schedule, steps=2, batch=8, images=16, tests=62)
    monkeypatch.setitem(SIZES[True], task, replace(sizes, schedule=schedule))
    results = {arm: run_one(Run(task, arm, 0, 1e-3, tuning=True, quick=True)) for arm in ("norm", "official")}
    for result in results.values():
        assert set(result["metrics"]) == {metric.name for metric in VISION.tasks[task].metrics}
        assert 0 <= result["metrics"]["accuracy"] <= 1
    assert results["official"]["flops"] > results["norm"]["flops"] > 1e5
    assert results["official"]["parameters"] > results["norm"]["parameters"]


def test_products_of_the_plain_model_are_counted_by_hand():
    """Two layers of width 32 on 16 patches of 4 pixels: projections, MLP of twice the width, maps, patches, classes."""
    model, tokens, width = make_model("plain", SHAPE, 0), 16, 32
    layer = tokens * (4 * width**2 + 2 * width * 2 * width) + 2 * tokens**2 * width
    expected = 2 * (2 * layer + tokens * 4 * width + width * 10)
    assert training.forward_flops(model, torch.zeros(1, 1, 8, 8)) == expected


def test_the_study_is_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["reproduce", "vision", "--output", str(tmp_path / "new"), "--tasks", "chess"]) == 2
    assert "tasks ['chess'] do not exist; choose from digits, glyphs, upcycled" in capsys.readouterr().err
