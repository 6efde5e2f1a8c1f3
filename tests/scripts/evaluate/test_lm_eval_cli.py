"""`dynattn lm-eval`: the harness's own command line with what this package adds."""

import sys

import pytest
from lm_eval._cli import HarnessCLI

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.evaluate.lm_eval_cli import main


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
