"""All subjects, and the selection of those and of the candidates that a run measures."""

from collections.abc import Collection, Sequence

from ...common.errors import UserError
from ..arguments import BenchmarkArguments, split_at_commas
from ..harness.interface import COMPILED, GLOBAL, Candidate, Subject
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import Shape, parse_shape
from .attention import ATTENTION, BIDIRECTIONAL
from .decode import DECODE
from .generation_step import STEP
from .long_sequences import LONG
from .models import BLOCK, PREFILL, TRAINING
from .positions import POSITIONS
from .profile import PROFILE
from .relative import RELATIVE_ATTENTION

USUAL = (ATTENTION, BLOCK, TRAINING, PREFILL, DECODE, STEP, RELATIVE_ATTENTION)
# Subjects that run only if they are named: `bidirectional` is much like `attention`, `long` takes hours, `positions`
# compares no implementations, and `profile` is about one of them on a CPU.
NAMED = (BIDIRECTIONAL, POSITIONS, LONG, PROFILE)
SUBJECTS = {one.name: one for one in (*USUAL, *NAMED)}
Selection = list[tuple[Subject, list[Candidate]]]


def select(arguments: BenchmarkArguments, settings: BenchmarkSettings) -> tuple[Selection, list[str]]:
    """Returns the subjects asked for, each with the candidates asked for, and the names of those left out.

    Raises:
        UserError: a name does not exist, or a subject cannot use a shape or the window.
    """
    names = select_subjects(arguments, settings)
    selection = [(SUBJECTS[name], SUBJECTS[name].candidates(settings.device)) for name in names]
    every = list(dict.fromkeys(one.name for _, candidates in selection for one in candidates))
    # A quick run leaves out what needs minutes of compilation. Without a window all models are global.
    skipped = (COMPILED,) * settings.quick + (GLOBAL,) * (settings.window is None)
    default = [name for name in every if not any(part in name for part in skipped)]
    wanted = split_at_commas(arguments.implementations or default)
    check_names(wanted, every, "implementation")
    chosen = [(subject, [one for one in candidates if one.name in wanted]) for subject, candidates in selection]
    return [(subject, found) for subject, found in chosen if found], [name for name in every if name not in wanted]


def select_subjects(arguments: BenchmarkArguments, settings: BenchmarkSettings) -> list[str]:
    """The names of the subjects asked for.

    Raises:
        UserError: a name does not exist, or a subject cannot use a shape or the window.
    """
    names = split_at_commas(arguments.subjects or [one.name for one in USUAL])
    check_names(names, SUBJECTS, "subject")
    if any(shape.memory for shape in settings.shapes) and names != [RELATIVE_ATTENTION.name]:
        raise UserError(f"a shape with +MEMORY is for --subjects {RELATIVE_ATTENTION.name} alone")
    for name in (RELATIVE_ATTENTION.name, STEP.name, BIDIRECTIONAL.name):
        if settings.window is not None and name in names:
            raise UserError(f"--window is not for the subject {name}; name other --subjects")
    return names


def check_names(names: Sequence[str], choices: Collection[str], kind: str) -> None:
    """Raises UserError if one of the names is not among the choices."""
    for name in names:
        if name not in choices:
            raise UserError(f"unknown {kind} {name!r}; choose from {', '.join(choices)}")


def shapes_of(subject: Subject, settings: BenchmarkSettings) -> Sequence[Shape]:
    """The shapes asked for, else the subject's own."""
    return settings.shapes or [parse_shape(one) for one in (subject.quick_shapes if settings.quick else subject.shapes)]
