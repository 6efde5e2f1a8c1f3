"""The search for the fastest constants of a module."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dynattn.scripts.benchmark.harness.process import DeviceLostError
from dynattn.scripts.benchmark.harness.tuning import TrialLog, TunableConstant, override_constants, tune

BLOCK, LEFT, RIGHT = (
    TunableConstant("BLOCK", (16, 32, 64)),
    TunableConstant("TILES", ((1, 2), (4, 4)), "left"),
    TunableConstant("TILES", ((8, 8),), "right"),
)


@pytest.fixture
def module() -> Any:
    return SimpleNamespace(BLOCK=32, TILES={"left": (1, 2), "right": (3, 3)})


def test_constants_have_other_values_for_a_while(module: Any) -> None:
    tiles = module.TILES
    with pytest.raises(ZeroDivisionError), override_constants(module, {BLOCK: 64, LEFT: (4, 4), RIGHT: (8, 8)}):
        assert (module.BLOCK, module.TILES) == (64, {"left": (4, 4), "right": (8, 8)})
        raise ZeroDivisionError
    assert module.BLOCK == 32
    assert module.TILES is tiles == {"left": (1, 2), "right": (3, 3)}


def test_the_tuner_finds_the_best_of_each_constant_and_passes_over_what_fails(module: Any) -> None:
    def trial() -> float:
        if module.BLOCK == 64:
            raise RuntimeError("out of shared memory\nand more")
        left = {(1, 2): 1.0, (4, 4): 0.5}[module.TILES["left"]]
        return module.BLOCK / 16 + left + (0.0 if module.TILES["right"] == (3, 3) else -0.001)

    tuning = tune(module, (BLOCK, LEFT, RIGHT), trial, lambda: True, TrialLog())
    assert tuning.finished
    assert tuning.best == {BLOCK: 16, LEFT: (4, 4), RIGHT: (3, 3)}, "a gain within the noise is none"
    assert module.BLOCK == 32
    labels = ["as it is", "BLOCK", "BLOCK", "TILES[left]", "TILES[right]"]
    assert [one["constant"] for one in tuning.trials] == labels
    assert tuning.trials[2] == {"constant": "BLOCK", "value": 64, "failure": "out of shared memory"}
    assert json.loads(json.dumps(tuning.as_record()))["best"] == {
        "BLOCK": 16,
        "TILES[left]": [4, 4],
        "TILES[right]": [3, 3],
    }


def test_the_tuner_stops_when_time_is_over(module: Any) -> None:
    time_left = iter([True, False])
    tuning = tune(module, (BLOCK, LEFT), lambda: float(module.BLOCK), lambda: next(time_left), TrialLog())
    assert not tuning.finished
    assert tuning.best == {BLOCK: 16, LEFT: (1, 2)}
    assert len(tuning.trials) == 2


def test_a_search_goes_on_behind_the_trial_that_ended_its_process(module: Any) -> None:
    saved: list[list[dict[str, Any]]] = []
    ran: list[int] = []

    def trial() -> float:
        ran.append(module.BLOCK)
        if module.BLOCK == 64:
            raise DeviceLostError("an illegal memory access")
        return float(module.BLOCK)

    def save(trials: list[dict[str, Any]]) -> None:
        saved.append(json.loads(json.dumps(trials)))

    with pytest.raises(DeviceLostError):
        tune(module, (BLOCK, LEFT), trial, lambda: True, TrialLog((), save))
    assert saved[-1][-1]["failure"] == "an illegal memory access"
    for last, failure in ((saved[-1], "an illegal memory access"), (saved[-2], "the process ended")):
        ran.clear()
        tuning = tune(module, (BLOCK, LEFT), trial, lambda: True, TrialLog(last, save))
        assert ran == [16] and tuning.best == {BLOCK: 16, LEFT: (1, 2)}
        assert tuning.trials[2] == {"constant": "BLOCK", "value": 64, "failure": failure}
