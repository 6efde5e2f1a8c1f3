"""The lines that `dynattn publish` prints about a finished publication."""

from collections.abc import Iterator

from .arguments import PublishArguments
from .job import Publication


def describe(publication: Publication, arguments: PublishArguments) -> Iterator[str]:
    """The lines of the report: checkpoint, check, files, and where they were pushed."""
    checkpoint, check = publication.checkpoint, publication.check
    yield f"checkpoint  {checkpoint.model_class.__name__}, {checkpoint.weights.total:,} parameters"
    if check is not None:
        yield f"verified    without the package: {', '.join(check.compared)}, saved and loaded again"
        yield f"            largest difference {check.max_difference:.1e}"
    yield f"written     {publication.folder}"
    for name, size in publication.sizes.items():
        yield f"{size:>14,}  {name}"
    if publication.url is not None:
        yield f"pushed      {publication.url}"
    elif arguments.repo is not None:
        total = sum(publication.sizes.values())
        yield f"dry run     would upload these {len(publication.sizes)} files, {total:,} bytes, to {arguments.repo}"


def warnings(publication: Publication) -> Iterator[str]:
    """What a user should know about the published folder."""
    if publication.checkpoint.tokenizer is None:
        yield "the checkpoint has no tokenizer; users must bring their own"
    if publication.check is None:
        yield "the folder was not verified"
    if publication.left_out:
        yield f"left out {', '.join(publication.left_out)}"
