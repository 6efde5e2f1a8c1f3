"""Makes a checkpoint loadable anywhere: a folder with its own code, verified, and pushed to the Hub on request.

Run: `dynattn publish CHECKPOINT [--output FOLDER] [--repo NAME/MODEL] [--dry_run]`
"""

import sys
from collections.abc import Iterator, Sequence

from ..common.arguments import parse_arguments
from .arguments import PublishArguments
from .job import Publication, publish


def main(argv: Sequence[str]) -> int:
    """Publishes and tells what was written, proved and pushed."""
    arguments = parse_arguments(PublishArguments, _name_checkpoint(argv), prog="dynattn publish", description=__doc__)
    publication = publish(arguments)
    for warning in _warnings(publication):
        print(f"warning: {warning}", file=sys.stderr)
    print("\n".join(_report(publication, arguments)))
    return 0


def _report(publication: Publication, arguments: PublishArguments) -> Iterator[str]:
    checkpoint, verification = publication.checkpoint, publication.verification
    yield f"checkpoint  {checkpoint.model_class.__name__}, {checkpoint.weights.total:,} parameters"
    if verification is not None:
        yield f"verified    without the package: {', '.join(verification.compared)}, saved and loaded again"
        yield f"            largest difference {verification.max_difference:.1e}"
    yield f"written     {publication.folder}"
    for name, size in publication.sizes.items():
        yield f"{size:>14,}  {name}"
    if publication.url is not None:
        yield f"pushed      {publication.url}"
    elif arguments.repo is not None:
        total = sum(publication.sizes.values())
        yield f"dry run     would upload these {len(publication.sizes)} files, {total:,} bytes, to {arguments.repo}"


def _warnings(publication: Publication) -> Iterator[str]:
    if publication.checkpoint.tokenizer is None:
        yield "the checkpoint has no tokenizer; users must bring their own"
    if publication.verification is None:
        yield "the folder was not verified"
    if publication.left_out:
        yield f"left out {', '.join(publication.left_out)}"


def _name_checkpoint(argv: Sequence[str]) -> list[str]:
    """Lets a leading CHECKPOINT stand for `--checkpoint CHECKPOINT`."""
    leading = bool(argv) and not argv[0].startswith("-") and not argv[0].endswith((".yaml", ".yml"))
    return ["--checkpoint", *argv] if leading else list(argv)
