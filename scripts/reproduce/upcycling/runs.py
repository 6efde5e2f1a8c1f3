"""The runs of the upcycling study: parents, upcycled parents, and their continuations.

A run is a folder that `dynattn pretrain` or `dynattn convert` completes by a rename, so it is either whole or absent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ...common.arguments import parse_arguments
from ...common.checkpoint_files import weights_sha256
from ...compare.job import train_once
from ...convert import NEOX, UpcycleArguments, upcycle_checkpoint
from ...convert.common.hub import locate
from ...pretrain import PretrainArguments
from ..study_runs import text_name
from .arguments import HEADS, UpcyclingArguments
from .changed_parents import compose_in_place, widen_mlps

MODEL: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": HEADS, "max_position_embeddings": 512}
# The models of parents that are trained here, by type, and how much wider their MLPs are than their hidden states.
# Mixtral's tokens read two of four experts, which are half as wide.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt_neox": (MODEL, 4),
    "mixtral": ({**MODEL, "num_key_value_heads": 4, "num_local_experts": 4}, 2),
}
COMMON: dict[str, Any] = {"sequence_length": 128, "batch_size": 8, "keep_checkpoints": 1}
PARENT: dict[str, Any] = {"vocab_size": 2048, "learning_rate": 2e-3}
# The share of warm-up in the updates is 1 / WARMUP. In the arm that freezes the parent's weights at first, the share of
# updates with frozen weights is 1 / FROZEN.
WARMUP, FROZEN = 12, 8
VALIDATIONS = 6


@dataclass(frozen=True)
class Arm:
    """One way to continue a parent.

    Attributes:
        composed: whether the model composes its heads.
        is_wide: whether the MLPs are wider, so that the model has about as many parameters as one that composes.
        groups: in how many groups of heads it composes.
        rate_ratio: the learning rate of the composition over that of the parent's weights.
        frozen_first: whether the parent's weights are frozen at first.
    """

    label: str
    composed: bool = False
    is_wide: bool = False
    groups: int = 1
    rate_ratio: float = 1
    frozen_first: bool = False


ARMS = {
    "plain": Arm("plain"),
    "wide": Arm("plain, wider MLP", is_wide=True),
    "composed": Arm("composed", composed=True),
    "slow": Arm("composed, composition a tenth as fast", composed=True, rate_ratio=0.1),
    "grouped": Arm("composed in two groups, composition a tenth as fast", composed=True, groups=2, rate_ratio=0.1),
    "fast": Arm("composed, composition 3 x as fast", composed=True, rate_ratio=3),
    "frozen_first": Arm("composed, parent frozen first", composed=True, frozen_first=True),
}
# Those that are compared with the plain arm.
COMPARED = {name: arm for name, arm in ARMS.items() if name != "plain"}


@dataclass(frozen=True)
class Runs:
    """Makes the runs of a study, each once; the methods return the folder of a finished run.

    Attributes:
        output: the folder of the study.
        arguments: the parents, the text, and how many updates each run gets.
    """

    output: Path
    arguments: UpcyclingArguments

    def parent(self, seed: int) -> Path:
        """The run of a model from scratch; `seed` decides its initial weights and the order of the data."""
        return train_once(self._pretraining(seed))

    def continued(self, seed: int, name: str, rate: float) -> Path:
        """The parent of `seed`, trained further as the arm `name`; all arms read the same tokens in the same order."""
        if self.arguments.trains_parents:
            self.parent(seed)
        if ARMS[name].composed or ARMS[name].is_wide:
            self._upcycle(seed, ARMS[name].groups)
        if ARMS[name].is_wide:
            self._widen(seed)
        return train_once(self._continuing(seed, name, rate))

    def planned(self, arms: Iterable[str], seeds: Sequence[int], rates: Sequence[float]) -> list[PretrainArguments]:
        """The runs from which a study may be made: parents, and each arm with each learning rate.

        Raises:
            UserError: a learning rate or an argument of all runs is refused, or there is no such trained parent.
        """
        parents = [self._pretraining(seed) for seed in seeds] if self.arguments.trains_parents else []
        return parents + [self._continuing(*cell) for cell in product(seeds, arms, rates)]

    def settings(self) -> dict[str, Any]:
        """What all runs have in common, for the record."""
        shares = {"warmup_share": 1 / WARMUP, "frozen_share": 1 / FROZEN}
        texts = {name: text_name(text) for name, text in self.arguments.texts.items()}
        common = {"common": {**texts, **self._common()}}
        if not self.arguments.trains_parents:
            # Folders of models are often called `model`, so that the name alone would let a study mix two of them.
            parent = {"parent": text_name(self.arguments.parent), "sha256": weights_sha256(self._trained_parent)}
            return {"steps": self.arguments.steps, **shares, **parent, **common}
        lengths = {"parent_steps": self.arguments.parent_steps, "steps": self.arguments.steps}
        return {**lengths, **shares, **self._parents(), **common}

    def _common(self) -> dict[str, Any]:
        """What all runs are told, apart from texts.

        Raises:
            UserError: `common` has an unknown argument, or a value that is not valid.
        """
        prog, given = "dynattn reproduce upcycling", self.arguments.for_all
        arguments = parse_arguments(PretrainArguments, ["--output", "unused"], prog=prog, common=given)
        return {**COMMON, **{name: getattr(arguments, name) for name in given}}

    def _parents(self) -> dict[str, dict[str, Any]]:
        """What parents are that are trained here, for the record."""
        name, width = self.arguments.parent, self.arguments.hidden_size
        model, ratio = MODELS[name]
        model = {"hidden_size": width, "intermediate_size": ratio * width, **model}
        return {"model": model, "parent": {"model_type": name, **PARENT}}

    def _upcycle(self, seed: int, groups: int) -> None:
        """Converts a GPT-NeoX to a DCPythia, and checks that both have the same logits, or composes heads in place."""
        source, folder = self._parent_model(seed), self._upcycled(seed, groups)
        if folder.exists():
            return
        if self.arguments.parent == "gpt_neox":
            places = {"source": str(source), "destination": str(folder)}
            upcycle_checkpoint(UpcycleArguments(**places, groups=groups, seed=seed), NEOX)
        else:
            compose_in_place(source, folder, groups, seed)

    def _widen(self, seed: int) -> None:
        """Gives the parent as many parameters as it has with composed heads, and the same logits."""
        if not (folder := self._widened(seed)).exists():
            widen_mlps(self._parent_model(seed), folder, like=self._upcycled(seed), seed=seed)

    def _pretraining(self, seed: int) -> PretrainArguments:
        parents = self._parents()
        return self._options(
            seed, "parent", self.arguments.parent_steps, model_config=parents["model"], **parents["parent"]
        )

    def _continuing(self, seed: int, name: str, rate: float) -> PretrainArguments:
        arm, steps = ARMS[name], self.arguments.steps
        return self._options(
            seed,
            f"{name}-{rate:g}",
            steps,
            init_from=str(self._start(seed, arm)),
            learning_rate=rate,
            composition_learning_rate=None if arm.rate_ratio == 1 else arm.rate_ratio * rate,
            freeze_parent_steps=-(-steps // FROZEN) if arm.frozen_first else 0,
        )

    def _options(self, seed: int, name: str, steps: int, **options: Any) -> PretrainArguments:
        every = max(1, steps // VALIDATIONS)
        lengths: dict[str, Any] = {
            "max_steps": steps,
            "warmup_steps": steps // WARMUP,
            "eval_every": every,
            "save_every": every,
        }
        output = str(self._folder(seed, name))
        shared = {**lengths, **self._common(), **self.arguments.texts}
        return PretrainArguments(output=output, seed=seed, **shared, **options)

    def _start(self, seed: int, arm: Arm) -> Path:
        """The folder of the model that an arm continues."""
        if arm.composed:
            return self._upcycled(seed, arm.groups)
        return self._widened(seed) if arm.is_wide else self._parent_model(seed)

    def _parent_model(self, seed: int) -> Path:
        return self._folder(seed, "parent") / "model" if self.arguments.trains_parents else self._trained_parent

    @cached_property
    def _trained_parent(self) -> Path:
        """The folder of the model that all seeds continue, which is downloaded if it is a name on the Hub."""
        return locate(self.arguments.parent)

    def _upcycled(self, seed: int, groups: int = 1) -> Path:
        return self._folder(seed, "upcycled" if groups == 1 else f"upcycled-{groups}-groups")

    def _widened(self, seed: int) -> Path:
        return self._folder(seed, "widened")

    def _folder(self, seed: int, name: str) -> Path:
        return self.output / f"seed-{seed}" / name
