"""Scores a model object with lm-eval, in this process."""

import copy
import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import add
from statistics import fmean
from typing import Any

import lm_eval
import torch
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from dynattn.modeling.positions.context_length import context_length

from ..common.builtin_corpus import builtin_documents
from ..common.checkpoint_loading import check_pair, refuse_nan
from ..common.errors import UserError
from ..common.memory_limits import check_memory, longest_segment
from ..common.special_tokens import warn_of_unknown
from .catalog import TaskCatalog
from .heldout import score_documents
from .quoted import quoted_scores
from .results import Metric, Results, TaskResult, describe_environment, describe_model, read_lm_eval
from .segments import roll_texts
from .suites import HELDOUT, SUITES
from .windows import check_context, encode_document

ROLLING = "loglikelihood_rolling"  # lm-eval's type of tasks that measure perplexities
DIRECT = f"{HELDOUT} (direct)"
AGREEMENT = 0.01  # relative difference up to which two measurements of bits per byte agree
BOOTSTRAPS = 1000  # resamplings for lm-eval's standard errors


class StrictHFLM(HFLM):
    """lm-eval's model wrapper, except that it refuses what would have wrong scores, such as prompts that are too long.

    Log-probabilities are computed in float32, whatever the dtype of the model. With `carry_memory`, texts whose
    perplexity is measured are read in segments, and the model's memory is carried from one to the next; otherwise in
    windows. In both cases a text begins with one `bos`, whether or not the tokenizer adds one itself.
    """

    add_bos_token: bool | None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        truncate: bool,
        carry_memory: bool,
        **kwargs: Any,
    ):
        # lm-eval may set the tokenizer's padding token: on a copy, the caller's stays as it was.
        tokenizer = copy.deepcopy(tokenizer)
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", softmax_dtype="float32", **kwargs)
        self._truncate = truncate
        self.segment = min(self.max_length, longest_segment(model.config)) if carry_memory else None

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [encode_document(self.tokenizer, request.args[0]) for request in requests]
        warn_of_unknown(self.tokenizer, [token for text in texts for token in text[1:]])
        if self.segment is not None:
            return roll_texts(self.model, texts, segment=self.segment, batch_size=int(self.batch_size))
        # lm-eval itself puts `prefix_token_id` before every text. It would score a `bos` that the tokenizer adds.
        own, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = own

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        refuse_endings(self.tokenizer)
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if nothing := next((text for text, _, target in requests if not target), None):
            # Its log-probability would be 0, which beats every other answer.
            raise UserError(
                f"the answer {nothing[1]!r} has no tokens of its own after the prompt that ends {nothing[0][-20:]!r}: "
                "it is empty, or the tokenizer joins it to the prompt; leave the task out"
            )
        if (most := max((len(target) for _, _, target in requests), default=0)) > self.max_length:
            raise UserError(f"an answer has {most} tokens but the model takes {self.max_length}; leave the task out")
        # The last token of an answer is not read.
        self._check_length(max((len(context) + len(target) for _, context, target in requests), default=1) - 1)
        # Rolling perplexity calls this once for each batch, and so many progress bars would flood the terminal.
        hide = disable_tqdm or override_bs is not None
        self.logits_cache = share_logits(requests)
        try:
            return super()._loglikelihood_tokens(requests, disable_tqdm=hide, override_bs=override_bs)
        except UserError:
            print(file=sys.stderr)  # the message must not stand on the progress bar's line
            raise

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = [normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"] for request in requests]
        if (most := max(answers, default=0)) >= self.max_length:
            raise UserError(
                f"a task wants answers of up to {most} tokens but the model takes {self.max_length}, prompt included; "
                "leave the task out"
            )
        refuse_endings(self.tokenizer)
        prompts = [len(self.tok_encode(request.args[0])) for request in requests]
        if 0 in prompts:
            raise UserError("a prompt is empty, and the tokenizer begins texts with no token; leave the task out")
        self._check_length(max(map(add, prompts, answers), default=0))
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _check_length(self, longest: int) -> None:
        """Raises UserError if the `longest` prompt, room for its answer included, is too long and may not be cut."""
        if longest > self.max_length and not self._truncate:
            raise UserError(
                f"the longest prompt has, with its answer, {longest} tokens but the model takes {self.max_length}; "
                "lower --num_fewshot, leave the task out, or pass --truncate to cut prompts from the left"
            )

    def _model_call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = super()._model_call(*args, **kwargs)
        refuse_nan(logits)
        return logits

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._model_generate(*args, logits_processor=LogitsProcessorList([RefuseNaN()]), **kwargs)


def refuse_endings(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if `tokenizer` ends texts with a token that would stand between a prompt and its answer."""
    text = tokenizer.encode("a", add_special_tokens=False)
    if text and (last := tokenizer.encode("a")[-1]) != text[-1]:
        raise UserError(
            f"the tokenizer ends every text with {tokenizer.decode([last])!r}, prompts too, so no answer could follow; "
            "save it without (add_eos_token=False, or another post-processor), or score texts with --dataset"
        )


def share_logits(requests: Iterable[tuple[Any, list[int], list[int]]]) -> bool:
    """Whether lm-eval may score requests together that have the same tokens but the last one.

    It takes the first logits of the longest answer for a shorter one, whose logits are the last of them.
    """
    sizes: dict[tuple[int, ...], int] = {}
    read = ((tuple(context + target[:-1]), len(target)) for _, context, target in requests)
    return all(sizes.setdefault(tokens, size) == size for tokens, size in read)


class RefuseNaN(LogitsProcessor):
    """Ends a generation with the error of `refuse_nan`, because NaN is the largest of all logits to `argmax`."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns `scores` `[B, V]` as they are."""
        refuse_nan(scores)
        return scores


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


def chances_of(loaded: Mapping[str, Mapping[str, Any]], limit: int | None) -> dict[str, float]:
    """The chance level of each task or group whose file has it, by name, for the documents that are scored.

    A file has that of all documents. The first ones may have more choices or fewer, and another share in a group.
    """
    named = [(name, task, task.config.metadata) for name, task in loaded["tasks"].items()]
    named += [(name, group, group.metadata) for name, group in loaded["groups"].items()]
    told = {name: (one, fields["chance"]) for name, one, fields in named if fields and "chance" in fields}
    if limit is None:
        return {name: chance for name, (_, chance) in told.items()}
    return {name: _chance_of_first(one, chance, limit) for name, (one, chance) in told.items()}


def _chance_of_first(one: Task | Group, chance: float, limit: int) -> float:
    """The chance level of a task's first `limit` documents, or of those of a group's tasks; `chance` is that of all."""
    tasks = one.get_all_tasks() if isinstance(one, Group) else [one]
    if any(task.OUTPUT_TYPE != "multiple_choice" for task in tasks):
        return chance
    documents = [(task, document) for task in tasks for document in islice(task.eval_docs, limit)]
    return round(fmean(1 / len(task.doc_to_choice(document)) for task, document in documents), 4)


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
