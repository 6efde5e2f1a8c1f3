"""`dynattn inspect` shows what a model really computes, and refuses what it cannot show."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases.checkpoints import save_tokenizer
from cases.html_page import Page
from cases.models import make_model
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)

from dynattn import with_composed_heads
from dynattn.modeling.ops.distance_tables import NO_TABLES
from dynattn.scripts.cli import main
from dynattn.scripts.common import environment
from dynattn.scripts.common.atomic_folder import MACHINE
from dynattn.scripts.common.composition_observation import visible_pairs
from dynattn.scripts.inspect import job
from dynattn.scripts.inspect.arguments import InspectArguments
from dynattn.scripts.inspect.figures import draw_maps
from dynattn.scripts.inspect.measures import ablate, head_flow, leave_out, loss_of, measure_layer, observe

IDS = torch.randint(0, 97, (1, 20), generator=torch.Generator().manual_seed(7))
SIDES = ("query", "key")


def test_observing_changes_nothing_and_keeps_the_models_own_maps() -> None:
    model = make_model()
    with torch.no_grad():
        logits = model(IDS).logits
        layers, loss = observe(model, IDS)
        assert loss == pytest.approx(float(cross_entropy(logits[0, :-1], IDS[0, 1:])), rel=1e-5)
        assert torch.equal(model(IDS).logits, logits)  # the model is as it was
        maps = model(IDS, output_attentions=True).attentions
    assert len(layers) == len(maps) == 3
    for layer, expected in zip(layers, maps, strict=True):
        torch.testing.assert_close(layer.maps.composed_probs, expected)
        assert set(layer.stages) == {"pre", "post"}


def test_heads_composed_in_place_are_observed_as_those_of_our_models(tmp_path: Path) -> None:
    """Of a Llama with the weights of a DCFormer."""
    ours = make_model(use_qk_norm=False, layer_types=None, sliding_window=None)
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(ours.config, name) for name in (*fields, "num_key_value_heads", "rms_norm_eps")}
    model = with_composed_heads(LlamaForCausalLM)(LlamaConfig(**sizes)).eval()
    model.load_state_dict(ours.state_dict())
    (expected, loss), (found, same_loss) = observe(ours, IDS), observe(model, IDS)
    assert same_loss == pytest.approx(loss, rel=1e-5) and len(found) == len(expected) == 3
    for layer, other in zip(found, expected, strict=True):
        torch.testing.assert_close(layer.maps.composed_probs, other.maps.composed_probs, atol=1e-4, rtol=1e-4)
        assert torch.equal(layer.visible, other.visible)
    model.config.vocab_size = 300
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    command = ["inspect", str(tmp_path / "model"), "--output", str(tmp_path / "seen"), "--max_tokens", "8"]
    assert main(command) == 0


@pytest.mark.parametrize(("stage", "field"), [("pre", "compose_pre"), ("post", "compose_post")])
def test_leaving_out_a_stage_is_the_model_without_it(stage: str, field: str) -> None:
    model, other = make_model(), make_model(**{field: False})
    weights = model.state_dict()
    kept = slice(2, 4) if stage == "pre" else slice(0, 2)  # components are pre-query, pre-key, post-query, post-key
    for name in list(weights):
        if "composition" in name:
            axis = 1 if name.endswith("factor_weight") else 2
            weights[name] = weights[name].movedim(axis, 0)[kept].movedim(0, axis)
    other.load_state_dict(weights)
    assert loss_of(model, IDS, change=leave_out(stage, "all")) == pytest.approx(loss_of(other, IDS), rel=1e-5)


@pytest.mark.parametrize("component", range(4))
@torch.no_grad()
def test_leaving_out_a_gate_is_the_model_whose_weights_of_it_are_zero(component: int) -> None:
    model, (stage, side) = make_model(), divmod(component, 2)
    without = loss_of(model, IDS, change=leave_out(("pre", "post")[stage], f"{SIDES[side]}_gate"))
    for name, weight in model.named_parameters():
        if name.endswith("gate_weight"):
            weight[:, :, component] = 0
    assert without == pytest.approx(loss_of(model, IDS), rel=1e-5)


def test_every_term_of_every_stage_is_left_out_once() -> None:
    model = make_model()
    layers, loss = observe(model, IDS)
    rows = ablate(model, IDS, layers, loss)
    terms = ["all", *(f"{side}_{kind}" for kind in ("low_rank", "gate") for side in SIDES)]
    assert [(row["stage"], row["term"]) for row in rows] == [
        (stage, term) for stage in ("pre", "post") for term in terms
    ]
    assert all(row["difference"] == pytest.approx(row["loss"] - loss) for row in rows)


def test_a_decoder_that_sees_pictures(tmp_path: Path) -> None:
    """Whose configuration keeps the number of positions in the part of the decoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 8}
    config = Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14})
    model = with_composed_heads(Gemma3ForConditionalGeneration)(config)
    save_tokenizer(tmp_path)
    arguments = InspectArguments("model", "seen", text="many words " * 9)
    tokens, _ = job.read_tokens(AutoTokenizer.from_pretrained(tmp_path), model, arguments)
    assert tokens.shape == (1, 8)


def test_layers_that_never_attend_are_not_counted(tmp_path: Path) -> None:
    """The cross-attention of a BART that decodes without an encoder."""
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 300}
    config = BartConfig(**sizes, encoder_layers=1, encoder_attention_heads=2, max_position_embeddings=32)
    with_composed_heads(BartForCausalLM)(config).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    command = ["inspect", str(tmp_path / "model"), "--output", str(tmp_path / "seen"), "--max_tokens", "8"]
    assert main(command) == 0
    assert len(json.loads((tmp_path / "seen" / "measures.json").read_text())["layers"]) == 2
    assert main([*command, "--overwrite", "--layer", "2"]) == 2


def test_a_stage_without_terms_is_no_stage_of_the_layer() -> None:
    options = {"compose_low_rank": False, "compose_gate": False, "num_key_value_heads": 6}
    model = make_model(**options, differential_heads=True)
    layers, loss = observe(model, IDS)
    assert all(set(layer.stages) == {"post"} == set(measure_layer(layer)) for layer in layers)
    assert {row["stage"] for row in ablate(model, IDS, layers, loss)} == {"post"}


def test_the_flow_between_heads_adds_up_to_the_composed_maps_where_nothing_cancels() -> None:
    [layer, *_], _ = observe(make_model(), IDS)
    flow = head_flow(layer, "post")
    assert flow.shape == (6, 6)
    composed = layer.maps.composed_probs[0, :, layer.visible].abs().mean(1)
    assert (flow.sum(0) >= composed - 1e-6).all()


@pytest.mark.parametrize("stage", ["pre", "post"])
def test_maps_of_a_head_are_drawn_in_one_scale_and_hidden_pairs_white(stage: str) -> None:
    [layer, *_], _ = observe(make_model(), IDS)
    images = [axes.images[0] for axes in draw_maps(layer, stage).axes]
    for before, after in zip(images[:6], images[6:], strict=True):
        drawn = torch.stack([torch.as_tensor(image.get_array()) for image in (before, after)])
        assert not drawn[:, ~layer.visible].any()
        largest = drawn.abs().max().item()
        assert before.get_clim() == after.get_clim() == pytest.approx((-largest, largest))


def test_pairs_that_a_head_sees_count_even_where_its_probability_underflows() -> None:
    """The steepest slope of ALiBi makes far pairs of a long text 0, which other heads see well."""
    model = make_model(position_scheme="alibi", num_attention_heads=8, num_key_value_heads=8)
    layers, _ = observe(model, torch.randint(0, 97, (1, 300)))
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    probs = layers[1].maps.probs
    assert probs is not None and (probs[0, 0] != 0).sum() < causal.sum()
    assert torch.equal(layers[1].visible, causal)
    assert torch.equal(layers[0].visible, causal.triu(-8)), "a sliding window of nine tokens"


def test_documents_and_padding_hide_pairs() -> None:
    query = torch.zeros(1, 1, 4, 2)
    call = {"attention_mask": None, "first_keys": None, "is_causal": True, "sliding_window": None}
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    documents = visible_pairs(query, query, NO_TABLES, call | {"first_keys": torch.tensor([[0, 0, 2, 2]])})
    assert torch.equal(documents, causal & (torch.arange(4) // 2 == torch.arange(4)[:, None] // 2))
    padding = torch.tensor([False, True, True, True])
    for mask in (padding, torch.where(padding, 0.0, torch.finfo(torch.float32).min)):
        visible = visible_pairs(query, query, NO_TABLES, call | {"attention_mask": mask[None, None, None]})
        assert torch.equal(visible, causal & padding)
    assert visible_pairs(query, query, NO_TABLES, call | {"is_causal": False}).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "model"
    make_model(vocab_size=300).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_one_page_holds_everything(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "Heads are composed before and after the softmax, <b>each pair</b> by a matrix of its own."
    began = time.perf_counter()
    assert main(["inspect", str(checkpoint), "--output", str(tmp_path / "seen"), "--text", text]) == 0
    seconds = time.perf_counter() - began
    assert capsys.readouterr().out == f"wrote {tmp_path / 'seen' / 'page.html'}\n"
    page = (tmp_path / "seen" / "page.html").read_text()
    links = Page(page).links
    assert len(links) == 8
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert len(page) < 5_000_000
    record = json.loads((tmp_path / "seen" / "measures.json").read_text())
    assert len(record["layers"]) == 3 and 0 < record["seconds"] < seconds
    assert f"{record['loss']:.4f}" in page
    measured = [layer[stage] for layer in record["layers"] for stage in ("pre", "post")]
    numbers = {f"{stage[name]:.3f}" for stage in measured for name in ("distance", "effective_rank")}
    assert numbers <= set(Page(page).texts)
    pictures = {path.name for path in (tmp_path / "seen").glob("*.png")}
    assert pictures == {
        f"{stage}-{name}.png" for stage in ("pre", "post") for name in ("terms", "similarity", "flow", "maps")
    }
    again = ["inspect", str(checkpoint), "--output", str(tmp_path / "seen")]
    assert main(again) == 2
    assert "is not empty; give another folder, or --overwrite" in capsys.readouterr().err
    assert main([*again, "--overwrite", "--max_tokens", "16", "--layer", "0"]) == 0


def test_measures_name_the_commit_of_the_code_that_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may commit something else before it has ended."""
    commits = ["began"]
    monkeypatch.setattr(environment, "source_commit", lambda: commits[-1])
    monkeypatch.setattr(job, "ablate", lambda *_: commits.append("committed meanwhile"))
    record, _ = job.look(make_model(), IDS, "model", "text")
    assert record["commit"] == "began"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "3"], "layer=3 must be from 0 to 2"),
        (["--max_tokens", "1000"], "max_tokens=1000 must be from 2 to 512"),
        (
            ["--text", "bad \udcff"],
            "text has \\udcff as character 5: half of a surrogate pair, or a byte that is no UTF-8",
        ),
        (["--text", ""], "the text has 0 tokens; give at least 2"),
        (["--text", "a", "--file", "b"], "text and file exclude each other"),
        (["--file", "nowhere.txt"], "file=nowhere.txt does not exist"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    options: list[str], message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(checkpoint), "--output", str(tmp_path / "seen"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "seen").exists()


def test_only_what_inspect_wrote_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is refused is refused before the checkpoint is read, which does not exist here."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in (".", str(here), str(tmp_path)):
        assert main(["inspect", "nowhere", "--output", name, "--overwrite"]) == 2
        assert "holds the current folder" in capsys.readouterr().err
    seen = tmp_path / "seen"
    seen.mkdir()
    (seen / "page.html").write_text("somebody else's")
    assert main(["inspect", "nowhere", "--output", str(seen), "--overwrite"]) == 2
    assert "holds no inspection, so it is not overwritten" in capsys.readouterr().err
    for name in ("measures.json", "page.html", "notes.md"):
        (seen / name).write_text("{}")
    assert main(["inspect", "nowhere", "--output", str(seen), "--overwrite"]) == 2
    assert "also holds notes.md, which would be lost" in capsys.readouterr().err
    assert (seen / "notes.md").is_file()


def test_what_a_killed_inspection_left_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    leftover = tmp_path / f".seen.partial-{MACHINE}-{ended.pid}"
    leftover.mkdir()
    assert main(["inspect", str(checkpoint), "--output", str(tmp_path / "seen"), "--max_tokens", "8"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


def test_a_tokenizer_from_elsewhere(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(vocab_size=300).save_pretrained(tmp_path / "model")
    command = ["inspect", str(tmp_path / "model"), "--output", str(tmp_path / "seen"), "--max_tokens", "8"]
    assert main(command) == 2
    assert "save one there or give --tokenizer PATH" in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(checkpoint)]) == 0


def test_a_model_without_composition_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(compose_pre=False, compose_post=False, vocab_size=300).save_pretrained(tmp_path / "plain")
    save_tokenizer(tmp_path / "plain")
    assert main(["inspect", str(tmp_path / "plain"), "--output", str(tmp_path / "seen")]) == 2
    message = capsys.readouterr().err
    assert "(dcformer) composes no heads" in message and "a model of with_composed_heads" in message


def test_settings_that_training_may_leave_change_nothing(tmp_path: Path) -> None:
    model = make_model(vocab_size=300)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config |= {"use_cache": False, "output_attentions": True}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    arguments = ["inspect", str(tmp_path / "model"), "--text", "heads are composed", "--output", str(tmp_path / "page")]
    assert main(arguments) == 0
