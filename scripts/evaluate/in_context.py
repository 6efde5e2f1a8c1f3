"""The in-context questions of `in_context_forms` as lm-eval tasks, one for each family."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval.api.samplers import ContextSampler

from .in_context_forms import FORMS, generate


class SameForm(ContextSampler):
    """Draws the few-shot examples of a question from the other questions of its form.

    lm-eval passes the question to a sampler only if examples come from the split that is scored, so there is one split.
    """

    def sample(
        self, n: int, eval_doc: dict[str, Any] | None = None, df: Sequence[dict[str, Any]] | None = None, **_: Any
    ) -> Sequence[dict[str, Any]]:
        if eval_doc is None:
            raise ValueError("examples of the same form need a question; let fewshot_split be the test_split")
        pool = [doc for doc in df or self.fewshot_docs() if doc["form"] == eval_doc["form"] and doc != eval_doc]
        return self.rnd.sample(pool, n)


def load_dataset(family: str, **_: object) -> DatasetDict:
    """Builds the split "test" of a family, which is also where few-shot examples come from; lm-eval calls it.

    Raises:
        ValueError: there is no such family.
    """
    items = [item for number, form in enumerate(FORMS) if form.family == family for item in generate(number)]
    if not items:
        families = ", ".join(dict.fromkeys(form.family for form in FORMS))
        raise ValueError(f"there is no family {family!r}; choose from {families}")
    return DatasetDict(test=Dataset.from_list([asdict(item) for item in items]))
