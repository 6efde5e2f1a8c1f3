"""Conversion between a plain model and ours: check everything, write aside, verify, then move in place."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from ...common.arguments import parse_arguments
from ...common.atomic_folder import check_destination, recover, staged_folder
from ...common.errors import UserError
from ..common.arguments import name_folders
from ..common.companion_files import copy_companions
from ..common.hub import locate
from ..common.probe import ask, compare_answers, describe, describe_effect, load_for_probe, make_probe
from ..common.writing import write_weights
from .arguments import UpcycleArguments
from .parents.interface import Parent
from .plan import Upcycling, plan_plain, plan_upcycling


def run(parent: Parent, kind: str, argv: Sequence[str], description: str | None) -> int:
    """The command line of `dynattn convert KIND`: converts, and tells what was read, dropped, written and proved."""
    prog = f"dynattn convert {kind} SRC DST"
    argv = name_folders(argv, UpcycleArguments)
    arguments = parse_arguments(UpcycleArguments, argv, prog=prog, description=description)
    disable_progress_bar()
    upcycling = upcycle_checkpoint(arguments, parent)
    for warning in upcycling.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print("\n".join(report(upcycling, arguments)))
    return 0


def upcycle_checkpoint(arguments: UpcycleArguments, parent: Parent) -> Upcycling:
    """Converts one checkpoint; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    source, destination = locate(arguments.source, arguments.revision), Path(arguments.destination).resolve()
    recover(destination)
    check_destination(destination, source, arguments.overwrite)
    upcycling = (plan_plain if arguments.reverse else plan_upcycling)(arguments, parent, source)
    with staged_folder(destination) as staging:
        write_weights(staging, upcycling.source, upcycling.steps, upcycling.dtype, arguments.max_shard_size)
        copy_companions(source, staging)
        upcycling.config.dtype = upcycling.dtype
        upcycling.config.save_pretrained(staging)
        if arguments.verify:
            verify(upcycling, staging)
        upcycling.sizes = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
    return upcycling


def verify(upcycling: Upcycling, written: Path) -> None:
    """Compares the source with what was written, run as the source runs; then, if the result is meant to differ, as is.

    Raises:
        UserError: logits differ by more than rounding, where they should not.
    """
    source, dtype = upcycling.source.folder, upcycling.dtype
    ids = make_probe(source, upcycling.config, upcycling.twin)
    theirs = ask(load_for_probe(source, dtype=dtype), ids)
    twin = None if upcycling.same_model else upcycling.twin
    proof = compare_answers(theirs, ask(load_for_probe(written, config=twin), ids))
    if not proof.equal:
        raise UserError(
            f"the written model's logits differ from the source's by {proof.difference:.1e}; rounding explains "
            f"{proof.limit:.1e}. Nothing was written"
        )
    upcycling.proof = proof
    if not upcycling.same_model:
        upcycling.effect = compare_answers(theirs, ask(load_for_probe(written), ids))


def report(upcycling: Upcycling, arguments: UpcycleArguments) -> Iterator[str]:
    """The lines to print."""
    config, source = upcycling.config, upcycling.source
    numbers = sum(shape.numel() for shape in source.shapes.values())
    yield (
        f"read        {config.num_hidden_layers} layers, {config.num_attention_heads} heads, "
        f"{numbers:,} numbers in {len(source.files)} files"
    )
    for reason, keys in upcycling.dropped.items():
        yield f"dropped     {len(keys)} tensors: {reason}"
    for name, size in upcycling.sizes.items():
        yield f"{size:>14,}  {name}"
    yield "verified    no (--no-verify)" if upcycling.proof is None else f"verified    {describe(upcycling.proof)}"
    if upcycling.effect is not None:
        yield f"effect      {describe_effect(upcycling.effect)}"
    yield f"written     {arguments.destination} ({config.model_type})"
