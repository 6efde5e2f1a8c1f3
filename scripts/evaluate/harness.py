"""Scores a model object with lm-eval, in this process."""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lm_eval
from lm_eval.api.task import Task
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from dynattn.modeling.positions.context_length import context_length

from ..common.builtin_corpus import builtin_documents
from ..common.checkpoint_loading import check_pair
from ..common.errors import UserError
from ..common.memory_limits import check_memory
from .catalog import TaskCatalog
from .chance_levels import chances_of
from .heldout import score_documents
from .quoted import quoted_scores
from .results import Metric, Results, TaskResult, describe_environment, describe_model, read_lm_eval
from .strict_lm import StrictHFLM
from .suites import HELDOUT, SUITES
from .windows import check_context

ROLLING = "loglikelihood_rolling"  # lm-eval's type of tasks that measure perplexities
DIRECT = f"{HELDOUT} (direct)"
AGREEMENT = 0.01  # relative difference up to which two measurements of bits per byte agree
BOOTSTRAPS = 1000  # resamplings for lm-eval's standard errors


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: TaskCatalog | Sequence[str] = SUITES["builtin"],
    *,
    num_fewshot: int | Sequence[int] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    truncate: bool = False,
    carry_memory: bool = False,
    seed: int = 1234,
    log_samples: bool = False,
    quoted: Sequence[str] = (),
) -> Results:
    """Scores a causal language model, on the device where it is, and leaves it in the mode that it was in.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        tasks: names of lm-eval tasks, ours or lm-eval's.
        num_fewshot: examples in the prompt; with several numbers each task is scored with each of them; with None each
            task has its own number.
        limit: score only the first `limit` documents of each task.
        batch_size: sequences in a forward pass; scores do not depend on it.
        max_length: tokens of context, at most and by default the model's `max_position_embeddings`.
        truncate: cut longer prompts from the left instead of refusing them.
        carry_memory: measure perplexities over whole documents, read in segments of as many tokens as `max_length` and
            the model's positions allow, with the model's memory carried from each to the next.
        seed: for choosing the examples; the global random generators are seeded with it too.
        log_samples: keep every document with its prompts and log-likelihoods in `Results.samples`.
        quoted: Pythia models whose published scores are shown beside these; "nearest" is the one of the nearest size.

    Raises:
        UserError: the model and tokenizer or the tasks do not fit together, or the scores are not numbers.
    """
    catalog = tasks if isinstance(tasks, TaskCatalog) else TaskCatalog(tasks)
    check_pair(model, tokenizer)
    if carry_memory:
        check_memory(model.config)
    check_context(model, max_length)
    shots = num_fewshot if isinstance(num_fewshot, Sequence) else [num_fewshot]
    results = Results(describe_model(model), {}, describe_environment(model.device))
    results.quoted = quoted_scores(quoted, model.num_parameters())
    with _evaluation_mode(model), _quiet("lm_eval", "transformers"):
        set_seed(seed)
        options = {"truncate": truncate, "carry_memory": carry_memory}
        length = max_length or context_length(model.config)
        lm = StrictHFLM(model, tokenizer, batch_size=batch_size, max_length=length, **options)
        for number in shots:
            _score_tasks(lm, catalog, number, results, limit=limit, seed=seed, log_samples=log_samples)
        if any(result.task == HELDOUT for result in results.tasks):
            _score_directly(lm, results, limit)
    scores = [metric.value for result in results.tasks for metric in result.metrics.values()]
    if not all(map(math.isfinite, scores)):
        raise UserError("some scores are infinite or NaN: the model has diverged, or overflows in this dtype (--dtype)")
    results.settings = {
        "tasks": catalog.names, "num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size,
        "max_length": lm.max_length, "truncate": truncate, "carry_memory": carry_memory, "segment": lm.segment,
        "seed": seed,
    }  # fmt: skip
    return results


def _score_tasks(
    lm: StrictHFLM,
    catalog: TaskCatalog,
    num_fewshot: int | None,
    results: Results,
    *,
    limit: int | None,
    seed: int,
    log_samples: bool,
) -> None:
    """Adds the scores of all tasks that can be loaded to `results`, with `num_fewshot` examples.

    Raises:
        UserError: memory is carried, and none of the tasks measures a perplexity.
    """
    loaded, missing = catalog.load()
    results.unavailable |= missing
    tasks: Collection[Task] = loaded["tasks"].values()
    if not tasks:
        return
    if lm.segment is not None and not any(task.OUTPUT_TYPE == ROLLING for task in tasks):
        raise UserError(f"carry_memory changes perplexities only, and {catalog.names} have none; leave it out")
    _set_examples(tasks, num_fewshot, seed)
    results.raw.append(_run(lm, loaded, limit, log_samples))
    _collect(results, results.raw[-1], chances_of(loaded, limit), num_fewshot)


def _set_examples(tasks: Iterable[Task], num_fewshot: int | None, seed: int) -> None:
    """Sets the number of examples by lm-eval's rule: a task whose own file says 0 keeps 0."""
    for task in tasks:
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):
            task.set_config("num_fewshot", num_fewshot or 0)
        task.set_fewshot_seed(seed)


def _run(lm: StrictHFLM, loaded: Mapping[str, Any], limit: int | None, log_samples: bool) -> dict[str, Any]:
    try:
        return lm_eval.evaluate(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=log_samples)
    except OverflowError as error:
        raise UserError("a perplexity is too large for a number: the model has diverged") from error
    except ZeroDivisionError as error:
        raise UserError("the documents of a task hold no text, so there is no mean; leave the task out") from error
    except ValueError as error:
        if not str(error).startswith("Sample larger than population"):
            raise
        raise UserError("num_fewshot is more examples than a task has beside its question; lower it") from error


def _collect(results: Results, raw: dict[str, Any], chances: Mapping[str, float], num_fewshot: int | None) -> None:
    """Adds what lm-eval returned to `results`, except for tasks that are there already with as many examples."""
    known = {(result.task, result.num_fewshot) for result in results.tasks}
    for result in read_lm_eval(raw, chances, num_fewshot):
        if (result.task, result.num_fewshot) not in known:
            results.tasks.append(result)
            label = {"task": result.task, "num_fewshot": result.num_fewshot}
            results.samples += [label | sample for sample in raw.get("samples", {}).get(result.task, [])]


def _score_directly(lm: StrictHFLM, results: Results, limit: int | None) -> None:
    """Adds scores of the held-out text that were computed without padding, and a warning if lm-eval's differ."""
    documents = builtin_documents("validation")[:limit]
    length, carries = lm.segment or lm.max_length, lm.segment is not None
    scores = score_documents(lm.model, lm.tokenizer, documents, max_length=length, carry_memory=carries)
    metrics = {name: Metric(value, None, name == "accuracy") for name, value in scores.items()}
    place = [result.task for result in results.tasks].index(HELDOUT) + 1
    results.tasks.insert(place, TaskResult(DIRECT, 0, len(documents), metrics))
    padded, direct = results.value(HELDOUT, "bits_per_byte"), scores["bits_per_byte"]
    if abs(padded - direct) > AGREEMENT * direct:
        results.warnings.append(
            f"bits per byte is {padded:.4f} in padded batches but {direct:.4f} without padding: "
            "the model lets padding or later tokens reach earlier ones, so its lm-eval scores mean nothing"
        )


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silences the warnings of these libraries in the block; they give advice on options that a user here has not."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
