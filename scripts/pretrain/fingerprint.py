"""What must not change between saving a checkpoint and resuming from it, and what may."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..common.errors import UserError
from .arguments import PretrainArguments
from .data.batch_order import MixtureOrder, TrainingOrder
from .data.preparation import Source
from .engines.interface import Engine
from .outputs.checkpoint import read_state
from .schedule import SCHEDULE_FIELDS, RateSchedule, keeps_past

logger = logging.getLogger(__name__)

# Settings that decide the loss curve, so that a run can be resumed only if they are the same.
FIXED_SETTINGS = (
    "objective",
    "mixture",
    "streaming",
    "shuffle_buffer",
    "skip_sequences",
    "packing",
    "position_sampling",
    "position_limit",
    "sequence_length",
    "mask_documents",
    "carry_memory",
    "composition_learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optimizer",
    "muon_momentum",
    "z_loss",
    "ema_decay",
    "base_width",
    "length_warmup_steps",
    "shortest_length",
    "max_grad_norm",
    "mixed_precision",
    "seed",
)
# Fields of a configuration that say nothing about the architecture.
UNRELATED_FIELDS = ("transformers_version", "architectures", "dtype", "_name_or_path", "use_cache")
# The options behind fields of a fingerprint that have other names, for messages.
OPTIONS = {
    "peak": "learning_rate",
    "min_ratio": "min_learning_rate_ratio",
    "first_step": "freeze_parent_steps",
    "shape": "schedule",
}
# Fields of a fingerprint that depend on the number of updates, or say how a run ends: an extended run has others.
LENGTH_FIELDS = ("max_steps", "warmup_steps", "decay_share")
# Fields of a fingerprint that checkpoints of earlier versions lack, with the values that their runs had.
EARLIER_SETTINGS = {
    "objective": "causal_lm",
    "optimizer": "adamw",
    "z_loss": 0.0,
    "ema_decay": None,
    "base_width": None,
    "length_warmup_steps": 0,
    "position_sampling": None,
}

# Fields that only some configurations of a model type have, with what their lack means.
ABSENT_FIELDS = {"model.composed_heads": None}

Fingerprint = dict[str, Any]


def build_fingerprint(
    arguments: PretrainArguments, config: PreTrainedConfig, source: Source, schedule: RateSchedule, order: TrainingOrder
) -> Fingerprint:
    """The values that must not change between saving a checkpoint and resuming from it, as JSON would store them."""
    architecture = {f"model.{name}": value for name, value in config.to_dict().items() if name not in UNRELATED_FIELDS}
    unread = arguments.without_effect
    settings = {name: getattr(arguments, name) for name in FIXED_SETTINGS if name not in unread}
    fingerprint = {
        **architecture,
        **source.fingerprint(),
        **settings,
        **dataclasses.asdict(schedule),
        "global_batch": order.global_batch,
        "pass_length": order.pass_length,
        "init_from": name_of_parent(arguments.init_from),
        **({"mixture_block": order.block} if isinstance(order, MixtureOrder) else {}),
    }
    return json.loads(json.dumps(fingerprint))


def name_of_parent(init_from: str | None) -> str | None:
    """A name on the Hub, or the last two names of a folder's path: a resumed run may have moved with its parent."""
    if init_from is None:
        return None
    place = Path(init_from)
    return "/".join(place.resolve().parts[-2:]) if place.is_dir() else init_from


def check_same_run(path: Path, fingerprint: Fingerprint) -> None:
    """Refuses to resume if the fingerprint of the checkpoint's run differs from `fingerprint`.

    The number of updates may change in two cases: a run that has made all its updates may get more of them, and any run
    if the learning rates of the updates so far stay the same. Fields that only one fingerprint has are ignored, because
    another version of a library may have added them.

    Raises:
        UserError: they differ; the message names every field with both values.
    """
    state = read_state(path)
    stored = {**ABSENT_FIELDS, **EARLIER_SETTINGS, **state["fingerprint"]}
    fingerprint = {**ABSENT_FIELDS, **fingerprint}
    names = sorted(name for name in stored.keys() & fingerprint.keys() if stored[name] != fingerprint[name])
    if is_extended(state, fingerprint):
        names = [name for name in names if name not in LENGTH_FIELDS]
        logger.warning(
            "the run had ended after %s updates and now goes on to %s; from here on, its learning rate is that of a "
            "run of this length",
            *(fields["max_steps"] for fields in (stored, fingerprint)),
        )
    elif names and keeps_past(stored, fingerprint, state["progress"]["step"]):
        names = [name for name in names if name not in SCHEDULE_FIELDS]
    if names:
        changes = ", ".join(f"{OPTIONS.get(name, name)} (was {stored[name]}, is {fingerprint[name]})" for name in names)
        split = (
            "; processes (groups of them, with context_processes), batch_size and gradient_accumulation_steps may "
            "change as long as their product does not"
        )
        raise UserError(
            f"cannot resume from {path} because this changed: {changes}; change it back, or start a new run in another "
            f"output folder (init_from takes over trained weights){split if 'global_batch' in names else ''}"
            f"{_template_of(path) if 'tokenizer' in names and ' chat ' in stored['tokenizer'] else ''}"
        )


def _template_of(path: Path) -> str:
    """Says where the chat template of a checkpoint's run is: a run of another version may have another shipped one."""
    template = path.resolve().parents[1] / "tokenizer" / "chat_template.jinja"
    return f"; the run's chat template is {template} (chat_template takes it)" if template.is_file() else ""


def is_extended(state: Mapping[str, Any], fingerprint: Fingerprint) -> bool:
    """Whether the state of a checkpoint is of its run's last update, and `fingerprint` of a run with more updates."""
    last = state["fingerprint"].get("max_steps")
    return last is not None and state["progress"]["step"] == last < fingerprint.get("max_steps", last)


def sharing_of(arguments: PretrainArguments, engine: Engine) -> dict[str, Any]:
    """How the processes share an update. This may change when a run is resumed; the terminal then says so."""
    return {
        "engine": engine.name,
        "processes": engine.accelerator.num_processes,
        "context_processes": engine.groups.size,
        "batch_size": arguments.batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
    }


def describe_changes(path: Path, sharing: Mapping[str, Any]) -> str:
    """What of `sharing`, the way in which processes share the work, has changed since the checkpoint, in words."""
    stored = read_state(path).get("sharing", {})
    names = [name for name, value in sharing.items() if stored.get(name, value) != value]
    changes = ", ".join(f"{name} (was {stored[name]}, is {sharing[name]})" for name in names)
    return f"; changed since it was saved: {changes}" if changes else ""
