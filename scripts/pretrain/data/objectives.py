"""What a model learns to predict: which tokens are targets, and what the model reads in their places."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from dynattn.modeling.ops.chunked_loss import IGNORED

from ...common.errors import UserError
from ..arguments import PretrainArguments
from .position_sampling import PositionSampler
from .sequences import Sequences

Item = dict[str, Tensor]
MASK_SHARE = 0.15
# Held-out text has the same masks in all runs; no run may have this number as its seed.
VALIDATION_SEED = 2**32 - 1


class Objective(ABC):
    """Makes examples of sequences, and says which of their tokens are targets."""

    @abstractmethod
    def example(self, item: Item, place: int) -> Item:
        """The model's input for a sequence of tensors `[T]`.

        Args:
            place: of the sequence in the order of the run. With the seed it decides all random choices.
        """

    @abstractmethod
    def targets(self, batch: Item) -> Tensor:
        """The targets of a batch of tensors `[B, T]`, `IGNORED` where there is none."""

    @abstractmethod
    def for_validation(self) -> "Objective":
        """The objective by which held-out text is scored; it is the same whatever the seed of the run."""

    def count(self, batch: Item) -> int:
        """The number of targets of a batch of tensors `[B, T]`."""
        return int((self.targets(batch) != IGNORED).sum())


class CausalLM(Objective):
    """Each token predicts the next one. The model shifts the labels, unless the sequences have shifted them."""

    def example(self, item: Item, place: int) -> Item:
        """The sequence of tensors `[T]` as it is."""
        return item

    def targets(self, batch: Item) -> Tensor:
        """`[B, T]` shifted labels, or `[B, T - 1]`."""
        return batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]

    def for_validation(self) -> "CausalLM":
        return self


class MaskedLM(Objective):
    """Some tokens are hidden, and each is predicted from all others of its document (BERT, arXiv 1810.04805).

    15 % of the tokens that are not special are targets. Of these the model reads 80 % as the mask token, 10 % as a
    random one and 10 % unchanged, as Transformers' collator does. A sequence without targets is drawn again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """Masks with the tokenizer's mask token.

        Raises:
            UserError: it has none.
        """
        if tokenizer.mask_token_id is None:
            raise UserError(
                "objective=masked_lm needs a tokenizer with a mask token, and this one has none; add one "
                "(tokenizer.add_special_tokens({'mask_token': '[MASK]'})) and save it, or give tokenizer: bpe"
            )
        self.tokenizer, self.seed = tokenizer, seed
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_SHARE)
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))

    def example(self, item: Item, place: int) -> Item:
        """`input_ids` `[T]` with masks, `labels` `[T]`, and what keeps documents and padding apart.

        That is `position_ids` `[T]` if the sequence has them, with padding as a document of its own, else an
        `attention_mask` `[T]`.
        """
        padding = self._padding(item)
        input_ids, labels = self._mask(item["input_ids"], padding, place)
        if "position_ids" not in item:
            return {"input_ids": input_ids, "labels": labels, "attention_mask": (~padding).long()}
        behind_text = torch.arange(len(padding)) - (~padding).sum()
        position_ids = torch.where(padding, behind_text, item["position_ids"])
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}

    def targets(self, batch: Item) -> Tensor:
        """`[B, T]`."""
        return batch["labels"]

    def for_validation(self) -> "MaskedLM":
        return MaskedLM(self.tokenizer, VALIDATION_SEED)

    def _padding(self, item: Item) -> Tensor:
        """`[T]`, true for the padding at the end: padding tokens whose label is ignored."""
        unused = (item["labels"] == IGNORED) & (item["input_ids"] == self.tokenizer.pad_token_id)
        return unused.flip(0).cummin(0).values.flip(0)

    def _mask(self, input_ids: Tensor, padding: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """The tokens `[T]` with masks, which the model reads, and the labels `[T]`."""
        kept = torch.isin(input_ids, self.special) | padding
        words = np.random.SeedSequence((self.seed, place)).generate_state(1, np.uint64)
        self.collator.generator = torch.Generator().manual_seed(int(words[0] >> 1))
        while True:
            read, labels = self.collator.torch_mask_tokens(input_ids[None].clone(), special_tokens_mask=kept[None])
            if kept.all() or bool((labels != IGNORED).any()):
                return read[0], labels[0]


class Examples(Dataset[Item]):
    """Sequences as an objective gives them to a model.

    They are indexed by `(sequence, place)`: the index of a sequence, and its place in the order of the run.

    Args:
        positions: draws the positions of each example, if given.
    """

    def __init__(self, sequences: Sequences, objective: Objective, positions: PositionSampler | None = None) -> None:
        self.sequences, self.objective, self.positions = sequences, objective, positions

    def __getitem__(self, index: tuple[int, int]) -> Item:
        """The example of tensors `[T]` for `(sequence, place)`."""
        sequence, place = index
        item = self.objective.example(self.sequences[sequence], place)
        return item if self.positions is None else self.positions.draw(item, place)


def make_objective(arguments: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Objective:
    """The objective that the arguments name.

    Raises:
        UserError: the tokenizer lacks what it needs.
    """
    return CausalLM() if arguments.objective == "causal_lm" else MaskedLM(tokenizer, arguments.seed)
