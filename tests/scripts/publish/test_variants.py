"""A variant that somebody else's package registers is published with that package's code."""

import subprocess
import sys
from pathlib import Path

import pytest

MODULES = {
    "__init__": """
from transformers import AutoConfig, AutoModelForCausalLM

from .model import ScaledConfig, ScaledForCausalLM

AutoConfig.register("scaled", ScaledConfig, exist_ok=True)
AutoModelForCausalLM.register(ScaledConfig, ScaledForCausalLM, exist_ok=True)
""",
    "heads": """
import torch
from torch import nn


class ScaledHead(nn.Linear):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__(width, tokens, bias=False)
        self.scale = nn.Parameter(torch.ones(tokens))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.scale
""",
    "model": """
from huggingface_hub.dataclasses import strict

from dynattn import DCFormerConfig, DCFormerForCausalLM

from .heads import ScaledHead


@strict
class ScaledConfig(DCFormerConfig):
    model_type = "scaled"
    tie_word_embeddings: bool = False


class ScaledForCausalLM(DCFormerForCausalLM):
    config_class = ScaledConfig

    def __init__(self, config: ScaledConfig) -> None:
        super().__init__(config)
        self.lm_head = ScaledHead(config.hidden_size, config.vocab_size)
        self.post_init()
""",
}
PROGRAM = """
import sys, torch
from dynattn.scripts.cli import main
if main(["publish", "--import", "my_variant", "checkpoint"]) != 2:
    sys.exit("a folder without a checkpoint was published")
from my_variant.model import ScaledConfig, ScaledForCausalLM
sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
model = ScaledForCausalLM(ScaledConfig(**sizes, num_attention_heads=4, initializer_range=0.2))
torch.nn.init.normal_(model.lm_head.scale)
model.save_pretrained("checkpoint")
sys.exit(main(["publish", "--import", "my_variant", "checkpoint", "--output", "published"]))
"""


@pytest.mark.slow
def test_a_registered_variant_is_published_with_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "my_variant").mkdir()
    for name, source in MODULES.items():
        (tmp_path / "my_variant" / f"{name}.py").write_text(source)
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "without the package" in ended.stdout
    written = {path.name for path in (tmp_path / "published").iterdir()}
    assert {"my_variant_model.py", "my_variant_heads.py", "modeling_dcformer.py", "README.md"} <= written
    assert "my_variant___init__.py" not in written
    card = (tmp_path / "published" / "README.md").read_text()
    assert "import my_variant  # makes the model known" in card
    assert "import dynattn" not in card  # which alone cannot load the model

    forgotten = [sys.executable, "-m", "dynattn", "publish", "checkpoint", "--output", "again"]
    ended = subprocess.run(forgotten, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "holds a model of type 'scaled'" in ended.stderr
    assert "name it with --import" in ended.stderr
