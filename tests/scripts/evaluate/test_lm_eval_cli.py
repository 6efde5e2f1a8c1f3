"""`dynattn lm-eval`: the harness's own command line with what this package adds."""

import sys
from pathlib import Path

import pytest
import torch
from lm_eval._cli import HarnessCLI
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM

from dynattn import with_composed_heads
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.evaluate.lm_eval_cli import main
from dynattn.scripts.evaluate.suites import TASKS
from dynattn.scripts.pretrain.data.tokenizer import train_bpe


@pytest.mark.parametrize(
    ("name", "message"),
    [("vllm", r"^No module named 'vllm'; pip install 'dynattn\[vllm\]'$"), ("gptq", "^No module named 'gptq'$")],
)
def test_a_package_that_a_model_needs_is_named_in_one_line(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(cli: HarnessCLI, arguments: object) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "argv", ["dynattn"])
    monkeypatch.setattr(HarnessCLI, "execute", execute)
    with pytest.raises(UserError, match=message):
        main(["run", "--model", name, "--tasks", "builtin_heldout"])


@pytest.mark.parametrize(
    ("words", "folders"), [([], ["mine"]), (["--include_path", "other"], ["other"])], ids=["file", "option first"]
)
def test_task_folders_of_a_configuration_file_are_read(
    words: list[str], folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["dynattn"])
    monkeypatch.setattr(HarnessCLI, "execute", lambda cli, arguments: found.append(arguments.include_path))
    (tmp_path / "run.yaml").write_text("tasks: [mine]\ninclude_path: mine\n")
    main(["run", "--config", str(tmp_path / "run.yaml"), *words])
    assert found == [[str(TASKS), *folders]]


def test_heads_composed_in_place_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = with_composed_heads(LlamaForCausalLM)(LlamaConfig(vocab_size=300, **sizes)).eval()
    for name, weight in model.named_parameters():
        if "composition" in name:
            torch.nn.init.normal_(weight)  # by itself it would begin as the identity
    model.save_pretrained(tmp_path)
    train_bpe([["text"]], 300).save_pretrained(tmp_path)
    tokens, found = torch.arange(9)[None], []

    def execute(cli: HarnessCLI, arguments: object) -> None:
        found.append(HFLM(pretrained=str(tmp_path), device="cpu")._model_call(tokens))

    monkeypatch.setattr(sys, "argv", ["dynattn"])
    monkeypatch.setattr(HarnessCLI, "execute", execute)
    create = HFLM._create_model
    main(["run", "--model", "hf", "--tasks", "builtin_heldout"])
    assert HFLM._create_model is create
    with torch.no_grad():
        torch.testing.assert_close(found[0], model(tokens).logits)
