"""Masked language modeling: the masks are those of Transformers' collator, and depend on seed and place alone."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from dynattn.modeling.ops.chunked_loss import IGNORED
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.objectives import CausalLM, Examples, MaskedLM, make_objective
from dynattn.scripts.pretrain.data.packing import PackedSequences
from dynattn.scripts.pretrain.data.token_stream import TokenStream
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

# Two documents, each between the start and the end token 0; 1 is padding and 2 the mask.
STREAM = TokenStream(np.array([0, *range(20, 40), 0, 0, *range(50, 80), 0]), np.array([0, 22]), text_bytes=50)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe([["a text"]], 300, masks=True)


@pytest.fixture(scope="module")
def objective(tokenizer: PreTrainedTokenizerFast) -> MaskedLM:
    return MaskedLM(tokenizer, seed=3)


def sequence(length: int) -> dict[str, Tensor]:
    """Tokens of text `[length]` between a start and an end token."""
    ids = torch.arange(length) % 250 + 10
    ids[0] = ids[-1] = 0
    return {"input_ids": ids, "labels": ids.clone()}


def test_masks_are_those_of_transformers_collator(objective: MaskedLM, tokenizer: PreTrainedTokenizerFast) -> None:
    item = sequence(64)
    found = objective.example(item, 5)
    # The next tensors that a generator of the same state makes are the same.
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    collator.generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence((3, 5)).generate_state(1, np.uint64)[0] >> 1)
    )
    ids, labels = collator.torch_mask_tokens(item["input_ids"][None].clone())
    assert torch.equal(found["input_ids"], ids[0]) and torch.equal(found["labels"], labels[0])


def test_of_fifteen_in_a_hundred_tokens_eight_tenths_are_hidden_and_one_is_random(objective: MaskedLM) -> None:
    item = sequence(40_000)
    found = objective.example(item, 0)
    read, labels, given = found["input_ids"], found["labels"], item["input_ids"]
    chosen = labels != IGNORED
    assert torch.equal(read[~chosen], given[~chosen]) and torch.equal(labels[chosen], given[chosen])
    assert not chosen[[0, -1]].any()
    shares = {
        "chosen": (0.15, chosen.double().mean()),
        "hidden": (0.8, (read == 2)[chosen].double().mean()),
        "kept": (0.1 + 0.1 / 300, (read == given)[chosen].double().mean()),
    }
    for share, observed in shares.values():
        # Four standard deviations of a share of the 6,000 tokens that are chosen at least.
        assert abs(observed - share) < 4 * (share * (1 - share) / 5_500) ** 0.5


def test_masks_depend_on_seed_and_place_alone(objective: MaskedLM, tokenizer: PreTrainedTokenizerFast) -> None:
    first, again, elsewhere = (objective.example(sequence(64), draw)["labels"] for draw in (1, 1, 2))
    other = MaskedLM(tokenizer, seed=4).example(sequence(64), 1)["labels"]
    assert torch.equal(first, again) and not torch.equal(first, elsewhere) and not torch.equal(first, other)
    held_out = {objective.for_validation().seed, MaskedLM(tokenizer, seed=4).for_validation().seed}
    assert held_out == {2**32 - 1}  # another one would give held-out text other masks than those of earlier runs


def test_a_sequence_in_which_nothing_was_drawn_is_drawn_again(objective: MaskedLM) -> None:
    counts = [objective.count(objective.example(sequence(4), draw)) for draw in range(100)]
    assert set(counts) == {1, 2}
    assert objective.count(objective.example({name: tensor[:1] for name, tensor in sequence(4).items()}, 0)) == 0


def test_padding_is_hidden_or_a_document_of_its_own(objective: MaskedLM) -> None:
    for mask_documents in (False, True):
        packed = PackedSequences(STREAM, 40, pad=1, mask_documents=mask_documents, score_all=True)
        item = Examples(packed, objective)[1, 1]  # one token of it is the last of the sequence before
        real = 54 - 39
        if mask_documents:
            assert set(item) == {"input_ids", "labels", "position_ids"}
            assert item["position_ids"].tolist() == [*range(real), *range(40 - real)]
        else:
            assert item["attention_mask"].tolist() == [1] * real + [0] * (40 - real)
        assert (item["labels"][real:] == IGNORED).all() and (item["input_ids"][real:] == 1).all()


def test_causal_targets_are_the_next_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    objective = make_objective(PretrainArguments(output="x"), tokenizer)
    packed = PackedSequences(STREAM, 54, pad=1, mask_documents=True, score_all=True)
    item = Examples(packed, objective)[0, 7]
    assert isinstance(objective, CausalLM) and torch.equal(item["labels"], packed[0]["labels"])
    assert objective.count({name: tensor[None] for name, tensor in item.items()}) == 52  # all but the starts
    shifted = torch.tensor([[7, IGNORED, 8]])
    assert objective.count({"labels": shifted, "shift_labels": shifted}) == 2


def test_a_tokenizer_without_a_mask_token_is_refused_with_the_fix() -> None:
    arguments = PretrainArguments(output="x", objective="masked_lm")
    with pytest.raises(UserError, match=r"this one has none; add one \(tokenizer.add_special_tokens"):
        make_objective(arguments, train_bpe([["a text"]], 300))
