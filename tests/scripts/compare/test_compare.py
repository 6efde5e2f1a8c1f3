"""`dynattn compare`: its statistics, its refusals, and a tiny comparison from end to end."""

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases.studies import pretend_to_train, record_training
from matplotlib.figure import Figure

from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.paired import holm
from dynattn.scripts.compare import figures, job
from dynattn.scripts.compare.arguments import CompareArguments
from dynattn.scripts.compare.figures import draw_arms
from dynattn.scripts.compare.record import (
    compare,
    flops_per_token,
    loss_at,
    losses_at_equal_seconds,
    make_record,
    token_ratio,
    tokens_to,
)
from dynattn.scripts.compare.table import table
from dynattn.scripts.compare.variants import read_variants
from dynattn.scripts.pretrain.guard import DivergedError
from dynattn.scripts.pretrain.trainer import Trainer

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
RUN = {
    "vocab_size": 300, "sequence_length": 32, "batch_size": 2, "max_steps": 4, "warmup_steps": 1, "eval_every": 2,
    "log_every": 1, "save_every": 4, "validation_share": 0.2,
}  # fmt: skip


def run_of(*losses: float, speed: float = 100.0) -> dict[str, Any]:
    """A run that was validated every 100 tokens."""
    validation = [{"tokens": 100 * n, "loss": loss, "bits_per_byte": None} for n, loss in enumerate(losses, start=1)]
    return {"validation": validation, "tokens": 100 * len(losses), "tokens_per_second": speed}


def test_losses_between_validations_lie_on_straight_lines():
    run = run_of(5.0, 4.0, 3.5)
    assert [loss_at(run, tokens) for tokens in (50, 100, 150, 275, 300, 400)] == [None, 5.0, 4.5, 3.625, 3.5, 3.5]
    assert [tokens_to(run, loss) for loss in (5.0, 4.5, 3.75, 3.5)] == [(at, at) for at in (100, 150, 250, 300)]
    assert tokens_to(run, 6.0) == (0, 100)  # it may have been as low before


def test_at_equal_time_the_slower_run_is_measured_before_its_end():
    """At half the speed, three seconds are enough for 150 tokens."""
    assert losses_at_equal_seconds(run_of(5.0, 4.0, 3.5, speed=50), run_of(5.0, 4.5, 4.25)) == (4.5, 4.25)


def test_the_ratio_of_tokens_says_who_needs_more_of_them():
    quick, slow = run_of(5.0, 4.0, 3.0), run_of(5.0, 4.5, 4.0)
    assert token_ratio(quick, slow) == pytest.approx((1.5, 1.5))
    assert token_ratio(slow, quick) == pytest.approx((1 / 1.5, 1 / 1.5))
    summary = compare([slow, slow, slow], [quick, quick, run_of(5.0, 4.2, 4.0)])["token_ratio"]
    assert summary["values"] == pytest.approx([1.5, 1.5, 1.0])
    assert summary["mean"] == pytest.approx(1.5 ** (2 / 3))
    assert summary["interval_95"][0] < summary["mean"] < summary["interval_95"][1]


def test_operations_of_a_token_do_not_depend_on_the_speed():
    """Medians of the two rates may be of different lines."""
    costs, tokens = (10.0, 20.0, 30.0), (100, 200, 250)

    def lines(*speeds: float) -> list[dict[str, Any]]:
        return [
            {"split": "train", "tokens": read, "tokens_per_second": speed, "flops_per_second": cost * speed}
            for read, cost, speed in zip(tokens, costs, speeds, strict=True)
        ]

    expected = (100 * 10 + 100 * 20 + 50 * 30) / 250
    assert flops_per_token(lines(20, 10, 5)) == flops_per_token(lines(5, 10, 20)) == pytest.approx(expected)


def test_a_run_that_was_better_from_the_first_validation_on_gives_a_bound():
    quick, slow, middle = run_of(3.9, 3.0), run_of(5.0, 4.0), run_of(5.0, 4.0, 3.0)
    assert token_ratio(quick, slow) == (2.0, math.inf)
    found = compare([slow, run_of(5.0, 4.5, 4.0)], [quick, middle])["token_ratio"]
    assert found == {"values": [2.0, 1.5], "mean": pytest.approx(3**0.5), "interval_95": None, "bound": "at least"}
    found = compare([quick, middle], [slow, run_of(5.0, 4.5, 4.0)])["token_ratio"]
    assert (found["mean"], found["bound"]) == (pytest.approx(3**-0.5), "at most")
    assert compare([quick, slow], [slow, quick])["token_ratio"] is None


def test_a_single_validation_tells_a_bound_and_nothing_at_equal_time():
    found = compare([run_of(5.0), run_of(5.0)], [run_of(4.0, speed=50), run_of(4.0, speed=50)])
    assert (found["token_ratio"]["mean"], found["token_ratio"]["bound"]) == (1.0, "at least")
    assert found["equal_seconds"] is None
    assert compare([run_of(5.0)] * 2, [run_of(4.0)] * 2)["equal_seconds"]["mean"] == -1.0


def record_of(arms: dict[str, dict[int, dict[str, Any] | None]], parents: Sequence[dict[str, Any]] = ()) -> Any:
    common = {"objective": "causal_lm", "dataset": "d", "hardware": "h", "versions": {}, "validation_targets": 9}
    more = {**common, "parameters": 7, "learning_rate": 1e-3, "flops_per_token": 2.0}
    arms = {
        name: {seed: run and {"seed": seed, **more, **run} for seed, run in runs.items()} for name, runs in arms.items()
    }
    settings = {"tuning_seed": 9, "learning_rates": None}
    return make_record(settings, arms, {name: name.upper() for name in arms}, parents)


def test_names_that_matplotlib_would_hide_or_typeset_are_in_the_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[str] = []
    legend = Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda self, lines, labels, **more: (drawn.extend(labels), legend(self))[1])
    record = record_of({"_plain": {0: run_of(5.0, 4.0)}, "_a$x$": {0: run_of(5.0, 3.0)}})
    for arm in record["arms"].values():
        arm["runs"] = [{**run, "flops_per_token": 1.0} for run in arm["runs"]]  # a ratio of FLOPs is drawn as well
    record["comparison"]["_a$x$"]["operations_ratio"] = {"mean": 1.5, "interval_95": None}
    draw_arms(json.loads(json.dumps(record)), tmp_path / "losses.png")
    assert drawn == [" _PLAIN", r" _A\$X\$"]


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_legend_says_what_bands_are_where_there_are_any(
    seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    draw_arms(record_of({"plain": dict.fromkeys(range(seeds), run_of(5.0, 4.0))}), tmp_path / "losses.png")
    told = "lines: means over seeds; bands: one standard deviation to each side"
    assert drawn[0].legends[0].get_title().get_text() == (told if seeds > 1 else "")
    assert bool(drawn[0].axes[0].collections) == (seeds > 1)


def test_bounds_are_told_and_drawn(tmp_path: Path):
    record = record_of({
        "plain": dict.fromkeys(range(3), run_of(5.0, 4.0)),
        "best": dict.fromkeys(range(3), run_of(3.9, 3.0, speed=30)),
        "worst": dict.fromkeys(range(3), run_of(7.0, 6.0)),
        "same": dict.fromkeys(range(3), run_of(5.0, 4.0)),
    })  # fmt: skip
    rows = table(record).splitlines()
    assert rows[0].split(" | ")[3:7] == ["difference", "95 % interval", "p", "difference at equal time"]
    assert rows[3].split(" | ")[6:9] == ["", *["\N{GREATER-THAN OR EQUAL TO} 2.00 x"] * 2]
    assert rows[4].split(" | ")[6:9] == ["+2.0000", *["\N{LESS-THAN OR EQUAL TO} 0.50 x"] * 2]
    assert rows[5].split(" | ")[6:9] == ["+0.0000", "1.00 x", "1.00 x"]
    assert "biased towards 1" in rows[-1]
    draw_arms(json.loads(json.dumps(record)), tmp_path / "losses.png")


def test_arms_are_compared_on_the_seeds_on_which_neither_diverged(tmp_path: Path):
    plain = {seed: run_of(5.0, 4.0 + 0.1 * seed) for seed in range(4)}
    composed = {seed: None if seed == 2 else run_of(5.0, 3.8) for seed in range(4)}
    single = {0: run_of(5.0, 4.1), **dict.fromkeys(range(1, 4))}
    record = record_of({"plain": plain, "composed": composed, "gone": dict.fromkeys(range(4)), "single": single})
    assert record["comparison"]["composed"]["values"] == pytest.approx([-0.2, -0.3, -0.5])
    assert list(record["arms"]) == ["plain", "composed", "single"]
    text = table(record)
    assert "COMPOSED diverged on seed 2; the comparison is of seeds 0, 1, 3." in text
    assert "GONE diverged on seeds 0, 1, 2, 3; there is no comparison." in text
    alone = table(record_of({"plain": plain, "gone": dict.fromkeys(range(4))}))
    assert "not corrected for 0 comparisons." in alone and "equal time" not in alone
    assert "| SINGLE | 7 | 4.1000 | +0.1000 |  |  |" in text
    draw_arms(record, tmp_path / "losses.png")
    record = record_of({"composed": composed, "plain": plain})
    assert "COMPOSED diverged on seed 2, of which there is no comparison." in table(record)
    assert record["comparison"]["plain"]["seeds"] == [0, 1, 3]
    with pytest.raises(UserError, match="all runs of the baseline, GONE, diverged"):
        record_of({"gone": dict.fromkeys(range(4)), "plain": plain})


def test_different_tokens_are_told_for_each_row():
    plain, longer = (dict.fromkeys(range(2), run) for run in (run_of(5.0, 4.0), run_of(5.0, 4.0, 3.0)))
    text = table(record_of({"plain": plain, "longer": longer}))
    assert "| PLAIN | 7 | 200 | 4.0000" in text and "| LONGER | 7 | 300 | 3.0000" in text
    assert "Tokens, parameters and computation are not equal." in text
    assert "Tokens are equal" not in text


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"parent": {"model_type": "gpt_neox"}}, "initial weights and order of the data"),
        ({"parent": "SmolLM2"}, "order of the data, and weights that are added"),
        ({"variants": {"a": {}, "b": {"init_from": "model"}}}, "initial weights and order of the data"),
        ({"variants": {"a": {"init_from": "model"}}}, "order of the data, and weights that are added"),
    ],
)
def test_the_table_says_what_seeds_decide(settings: dict[str, Any], what: str):
    record = record_of({"plain": dict.fromkeys(range(2), run_of(5.0))})
    record["settings"] |= settings
    assert f"over 2 seeds ({what});" in table(record)


def test_differences_are_drawn_at_equal_tokens():
    """One arm is validated twice as often: its losses are compared with those of the other after the same tokens."""
    often = {**run_of(5.0, 4.0, 3.5, 3.0), "seed": 3}
    seldom = {"seed": 3, "validation": [{"tokens": 200, "loss": 4.5}, {"tokens": 300, "loss": 4.0}]}
    tokens, differences = figures._differences([often], [seldom], {})
    assert tokens.tolist() == [200, 300] and differences.tolist() == [[-0.5, -0.5]]
    tokens, differences = figures._differences([often], [{**seldom, "seed": 4}], {})
    assert not len(differences)
    tokens, differences = figures._differences([seldom], [often], {3: 6.0})
    assert tokens.tolist() == [0, 200, 300] and differences.tolist() == [[0, 0.5, 0.5]]


def test_differences_without_spread_have_no_interval():
    found = compare([run_of(5.0, 4.0)] * 2, [run_of(5.0, 4.0)] * 2)
    assert (found["mean"], found["p"], found["token_ratio"]["interval_95"]) == (0.0, None, None)


def test_p_values_are_corrected_step_by_step():
    """The worked example of Holm's procedure: the smallest counts for all, the next for one fewer, and none falls."""
    assert holm([0.01, 0.04, 0.03, None, 0.005]) == pytest.approx([0.03, 0.06, 0.06, None, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def variant(folder: Path, name: str, text: Path, **options: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"model_config": SIZES, "dataset": str(text), **RUN, **options}))
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"The number {n} comes before {n + 1}. " * 5}) for n in range(60)))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_share": 0.5}, "losses on different data or tokens do not compare"),
        ({"vocab_size": 400}, "plain has vocab_size=400 and dcformer 300"),
        ({"sequence_length": 64}, "plain has sequence_length=64 and dcformer 32; .* nor with other contexts"),
        ({"mask_documents": False}, "plain has mask_documents=False and dcformer True"),
        ({"sweep": "lr=1e-4:1e-2:3"}, "a variant is one run for each seed, so leave sweep out"),
        ({"dry_run": True}, "has dry_run, and a comparison trains; leave it out"),
        ({"learning_rat": 1}, "unknown arguments"),
        ({"learning_rate": -1}, "learning_rate=-1.0 must be positive"),
    ],
)
def test_variants_that_do_not_compare_are_refused(tmp_path: Path, text: Path, options: dict[str, Any], message: str):
    files = [variant(tmp_path, "dcformer", text), variant(tmp_path, "plain", text, **options)]
    with pytest.raises(UserError, match=message):
        read_variants(files, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_config": {"hiden_size": 16}}, "plain: model_config names .*did you mean hidden_size"),
        ({"model_config": {**SIZES, "max_position_embeddings": 16}}, "plain: sequence_length=32 is above the model's"),
        ({"model_type": "bert"}, "plain: a bert reads each token with those after it"),
        ({"model_config": {**SIZES, "num_attention_heads": "two"}}, "plain: model_config is not valid for dcformer"),
        (
            {"model_type": "llama", "model_config": {**SIZES, "composed_heads": {"compose_gate": "no"}}},
            "plain: cannot build the model 'llama': model.layers.0.self_attn: Field 'compose_gate' expected bool",
        ),
        (
            {"model_type": "llama", "model_config": SIZES, "composition_learning_rate": 1e-4},
            "plain: composition_learning_rate=0.0001 .* are for models that compose heads",
        ),
        (
            {"model_type": "mamba", "model_config": {"hidden_size": 16, "num_hidden_layers": 1}},
            "plain: mask_documents keeps documents apart .* a mamba does not",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_before_the_first_run(
    tmp_path: Path, text: Path, options: dict[str, Any], message: str
):
    files = [variant(tmp_path, "dcformer", text), variant(tmp_path, "plain", text, **options)]
    with pytest.raises(UserError, match=message):
        job.run_comparison(CompareArguments(variants=files, output=str(tmp_path / "study")))
    assert not (tmp_path / "study").exists()


def test_what_the_comparison_sets_is_not_common(tmp_path: Path, text: Path):
    files = [variant(tmp_path, "a", text), variant(tmp_path, "b", text, model_type="llama")]
    with pytest.raises(UserError, match="common has output, seed, which the comparison decides"):
        read_variants(files, {"seed": 7, "output": "runs"})


def test_names_are_those_of_files_and_must_differ(tmp_path: Path, text: Path):
    (tmp_path / "other").mkdir()
    files = [variant(tmp_path, "dcformer", text), variant(tmp_path / "other", "dcformer", text)]
    with pytest.raises(UserError, match=r"'dcformer'\] occurs twice; rename a file"):
        read_variants(files, None)
    with pytest.raises(UserError, match=r"must be a \.yaml file"):
        read_variants(["dcformer"], None)


def test_common_arguments_replace_those_of_every_file(tmp_path: Path, text: Path):
    files = [variant(tmp_path, "a", text), variant(tmp_path, "b", text, model_type="llama")]
    read = read_variants(files, '{"max_steps": 9, "trackers": ["wandb"], "model_config": {"hidden_size": 8}}')
    assert [one.options["max_steps"] for one in read] == [9, 9]
    assert read[1].options["model_config"] == {"hidden_size": 8}
    assert read[0].options["trackers"] == ["wandb"]
    with pytest.raises(UserError, match=r"common has unknown arguments \['steps'\]"):
        read_variants(files, {"steps": 9})
    with pytest.raises(UserError, match="common: argument --max_steps/--max-steps: invalid int value: 'many'"):
        read_variants(files, {"max_steps": "many"})
    assert read_variants(files, {"max_steps": None})[0].options.get("max_steps") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "variants=[] must be two or more, to be compared; name files of arguments, or recipes"),
        (["tiny.yaml"], "must be two or more, to be compared"),
        (["tiny.yaml", "tiny.yaml", "--seeds", "1"], "seeds=1 must be from 2 to 1000"),
        (["tiny.yaml", "tiny.yaml", "--seeds", "99999999999999"], "seeds=99999999999999 must be from 2 to 1000"),
        (["tiny.yaml", "tiny.yaml", "--seeds", "3", "--tuning_seed", "2"], "is one of the measured seeds"),
        (["tiny.yaml", "tiny.yaml", "--first_seed", "99"], "tuning_seed=100 is one of the measured seeds"),
        (["tiny.yaml", "tiny.yaml", "--first_seed", "-1"], "first_seed=-1 must be between 0 and"),
        (["tiny.yaml", "tiny.yaml", "--tuning_seed", "9"], "tuning_seed=9 chooses among learning_rates; give"),
        (["tiny.yaml", "tiny.yaml", "--learning_rates", "0"], "must be one or more positive numbers"),
        (["tiny.yaml", "tiny.yaml", "--max_seconds", "-1"], "max_seconds=-1.0 must be 0 or more"),
        (["a.yaml", "b.yaml", "--redraw", "--output", "nowhere"], "holds no record.json"),
        (["--redraw", "--output", "nowhere"], "holds no record.json"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_tiny_comparison_goes_on_and_grows(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    """A Llama is the baseline of a DCFormer; rates are tuned on another seed, and a third seed is added later.

    One rate makes both diverge, which is no reason to stop, nor to train them again.
    """
    trained = record_training(monkeypatch)
    files = [variant(tmp_path, "llama", text, model_type="llama"), variant(tmp_path, "dcformer", text)]
    command = ["compare", *files, "--output", str(tmp_path / "study"), "--learning_rates", "1e-3", "1e-2", "1e30"]
    assert cli.main(command) == 2  # such a rate times the usual weight decay is refused
    assert not trained
    assert not (tmp_path / "study").exists()
    command += ["--common", '{"weight_decay": 0}']
    assert cli.main([*command, "--seeds", "2"]) == 0
    assert cli.main([*command, "--seeds", "3"]) == 0
    assert len(trained) == len(set(trained)) == 6 + 2 * 3
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    check_comparison(record, tmp_path / "study")
    assert cli.main([*command, "--seeds", "4", "--max_seconds", "0"]) == 0
    assert len(json.loads((tmp_path / "study" / "record.json").read_text())["arms"]["llama"]["runs"]) == 3
    assert len(trained) == 6 + 2 * 3
    assert cli.main(["compare", *files[::-1], "--output", str(tmp_path / "study"), "--redraw"]) == 0
    other = ["compare", *files, "--output", str(tmp_path / "study"), "--common", '{"max_steps": 5}']
    assert cli.main(other) == 2


def test_new_seeds_repeat_a_comparison_and_say_which_they_are(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
):
    trained = pretend_to_train(monkeypatch, [])
    files = [variant(tmp_path, "a", text), variant(tmp_path, "b", text)]
    command = ["compare", *files, "--output", str(tmp_path / "study"), "--seeds", "2", "--first_seed", "5"]
    assert cli.main(command) == 0
    assert trained == ["seed-5/a", "seed-5/b", "seed-6/a", "seed-6/b"]
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert [run["seed"] for run in record["arms"]["a"]["runs"]] == record["comparison"]["b"]["seeds"] == [5, 6]
    assert record["command"] == "dynattn compare a.yaml b.yaml --seeds 2 --first_seed 5"


def test_rates_that_all_diverge_are_told():
    def train(rate: float) -> Path:
        raise DivergedError(f"a loss of nan with {rate}")

    with pytest.raises(UserError, match=r"all learning_rates=\[1.0, 2.0\] diverged; .* a loss of nan with 2.0"):
        job.choose_rate(train, [1.0, 2.0])


def test_a_measured_run_that_diverges_does_not_stop_the_others(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Nor is it trained again; its folder says so."""
    trained = pretend_to_train(monkeypatch, ["seed-1/b"])
    files = [variant(tmp_path, "a", text), variant(tmp_path, "b", text)]
    command = ["compare", *files, "--output", str(tmp_path / "study"), "--seeds", "3"]
    for _ in range(2):
        assert cli.main(command) == 0
        assert "b diverged on seed 1; the comparison is of seeds 0, 2." in capsys.readouterr().out
    assert len(trained) == len(set(trained)) == 6


def test_a_signal_ends_a_comparison_with_a_line(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def show(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    earlier = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a terminal, and not as in the background of a shell
    monkeypatch.setattr(Trainer, "_show", show)
    files = [variant(tmp_path, "a", text), variant(tmp_path, "b", text)]
    assert cli.main(["compare", *files, "--output", str(tmp_path / "study")]) == 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, earlier)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.endswith(
        "stopped by SIGTERM; update 2 is finished and saved, and the same command continues from there\n"
    )


def check_comparison(record: dict[str, Any], folder: Path) -> None:
    chosen, losses = record["settings"]["chosen"], record["settings"]["tuning_losses"]
    arms = {name: arm["runs"] for name, arm in record["arms"].items()}
    assert list(arms) == ["llama", "dcformer"]
    for name, runs in arms.items():
        assert losses[name]["1e+30"] is None
        assert losses[name][f"{chosen[name]:g}"] == min(losses[name]["0.001"], losses[name]["0.01"])
        assert [run["seed"] for run in runs] == [0, 1, 2]
        assert {run["learning_rate"] for run in runs} == {chosen[name]}
    last = [[run["validation"][-1]["loss"] for run in runs] for runs in arms.values()]
    assert record["comparison"]["dcformer"]["values"] == [theirs - ours for ours, theirs in zip(*last, strict=True)]
    assert record["command"].startswith("dynattn compare llama.yaml dcformer.yaml --seeds 3 --common")
    assert "--learning_rates 0.001 0.01 1e+30 --tuning_seed 100" in record["command"]
    assert "Learning rates (chosen on seed 100 from 0.001, 0.01, 1e+30)" in (folder / "table.md").read_text()
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_of_a_comparison_names_modules_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.IMPORTS, "mine")
    command = job.command_of(CompareArguments(variants=["folder/a.yaml", "b.yaml"], seeds=2))
    assert command == "dynattn compare --import mine a.yaml b.yaml --seeds 2"
