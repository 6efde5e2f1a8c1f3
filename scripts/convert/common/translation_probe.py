"""The probe of encoder-decoders: long and short targets, a padded source, decoding from a cache, and generating."""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from dynattn.modeling.caches.names import cache_in, named_cache

from .decoder_probe import make_probe
from .probe import Answers, Probe, rounding_between

GENERATED = 8


@torch.no_grad()
def ask(model: PreTrainedModel, ids: Tensor) -> Answers:
    """Runs `model` on token ids `[2, T]`, a third of which is the source of the others, and the other way round."""
    third = max(1, ids.shape[1] // 3)
    source, target = ids[:, :third], ids[:, third:]
    full = _logits(model, source, target)
    padded, decoded = _padded_logits(model, source, target), _decoded_logits(model, source, target)
    tokens = model.generate(  # type: ignore[operator]
        source,
        attention_mask=torch.ones_like(source),
        max_new_tokens=GENERATED,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
    )
    return Answers(
        f"{ids.numel()} tokens, short and long sources, padded, cached and generated",
        (full, _logits(model, target, source), padded, decoded),
        rounding_between((full, padded), (full, decoded)),
        functional.cross_entropy(full[:, :-1].flatten(0, 1), target[:, 1:].flatten()).item(),
        tokens,
    )


def _logits(model: PreTrainedModel, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits `[2, T, V]` of the target `[2, T]` after the source `[2, S]`."""
    return model(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits


def _padded_logits(model: PreTrainedModel, source: Tensor, target: Tensor) -> Tensor:
    """Logits `[2, T, V]` as `_logits`, with padding behind the source as far as there are positions for it."""
    length = source.shape[1]
    limit = getattr(model.config, "max_position_embeddings", None) or 2 * length  # relative positions have no limit
    pads = min(length, limit - length)
    padded = torch.cat([source, source[:, :pads]], dim=1)
    mask = (torch.arange(padded.shape[1]) < length).long().expand(len(source), -1)
    return _logits(model, padded, target, mask)


def _decoded_logits(model: PreTrainedModel, source: Tensor, target: Tensor) -> Tensor:
    """Logits `[2, T, V]` as `_logits`, decoded token by token from a cache."""
    cache, encoded, logits = None, model.get_encoder()(input_ids=source), []
    for token in target.split(1, dim=1):
        output = model(encoder_outputs=encoded, decoder_input_ids=token, use_cache=True, **named_cache(cache))
        cache = cache_in(output)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


TRANSLATION = Probe(lambda architectures: "AutoModelForSeq2SeqLM", make_probe, ask, generates=True)
