"""The upcycling study: its statistics, its table and plot from the record, and a tiny one from end to end."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import save_tokenizer
from cases.studies import pretend_to_train, record_training
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.compare.figures import PLOT, draw_arms
from dynattn.scripts.compare.record import compare
from dynattn.scripts.compare.study_folder import claim, draw
from dynattn.scripts.compare.table import table
from dynattn.scripts.reproduce.upcycling import changed_parents
from dynattn.scripts.reproduce.upcycling import runs as upcycling_runs
from dynattn.scripts.reproduce.upcycling.arguments import UpcyclingArguments
from dynattn.scripts.reproduce.upcycling.changed_parents import check_same_logits, compose_in_place, widen_mlps
from dynattn.scripts.reproduce.upcycling.job import command_of

TINY = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 128,
}  # fmt: skip
OPTIONS = ["--parent_steps", "3", "--steps", "3", "--learning_rates", "1e-2", "2e-2"]


def run_of(seed: int, *losses: float) -> dict[str, Any]:
    validation = [
        {"tokens": 100 * n, "loss": loss, "bits_per_byte": loss / 2} for n, loss in enumerate(losses, start=1)
    ]
    sizes = {"parameters": 1234, "tokens": 100 * len(losses), "tokens_per_second": 5000.4}
    return {"seed": seed, "learning_rate": 2e-3, "validation": validation, **sizes}


@pytest.fixture
def record() -> dict[str, Any]:
    """Two arms of three seeds that differ by 0.1, 0.2 and 0.3 at the end."""
    arms = {
        "plain": [run_of(seed, 4.5, 4.0 + seed / 10) for seed in range(3)],
        "composed": [run_of(seed, 4.6, 3.9) for seed in range(3)],
    }
    return {
        "parents": [run_of(seed, 5.0) for seed in range(3)],
        "validation_targets": [777],
        "settings": {"tuning_seed": 9, "learning_rates": [1e-3, 2e-3]},
        "arms": {name: {"label": name, "runs": runs} for name, runs in arms.items()},
        "comparison": {"composed": compare(arms["plain"], arms["composed"])},
    }


def test_the_table_quotes_the_record(record: dict[str, Any]):
    lines = table(record).split("\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert rows[2] == ["parent, before", "1,234", "5.0000 ± 0.0000", "2.5000 ± 0.0000", *[""] * 6]
    assert rows[3] == ["plain", "1,234", "4.1000 ± 0.1000", "2.0500 ± 0.0500", *[""] * 5, "5,000"]
    assert rows[4][:5] == ["composed", "1,234", "3.9000 ± 0.0000", "1.9500 ± 0.0000", "-0.2000"]
    assert rows[4][5:7] == ["-0.4484 to +0.0484", "0.074"]
    assert "over 3 seeds" in lines[-1]
    assert "777 held-out tokens" in lines[-1]
    assert "Learning rates (chosen on seed 9 from 0.001, 0.002): plain 0.002; composed 0.002." in lines[-1]


def test_table_and_plot_are_made_again_from_the_record_alone(record: dict[str, Any], tmp_path: Path):
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert cli.main(["reproduce", "upcycling", "--redraw", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "table.md").read_text() == table(record) + "\n"
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"record.json", "table.md", "losses.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [1]}, "must be two or more different ones"),
        ({"seeds": [1, 1]}, "must be two or more different ones"),
        ({"seeds": [0, 100]}, "tuning_seed=100 is one of the measured"),
        ({"learning_rates": [1e-3, 0.0]}, "must be one or more positive numbers"),
        ({"learning_rates": [1e-3, float("inf")]}, "must be one or more positive numbers"),
        ({"steps": 1}, "steps=1 2 or more"),
        ({"hidden_size": 100}, "hidden_size=100 must be a multiple of 64"),
        ({"parent": "a/model", "parent_steps": 9}, "parent_steps of the parent a/model are known"),
        ({"common": '{"seed": 1, "batch_size": 2}'}, "common has seed, which the study decides"),
        ({"dataset": "text.txt"}, "dataset=text.txt and validation_dataset=None: give both, or neither"),
        ({"redraw": True, "output": "nowhere"}, "nowhere holds no record.json"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        draw(Path(str(UpcyclingArguments(**options).output)), table, draw_arms, PLOT)


def test_a_rate_that_one_arm_refuses_is_told_before_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The composition of one arm learns three times as fast as the rest."""
    options = ["--output", str(tmp_path / "study"), "--learning_rates", "1e-3", "4"]
    assert cli.main(["reproduce", "upcycling", *options]) == 2
    assert "times the learning rate 12.0 must be below 1" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--common", '{"batch_sise": 2}'], "batch_sise"),
        (["--common", '{"batch_size": "two"}'], "batch_size"),
        (["--parent", "nowhere/at/all"], "nowhere/at/all does not exist"),
    ],
)
def test_what_no_run_can_be_told_is_refused_before_the_first(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["reproduce", "upcycling", "--output", str(tmp_path / "study"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_an_arm_that_does_not_exist_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["reproduce", "upcycling", "--output", str(tmp_path / "study"), "--arms", "slower"]
    assert cli.main(command) == 2
    assert "['slower'] do not exist; choose from wide, composed, slow" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(("parent", "width"), [("gpt_neox", 1024), ("mixtral", 512)])
def test_parents_of_another_width_have_mlps_of_the_same_ratio(parent: Any, width: int, tmp_path: Path):
    arguments = UpcyclingArguments(parent=parent, hidden_size=256, output=str(tmp_path))
    run, *_ = upcycling_runs.Runs(tmp_path, arguments).planned([], [0], [])
    assert (run.model_config["hidden_size"], run.model_config["intermediate_size"]) == (256, width)
    assert "--hidden_size 256 --seeds" in command_of(arguments)


def test_the_record_tells_which_share_of_the_updates_warms_up_or_has_frozen_weights(tmp_path: Path):
    runs = upcycling_runs.Runs(tmp_path, UpcyclingArguments(steps=240, parent_steps=480))
    shares = runs.settings()
    assert (shares["parent_steps"], shares["steps"]) == (480, 240)
    for run in runs.planned(["frozen_first"], [0], [1e-3]):
        assert run.warmup_steps == shares["warmup_share"] * run.max_steps
    assert run.freeze_parent_steps == shares["frozen_share"] * run.max_steps == 30


def test_only_the_arms_that_are_named_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Composition's learning rate is chosen by the composed arm, which is not measured."""
    trained = pretend_to_train(monkeypatch, [])
    monkeypatch.setattr(upcycling_runs, "upcycle_checkpoint", lambda arguments, family: None)
    command = ["reproduce", "upcycling", "--output", str(tmp_path), "--learning_rates", "1e-3", "2e-3"]
    assert cli.main([*command, "--seeds", "0", "1", "--arms", "slow"]) == 0
    tuning = [
        f"seed-100/{name}" for name in ("parent", *(f"{a}-0.00{n}" for a in ("plain", "composed") for n in (1, 2)))
    ]
    assert sorted(trained[:5]) == sorted(tuning)
    assert {name.rpartition("-")[0] for name in trained[5:] if "parent" not in name} == {
        f"seed-{seed}/{arm}" for seed in (0, 1) for arm in ("plain", "slow")
    }
    command_told = json.loads((tmp_path / "record.json").read_text())["command"]
    assert command_told.endswith("--arms slow")


def test_quick_has_its_own_folder():
    arguments = UpcyclingArguments(quick=True)
    assert (arguments.output, arguments.seeds, arguments.learning_rates) == ("runs/upcycling-quick", [0, 1], [2e-3])
    assert UpcyclingArguments().output == "runs/upcycling"


def test_a_folder_belongs_to_one_study(tmp_path: Path):
    claim(tmp_path / "study", {"steps": 3, "model": TINY}, "upcycling study")
    (tmp_path / "study" / "runs").mkdir()
    claim(tmp_path / "study", {"steps": 3, "model": TINY}, "upcycling study")
    with pytest.raises(UserError, match="holds a study with other steps"):
        claim(tmp_path / "study", {"steps": 4, "model": TINY}, "upcycling study")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="no upcycling study"):
        claim(tmp_path / "foreign", {"steps": 3}, "upcycling study")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shrinks the study's model, and writes small texts; the list names every run that is trained."""
    for name, numbers in (("text.jsonl", range(99)), ("held_out.jsonl", range(99, 110))):
        documents = [{"text": f"The number {n} comes before {n + 1}. " * 5} for n in numbers]
        (tmp_path / name).write_text("\n".join(map(json.dumps, documents)))
    experts = {**TINY, "num_key_value_heads": 1, "num_local_experts": 2}
    monkeypatch.setattr(upcycling_runs, "MODELS", {"gpt_neox": (TINY, 4), "mixtral": (experts, 2)})
    monkeypatch.setattr(upcycling_runs, "PARENT", {**upcycling_runs.PARENT, "vocab_size": 300})
    return record_training(monkeypatch)


def test_a_run_that_diverges_does_not_stop_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Of a parent that diverges there are no arms."""
    trained = pretend_to_train(monkeypatch, ["seed-0/fast-0.002", "seed-2/parent"])
    monkeypatch.setattr(upcycling_runs, "upcycle_checkpoint", lambda arguments, family: None)
    monkeypatch.setattr(upcycling_runs, "widen_mlps", lambda *folders, **options: None)
    command = ["reproduce", "upcycling", "--output", str(tmp_path), "--learning_rates", "2e-3"]
    for _ in range(2):
        assert cli.main([*command, "--seeds", "0", "1", "2", "3"]) == 0
        told = capsys.readouterr().out
        assert "plain diverged on seed 2, of which there is no comparison." in told
        assert "composed, composition 3 x as fast diverged on seeds 0, 2; the comparison is of seeds 1, 3." in told
    assert len(trained) == len(set(trained)) == 4 + 3 * 7


@pytest.mark.parametrize("parent", ["gpt_neox", "mixtral", "llama", "phi3"])
def test_a_parent_with_wider_mlps_has_the_same_logits_and_learns_with_all_of_them(parent: str, tmp_path: Path):
    torch.manual_seed(0)
    others = {"num_key_value_heads": 1, "num_local_experts": 2} if parent == "mixtral" else {}
    models = {
        name: AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                parent, **{**TINY, "vocab_size": 40, "pad_token_id": 0, "intermediate_size": width}, **others
            )
        )
        for name, width in (("plain", 32), ("like", 44))
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    widen_mlps(tmp_path / "plain", tmp_path / "wide", like=tmp_path / "like", seed=1)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.num_parameters() == models["like"].num_parameters()
    tokens = torch.randint(40, (2, 9))
    torch.testing.assert_close(wide(tokens).logits, models["plain"](tokens).logits)
    wide(tokens, labels=tokens).loss.backward()
    mlp = wide.base_model.layers[0].mlp
    read = {
        "gpt_neox": lambda: mlp.dense_4h_to_h.weight.grad,
        "mixtral": lambda: mlp.experts.down_proj.grad.sum(dim=0),
    }.get(parent, lambda: mlp.down_proj.weight.grad)()
    assert read.abs().sum(dim=0).min() > 0, "each new hidden unit has a gradient"


@pytest.mark.slow
def test_a_tiny_study_is_interrupted_continued_and_extended(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = ["--dataset", str(tmp_path / "text.jsonl"), "--validation_dataset", str(tmp_path / "held_out.jsonl")]
    command = ["reproduce", "upcycling", "--output", str(tmp_path / "study"), *OPTIONS, "--seeds", "0", "1", *texts]
    with monkeypatch.context() as patch:
        patch.setattr(upcycling_runs, "upcycle_checkpoint", interrupted)
        assert cli.main(command) == 128 + signal.SIGINT
    assert tiny == ["seed-100/parent", "seed-100/plain-0.01", "seed-100/plain-0.02"]
    assert cli.main(command) == 0
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert len(tiny) == len(set(tiny)) == 3 + 2 + 2 * 8
    assert cli.main(command) == 0
    assert len(tiny) == 21
    check_record(record, tmp_path / "study")


@pytest.mark.slow
def test_parents_of_another_type_are_composed_in_place(tiny: list[str], tmp_path: Path):
    texts = ["--dataset", str(tmp_path / "text.jsonl"), "--validation_dataset", str(tmp_path / "held_out.jsonl")]
    command = ["reproduce", "upcycling", "--output", str(tmp_path / "study"), *OPTIONS[:-1], "--seeds", "0", "1"]
    assert cli.main([*command, "--parent", "mixtral", "--arms", "slow", *texts]) == 0
    assert len(tiny) == len(set(tiny)) == 2 * 3
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert record["settings"]["parent"]["model_type"] == "mixtral"
    assert record["command"].startswith("dynattn reproduce upcycling --parent mixtral --seeds 0 1")
    seed = tmp_path / "study" / "seed-0"
    parent, start = (load_file(seed / name / "model.safetensors") for name in ("parent/model", "upcycled"))
    assert all(weight.equal(start[name]) for name, weight in parent.items())
    trained = load_file(seed / "slow-0.01" / "model" / "model.safetensors")
    gate = "model.layers.0.self_attn.composition.gate_weight"
    assert not start[gate].any() and trained[gate].any()


@pytest.fixture
def trained_llama(tmp_path: Path) -> Path:
    """A small Llama with its tokenizer, as a user has one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **TINY, num_key_value_heads=2, vocab_size=300)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    save_tokenizer(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_trained_parent_is_the_start_of_all_seeds(tiny: list[str], trained_llama: Path, tmp_path: Path):
    texts = ["--dataset", str(tmp_path / "text.jsonl"), "--validation_dataset", str(tmp_path / "held_out.jsonl")]
    options = ["--parent", str(trained_llama), "--steps", "3", "--learning_rates", "1e-2", "--seeds", "0", "1"]
    options += ["--arms", "wide", "composed", "--common", '{"batch_size": 2, "sequence_length": 32}']
    command = ["reproduce", "upcycling", "--output", str(tmp_path / "study"), *options, *texts]
    assert cli.main(command) == 0
    assert tiny == [f"seed-{seed}/{arm}-0.01" for seed in (0, 1) for arm in ("plain", "wide", "composed")]
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert (record["settings"]["parent"], record["parents"]) == ("llama", [])
    assert record["settings"].keys() >= {"steps", "warmup_share", "frozen_share", "sha256", "common"}
    assert record["command"].startswith("dynattn reproduce upcycling --parent llama --seeds 0 1")
    arms = {name: arm["runs"][0] for name, arm in record["arms"].items()}
    assert {run["tokens"] for run in arms.values()} == {3 * 2 * 32}
    assert arms["plain"]["parameters"] < arms["composed"]["parameters"]
    assert arms["wide"]["parameters"] == pytest.approx(arms["composed"]["parameters"], abs=3 * TINY["hidden_size"])
    upcycled = tmp_path / "study" / "seed-0" / "upcycled"
    parent, start = (load_file(folder / "model.safetensors") for folder in (trained_llama, upcycled))
    assert all(weight.equal(start[name]) for name, weight in parent.items())
    save_file({name: 2 * weight for name, weight in parent.items()}, trained_llama / "model.safetensors")
    assert cli.main(command) == 2, "the study would mix runs of two parents"


def test_a_parent_is_composed_in_place_with_groups_a_seed_and_its_tokenizer(
    trained_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = {}
    for name, groups, seed in (("first", 2, 0), ("again", 2, 0), ("other seed", 2, 1), ("one group", 1, 0)):
        compose_in_place(trained_llama, tmp_path / name, groups, seed)
        weights = load_file(tmp_path / name / "model.safetensors")
        made[name] = weights["model.layers.0.self_attn.composition.factor_weight"]
        assert weights["model.layers.0.self_attn.composition.gate_weight"].shape[1] == groups
    assert made["first"].equal(made["again"]) and not made["first"].equal(made["other seed"])
    tokenizers = {(folder / "tokenizer.json").read_bytes() for folder in (trained_llama, tmp_path / "first")}
    assert len(tokenizers) == 1
    monkeypatch.setattr(changed_parents, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match="so what they learn does not compare"):
        compose_in_place(trained_llama, tmp_path / "refused", groups=1, seed=0)
    assert not (tmp_path / "refused").exists()


def test_a_parent_that_would_begin_with_other_logits_is_refused(trained_llama: Path):
    model = AutoModelForCausalLM.from_pretrained(trained_llama)
    wider = AutoModelForCausalLM.from_pretrained(trained_llama)
    with torch.no_grad():
        wider.model.layers[0].mlp.down_proj.weight.mul_(2)
    check_same_logits(model, model)
    with pytest.raises(UserError, match="logits of LlamaForCausalLM differ from those of LlamaForCausalLM by"):
        check_same_logits(model, wider)


def test_a_parent_whose_mlps_have_no_known_width_cannot_be_widened(tmp_path: Path):
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=40)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"\(gpt2\) has no intermediate_size to widen; give --arms without wide"):
        widen_mlps(tmp_path / "gpt2", tmp_path / "wide", like=tmp_path / "gpt2", seed=0)
    assert not (tmp_path / "wide").exists()


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def check_record(record: dict[str, Any], folder: Path) -> None:
    arms = {name: arm["runs"] for name, arm in record["arms"].items()}
    chosen, losses = record["settings"]["chosen"], record["settings"]["tuning_losses"]
    for name in ("plain", "composed"):
        assert losses[name][f"{chosen[name]:g}"] == min(losses[name].values())
    assert chosen["wide"] == chosen["plain"]
    assert chosen["frozen_first"] == chosen["fast"] == chosen["slow"] == chosen["composed"]
    for name, ratio in (("slow", 0.1), ("fast", 3)):
        assert [run["composition_learning_rate"] for run in arms[name]] == [ratio * chosen["composed"]] * 2
    for runs in (record["parents"], *arms.values()):
        assert [run["seed"] for run in runs] == [0, 1]
        assert {run["tokens"] for run in runs} == {3 * 1024}
        assert len({run["validation"][-1]["loss"] for run in runs}) == 2
    plain, wide, composed = (arms[name][0]["parameters"] for name in ("plain", "wide", "composed"))
    assert plain < composed
    assert wide == pytest.approx(composed, abs=TINY["hidden_size"] + 1)
    assert [run["freeze_parent_steps"] for run in arms["frozen_first"]] == [1, 1]
    assert arms["frozen_first"][0]["validation"] != arms["composed"][0]["validation"]
    shared = load_file(folder / "seed-0" / "parent" / "model" / "model.safetensors")["gpt_neox.embed_in.weight"]
    start = load_file(folder / "seed-0" / "upcycled" / "model.safetensors")["model.embed_tokens.weight"]
    assert shared.equal(start)
    assert record["command"] == "dynattn reproduce upcycling --seeds 0 1 --tuning_seed 100 " + (
        "--learning_rates 0.01 0.02 --parent_steps 3 --steps 3 --dataset text.jsonl --validation_dataset held_out.jsonl"
    )
    assert len(record["versions"]) == len(record["hardware"]) == len(record["validation_targets"]) == 1
