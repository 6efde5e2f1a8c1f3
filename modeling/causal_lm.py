"""The language modeling head that every decoder of this package has."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple


class GenericForCausalLM:
    """A mixin as Transformers' generic heads: `XForCausalLM(GenericForCausalLM, XPreTrainedModel, GenerationMixin)`."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan: ClassVar[dict[str, Any]] = {"lm_head": (["hidden_states"], ["logits"])}
    base_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = self.base_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Returns logits `[B, T, V]` and, with labels, the loss.

        Args:
            labels: `[B, T]`, the same tokens as `input_ids` (the shift is done here), -100 where no loss is wanted.
                With `num_items_in_batch` the loss is the sum over targets divided by it, else the mean.
            logits_to_keep: 0 for the logits of all positions, `n` for the last `n`, or the positions' indices.

        The other arguments are those of the base model.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            check_labels(labels, logits)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raises ValueError unless there is one label for each position of the logits."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}; "
            "give one label for each input token, and logits_to_keep=0"
        )
