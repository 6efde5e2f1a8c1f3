"""The heads of decoders, mixed in front of a family's `PreTrainedModel`."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch  # llm-compressor runs a copy of `forward` in this namespace, and calls torch there
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from ..caches.names import cache_in, named_cache, takes_either_name
from ..ops.chunked_loss import chunked_causal_loss
from ..positions.rotary import longrope_borders
from ..serving.batched_generation import BatchedGeneration
from .input_checks import tells_padding
from .losses import check_skip_logits, check_token_labels


class CausalLMHead(BatchedGeneration):
    """Language modeling: `class XForCausalLM(CausalLMHead, XPreTrainedModel, GenerationMixin)`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: Any = {"lm_head": "colwise_gather_output"}
    _fsdp_plan: Any = {"lm_head": "keep_full_weight"}
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}
    base_class: ClassVar[type[nn.Module]]
    # Provided by PreTrainedModel.
    config: Any
    loss_function: Callable[..., Tensor]
    post_init: Callable[[], None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds the class to Transformers' names of causal models.

        With `label_smoothing_factor` the Trainer computes the loss itself, and shifts the labels only for these names.
        """
        super().__init_subclass__(**kwargs)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model: Any = self.base_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=getattr(config, "lm_head_bias", False))
        self.post_init()

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers, whose first pass reads all of `input_ids` `[1, T]`, also tokens that are cached already.

        Raises:
            ValueError: the cache holds tokens, or LongRoPE would turn to its long factors on the way.
        """
        longest = kwargs["generation_config"].max_length
        for border in longrope_borders(self.config):
            if input_ids.shape[1] <= border < longest:
                raise ValueError(
                    f"assisted decoding to max_length={longest} would take the keys of LongRoPE's short factors beyond "
                    f"original_max_position_embeddings ({border}); give max_length={border}, or generate without it"
                )
        cache = cache_in(kwargs)
        if cache is not None and (held := int(cache.get_seq_length())):
            raise ValueError(
                f"past_key_values holds {held} tokens, and assisted decoding would append them again; start without it"
            )
        if cache is not None:  # makes the layers that are told to record the past
            self.model.prepare_cache(cache)
        return super()._assisted_decoding(input_ids, *args, **kwargs)  # type: ignore[misc]

    # With the signature of the original, in which `generate` looks for the arguments that it may be given.
    @wraps(GenerationMixin.prepare_inputs_for_generation, assigned=())
    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers, but where LongRoPE turns to its long factors all tokens are read again, as by its Phi-3.

        Without the cached ones among the tokens `[B, T]`, as after embeddings, that cannot be done.
        """
        if self._turns_to_long_factors(input_ids, cache_in(kwargs), kwargs.get("attention_mask")):
            kwargs |= {**named_cache(None), "next_sequence_length": None}
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]

    def _turns_to_long_factors(self, input_ids: Tensor, cache: Cache | None, mask: Any) -> bool:
        """Whether the longest row of all tokens `[B, T]` crosses a border of LongRoPE that the cached ones do not."""
        borders = longrope_borders(self.config)
        if not borders or cache is None or not cache.get_seq_length():
            return False
        mask = mask if tells_padding(mask) else torch.ones_like(input_ids)
        if mask.shape[1] != input_ids.shape[1]:
            return False
        cached, all_tokens = (int(mask[:, :end].sum(dim=1).max()) for end in (cache.get_seq_length(), None))
        return any(cached <= border < all_tokens for border in borders)

    @takes_either_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Returns logits `[B, T, V]`, or `None` with `skip_logits`, and, with labels, the loss.

        Args:
            labels: `[B, T]`, the same tokens as `input_ids` (the shift is done here), -100 where no loss is wanted.
                With `num_items_in_batch` the loss is the sum over targets divided by it, else the mean; `z_loss` is an
                argument of `chunked_causal_loss`, for which the logits have to be skipped.
            logits_to_keep: 0 for the logits of all positions, `n` for the last `n`, or the positions' indices.
            skip_logits: return the loss without logits. The logits are then computed for a chunk of tokens at a time,
                unless the head is more than a linear layer (adapters, quantized or sharded weights, hooks) or the loss
                is not Transformers' loss for causal models. Trainer passes this argument where Liger's kernels are in
                use.

        The other arguments are those of the base model.

        Raises:
            ValueError: labels have another shape than the logits, or are missing with `skip_logits`; or `z_loss` is
                given and the loss is not computed in chunks.
        """
        check_skip_logits(skip_logits, labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept]
        in_chunks = skip_logits and self.loss_function is ForCausalLMLoss and is_plain_linear(self.lm_head)
        if kwargs.get("z_loss") and not in_chunks:
            raise ValueError(
                "z_loss is part of the loss in chunks: give skip_logits=True, a head without adapters, and no loss of "
                "your own"
            )
        logits = None if in_chunks else self.lm_head(hidden_states)
        return CausalLMOutputWithPast(
            loss=None if labels is None else self._loss(hidden_states, logits, labels, **kwargs),
            logits=None if skip_logits else logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **named_cache(cache_in(outputs)),
        )

    def _loss(self, hidden_states: Tensor, logits: Tensor | None, labels: Tensor, **kwargs: Any) -> Tensor:
        """The loss of logits `[B, T, V]`; without them it is computed in chunks from hidden states `[B, T, E]`."""
        check_token_labels(labels, hidden_states)
        if logits is None:
            return chunked_causal_loss(hidden_states, self.lm_head.weight, self.lm_head.bias, labels, **kwargs)
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)


class SequenceClassificationHead(GenericForSequenceClassification):
    """A classifier on the last real token.

    `__init__` repeats that of Transformers with `base_class` as the body, because Auto classes, which Transformers
    would ask for it, do not know the classes of remote code.
    """

    base_class: ClassVar[type[nn.Module]]
    post_init: Callable[[], None]
    # The loss is a mean over the batch, so that with gradient accumulation the Trainer has to divide it.
    accepts_loss_kwargs = False

    def __init__(self, config: Any) -> None:
        super(GenericForSequenceClassification, self).__init__(config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = self.base_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class TokenClassificationHead(GenericForTokenClassification):
    """A classifier on every token, whose `__init__` is there for the reason that `SequenceClassificationHead` gives."""

    base_class: ClassVar[type[nn.Module]]
    post_init: Callable[[], None]
    accepts_loss_kwargs = False  # as in `SequenceClassificationHead`

    def __init__(self, config: Any) -> None:
        super(GenericForTokenClassification, self).__init__(config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = self.base_class(config)
        given = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in given if rate is not None), 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class DecoderQuestionAnsweringHead(GenericForQuestionAnswering):
    """Scores of every token for being the first and the last one of an answer; `__init__` as in the other heads."""

    base_class: ClassVar[type[nn.Module]]
    post_init: Callable[[], None]

    def __init__(self, config: Any) -> None:
        super(GenericForQuestionAnswering, self).__init__(config)  # type: ignore[call-arg]
        self.model = self.base_class(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


def causal_model_in(model: Any) -> Any:
    """The model with a language modeling head that `model` is, or that PEFT's wrapper holds with its adapters.

    Raises:
        ValueError: there is none, or PEFT puts a trained prompt before the tokens, which the model alone does not read.
    """
    wrapped = getattr(model, "get_base_model", None)
    if wrapped is not None and model.active_peft_config.is_prompt_learning:
        raise ValueError("a PEFT model with a trained prompt is not supported; give one with adapters, or a plain one")
    base = model if wrapped is None else wrapped()
    if not getattr(base, "can_generate", bool)():
        raise ValueError(f"a {type(base).__name__} has no language modeling head; give a model that generates")
    return base


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module only multiplies by its weight and adds its bias.

    Adapters, quantized or sharded weights and hooks make it more than that.
    """
    replaced = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not replaced
