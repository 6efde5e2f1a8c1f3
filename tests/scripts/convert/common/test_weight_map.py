"""One declarative table, read in both directions."""

import pytest
import torch

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.transforms import Split
from dynattn.scripts.convert.common.weight_map import (
    Drop,
    Rule,
    WeightMap,
    foreign_shapes,
    plan_export,
    plan_import,
    written_shapes,
)


def foreign(joined: bool) -> list[str]:
    return ["table", *([f"{layer}.ab" for layer in range(2)] if joined else ["0.a", "0.b", "1.a", "1.b"])]


SIZES = {"a": 1, "b": 2}
MAP = WeightMap(
    layers=2,
    rules=(
        Rule(("table",), ("embed",)),
        Rule(("{layer}.ab",), ("layers.{layer}.a", "layers.{layer}.b"), Split(tuple(SIZES.values()))),
        Rule(("{layer}.a",), ("layers.{layer}.a",)),
        Rule(("{layer}.b",), ("layers.{layer}.b",)),
    ),
    drops=(
        Drop("{layer}.cache.*", "a cache"),
        Drop("mask", "a mask"),
        Drop("{layer}.eye", "a buffer", lambda: torch.eye(2)),
    ),
)


@pytest.mark.parametrize("joined", [True, False])
def test_one_table_reads_both_ways(joined: bool) -> None:
    cached = [f"1.cache.{letter}" for letter in "abcdefgh"]
    steps, dropped = plan_import(MAP, [*foreign(joined), *reversed(cached), "mask", "0.eye"])
    assert dropped == {"a cache": cached, "a mask": ["mask"], "a buffer": ["0.eye"]}
    ours = [key for step in steps for key in step.writes]
    assert sorted(ours) == ["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"]
    back = plan_export(MAP, ours)
    assert sorted(key for step in back for key in step.writes) == ["0.ab", "0.eye", "1.ab", "1.eye", "table"]
    made = next(step for step in back if step.writes == ("1.eye",))
    assert torch.equal(made.run([])[0], torch.eye(2))


def test_shapes_follow_without_storage() -> None:
    """No machine could hold these tensors."""
    width = 1 << 50
    steps, _ = plan_import(MAP, foreign(joined=True))
    ours = {"embed": torch.Size((3, width))}
    ours |= {f"layers.{layer}.{name}": torch.Size((size, width)) for layer in range(2) for name, size in SIZES.items()}
    theirs = foreign_shapes(steps, ours)
    assert theirs == {"table": (3, width), "0.ab": (3, width), "1.ab": (3, width)}
    assert written_shapes(steps, theirs) == ours


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["0.ab", "1.ab"], "lack table"),
        (["table", "0.ab", "1.a"], "lack 1.ab or 1.b"),
        ([*foreign(True), "0.a"], "both 0.ab and 0.a"),
        ([*foreign(True), "2.cache.k", "x"], "2.cache.k (2 such keys) which are no part of this format; leave them"),
    ],
)
def test_incomplete_or_unknown_foreign_keys(keys: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        plan_import(MAP, keys)
    assert says in str(error.value)


def test_incomplete_or_unknown_keys_of_ours() -> None:
    with pytest.raises(UserError, match="lack embed"):
        plan_export(MAP, [f"layers.{layer}.{name}" for layer in range(2) for name in "ab"])
    with pytest.raises(UserError, match="surplus which is no part"):
        plan_export(MAP, ["embed", "surplus", *[f"layers.{layer}.{name}" for layer in range(2) for name in "ab"]])
