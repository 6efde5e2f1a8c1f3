"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass

from ...common.arguments import given_options, option
from ...common.errors import UserError
from ...common.number_ranges import check_positive, check_seed
from .plan import GROUPS


@dataclass
class StudyArguments:
    """Arguments of the study.

    Raises:
        UserError: a value is out of its range, or a text is missing.
    """

    output: str | None = option(
        None, "folder of the study; runs/tiny-shakespeare, with --quick runs/tiny-shakespeare-quick"
    )
    data: str | None = option(None, "Tiny Shakespeare: a file or a Hub dataset")
    wikitext_train: str | None = option(None, "characters to train on: a file or Hub dataset")
    wikitext_validation: str | None = option(None, "characters to validate on")
    other_text: bool = option(False, "accept another text than Tiny Shakespeare")
    groups: list[str] = option(
        [name for name, group in GROUPS.items() if group.patience is None],
        f"groups of runs, in order: {', '.join(GROUPS)}; all but those that run for days",
    )
    seeds: list[int] = option([0, 1, 2], "seeds of every group")
    steps: int | None = option(None, "updates of each run, in place of the setting's")
    epochs: float | None = option(None, "passes over the text of each run, in place of steps; the paper's are 10")
    streams: int | None = option(None, "texts side by side, in place of the setting's")
    quick: bool = option(False, "few updates, two seeds and short scoring: minutes")
    compiled: bool = option(False, "train with torch.compile, which pays for runs of hours; needs a C++ compiler")
    report_only: bool = option(False, "train nothing, report the runs that are finished")

    def __post_init__(self) -> None:
        if self.quick:
            self.seeds = self.seeds[:2]
        self.output = self.output or f"runs/tiny-shakespeare{'-quick' if self.quick else ''}"
        if unknown := [group for group in self.groups if group not in GROUPS]:
            raise UserError(f"there is no group {unknown[0]!r}; choose from {', '.join(GROUPS)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds={self.seeds} must be one or more different ones")
        for seed in self.seeds:
            check_seed("seeds", seed)
        check_positive(self, ("steps", "epochs", "streams"))
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"steps={self.steps} and epochs={self.epochs} both say how long to train; give one")
        if (self.wikitext_train is None) != (self.wikitext_validation is None):
            raise UserError("give both --wikitext_train and --wikitext_validation, or neither")
        if not self.report_only:
            self._check_texts()

    def _check_texts(self) -> None:
        """Raises UserError if a text is missing. WikiText-2 may be, unless its groups are named."""
        if not self.data:
            raise UserError("give --data, a file with Tiny Shakespeare or the name of a Hub dataset that holds it")
        unread = [name for name in self.groups if GROUPS[name].corpus == "wikitext-2"]
        if unread and self.wikitext_train is None and "groups" in given_options(self):
            raise UserError(f"groups={unread} train on WikiText-2; give --wikitext_train and --wikitext_validation")
