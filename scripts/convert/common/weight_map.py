"""One declarative table between a foreign checkpoint format and ours, read in both directions.

Names are templates: `{layer}` stands for every layer. Where several rules give the same tensors of ours (joined or
separate projections), the foreign checkpoint decides which one applies, and the first is what we write.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor

from ...common.errors import UserError
from .transforms import KEEP, Transform

# How names begin in state dicts of models that DistributedDataParallel or `torch.compile` has wrapped.
WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Rule:
    """The foreign tensors `theirs` hold the same as our tensors `ours`, once `transform` has changed their layout.

    A rule for every layer begins at `first_layer`.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: Transform = KEEP
    first_layer: int = 0


def renames(names: Mapping[str, str], kinds: Sequence[str] = ()) -> list[Rule]:
    """Rules of tensors that only have other names: ours by theirs, or those of modules with parameters of `kinds`."""
    if kinds:
        names = {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in names.items() for kind in kinds}
    return [Rule((theirs,), (ours,)) for theirs, ours in names.items()]


@dataclass(frozen=True)
class Drop:
    """A foreign tensor that is dropped: its name pattern (`*` is a wildcard) and why nothing is lost.

    `written` recreates it on export, where the foreign code needs it. `copy_of` names the foreign tensor that it has to
    equal.
    """

    theirs: str
    reason: str
    written: Callable[[], Tensor] | None = None
    copy_of: str | None = None


@dataclass(frozen=True)
class WeightMap:
    """How a foreign format and ours correspond: the rules, the tensors to drop, the number of layers."""

    layers: int
    rules: tuple[Rule, ...]
    drops: tuple[Drop, ...] = ()


@dataclass(frozen=True)
class Step:
    """Tensors that are read together, and what is written from them: `run` gives it, `undo` reverses it."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[Sequence[Tensor]], list[Tensor]]
    undo: Callable[[Sequence[Tensor]], list[Tensor]] | None = None


def plan_import(weight_map: WeightMap, keys: Iterable[str]) -> tuple[list[Step], dict[str, list[str]]]:
    """Returns the steps from a foreign checkpoint with `keys` to ours, and the dropped keys by reason.

    Raises:
        UserError: a tensor of ours has no source, or more than one, or a key is not in the map.
    """
    keys = set(keys)
    if wrapper := next((prefix for prefix in WRAPPERS if keys and all(key.startswith(prefix) for key in keys)), None):
        raise UserError(f"the names of all weights begin with {wrapper}; save the state dict of the model inside")
    candidates = list(expand(weight_map.rules, weight_map.layers))
    chosen = [rule for rule in candidates if keys.issuperset(rule.theirs)]
    _require_one_source(candidates, chosen)
    used = {key for rule in chosen for key in rule.theirs}
    dropped = _match_drops(weight_map, keys - used)
    if unknown := keys - used - {key for found in dropped.values() for key in found}:
        raise UserError(_refusal_of(unknown))
    steps = [Step(rule.theirs, rule.ours, rule.transform.forward, rule.transform.backward) for rule in chosen]
    return steps, dropped


def plan_export(weight_map: WeightMap, keys: Iterable[str]) -> list[Step]:
    """Returns the steps from our checkpoint with `keys` to the foreign format.

    Raises:
        UserError: a key is missing, or has no place there.
    """
    keys, written = set(keys), set[str]()
    steps: list[Step] = []
    for rule in expand(weight_map.rules, weight_map.layers):
        if written.isdisjoint(rule.ours):
            written.update(rule.ours)
            steps.append(Step(rule.ours, rule.theirs, rule.transform.backward, rule.transform.forward))
    if absent := written - keys:
        raise UserError(f"the weights lack {_some(absent)}; config.json asks for {_them(absent)}")
    if unknown := keys - written:
        raise UserError(_refusal_of(unknown))
    return steps + list(_restored(weight_map))


def foreign_shapes(steps: Sequence[Step], ours: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The shapes that the foreign tensors of an import must have, given those of ours."""
    shapes: dict[str, torch.Size] = {}
    for step in steps:
        if step.undo is not None:
            theirs = step.undo([torch.empty(ours[key], device="meta") for key in step.writes])
            shapes |= {key: tensor.shape for key, tensor in zip(step.reads, theirs, strict=True)}
    return shapes


def written_shapes(steps: Sequence[Step], read: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The shapes of what the steps write, given those of what they read."""
    shapes: dict[str, torch.Size] = {}
    for step in steps:
        tensors = step.run([torch.empty(read[key], device="meta") for key in step.reads])
        shapes |= {key: tensor.shape for key, tensor in zip(step.writes, tensors, strict=True)}
    return shapes


def expand(rules: Iterable[Rule], layers: int) -> Iterator[Rule]:
    """The rules with every layer's number in place of `{layer}`."""
    for rule in rules:
        if not any("{layer}" in name for name in (*rule.theirs, *rule.ours)):
            yield rule
            continue
        for layer in range(rule.first_layer, layers):
            theirs, ours = (
                tuple(name.replace("{layer}", str(layer)) for name in names) for names in (rule.theirs, rule.ours)
            )
            yield Rule(theirs, ours, rule.transform)


def _require_one_source(candidates: Sequence[Rule], chosen: Sequence[Rule]) -> None:
    sources: dict[str, list[Rule]] = {target: [] for rule in candidates for target in rule.ours}
    for rule in chosen:
        for target in rule.ours:
            sources[target].append(rule)
    for target, found in sources.items():
        if not found:
            choices = [" and ".join(rule.theirs) for rule in candidates if target in rule.ours]
            raise UserError(f"the weights lack {' or '.join(choices)} (our {target}); config.json asks for it")
        if len(found) > 1:
            choices = [" and ".join(rule.theirs) for rule in found]
            raise UserError(f"the weights have both {' and '.join(choices)}, which say the same; leave one out")


def _match_drops(weight_map: WeightMap, keys: set[str]) -> dict[str, list[str]]:
    dropped: dict[str, list[str]] = {}
    layers = [str(layer) for layer in range(weight_map.layers)]
    for drop in weight_map.drops:
        patterns = [drop.theirs.replace("{layer}", layer) for layer in layers] if "{layer}" in drop.theirs else []
        for pattern in patterns or [drop.theirs]:
            dropped.setdefault(drop.reason, []).extend(sorted(key for key in keys if fnmatchcase(key, pattern)))
    return {reason: found for reason, found in dropped.items() if found}


def _restored(weight_map: WeightMap) -> Iterator[Step]:
    for drop in weight_map.drops:
        if drop.written is not None:
            for layer in range(weight_map.layers if "{layer}" in drop.theirs else 1):
                yield Step((), (drop.theirs.replace("{layer}", str(layer)),), partial(_make, drop.written))


def _make(written: Callable[[], Tensor], _: Sequence[Tensor]) -> list[Tensor]:
    """Runs a step that reads nothing: the tensor `[...]` that `written` makes."""
    return [written()]


def _some(keys: set[str]) -> str:
    first = min(keys)
    return first if len(keys) == 1 else f"{first} ({len(keys)} such keys)"


def _refusal_of(unknown: set[str]) -> str:
    are = "is" if len(unknown) == 1 else "are"
    return f"the weights have {_some(unknown)} which {are} no part of this format; leave {_them(unknown)} out"


def _them(keys: set[str]) -> str:
    return "it" if len(keys) == 1 else "them"
