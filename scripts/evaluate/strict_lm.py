"""lm-eval's language model, which refuses what would have wrong scores instead of changing it in silence."""

import copy
import sys
from collections.abc import Iterable
from operator import add
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from ..common.checkpoint_loading import refuse_nan
from ..common.errors import UserError
from ..common.memory_limits import longest_segment
from ..common.special_tokens import warn_of_unknown
from .segments import roll_texts
from .windows import encode_document


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
