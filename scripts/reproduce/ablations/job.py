"""The variants of the study, and its run by `dynattn compare`."""

from dataclasses import dataclass
from typing import Any

from ...common.arguments import command_line, given_options
from ...compare.job import compare_variants
from ...compare.variants import Variant
from ..attentions import ATTENTIONS
from ..study_runs import chosen, text_name
from ..texts import text_options
from .arguments import AblationsArguments

# arXiv 2405.08553, abstract: "matching the performance of models with ~1.7x-2.0x compute".
QUOTED = {
    "label": "1.7 to 2.0 times the compute",
    "source": "abstract of arXiv 2405.08553, of models from 405 M to 6.9 B parameters",
    "interval": [1.7, 2.0],
}
WIDER = "plain-wider"
COMMON: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 2048, "sequence_length": 128, "batch_size": 8}
VALIDATIONS = 10


@dataclass(frozen=True)
class Size:
    """The models of one size and how long they are trained.

    Attributes:
        wider: the width of the MLP with which plain attention has as many parameters as full composition.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    wider: int
    learning_rate: float
    steps: int

    def model(self) -> dict[str, Any]:
        """Fields of the configuration."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return {
            **{name: getattr(self, name) for name in names},
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        }


SIZES = {
    "small": Size(64, 2, 4, 176, 208, learning_rate=4e-3, steps=400),
    "medium": Size(128, 4, 8, 352, 416, learning_rate=2e-3, steps=800),
    "large": Size(256, 6, 8, 704, 763, learning_rate=1e-3, steps=1600),
}


def run_study(arguments: AblationsArguments) -> str:
    """Trains what is missing, then writes record, table and plot; returns the table and the names of the files.

    Raises:
        UserError: a variant does not exist, the folder holds another study, a run failed, or time was over before two
            seeds were complete.
    """
    known = variants(arguments)
    names = chosen("variant", arguments.variants, known)
    return compare_variants(arguments.compared(names), [known[name] for name in names], command_of(arguments), QUOTED)


def variants(arguments: AblationsArguments) -> dict[str, Variant]:
    """What each variant trains, by name; the first is the baseline."""
    size = SIZES[arguments.size]
    steps = size.steps if arguments.max_steps is None else arguments.max_steps
    every = max(1, steps // VALIDATIONS)
    options = {
        **COMMON,
        **text_options(arguments.dataset, arguments.validation_dataset),
        "model_type": "dcformer",
        "learning_rate": size.learning_rate,
        "max_steps": steps,
        "warmup_steps": max(1, steps // 20),
        "eval_every": every,
        "save_every": every,  # so that a run that is stopped loses a tenth of its time at most
        "keep_checkpoints": 1,
    }
    plain = ATTENTIONS["plain"].fields
    changes = {"plain": plain, WIDER: {**plain, "intermediate_size": size.wider}}
    changes |= {name: attention.fields for name, attention in ATTENTIONS.items()}
    known = {name: {**options, "model_config": {**size.model(), **fields}} for name, fields in changes.items()}
    if (rate := arguments.composition_learning_rate) is not None:
        slow = {"composition_learning_rate": rate}
        known |= {f"{name}-slow": known[name] | slow for name in ATTENTIONS if ATTENTIONS[name].fields != plain}
    return {name: Variant(name, trained) for name, trained in known.items()}


def command_of(arguments: AblationsArguments) -> str:
    """The command line that repeats the study, wherever its folder and its texts are."""
    told = [name for name in given_options(arguments) if name not in ("output", "max_seconds", "redraw")]
    options = {name: getattr(arguments, name) for name in told}
    options |= {name: text_name(options[name]) for name in options.keys() & {"dataset", "validation_dataset"}}
    return command_line("reproduce ablations", options)
