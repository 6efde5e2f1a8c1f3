"""Whole runs in this process: what they leave behind, resuming, equal updates, and every way to go wrong."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import assert_same_weights, weights_of
from cases.training import LLAMA, arguments, assert_same_run, curve, killed_run, losses, run, without_timing
from cases.versions import needs_transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from dynattn import DCFormerConfig
from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.common.environment import source_commit
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.flops import ModelFlops
from dynattn.scripts.pretrain import PretrainArguments, Result
from dynattn.scripts.pretrain import trainer as trainer_module
from dynattn.scripts.pretrain.card import write_card
from dynattn.scripts.pretrain.data.documents import load_documents
from dynattn.scripts.pretrain.data.tokenizer import train_bpe
from dynattn.scripts.pretrain.model_config import pad_vocabulary
from dynattn.scripts.pretrain.outputs.metrics import read_metrics


def test_a_finished_run_learned_and_leaves_everything(finished: Result):
    losses = [line["loss"] for line in read_metrics(finished.output / "metrics.jsonl", "train")]
    assert finished.validation_loss < losses[0] and finished.train_loss == losses[-1] != losses[-2]
    names = {path.name for path in finished.output.iterdir()}
    assert names == {
        "run.json",
        "tokenizer",
        "data",
        "checkpoints",
        "metrics.jsonl",
        "tensorboard",
        "model",
        "result.json",
    }
    assert [path.name for path in sorted((finished.output / "checkpoints").iterdir())] == [
        "step-000004", "step-000008", "step-000012",
    ]  # fmt: skip
    stored = json.loads((finished.output / "result.json").read_text())
    assert stored["validation_loss"] == finished.validation_loss
    assert stored["arguments"]["learning_rate"] == 1e-2
    assert stored["commit"] == source_commit() and stored["date"] == finished.date
    assert finished.steps == 12
    assert finished.tokens == 12 * 4 * 32
    assert list((finished.output / "tensorboard").iterdir())


def test_final_model_reloads_and_scores_what_was_reported(corpus: Path, tmp_path: Path):
    """Bits per byte from the saved files alone: each document by itself, behind its start token."""
    result = run(tmp_path / "run", corpus, sequence_length=256, max_steps=1, warmup_steps=0)
    model = AutoModelForCausalLM.from_pretrained(result.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    texts = load_documents(arguments(result.output, corpus)).validation["text"]
    nats, targets = 0.0, 0
    for text in texts:
        tokens = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([tokens])).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum").item()
        targets += len(tokens) - 1
    text_bytes = sum(len(text.encode()) for text in texts)
    assert result.validation_loss == pytest.approx(nats / targets, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / torch.log(torch.tensor(2.0)).item() / text_bytes, rel=1e-5)
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_final_card_is_valid_and_quotes_the_measurements(finished: Result):
    card = ModelCard.load(finished.model / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    values = {result.metric_type: result.metric_value for result in card.data.eval_results or []}
    assert values == pytest.approx(
        {"loss": finished.validation_loss, "perplexity": finished.perplexity, "bits_per_byte": finished.bits_per_byte},
        rel=1e-4,
    )
    assert f"| validation loss (nats per token) | {finished.validation_loss:.4f} |" in card.text
    assert str(finished.output.parent) not in card.content


def test_final_card_names_settings_that_are_not_the_defaults(finished: Result, tmp_path: Path):
    given = PretrainArguments(output="runs", optimizer="muon", schedule="wsd", packing="best_fit", max_steps=7)
    write_card(tmp_path, given, finished, "llama")
    rows = (tmp_path / "README.md").read_text().splitlines()
    assert {"| optimizer | muon |", "| schedule | wsd |", "| packing | best_fit |", "| max_steps | 7 |"} <= set(rows)
    assert not any("muon_momentum" in row for row in rows)


def test_options_that_a_run_does_not_read_are_named(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = train_bpe([["one two three"]], vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = {"decay_share": 0.5, "max_bad_updates": 3, "vocab_size": 400, "tokenizer": str(tmp_path / "tokenizer")}
    run(tmp_path / "run", corpus, max_steps=2, warmup_steps=0, **given)
    assert [line for line in capsys.readouterr().out.splitlines() if "no effect" in line] == [
        "vocab_size=400 has no effect: it needs tokenizer: bpe",
        "decay_share=0.5 has no effect: it needs schedule: wsd",
        "max_bad_updates=3 has no effect: it needs on_bad_update: skip or rollback",
    ]
    usual = {"vocab_size": pad_vocabulary(len(tokenizer)), "tokenizer": str(tmp_path / "tokenizer")}
    run(tmp_path / "usual", corpus, max_steps=2, warmup_steps=0, **usual)
    assert "no effect" not in capsys.readouterr().out


def test_final_card_imports_the_package_that_registers_the_model(
    finished: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    variant = type("MyConfig", (DCFormerConfig,), {"__module__": "mine.configuration", "model_type": "mine"})
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "mine", variant)
    for model_type, package in {"mine": "mine", "dcformer": "dynattn", "llama": "dynattn"}.items():
        write_card(tmp_path, PretrainArguments(output="runs"), finished, model_type)
        assert f"```python\nimport {package}  #" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("init_from", "told", "base_model"),
    [
        ("EleutherAI/pythia-70m", "EleutherAI/pythia-70m", "EleutherAI/pythia-70m"),
        ("/home/me/runs/parent", "parent", None),  # which is not on this machine
        ("runs/first/parent", "parent", None),
        ("HERE", "HERE", None),
    ],
)
def test_final_card_tells_no_path_of_a_parent(
    init_from: str, told: str, base_model: str | None, finished: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("HERE").mkdir()
    write_card(tmp_path, PretrainArguments(output="runs", init_from=init_from), finished, "llama")
    card = ModelCard.load(tmp_path / "README.md")
    assert f"from the weights of `{told}`." in card.text
    assert card.data.base_model == base_model


@pytest.mark.parametrize("step", [3, 9, 12])
def test_a_killed_run_resumes_to_the_same_curve_and_weights(step: int, finished: Result, corpus: Path, tmp_path: Path):
    killed_run(tmp_path / "run", corpus, step)
    resumed = run(tmp_path / "run", corpus)
    assert_same_run(resumed.output, finished.output)
    assert resumed.validation_loss == finished.validation_loss


def test_a_run_killed_while_it_saves_the_model_only_saves_again(finished: Result, corpus: Path, tmp_path: Path):
    copy = Path(shutil.copytree(finished.output, tmp_path / "copy"))
    (copy / "model").rename(copy / ".model.partial")
    again = run(copy, corpus)
    assert again.validation_loss == finished.validation_loss
    assert without_timing(copy) == without_timing(finished.output)
    assert not (copy / ".model.partial").exists()


def test_accumulation_and_batch_size_make_the_same_update(corpus: Path, tmp_path: Path):
    """Documents differ in length, so forward passes differ in their number of targets."""
    changes = {"model_config": {**LLAMA, "attention_dropout": 0.0}, "max_steps": 6}
    one = run(tmp_path / "one", corpus, **changes)
    four = run(tmp_path / "four", corpus, **changes, batch_size=1, gradient_accumulation_steps=4)
    for name, tolerance in {"loss": 1e-4, "grad_norm": 1e-3}.items():
        ours, theirs = (curve(result.output, name, split="train") for result in (four, one))
        assert ours == [pytest.approx(line, rel=tolerance) for line in theirs]
    assert four.validation_loss == pytest.approx(one.validation_loss, rel=1e-4)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 24}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROUTER = "output_router_logits"
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_chunk_size": 16, "mamba_expand": 2}
# The fields of models that add more to a loss than that of the targets, and by which field and value they do.
ADDING: dict[str, tuple[dict[str, Any], str, Any]] = {
    "mixtral": ({**SMALL, **EXPERTS, "num_attention_heads": 2, "router_aux_loss_coef": 1.0}, ROUTER, True),
    "jetmoe": ({**SMALL, **EXPERTS, "kv_channels": 4, "aux_loss_coef": 1.0}, ROUTER, True),
    "bamba": ({**SMALL, **MAMBA, "num_attention_heads": 2, "attn_layer_indices": [1]}, "z_loss_coefficient", 1.0),
}


READS_ITS_FIELD = needs_transformers("5.19")


@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("jetmoe", marks=READS_ITS_FIELD), "bamba"])
def test_what_a_model_adds_to_losses_counts_once_in_an_update_and_not_in_validation(
    model_type: str, corpus: Path, tmp_path: Path
):
    """With a rate of nearly zero the weights stay, so that only what is added to the losses differs."""
    fields, switch, value = ADDING[model_type]
    trained: dict[str, float] = {}
    validated: list[float] = []
    for name, passes, adds in (("without", 1, False), ("one", 1, True), ("four", 4, True)):
        config = {**fields, switch: value if adds else type(value)()}
        model = {"model_type": model_type, "model_config": config, "mask_documents": False}
        split = {"batch_size": 4 // passes, "gradient_accumulation_steps": passes}
        changes = {**model, **split, "learning_rate": 1e-12, "max_steps": 1, "warmup_steps": 0}
        result = run(tmp_path / name, corpus, **changes)
        trained[name] = float(losses(result.output, "train")[0])
        validated.append(result.validation_loss)
    once = trained["one"] - trained["without"]
    assert once > 0.5
    assert trained["four"] - trained["without"] == pytest.approx(once, rel=0.1)  # tokens of one pass have another mean
    assert validated == [pytest.approx(validated[0], rel=1e-6)] * 3


def test_epochs_count_updates_and_old_checkpoints_go(corpus: Path, tmp_path: Path):
    result = run(tmp_path / "run", corpus, max_steps=None, epochs=2.0, save_every=2, keep_checkpoints=1)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{result.steps:06d}"]
    training_tokens = (tmp_path / "run" / "data" / "train" / "tokens.bin").stat().st_size // 4
    assert result.steps == -(-2 * (training_tokens // 32) // 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"mixed_precision": "bf16"},
        {"gradient_checkpointing": True},
        {"mask_documents": False},
        {"dataloader_workers": 1},
    ],
)
def test_a_run_with_a_switch_learns_what_a_run_without_it_learns(
    changes: dict[str, Any], finished: Result, corpus: Path, tmp_path: Path
):
    switched = run(tmp_path / "run", corpus, **changes)
    assert switched.validation_loss == pytest.approx(finished.validation_loss, rel=0.02)
    assert switched.validation_loss < read_metrics(switched.output / "metrics.jsonl", "train")[0]["loss"]


def test_speed_counts_what_the_model_needs(corpus: Path, tmp_path: Path, finished: Result):
    model = {"model_type": None, "model_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}}
    changes = {"max_steps": 2, "warmup_steps": 0, "mask_documents": False, "gradient_accumulation_steps": 2}
    result = run(tmp_path / "run", corpus, **model, **changes)
    flops = ModelFlops.of(AutoModelForCausalLM.from_pretrained(result.model))
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl", "train"):
        of_a_token = line["flops_per_second"] / line["tokens_per_second"]
        assert of_a_token == pytest.approx(flops.training(torch.arange(32)) / 32, rel=1e-6)
        assert line["mfu"] == line["flops_per_second"] / line["gemm_flops_per_second"]
    assert result.mfu is not None
    assert 0 < result.mfu < 1
    assert finished.mfu is None  # a Llama


def test_dcformer_trains_resumes_generates_and_continues_elsewhere(corpus: Path, tmp_path: Path):
    dcformer = {
        "model_type": None,
        "model_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    }
    straight = run(tmp_path / "straight", corpus, max_steps=5, **dcformer)
    killed_run(tmp_path / "killed", corpus, 5, max_steps=5, **dcformer)
    run(tmp_path / "killed", corpus, max_steps=5, **dcformer)
    assert without_timing(tmp_path / "killed") == without_timing(straight.output)
    model = AutoModelForCausalLM.from_pretrained(straight.model)
    assert model.config.model_type == "dcformer"
    tokenizer = AutoTokenizer.from_pretrained(straight.model)
    assert (
        model.generate(**tokenizer("The number", return_tensors="pt"), max_new_tokens=3, do_sample=False).shape[1] > 2
    )
    fresh = {"model_type": None, "model_config": None, "init_from": str(straight.model)}
    continued = run(tmp_path / "continued", corpus, max_steps=2, warmup_steps=1, learning_rate=1e-6, **fresh)
    assert continued.validation_loss == pytest.approx(straight.validation_loss, abs=1e-3)


def test_measuring_the_composition_changes_nothing(corpus: Path, tmp_path: Path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "compose_dropout": 0.5}
    options: dict[str, Any] = {"model_type": None, "model_config": sizes, "max_steps": 4, "warmup_steps": 0}
    curves = [
        curve(run(tmp_path / str(every), corpus, eval_every=every, **options).output, "step", "loss", split="train")
        for every in (1, 4)
    ]
    assert curves[0] == curves[1]


def test_another_run_is_not_overwritten_unless_asked(finished: Result, corpus: Path, tmp_path: Path):
    before = {path: path.stat().st_mtime_ns for path in finished.output.rglob("*")}
    with pytest.raises(UserError, match="already holds a finished model"):
        run(finished.output, corpus)
    killed_run(tmp_path / "killed", corpus, 5)
    with pytest.raises(UserError, match="already holds a run with step-000004"):
        run(tmp_path / "killed", corpus, resume="never")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"holds thesis\.tex and no run"):
            run(tmp_path / "foreign", corpus, overwrite=overwrite)
    (tmp_path / "other" / "data").mkdir(parents=True)
    (tmp_path / "other" / "run.json").write_text('{"name": "of another tool"}')
    with pytest.raises(UserError, match=r"holds data and no run"):
        run(tmp_path / "other", corpus)
    shutil.copytree(tmp_path / "killed", tmp_path / "a damaged run")
    (tmp_path / "a damaged run" / "run.json").write_text('{"output": "dam')
    with pytest.raises(UserError, match=r"run\.json is damaged; to go on, .* --resume '.*/step-000004'"):
        run(tmp_path / "a damaged run", corpus)
    with pytest.raises(UserError, match="is a file"):
        run(corpus, corpus)
    assert before == {path: path.stat().st_mtime_ns for path in finished.output.rglob("*")}
    tokenizer = str(tmp_path / "killed" / "tokenizer")  # which is copied before it is deleted
    assert run(tmp_path / "killed", corpus, overwrite=True, max_steps=3, tokenizer=tokenizer).steps == 3
    assert curve(tmp_path / "killed", "step", split="train") == [[1], [2], [3]]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_mistake_changes_nothing(overwrite: bool, corpus: Path, tmp_path: Path):
    killed_run(tmp_path / "run", corpus, 5)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for changes, message in (
        ({"vocab_size": 280, "model_config": {"vocab_size": 64}}, "280 tokens, more than the model's vocab_size=64"),
        ({"dataset": "missing.txt"}, "missing.txt"),
        ({"sequence_length": 5000}, "5000"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path / "run", corpus, overwrite=overwrite, **changes)
        assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
        assert not (tmp_path / "run" / ".prepared").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_config": {**LLAMA, "hidden_size": 32}}, r"model.hidden_size \(was 16, is 32\)"),
        ({"learning_rate": 2e-2}, r"changed: learning_rate \(was 0.01, is 0.02\)"),
        ({"max_steps": 20}, r"max_steps \(was 12, is 20\)"),
        ({"vocab_size": 290}, r"tokenizer \(was bpe 300, is bpe 290\)"),
        ({"validation_share": 0.2}, "training_data .*, validation_data"),
        ({"batch_size": 2}, r"global_batch \(was 4, is 2\)"),
        ({"sequence_length": 16}, r"sequence_length \(was 32, is 16\)"),
    ],
)
def test_resuming_another_run_names_what_changed(
    changes: dict[str, Any], message: str, interrupted: Path, corpus: Path
):
    with pytest.raises(UserError, match=message):
        run(interrupted, corpus, **changes)


def test_an_older_checkpoint_resumes_by_its_path(interrupted: Path, finished: Result, corpus: Path, tmp_path: Path):
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    run(output, corpus, resume=str(output / "checkpoints" / "step-000004"))
    assert without_timing(output) == without_timing(finished.output)
    elsewhere = run(tmp_path / "new", corpus, resume=str(interrupted / "checkpoints" / "step-000008"))
    assert without_timing(elsewhere.output) == [line for line in without_timing(finished.output) if line["step"] > 8]
    with pytest.raises(UserError, match="there is no checkpoint nowhere"):
        run(tmp_path / "other", corpus, resume="nowhere")
    for place in (output, output / "checkpoints"):
        with pytest.raises(UserError, match=f"{place} is no checkpoint; the newest of this run is .*/step-000012"):
            run(tmp_path / "other", corpus, resume=str(place))
    with pytest.raises(UserError, match=f"{tmp_path} is no checkpoint, whose name is step-NNNNNN"):
        run(tmp_path / "other", corpus, resume=str(tmp_path))


@pytest.mark.parametrize("changes", [{"max_steps": 14}, {"overwrite": True}], ids=["extended", "overwritten"])
def test_files_of_the_users_in_the_folder_of_the_model_stay(
    changes: dict[str, Any], finished: Result, corpus: Path, tmp_path: Path
):
    output = Path(shutil.copytree(finished.output, tmp_path / "run"))
    (output / "model" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"model also holds notes.txt, which would be lost; move it"):
        run(output, corpus, **changes)
    assert (output / "model" / "notes.txt").exists()


def test_models_are_not_compiled_without_a_compiler(
    finished: Result, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = Path(shutil.copytree(finished.output, tmp_path / "run"))
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(UserError, match=r"compile needs a C\+\+ compiler, and no-such-compiler was not found"):
        run(output, corpus, compile=True, overwrite=True)
    assert (output / "model").is_dir()


def test_a_checkpoint_of_the_last_update_becomes_the_same_model_elsewhere(
    finished: Result, corpus: Path, tmp_path: Path
):
    """No update is left, so nothing of the training is measured there."""
    again = run(tmp_path / "new", corpus, resume=str(finished.output / "checkpoints" / "step-000012"))
    assert_same_weights(weights_of(again.model), weights_of(finished.model))
    assert again.validation_loss == finished.validation_loss
    assert (again.train_loss, again.tokens_per_second) == (None, None)
    assert "tokens/s" in finished.summary()
    assert "tokens/s" not in again.summary()
    card = (again.model / "README.md").read_text()
    assert "| tokens per second (median) | not measured |" in card
    assert "training loss" not in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "model_type=lama is not known"),
        ({"model_type": "llama", "model_size": "tiny"}, "llama has no named sizes"),
        (
            {"model_type": "dcformer", "model_size": "huge", "model_config": None},
            "model_size=huge is not a size of dcformer; choose from",
        ),
        ({"model_config": {"hidden_sise": 8}}, r"model_config names \['hidden_sise'\]"),
        ({"model_config": {**LLAMA, "hidden_size": "8"}}, "model_config is not valid for llama"),
        ({"model_config": {**LLAMA, "num_attention_heads": 3}}, "model_config is not valid for llama"),
        ({"model_config": {**LLAMA, "vocab_size": 100}}, "tokens, more than the model's vocab_size=100"),
        ({"model_config": {**LLAMA, "max_position_embeddings": 16}}, "sequence_length=32 is above .* of 16 tokens"),
        ({"attn_implementation": "nothing"}, "cannot build the model 'llama'"),
        ({"sequence_length": 2000}, "fewer than one sequence of sequence_length=2000"),
        ({"tokenizer": "missing/folder"}, "cannot load the tokenizer 'missing/folder'"),
        ({"init_from": "missing/folder", "model_type": None, "model_config": None}, "cannot load"),
        ({"text_column": "body"}, "has no column 'body'"),
        ({"dataset": "builtin", "validation_split": "test"}, "validation_split=test is a split of dataset or"),
        ({"validation_split": "test"}, "validation_split=test is a split of a Hub dataset, not of .*corpus"),
        ({"train_split": "test"}, "train_split=test is a split of a Hub dataset, not of .*corpus"),
        ({"shard_processes": 2}, "shard_processes=2 is for engine=hsdp, not ddp"),
        ({"cuda_graphs": True}, "cuda_graphs are of compiled models; give compile, too"),
        ({"cuda_graphs": True, "compile": True}, "cuda_graphs need a GPU with CUDA, and this run is on cpu"),
        ({"resume": ""}, "resume is empty"),
        ({"vocab_size": 2**22 + 1}, "vocab_size=4194305 is more than memory is made for"),
        ({"position_sampling": "jitter", "position_limit": 31}, "position_limit=31 is below sequence_length=32"),
    ],
)
def test_foreseeable_mistakes_are_one_clear_error(changes: dict[str, Any], message: str, corpus: Path, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", corpus, **changes)
    assert not (tmp_path / "run").exists()


def test_a_published_mixer_is_a_setting_of_the_model(corpus: Path, tmp_path: Path):
    config = {"mixer": "differential", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    result = run(tmp_path / "run", corpus, model_type="dcpythia", model_config=config, max_steps=3)
    saved = json.loads((result.model / "config.json").read_text())
    assert saved["differential_heads"]
    assert "mixer" not in saved
    with pytest.raises(UserError, match="mixer='knocking_heads' mixes the features"):
        run(tmp_path / "other", corpus, model_type="dcformer", model_config={"mixer": "knocking_heads"})


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_parent_without_all_weights_is_refused(damage: str, finished: Result, corpus: Path, tmp_path: Path):
    parent = Path(shutil.copytree(finished.model, tmp_path / "parent"))
    if damage == "cut":
        (parent / "model.safetensors").write_bytes((parent / "model.safetensors").read_bytes()[:-100])
    else:
        weights = load_file(parent / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, parent / "model.safetensors", metadata={"format": "pt"})
    message = {
        "missing": r"lacks 1 weights of the model, such as model.layers.1.mlp.up_proj",
        "cut": "cannot build the .* weight file is truncated or damaged .+; copy or save it again",
    }
    with pytest.raises(UserError, match=message[damage]):
        run(tmp_path / "run", corpus, init_from=str(parent), model_type=None, model_config=None)


def test_a_given_tokenizer_must_fit_a_given_model(finished: Result, corpus: Path, tmp_path: Path):
    train_bpe([builtin_documents("validation")], vocab_size=400).save_pretrained(tmp_path / "large")
    changes = {
        "init_from": str(finished.model),
        "model_type": None,
        "model_config": None,
        "tokenizer": str(tmp_path / "large"),
    }
    with pytest.raises(UserError, match=r"more than the model's vocab_size=\d+; give the tokenizer that"):
        run(tmp_path / "run", corpus, **changes)


def test_validating_on_the_training_data_is_refused(corpus: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"the validation data is the training data of corpus\.jsonl"):
        run(tmp_path / "run", corpus, validation_dataset=str(corpus))


def test_an_update_without_targets_is_not_made(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As of the first turns of long conversations, in which only the answers are learned."""
    accumulate = trainer_module.Trainer._accumulate

    def hide(self: trainer_module.Trainer, batches: list[Any]) -> torch.Tensor:
        if self.progress.step == 6:
            batches = [{**batch, "labels": torch.full_like(batch["input_ids"], -100)} for batch in batches]
        return accumulate(self, batches)

    monkeypatch.setattr(trainer_module.Trainer, "_accumulate", hide)
    result = run(tmp_path / "run", corpus)
    losses = curve(result.output, "step", "loss", split="train")
    assert [step for step, loss in losses if loss is None] == [7] and len(losses) == 12
    assert not (tmp_path / "run" / "incidents").exists()


def test_the_arguments_of_a_run_are_stored(finished: Result, corpus: Path):
    stored = json.loads((finished.output / "run.json").read_text())
    assert stored == dataclasses.asdict(arguments(finished.output, corpus))
