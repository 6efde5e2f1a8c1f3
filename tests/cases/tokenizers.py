"""Tokenizers that tests make of others."""

import copy

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def that_adds_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer, which puts its `eos` as `bos` before every text, as Llama's puts its own."""
    adding = copy.deepcopy(tokenizer)
    bos = (adding.eos_token, adding.eos_token_id)
    adding.bos_token = adding.eos_token
    adding.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    assert adding.encode("a")[0] == adding.bos_token_id
    return adding


def that_knows(*words: str) -> PreTrainedTokenizerFast:
    """A tokenizer of these words alone, to which all others are `<unk>`."""
    inside = Tokenizer(models.WordLevel({w: i for i, w in enumerate(("<end>", "<unk>", *words))}, unk_token="<unk>"))
    inside.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inside, eos_token="<end>", unk_token="<unk>")
