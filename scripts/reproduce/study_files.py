"""The files of small studies of one trained model: they read held-out tokens of its run, and write record and table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from dynattn.modeling.positions.context_length import longest_readable

from ..common import markdown
from ..common.atomic_file import read_json, write_json, write_whole
from ..common.environment import hardware, provenance, versions
from ..common.errors import UserError, refusal_of
from ..common.folder_names import resolve_destination, resolve_folder
from ..compare.study_folder import RECORD, TABLE, claim
from ..pretrain.data.token_stream import TokenStream

Row = dict[str, Any]
# What of a run's options decides its model.
TRAINED = (
    *("seed", "max_steps", "batch_size", "sequence_length", "learning_rate", "warmup_steps", "vocab_size"),
    *("model_type", "model_size", "model_config"),
)


def held_out_windows(run: str, length: int) -> Tensor:
    """The held-out tokens of a run of `dynattn pretrain`, in windows `[N, length]`.

    Raises:
        UserError: the folder is no finished run, or its run held out too few tokens.
    """
    folder = finished_run(run)
    tokens = torch.from_numpy(np.asarray(TokenStream.open(folder / "data" / "validation").tokens).astype(np.int64))
    if len(tokens) < length:
        raise UserError(f"{folder} holds out {len(tokens)} tokens, too few for a window of {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)


def check_readable(run: str, tokens: int, said: str) -> None:
    """Refuses texts of `tokens` tokens, which the options `said` ask for, where the model of a run cannot read them.

    Raises:
        UserError: as `finished_run`, or the position scheme of the model ends earlier.
    """
    folder = finished_run(run)
    longest = longest_readable(AutoConfig.from_pretrained(folder / "model"))
    if longest is not None and tokens > longest:
        raise UserError(f"{said}, but the model of {folder} reads {longest} tokens at most; lower it")


def finished_run(run: str) -> Path:
    """The folder of a run of `dynattn pretrain`.

    Raises:
        UserError: it is missing, or is no finished run.
    """
    folder = resolve_folder(run)
    found = [folder / "model" / "config.json", folder / "data" / "validation", folder / "result.json"]
    if not all(path.exists() for path in found):
        raise UserError(
            f"{folder} is no finished run of dynattn pretrain; give a folder with model, data/validation and "
            "result.json"
        )
    return folder


def describe_run(run: str) -> dict[str, Any]:
    """How the model of a run was trained, without the folders of the machine that did it.

    Raises:
        UserError: as `finished_run`, the run did not train next-token prediction, or something else wrote its result.
    """
    folder = finished_run(run)
    result = read_json(folder / "result.json", "give another run")
    try:
        given, parameters = result["arguments"], result["parameters"]
        trained = {name: given[name] for name in TRAINED}
        objective, dataset = given.get("objective", "causal_lm"), Path(given["dataset"]).name
    except (LookupError, TypeError, AttributeError) as error:
        reason = f"does not hold the result of dynattn pretrain: {refusal_of(error)}"
        raise UserError(f"{folder / 'result.json'} {reason}; give another run") from error
    if objective != "causal_lm":
        raise UserError(f"{folder} was trained with objective={objective}; give a run of next-token prediction")
    return {"name": folder.name, "parameters": parameters, "dataset": dataset, **trained}


def claim_folder(output: str, settings: Mapping[str, Any]) -> Path:
    """Reserves the folder of a study with these settings, before anything is measured, and returns it.

    Raises:
        UserError: the folder cannot be written, or holds something else.
    """
    folder = resolve_destination(output)
    claim(folder, settings, f"study of {settings['study']}")
    return folder


def write_study(folder: Path, settings: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Writes `record.json` and `table.md`, whose columns are the keys of a row; returns the table."""
    measured = {"hardware": hardware(torch.device("cpu")), "threads": torch.get_num_threads(), "versions": versions()}
    write_json(folder / RECORD, {"settings": dict(settings), **measured, **provenance(), "rows": list(rows)})
    head = [name.replace("_", " ") for name in rows[0]]
    table = markdown.table(head, [[_cell(value) for value in row.values()] for row in rows])
    write_whole(folder / TABLE, table + "\n")
    return table


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
