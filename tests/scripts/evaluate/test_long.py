"""The suite `long`: prompts of the right length, losses against a plain forward pass, comparisons, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dynattn import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig
from dynattn.scripts.cli import main
from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.evaluate import long_figure
from dynattn.scripts.evaluate.arguments import EvaluateArguments
from dynattn.scripts.evaluate.long_context import (
    cut_windows,
    find_keys,
    loss_by_position,
    make_prompt,
    own_start,
    score_windows,
)
from dynattn.scripts.evaluate.long_suite import change_rope
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

TRAINED = 96
FIELDS: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "sliding_window": None,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.3,
}


def make(**fields: Any) -> DCFormerForCausalLM:
    torch.manual_seed(0)
    return DCFormerForCausalLM(DCFormerConfig(**FIELDS, **fields)).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe([builtin_documents("validation")], vocab_size=257)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    folders = []
    for scheme in ("rope", "learned"):
        folders.append(str(tmp_path_factory.mktemp("models") / scheme))
        make(position_scheme=scheme).save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


def test_starts_of_documents_are_read_and_not_scored():
    """No model learns to predict them, so that their losses would hide what the length does."""
    tokenizer = train_bpe([["abc"]], vocab_size=257)
    end = tokenizer.eos_token_id
    assert cut_windows(tokenizer, ["a", "bc", "d"], 2, None) == [[end, 65, end], [end, 66, 67], [67, end, 68]]
    assert own_start(tokenizer) is None
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    windows = cut_windows(tokenizer, ["a", "bc", "d"], 4, None)
    assert windows == [[257, 65, end, 257, 66], [66, 67, end, 257, 68]]
    torch.manual_seed(0)
    model = DCFormerForCausalLM(DCFormerConfig(**{**FIELDS, "vocab_size": 258})).eval()
    every, scored = score_windows(model, windows), score_windows(model, windows, own_start(tokenizer))
    assert np.argwhere(np.isnan(scored)).tolist() == [[0, 2], [1, 2]]
    kept = np.delete(every, 2, axis=1)
    assert loss_by_position(scored, 4)[0]["windows"] == pytest.approx(kept.mean(1).tolist())


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_has_its_length_and_the_key_at_its_depth(tokenizer: PreTrainedTokenizerFast, depth: float) -> None:
    prompt = make_prompt(tokenizer, "04711", 400, depth)
    assert len(prompt.tokens) + len(prompt.answer) == 400
    text = tokenizer.decode(prompt.tokens[1:])
    assert text.startswith("Find the pass key. ")
    assert text.endswith("The pass key is ")
    assert tokenizer.decode(prompt.answer) == "04711"
    room = 400 - len("1Find the pass key. The pass key is 04711. The pass key is 04711")
    assert text.index("The pass key is 04711. ") == len("Find the pass key. ") + round(depth * room)


def test_an_answer_has_the_tokens_of_the_key_in_the_text() -> None:
    joining = train_bpe([["The pass key is 04711. "] * 9], vocab_size=290)
    prompt = make_prompt(joining, "04711", 200, 0.5)
    assert joining.decode(prompt.answer) == " 04711"
    assert prompt.tokens.count(prompt.answer[0]) == 1
    assert len(prompt.tokens) + len(prompt.answer) == 200


def test_a_prompt_without_room_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="a pass key needs 64 tokens, and max_length is 63"):
        make_prompt(tokenizer, "04711", 63, 0.5)
    prompt = make_prompt(tokenizer, "04711", 64, 0.5)
    assert len(prompt.tokens) + len(prompt.answer) == 64


class Copier(PreTrainedModel):
    """Says again what followed the last token's latest occurrence before it: finds every key, however far."""

    config_class = DCFormerConfig

    def __init__(self) -> None:
        super().__init__(DCFormerConfig(**FIELDS))
        self.place = torch.nn.Parameter(torch.zeros(1))  # tells the device
        self.post_init()

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **_: Any) -> Any:
        ids = input_ids[0].tolist()
        logits = torch.zeros(1, len(ids), 257)
        for place in range(len(ids)):
            context = ids[max(0, place - 15) : place + 1]
            earlier = [p for p in range(15, place) if ids[p - 15 : p + 1] == context]
            if earlier:
                logits[0, place, ids[earlier[-1] + 1]] = 50.0
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


def test_a_model_that_copies_finds_every_key_and_a_random_one_none(tokenizer: PreTrainedTokenizerFast) -> None:
    copied = find_keys(Copier(), tokenizer, [TRAINED, 2 * TRAINED], prompts=2, seed=1)
    assert [cell["exact"] for cell in copied] == [1.0] * 10
    assert max(cell["nats"] for cell in copied) < 1e-6
    guessed = find_keys(make(), tokenizer, [TRAINED], prompts=2, seed=1)
    assert [cell["exact"] for cell in guessed] == [0.0] * 5
    assert min(cell["nats"] for cell in guessed) > 5 * math.log(10)


def test_losses_are_those_of_a_forward_pass_over_each_window(tokenizer: PreTrainedTokenizerFast) -> None:
    model, windows = make(), cut_windows(tokenizer, builtin_documents("validation"), 4 * TRAINED, 3)
    assert [len(window) for window in windows] == [4 * TRAINED + 1] * 3
    assert windows[0][-1] == windows[1][0]
    found = loss_by_position(score_windows(model, windows), TRAINED)
    ids = torch.tensor(windows)
    with torch.no_grad():
        nats = F.cross_entropy(model(ids[:, :-1]).logits.transpose(1, 2), ids[:, 1:], reduction="none").double()
    for line, (low, high) in zip(found, [(0, 96), (96, 192), (192, 384)], strict=True):
        assert (line["from"], line["to"]) == (low + 1, high)
        np.testing.assert_allclose(line["windows"], nats[:, low:high].mean(1), rtol=1e-5)
        np.testing.assert_allclose(line["perplexity"], nats[:, low:high].mean().exp(), rtol=1e-4)


def test_scaling_is_measured_beside_the_model_as_it_is(
    checkpoints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["evaluate", checkpoints[0], "--suite", "long", "--limit", "1"]
    assert main([*common, "--output", str(tmp_path / "plain")]) == 0
    rope = '{"rope_type": "linear", "factor": 8.0}'
    assert main([*common, "--output", str(tmp_path / "linear"), "--rope_parameters", rope]) == 0
    assert "rope (linear)" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "linear").iterdir()} == {"results.json", "results.md", "long.png"}
    plain, linear = (
        json.loads((tmp_path / name / "results.json").read_text())["checkpoints"][0] for name in ("plain", "linear")
    )
    assert linear["rope_parameters"]["factor"] == 8.0
    assert [line["to"] for line in plain["by_position"]] == [96, 192, 384, 768]
    assert plain["by_position"] != linear["by_position"]
    assert main([*common, "--output", str(tmp_path / "plain")]) == 2


def test_the_plot_names_every_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose name Matplotlib would take for a formula, or hide because of its first sign."""
    figures: list[Any] = []
    monkeypatch.setattr(long_figure, "save", lambda figure, path: figures.append(figure))
    measured = {
        "by_position": [{"from": 1, "to": 8, "perplexity": 2.0}],
        "pass_key": [{"length": 8, "nats": 3.0}],
        "rope_parameters": None,
        "trained_length": 8,
    }
    names = ["$a^^$b", "_hidden"]
    long_figure.draw({"checkpoints": [{"model": {"path": name}, **measured} for name in names]}, tmp_path / "long.png")
    figures[0].canvas.draw()
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [r"\$a^^\$b", " _hidden"]


@pytest.mark.parametrize("family", [DCFormerConfig, DCPythiaConfig])
def test_scaling_keeps_the_base_and_the_rotated_share(family: type[Any]) -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    fields = {**FIELDS, "head_dim": 16, "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    config = family(**fields)
    changed = family.from_dict({**config.to_dict(), **change_rope(linear, config)})
    assert changed.rope_parameters == {**linear, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert change_rope({**linear, "rope_theta": 1e4}, config)["rope_parameters"]["rope_theta"] == 1e4


def test_scaling_is_of_every_layer_type_that_rotates() -> None:
    own = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    fields: dict[str, Any] = {**FIELDS, "num_hidden_layers": 2, "sliding_window": 8, "rope_parameters": own}
    linear = {"rope_type": "linear", "factor": 4.0}
    changed = change_rope(linear, DCFormerConfig(**fields))["rope_parameters"]
    assert changed == {name: {**rope, **linear} for name, rope in own.items()}
    mixed = DCFormerConfig(**fields, position_scheme={"sliding_attention": "rope", "full_attention": "none"})
    changed = change_rope(linear, mixed)["rope_parameters"]
    assert changed["sliding_attention"] == {**own["sliding_attention"], **linear}
    assert "factor" not in changed["full_attention"]


@pytest.mark.parametrize("scheme", ["none", "alibi", "learned", "carope"])
def test_scaling_is_refused_where_positions_rotate_nothing(scheme: str) -> None:
    with pytest.raises(UserError, match=f"position_scheme='{scheme}'.* rotate nothing; leave it out"):
        change_rope({"rope_type": "linear", "factor": 4.0}, DCFormerConfig(**FIELDS, position_scheme=scheme))


def test_checkpoints_are_compared_at_the_positions_that_both_read(checkpoints: list[str], tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("One or two words of it. " * 5)  # of 120 bytes: one window of 96
    options = ["--suite", "long", "--dataset", str(text), "--others", checkpoints[1], "--output", str(tmp_path / "out")]
    assert main(["evaluate", checkpoints[0], *options]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    first, other = results["checkpoints"]
    assert results["text"] == str(text)
    assert [cell["length"] for cell in other["pass_key"]] == [96] * 5
    (difference,) = results["comparison"][0]
    assert (difference["from"], difference["to"]) == (1, 96)
    assert difference["mean"] == pytest.approx(other["by_position"][0]["loss"] - first["by_position"][0]["loss"])
    assert difference["mean"] != 0


def test_windows_that_begin_elsewhere_are_not_paired(checkpoints: list[str], tmp_path: Path) -> None:
    """The model with rotary positions reads windows of 768 tokens, and the one with learned positions of 96."""
    options = ["--suite", "long", "--limit", "2", "--others", checkpoints[1], "--output", str(tmp_path / "out")]
    assert main(["evaluate", checkpoints[0], *options]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [len(one["by_position"][0]["windows"]) for one in results["checkpoints"]] == [2, 2]
    assert results["comparison"] == [[]]
    told = (tmp_path / "out" / "results.md").read_text().splitlines()[-1]
    assert told.endswith("read different windows, so their losses are not compared.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_parameters": "{}"}, "is for --suite long"),
        ({"rope_parameters": "{}", "suite": "long", "others": ["x"]}, "for a single checkpoint"),
        ({"suite": "long", "tasks": ["x"], "truncate": True}, "--suite long has no tasks, truncate"),
        ({"suite": "long", "carry_memory": True}, "--suite long has no carry_memory"),
    ],
)
def test_options_of_other_suites_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluateArguments("model", **options)


@pytest.mark.parametrize("rope", ["{", "3", '{"rope_type": "yarn"}'])
def test_rotary_parameters_that_are_not_valid_are_refused(
    checkpoints: list[str], rope: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", checkpoints[0], "--suite", "long", "--rope_parameters", rope]) == 2
    assert "rope" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "message"),
    [(97, "can read 96 tokens and not 97; give a smaller --max_length"), (90, "shorter than 90 tokens; give a longer")],
)
def test_lengths_that_the_model_or_the_text_does_not_have_are_refused(
    length: int, message: str, checkpoints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("Few words.")
    options = ["--suite", "long", "--dataset", str(tmp_path / "short.txt"), "--max_length", str(length)]
    assert main(["evaluate", checkpoints[1], *options]) == 2
    assert message in capsys.readouterr().err
