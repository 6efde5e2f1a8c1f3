"""The study of encoder-decoders: its arms, its pairs, and runs from end to end."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.reproduce.paired_study.job import Run
from dynattn.scripts.reproduce.seq2seq import training
from dynattn.scripts.reproduce.seq2seq.arms import ARMS, CONTRASTS, make_model
from dynattn.scripts.reproduce.seq2seq.edit_distance import edit_distance
from dynattn.scripts.reproduce.seq2seq.generated import FIRST_SYMBOL, TRANSFORMATIONS, draw_pairs
from dynattn.scripts.reproduce.seq2seq.job import SEQ2SEQ
from dynattn.scripts.reproduce.seq2seq.names import Names, load_names, part_of
from dynattn.scripts.reproduce.seq2seq.pairs import EOS, FIRST_TOKEN, IGNORED, PAD, make_batch
from dynattn.scripts.reproduce.seq2seq.training import SIZES, read_answers, run_one

SHAPE = SIZES[True]["sequences"].shape
TINY = replace(SHAPE, hidden_size=16, num_attention_heads=2)


@pytest.mark.parametrize(
    ("arm", "places"),
    [
        ("plain", set()),
        ("encoder", {"encoder.layers.0.self_attn"}),
        ("decoder", {"decoder.layers.0.self_attn"}),
        ("cross", {"decoder.layers.0.cross_attn"}),
        ("all", {"encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.cross_attn"}),
        ("wide", set()),
    ],
)
def test_an_arm_composes_where_its_name_says(arm: str, places: set[str]):
    names = [name.removeprefix("model.") for name, _ in make_model(arm, SHAPE, 0).named_parameters()]
    assert {name.split(".composition.")[0] for name in names if ".composition." in name} == places


def test_arms_of_a_seed_begin_alike_and_the_wide_one_has_as_many_parameters():
    models = {arm: make_model(arm, SHAPE, 3) for arm in ARMS}
    plain, composed = (dict(models[arm].named_parameters()) for arm in ("plain", "all"))
    assert all(torch.equal(weight, composed[name]) for name, weight in plain.items())
    assert abs(models["wide"].num_parameters() / models["all"].num_parameters() - 1) < 0.01
    relative, content = (dict(models[arm].named_parameters()) for arm in ("rcmha", "mha"))
    alike = [torch.equal(relative[name], weight) for name, weight in content.items() if name in relative]
    assert all(alike) and len(alike) > len(content) / 2
    types = {models[arm].config.attention_type for arm in ("mha", "rmha", "mdha", "rcmha")}
    assert types == {"mha", "rmha", "mdha", "rcmha"}
    assert {name for pair in CONTRASTS for name in pair} == set(ARMS) == set(SEQ2SEQ.arms)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_is_what_its_name_says(name: str):
    definitions = {
        "copy": lambda row: row,
        "reverse": lambda row: row[::-1],
        "sort": sorted,
        "double": lambda row: [symbol for symbol in row for _ in range(2)],
    }
    batch = draw_pairs([name], np.random.default_rng(0), 20, 6)
    task = FIRST_TOKEN + list(TRANSFORMATIONS).index(name)
    for source, target in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        assert (source[0], source[-1], target[-1]) == (task, EOS, EOS)
        assert min(source[1:-1]) >= FIRST_SYMBOL
        assert target[:-1] == definitions[name](source[1:-1])


def test_rows_of_a_batch_are_padded_and_their_padding_is_not_asked_for():
    batch = make_batch([[5], [6, 7]], [[8, 9], []])
    assert batch.input_ids.tolist() == [[5, EOS, PAD], [6, 7, EOS]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.labels.tolist() == [[8, 9, EOS], [EOS, IGNORED, IGNORED]]


@pytest.mark.parametrize("arm", ["all", "rcmha"])
def test_answers_are_right_exactly_where_greedy_decoding_is(arm: str):
    """A model that has learned three pairs by heart, asked for four."""
    model = make_model(arm, TINY, 0)
    pairs = ([[5, 6], [7], [8, 9, 10], [11]], [[20, 21, 22], [23], [24, 25], [26, 27]])
    known = make_batch(*(rows[:3] for rows in pairs))
    training.train_steps(model, 1e-2, 60, lambda step: model(**known._asdict()).loss)
    batch = make_batch(*pairs)
    right, _ = read_answers(model, batch)
    tokens = model.generate(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=8, do_sample=False)
    decoded = [row[1 : row.index(EOS) + 1] if EOS in row else row for row in tokens.tolist()]
    assert right.tolist() == [row == [*target, EOS] for row, target in zip(decoded, pairs[1], strict=True)]
    assert right.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("abc", "abc", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_the_edit_distance_of_known_pairs(first: str, second: str, distance: int):
    assert edit_distance(first, second) == edit_distance(second, first) == distance


def some_names() -> Names:
    stems = ["Aland", "Berg", "Corno", "Dover", "Essen", "Fulda", "Goa", "Hull", "Ivry", "Jena", "Kiel", "Lodz"]
    return Names(tuple((f"{stem} {place}", f"{stem[::-1]} {place}".upper()) for stem in stems for place in range(9)))


def test_names_of_the_test_are_not_trained_on_and_survive_their_tokens():
    names = some_names()
    parts = {part: names.part(part) for part in ("train", "validation", "test")}
    assert sorted(pair for rows in parts.values() for pair in rows) == sorted(names.pairs)
    assert all(part_of(source) == part for part, rows in parts.items() for source, _ in rows)
    assert min(map(len, parts.values())) > 0
    assert all(names.decode(names.encode(name)) == name for pair in names.pairs for name in pair)


def test_names_come_from_pycountry():
    pytest.importorskip("pycountry")
    names = load_names(12)
    assert ("Ukraine", "Україна") in names.pairs and ("Estonian", "естонська") in names.pairs
    assert len(names.pairs) == len({source for source, _ in names.pairs}) > 5000
    assert max(len(name) for pair in names.pairs for name in pair) == 12


def test_a_missing_pycountry_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pycountry", None)
    with pytest.raises(UserError, match=r"install dynattn\[studies\]"):
        load_names(12)


@pytest.mark.parametrize("task", ["sequences", "names"])
def test_a_run_tells_costs_and_metrics(task: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "load_names", lambda longest: some_names())
    tiny = replace(SIZES[True][task], shape=TINY, steps=2, batch=8, tests=4)
    monkeypatch.setitem(SIZES[True], task, tiny)
    results = {arm: run_one(Run(task, arm, 0, 1e-3, tuning=False, quick=True)) for arm in ("plain", "cross")}
    for result in results.values():
        assert set(result["metrics"]) == {metric.name for metric in SEQ2SEQ.tasks[task].metrics}
        assert result["metrics"]["loss"] > 0
    assert results["cross"]["flops"] > results["plain"]["flops"]
    assert results["cross"]["parameters"] > results["plain"]["parameters"]


def test_what_chooses_a_learning_rate_is_not_what_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SIZES[True], "sequences", replace(SIZES[True]["sequences"], shape=TINY, steps=2, tests=4))
    tested: list[torch.Tensor] = []
    whole = training.read_answers
    monkeypatch.setattr(
        training, "read_answers", lambda model, batch: (tested.append(batch.input_ids), whole(model, batch))[1]
    )
    for seed, tuning in ((0, True), (1, True), (2, False), (3, False)):
        run_one(Run("sequences", "plain", seed, 1e-3, tuning=tuning, quick=True))
    quarter = len(tested) // 4
    first, again, measured, repeated = (tested[start * quarter : (start + 1) * quarter] for start in range(4))
    assert all(map(torch.equal, first, again)) and all(map(torch.equal, measured, repeated))
    assert not any(map(torch.equal, first, measured))


@pytest.mark.parametrize("task", ["sequences", "names"])
def test_a_run_that_diverged_has_no_metrics(task: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "load_names", lambda longest: some_names())
    monkeypatch.setitem(SIZES[True], task, replace(SIZES[True][task], shape=TINY, steps=2, batch=8, tests=4))
    metrics = run_one(Run(task, "plain", 0, math.inf, tuning=False, quick=True))["metrics"]
    assert metrics and all(map(math.isnan, metrics.values()))


def test_the_study_is_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["reproduce", "seq2seq", "--output", str(tmp_path / "new"), "--tasks", "chess"]) == 2
    assert "tasks ['chess'] do not exist; choose from sequences, names" in capsys.readouterr().err
