"""Cards are valid for the Hub, and what they tell of sizes is what the code makes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from dynattn.families import FAMILIES, Family
from dynattn.scripts.publish.card import TASKS

CARDS = Path(__file__).parent.parent / "model_cards"
FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def test_every_family_has_a_card() -> None:
    assert {path.name for path in CARDS.glob("*.md")} == {f"{name}.md" for name in FAMILIES}


@FAMILY
def test_metadata(family: Family) -> None:
    card = ModelCard.load(CARDS / f"{family.model_type}.md")
    data = card.data.to_dict()
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == TASKS[family.main_auto_class]
    assert data["license"] == "mit"
    assert {"dynattn", family.model_type} <= set(data["tags"])
    assert family.paper in card.text
    for section in ("Architecture", "Use", "Limits", "Citation"):
        assert f"\n## {section}" in card.text


@FAMILY
def test_the_table_of_sizes_is_true(family: Family) -> None:
    config_class: Any = family.load_config_class()
    model_class = family.load_model_class(family.main_auto_class)
    rows = re.findall(r"^\| `([\w.-]+)` \|(.*)\|$", (CARDS / f"{family.model_type}.md").read_text(), flags=re.M)
    told = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows if cells.count("|") == 6}
    assert told.keys() == config_class.sizes.keys()
    for name, (hidden, layers, heads, mlp, *reads, parameters) in told.items():
        config = config_class.from_size(name)
        shape = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
        assert (int(hidden), int(layers), int(heads)) == shape
        assert int(mlp.split()[0]) == config.intermediate_size
        names = ("vocab_size", "max_position_embeddings")
        if model_class.main_input_name == "pixel_values":
            names = ("image_size", "patch_size")
        assert [int(cell.replace(",", "")) for cell in reads] == [getattr(config, name) for name in names]
        with torch.device("meta"):
            count = model_class(config).num_parameters()
        number, unit = parameters.split()
        assert count / {"M": 1e6, "B": 1e9}[unit] == pytest.approx(
            float(number), abs=0.51 * 10 ** -len(number.partition(".")[2])
        )
