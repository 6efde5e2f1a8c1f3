"""What studies of arms share: choice of learning rates, paired statistics, table, plot, and how a study goes on."""

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from dynattn.scripts.common.environment import source_commit
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.reproduce.model_training import learning_rate_factor
from dynattn.scripts.reproduce.paired_study.arguments import PairedStudyArguments
from dynattn.scripts.reproduce.paired_study.job import Metric, Run, Study, Task, merit, run_study
from dynattn.scripts.reproduce.study_runs import chosen

QUALITY, ERROR = Metric("quality", "quality", "higher"), Metric("error", "error", "lower")
# What two arms reach with each seed; the second learns best with the smaller of two rates.
QUALITIES = {"old": {0: 0.5, 1: 0.6, 2: 0.4, 9: 0.5}, "new": {0: 0.7, 1: 0.7, 2: 0.65, 9: 0.6}}
BEST_RATES = {"old": 0.2, "new": 0.1}
calls: list[Run] = []


@dataclass(frozen=True)
class Sizes:
    width: int


def run_one(run: Run) -> dict[str, Any]:
    calls.append(run)
    quality = QUALITIES[run.arm][run.seed] - (run.learning_rate != BEST_RATES[run.arm]) * 0.1
    quality -= run.tuning * 0.2  # other data are scored
    return {
        "run": asdict(run),
        "metrics": {"quality": quality, "error": 1 - quality},
        "parameters": 10,
        "flops": 2_000_000,
        "cpu_seconds": 1.0,
    }


STUDY = Study(
    name="none",
    tasks={"read": Task("reading", (QUALITY, ERROR), chosen_by=ERROR)},
    arms={"old": "Old", "new": "New"},
    contrasts=(("new", "old"),),
    run_one=run_one,
    sizes={False: {"read": Sizes(4)}, True: {"read": Sizes(2)}},
    notes="Notes.",
)


def arguments(folder: Path, **changed: Any) -> PairedStudyArguments:
    given: dict[str, Any] = {"output": str(folder / "study"), "learning_rates": [0.1, 0.2], "tuning_seed": 9}
    return PairedStudyArguments(**given | changed)


def test_each_arm_is_measured_with_its_best_rate_and_compared_in_pairs(tmp_path: Path):
    calls.clear()
    text = run_study(STUDY, arguments(tmp_path))
    assert [run.tuning for run in calls] == [True] * 4 + [False] * 6
    assert {(run.arm, run.learning_rate) for run in calls[4:]} == set(BEST_RATES.items())
    assert [run.seed for run in calls[4:]] == [0, 0, 1, 1, 2, 2]
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert record["settings"]["tuning"]["read"]["new"] == pytest.approx({"0.1": 0.6, "0.2": 0.7})
    assert record["commit"] == [source_commit()] and len(record["date"]) == 1
    for metric, sign in (("quality", 1), ("error", -1)):
        (row,) = record["results"]["read"]["differences"][metric]
        assert row["values"] == pytest.approx([0.2 * sign, 0.1 * sign, 0.25 * sign])
        expected = stats.ttest_1samp([0.2, 0.1, 0.25], 0)
        interval = expected.confidence_interval(0.95)
        assert row["p"] == row["p_holm"] == pytest.approx(expected.pvalue)
        assert sorted(abs(limit) for limit in row["interval_95"]) == pytest.approx(sorted(map(abs, interval)))
    assert "| New | 10 | 2.00 | 1 | 0.1 | 0.683 ± 0.029 | 0.317 ± 0.029 |" in text
    assert "| New \N{MINUS SIGN} Old | +0.183 (-0.006 to +0.373) |" in text
    assert (tmp_path / "study" / "arms.png").read_bytes().startswith(b"\x89PNG")


def test_a_rate_counts_as_chosen_only_when_all_have_been_tried(tmp_path: Path):
    run_study(STUDY, arguments(tmp_path, learning_rates=[0.1]))
    with pytest.raises(UserError, match="holds no measured run yet"):  # and not those of the one rate of before
        run_study(STUDY, arguments(tmp_path, max_seconds=0))
    more = run_study(STUDY, arguments(tmp_path))
    assert "| New | 10 | 2.00 | 1 | 0.1 |" in more and "| Old | 10 | 2.00 | 1 | 0.2 |" in more


def test_a_rate_whose_run_diverged_is_the_worst():
    """The first of them diverged, so that nothing is greater than its error. Its file has null, earlier ones NaN."""
    runs = [{"run": {"task": "read"}, "metrics": {"error": error}} for error in (math.nan, None, 0.4, 0.3)]
    assert [merit(STUDY, run) for run in runs] == [-math.inf, -math.inf, -0.4, -0.3]


def diverging(run: Run) -> dict[str, Any]:
    result = run_one(run)
    if (run.arm, run.seed) == ("new", 1):
        result["metrics"]["error"] = math.nan
    return result


def test_a_study_tells_which_of_its_runs_diverged(tmp_path: Path):
    text = run_study(replace(STUDY, run_one=diverging), arguments(tmp_path, learning_rates=[0.1]))
    assert "| New | 10 | 2.00 | 1 | 0.1 | 0.683 ± 0.029 | diverged on seed 1 |" in text
    assert "| diverged on seed 1 |  |" in text.split("New \N{MINUS SIGN} Old")[1]
    for file in (tmp_path / "study").rglob("*.json"):
        assert "NaN" not in file.read_text()
    assert run_study(STUDY, arguments(tmp_path, learning_rates=[0.1], redraw=True)) == text


def test_a_study_stops_in_time_goes_on_and_keeps_its_sizes(tmp_path: Path):
    with pytest.raises(UserError, match="no measured run yet"):
        run_study(STUDY, arguments(tmp_path, max_seconds=1e-9))
    run_study(STUDY, arguments(tmp_path, seeds=[0, 1]))
    calls.clear()
    older = tmp_path / "study" / "runs" / "read" / "new-seed-0-rate-0.1.json"
    older.write_text(json.dumps({**json.loads(older.read_text()), "commit": "earlier"}))
    text = run_study(STUDY, arguments(tmp_path, max_seconds=0))
    assert "runs were made with other code: commit earlier; this is" in text
    assert not calls
    assert "2 runs are left" in text and "2 runs are not finished" in text
    run_study(STUDY, arguments(tmp_path))
    assert [run.seed for run in calls] == [2, 2]
    wider = replace(STUDY, sizes={False: {"read": Sizes(8)}, True: STUDY.sizes[True]})
    with pytest.raises(UserError, match="study with other sizes"):
        run_study(wider, arguments(tmp_path))
    with pytest.raises(UserError, match="study with other sizes"):
        run_study(STUDY, arguments(tmp_path, quick=True))
    assert "+0.183" in run_study(STUDY, arguments(tmp_path, redraw=True))
    assert "4 runs are left" in run_study(STUDY, arguments(tmp_path, redraw=True, seeds=[0, 1, 2, 3, 4]))


def test_one_process_at_a_time_makes_the_runs_of_a_study(tmp_path: Path):
    """A second one is refused while there is something to make, but may report what is finished."""
    attempts: list[str] = []

    def run_both(run: Run) -> dict[str, Any]:
        if not run.tuning and run.seed == 1:
            with pytest.raises(UserError, match=rf"study is in use by process {os.getpid()} .*; wait for it"):
                run_study(STUDY, arguments(tmp_path))
            attempts.append(run_study(STUDY, arguments(tmp_path, max_seconds=0)))
        return run_one(run)

    run_study(replace(STUDY, run_one=run_both), arguments(tmp_path))
    assert len(attempts) == 2 and "4 runs are left" in attempts[0] and "3 runs are left" in attempts[1]
    assert not (tmp_path / "study" / ".lock").exists()


def test_a_run_that_tuned_is_not_measured_nor_the_reverse(tmp_path: Path):
    run_study(STUDY, arguments(tmp_path, seeds=[0, 1], tuning_seed=9))
    assert len(list((tmp_path / "study" / "runs").glob("*/*-tuning.json"))) == 4
    calls.clear()
    run_study(STUDY, arguments(tmp_path, seeds=[1, 9], tuning_seed=0))
    assert sorted({(run.seed, run.tuning) for run in calls}) == [(0, True), (9, False)]
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    (row,) = record["results"]["read"]["differences"]["quality"]
    assert row["values"] == pytest.approx([0.1, 0.1])  # 0.7 - 0.6 and 0.6 - 0.5
    assert record["settings"]["tuning"]["read"]["old"] == pytest.approx({"0.1": 0.8, "0.2": 0.7})
    calls.clear()
    run_study(STUDY, arguments(tmp_path, seeds=[0, 1], tuning_seed=9))
    assert not calls


def test_a_run_whose_file_was_cut_off_is_named(tmp_path: Path):
    run_study(STUDY, arguments(tmp_path))
    (tmp_path / "study" / "runs" / "read" / "old-seed-1-rate-0.2.json").write_text('{"run": {')
    for redraw in (False, True):
        with pytest.raises(UserError, match=r"old-seed-1-rate-0.2.json is damaged: .*; remove it to repeat the run"):
            run_study(STUDY, arguments(tmp_path, redraw=redraw))


@pytest.mark.parametrize("redraw", [False, True])
def test_the_folder_of_another_study_is_left_as_it_is(redraw: bool, tmp_path: Path):
    run = tmp_path / "study" / "runs" / "mqar" / "plain-seed-1.json"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"run": {"task": "mqar", "layers": 2}}))
    (tmp_path / "study" / "study.json").write_text(json.dumps({"study": "mechanisms"}))
    with pytest.raises(UserError, match="holds a study with other study"):
        run_study(STUDY, arguments(tmp_path, redraw=redraw))
    assert run.exists()


def test_only_seeds_that_both_arms_have_are_compared(tmp_path: Path):
    run_study(STUDY, arguments(tmp_path))
    (tmp_path / "study" / "runs" / "read" / "old-seed-1-rate-0.2.json").unlink()
    run_study(STUDY, arguments(tmp_path, redraw=True))
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    (row,) = record["results"]["read"]["differences"]["quality"]
    assert row["seeds"] == [0, 2] and row["values"] == pytest.approx([0.2, 0.25])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tasks": ["chess"]}, r"tasks \['chess'\] do not exist; choose from read"),
        ({"arms": ["magic"]}, r"arms \['magic'\] do not exist; choose from old, new"),
        ({"seeds": [1]}, "two or more different ones"),
        ({"seeds": [1, 9]}, "tuning_seed=9 is one of the measured"),
        ({"workers": 0}, "workers=0 must be a positive number"),
        ({"max_seconds": -1.0}, "max_seconds=-1.0 must be 0 or more"),
        ({"learning_rates": [0.0]}, "positive numbers"),
        ({"redraw": True}, "no measured run yet"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_told(changed: dict[str, Any], told: str, tmp_path: Path):
    with pytest.raises(UserError, match=told):
        run_study(STUDY, arguments(tmp_path, **changed))


def test_the_rate_warms_up_and_falls_to_zero():
    rates = [learning_rate_factor(step, 200) for step in range(201)]
    assert rates[0] == pytest.approx(1 / 60) and rates[59] == rates[60] == 1.0
    assert rates[59:] == sorted(rates[59:], reverse=True)
    assert rates[200] == 0


def test_a_name_that_is_given_twice_counts_once() -> None:
    """Its runs would otherwise be told as runs of more seeds."""
    assert chosen("arm", ["new", "old", "new"], {"old": 1, "new": 2}) == ["new", "old"]


def test_data_that_are_missing_are_missed_before_the_first_run(tmp_path: Path) -> None:
    task = replace(STUDY.tasks["read"], package="no_such_package")
    study = replace(STUDY, tasks={"read": task, "other": STUDY.tasks["read"]})
    before = len(calls)
    with pytest.raises(UserError, match="task 'read' come with 'no_such_package', which is not installed"):
        run_study(study, arguments(tmp_path))
    assert len(calls) == before and not (tmp_path / "study").exists()
