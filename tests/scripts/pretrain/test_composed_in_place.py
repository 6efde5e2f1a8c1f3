"""Training models of Transformers with composed heads: new ones, upcycled ones, and what is loaded of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.training import LLAMA, RUN, assert_same_run, killed_run, run
from cases.vision_models import strengthen
from transformers import LlamaForCausalLM

from dynattn import with_composed_heads
from dynattn.scripts.common.checkpoint_loading import load_checkpoint
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments, pretrain
from dynattn.scripts.pretrain.consolidate import ConsolidateArguments, consolidate
from dynattn.scripts.pretrain.outputs.metrics import read_metrics

PLAIN = {**LLAMA, "attention_dropout": 0.0}
COMPOSED = {**PLAIN, "composed_heads": {"compose_rank": 1}}
IDS = torch.arange(3, 19)[None]


def test_a_new_model_trains_resumes_and_is_loaded(corpus: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_config": COMPOSED, "composition_learning_rate": 1e-3}
    result = run(tmp_path / "whole", corpus, **options)
    killed_run(tmp_path / "again", corpus, 6, **options)
    run(tmp_path / "again", corpus, **options)
    assert_same_run(tmp_path / "whole", tmp_path / "again")
    model, _ = load_checkpoint(str(result.model))
    assert type(model).__name__ == "ComposedLlamaForCausalLM"
    learned = [weight for name, weight in model.named_parameters() if name.endswith("composition.gate_weight")]
    assert len(learned) == 2 and all(bool(weight.abs().max() > 0) for weight in learned)
    health = [row for row in read_metrics(result.output / "metrics.jsonl") if row["split"] == "composition"]
    assert health and {name.partition(".")[0] for name in health[-1]} >= {"00", "01"}
    card = (Path(result.model) / "README.md").read_text()
    assert "A `llama` language model with composed heads that `dynattn pretrain` made from fresh weights." in card
    block = card[card.index("import dynattn") :].partition("```")[0].replace("PATH_OR_NAME", str(result.model))
    names: dict[str, Any] = {}
    exec(block, names)
    torch.testing.assert_close(names["model"](IDS).logits, model(IDS).logits)


def test_a_plain_model_is_upcycled_in_python_and_trained_on(corpus: Path, tmp_path: Path) -> None:
    parent = run(tmp_path / "parent", corpus, model_config=PLAIN)
    model, tokenizer = load_checkpoint(str(parent.model))
    composed = with_composed_heads(LlamaForCausalLM, compose_rank=1).from_pretrained(parent.model)
    torch.testing.assert_close(composed(IDS).logits, model(IDS).logits)
    composed.save_pretrained(tmp_path / "upcycled")
    tokenizer.save_pretrained(tmp_path / "upcycled")
    options: dict[str, Any] = {
        name: RUN[name] for name in RUN if name not in ("model_type", "model_config", "vocab_size")
    }
    options |= {"init_from": str(tmp_path / "upcycled"), "dataset": str(corpus), "freeze_parent_steps": 6}
    result = pretrain(PretrainArguments(output=str(tmp_path / "on"), **options))
    trained, _ = load_checkpoint(str(result.model))
    learned = [weight for name, weight in trained.named_parameters() if name.endswith("composition.gate_weight")]
    assert len(learned) == 2 and all(bool(weight.abs().max() > 0) for weight in learned)


def test_a_consolidated_checkpoint_has_composed_heads(corpus: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "run", corpus, model_config=COMPOSED)
    consolidate(ConsolidateArguments(source=str(tmp_path / "run"), destination=str(tmp_path / "model")))
    for folder in (result.model, tmp_path / "model"):
        strengthen(model := load_checkpoint(str(folder))[0])
        assert type(model).__name__ == "ComposedLlamaForCausalLM"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 1}, r"cannot build the model 'llama': no options \['rank'\] exist here"),
        (True, r"cannot build the model 'llama': composed_heads \(True\) must be options of compose_heads_of"),
        ({"names": ["lm_head"]}, r"cannot build the model 'llama': names has \['lm_head'\], which are no attention"),
    ],
)
def test_options_that_are_wrong_are_named(given: Any, message: str, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", corpus, model_config={**PLAIN, "composed_heads": given})


@pytest.mark.parametrize(("first", "then"), [(PLAIN, COMPOSED), (COMPOSED, PLAIN)])
def test_a_run_does_not_resume_with_heads_that_came_or_went(
    first: dict[str, Any], then: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    killed_run(tmp_path / "run", corpus, 6, model_config=first)
    before, now = (re.escape(str(config.get("composed_heads"))) for config in (first, then))
    with pytest.raises(UserError, match=rf"this changed: model.composed_heads \(was {before}, is {now}\); change it"):
        run(tmp_path / "run", corpus, model_config=then)


def test_an_implementation_without_masks_is_refused_before_the_run(corpus: Path, tmp_path: Path) -> None:
    fix = r"attn_implementation='flex_attention' has no masks for composed heads; use 'sdpa' for the model"
    with pytest.raises(UserError, match=f"cannot build the model 'llama': {fix}"):
        run(tmp_path / "run", corpus, model_config=COMPOSED, attn_implementation="flex_attention")


def test_the_terminal_tells_what_an_implementation_is_for(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, part in (("eager", "by eager"), ("sdpa", "with the masks of sdpa")):
        run(tmp_path / name, corpus, model_config=COMPOSED, attn_implementation=name, max_steps=4)
        assert f"attention: heads composed in place {part}\n" in capsys.readouterr().out


def test_families_of_this_package_have_fields_instead(corpus: Path, tmp_path: Path) -> None:
    options = {"model_type": "dcformer", "model_config": {"composed_heads": {}}}
    with pytest.raises(UserError, match=r"model_config names \['composed_heads'\], which dcformer does not have"):
        run(tmp_path / "run", corpus, **options)
