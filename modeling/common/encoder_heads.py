"""The heads of text encoders, mixed in front of a family's `PreTrainedModel`."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from .losses import check_skip_logits, check_token_labels, choice_loss, class_loss, read_by_loss
from .pooling import first_token, mean_of_tokens


class PredictionHead(nn.Module):
    """`norm(act(dense(x)))`, the last transformation in front of a head's output layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.act_fn = ACT2FN[config.classifier_activation]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps hidden states `[..., E]` to `[..., E]`."""
        return self.norm(self.act_fn(self.dense(hidden_states)))


class EncoderHead:
    """What the heads share: the encoder, a prediction head behind it, and then an output layer."""

    base_class: ClassVar[type[nn.Module]]
    # Provided by PreTrainedModel.
    config: Any
    loss_function: Callable[..., Tensor]
    post_init: Callable[[], None]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.base_class(config)
        # Not `head`: with `device_map="auto"` Transformers would take the weights of `lm_head` for those of `head`.
        self.prediction_head = PredictionHead(config)
        self.make_output(config)
        self.post_init()

    def make_output(self, config: Any) -> None:
        """Makes the output layer behind the prediction head: here a classifier."""
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def classify(self, hidden_states: Tensor) -> Tensor:
        """Class scores `[..., C]` of hidden states `[..., E]`."""
        return self.classifier(self.dropout(self.prediction_head(hidden_states)))

    def classify_texts(self, hidden_states: Tensor, attention_mask: Any) -> Tensor:
        """Class scores `[B, C]` of the first real token, or of the mean of all real tokens, of states `[B, T, E]`.

        Raises:
            ValueError: the mean is to be taken, and the mask does not tell the real tokens.
        """
        pool = first_token if self.config.classifier_pooling == "cls" else mean_of_tokens
        return self.classify(pool(hidden_states, attention_mask))


class MaskedLMHead(EncoderHead):
    """Masked language modeling: `class XForMaskedLM(MaskedLMHead, XPreTrainedModel)`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: Any = {"lm_head": "colwise_gather_output"}

    def make_output(self, config: Any) -> None:
        """Makes the output layer, which shares its weight with the embedding if `tie_word_embeddings` is set."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.decoder_bias)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Returns logits `[B, T, V]`, or `None` with `skip_logits`, and, with labels, the loss.

        Args:
            labels: `[B, T]`, the token in each place, -100 where no loss is wanted. With `num_items_in_batch` the loss
                is the sum over targets divided by it, else the mean.
            skip_logits: return the loss without logits. They are then computed only for the targets, usually a small
                part of the tokens.

        The other arguments are those of the base model.

        Raises:
            ValueError: labels have another shape than the tokens, or are missing with `skip_logits`; or `z_loss` is
                given.
        """
        check_skip_logits(skip_logits, labels)
        if kwargs.get("z_loss"):
            raise ValueError(f"z_loss={kwargs['z_loss']} is part of the loss of causal models alone; leave it out")
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        hidden_states = outputs.last_hidden_state
        if labels is not None:
            hidden_states, labels = read_by_loss(hidden_states, labels, skip_logits)
        logits, loss = self.lm_head(self.prediction_head(hidden_states)), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=None if skip_logits else logits, **_recorded(outputs))


class PooledClassificationHead(EncoderHead):
    """A classifier of whole sequences, which reads the first real token or the mean of all real tokens."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Returns class scores `[B, C]` and, with labels, the loss; other arguments are those of the base model.

        Args:
            labels: `[B]`, or `[B, C]` if the configuration's `problem_type` is multi-label (or regression of several
                values). With `num_items_in_batch` the loss is the sum over labels divided by it, else the mean.

        Raises:
            ValueError: labels do not fit, or the mean is to be taken and the mask does not tell the real tokens.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits = self.classify_texts(outputs.last_hidden_state, attention_mask)
        loss = None
        if labels is not None:
            loss = class_loss(self.loss_function, labels, logits, self.config, **kwargs)
        return SequenceClassifierOutput(loss=loss, logits=logits, **_recorded(outputs))


class MultipleChoiceHead(EncoderHead):
    """A score for each of several texts, of which one is the right one, such as endings of a story."""

    def make_output(self, config: Any) -> None:
        """Makes the classifier, whose only output is the score of a text."""
        super().make_output(config)
        self.classifier = nn.Linear(config.hidden_size, 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Returns scores `[B, C]` of the `C` choices in each row and, with labels, the loss.

        Args:
            input_ids: `[B, C, T]`; embeddings are `[B, C, T, E]`, and mask and positions have the dimension of the
                choices too.
            labels: `[B]`, the number of the right choice. With `num_items_in_batch` the loss is the sum over labels
                divided by it, else the mean.

        The other arguments are those of the base model.

        Raises:
            ValueError: inputs have no dimension of the choices; or labels do not fit; or as the classifier of texts.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        rows, choices = _rows_and_choices(inputs)
        texts = {name: given if given is None else given.flatten(0, 1) for name, given in inputs.items()}
        outputs = self.model(**texts, **kwargs)
        logits = self.classify_texts(outputs.last_hidden_state, texts["attention_mask"]).view(rows, choices)
        loss = None
        if labels is not None:
            loss = choice_loss(labels, logits, kwargs.get("num_items_in_batch"))
        return MultipleChoiceModelOutput(loss=loss, logits=logits, **_recorded(outputs))


class EncoderTokenClassificationHead(EncoderHead):
    """A classifier of every token."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Returns class scores `[B, T, C]` and, with labels `[B, T]`, the loss; others as in the base model.

        Raises:
            ValueError: labels have another shape than the tokens.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits = self.classify(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_token_labels(labels, logits)
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, **_recorded(outputs))


class QuestionAnsweringHead(EncoderHead):
    """Scores of every token for being the first and the last one of an answer."""

    def make_output(self, config: Any) -> None:
        """Makes the classifier, whose two classes are starts and ends.

        Raises:
            ValueError: the configuration has another number of labels.
        """
        if config.num_labels != 2:
            raise ValueError(f"num_labels ({config.num_labels}) must be 2, for starts and ends; pass num_labels=2")
        super().make_output(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Returns the scores `[B, T]` of starts and of ends and, with both positions `[B]`, the loss.

        Other arguments are those of the base model.

        Raises:
            ValueError: only one of the two positions is given.
        """
        if (start_positions is None) != (end_positions is None):
            missing = "start_positions" if start_positions is None else "end_positions"
            raise ValueError(f"{missing} is None, but the loss needs starts and ends; give both, or neither")
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        start, end = self.classify(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end, **_recorded(outputs))


def _rows_and_choices(inputs: dict[str, Tensor | None]) -> tuple[int, ...]:
    """The number of rows and of choices, the first two dimensions of every input that is given.

    Raises:
        ValueError: an input has other ones, or none of the choices.
    """
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    if not given:
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.ndim < 3:
            raise ValueError(f"{name} must be a tensor [batch, choices, length, ...]; tokenize all choices of a row")
    sizes = {name: tuple(tensor.shape[:2]) for name, tensor in given.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"inputs must agree in rows and choices, but have {sizes}; give every input for each choice")
    return next(iter(sizes.values()))


def _recorded(outputs: BaseModelOutput) -> dict[str, Any]:
    """The hidden states and attention maps that the encoder recorded, as fields of a head's output."""
    return {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
