"""ModernBERT as the plain encoder inside a DCModernBert."""

from typing import Any

from transformers import ModernBertConfig, PreTrainedConfig

from ...common.encoder_probe import ENCODER
from ...common.transforms import Split
from ...common.weight_map import Drop, Rule, WeightMap, renames
from .interface import Parent, class_head, obeyed_rope, plain_heads, require_fields, shared_fields

SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "initializer_range", "initializer_cutoff_factor", "norm_eps", "norm_bias", "mlp_bias"),
    *("attention_bias", "layer_types", "rope_parameters", "local_attention", "embedding_dropout", "mlp_dropout"),
    *("decoder_bias", "classifier_pooling", "classifier_dropout", "classifier_bias", "classifier_activation"),
    *("tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"),
    *("id2label", "label2id", "problem_type"),
)
HEADS = (
    *("ForMaskedLM", "ForMultipleChoice", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "Model"),
)
LAYER = "model.layers.{layer}."
NORMS = {"embeddings.norm": "embed_norm", "final_norm": "norm"}


def to_fields(config: Any) -> dict[str, Any]:
    """Our fields for the same model.

    Raises:
        UserError: it has another head than ours have.
    """
    fields = {**shared_fields(config, SHARED), "hidden_act": config.hidden_activation, "use_qk_norm": False}
    fields["rope_parameters"] = obeyed_rope(config.rope_parameters)
    return {**fields, "architectures": ["DCModernBert" + class_head(config, HEADS)]}


def restore(config: Any) -> PreTrainedConfig:
    """The configuration of the ModernBERT that has what a DCModernBert without composition has.

    Raises:
        UserError: ModernBERT lacks something that the model has.
    """
    needed = {**plain_heads(config), "attention_output_bias": None, "attention_scaling": None}
    require_fields(config, needed, "ModernBERT")
    name = "ModernBert" + class_head(config, HEADS)
    fields = shared_fields(config, SHARED)
    return ModernBertConfig(**fields, hidden_activation=config.hidden_act, architectures=[name])


def weight_map(config: Any) -> WeightMap:
    """The table for one DCModernBert configuration. Files of a model without a head have no prefix."""
    head = class_head(config, HEADS)
    prefix = "" if head == "Model" else "model."
    layer = prefix + "layers.{layer}."
    embedding = prefix + "embeddings.tok_embeddings.weight"
    rules = renames({embedding: "model.embed_tokens.weight"})
    norms = {prefix + theirs: f"model.{ours}" for theirs, ours in NORMS.items()}
    norms[f"{layer}mlp_norm"] = f"{LAYER}post_attention_layernorm"
    for kind in ("weight", "bias") if config.norm_bias else ("weight",):
        rules += renames(norms, [kind])
        rules.append(Rule((f"{layer}attn_norm.{kind}",), (f"{LAYER}input_layernorm.{kind}",), first_layer=1))
    rules += _layer_rules(config, layer)
    rules += _head_rules(config, head)
    drops = [Drop("decoder.weight", "a head that is tied to the embedding", copy_of=embedding)]
    return WeightMap(config.num_hidden_layers, tuple(rules), tuple(drops) if config.tie_word_embeddings else ())


def _layer_rules(config: Any, layer: str) -> list[Rule]:
    """The projections of attention and MLP; each joins what is ours in parts."""
    rules = []
    width = config.num_attention_heads * config.head_dim
    for kind in ("weight", "bias"):
        if kind == "weight" or config.attention_bias:
            parts = tuple(f"{LAYER}self_attn.{name}_proj.{kind}" for name in "qkv")
            rules.append(Rule((f"{layer}attn.Wqkv.{kind}",), parts, Split((width,) * 3)))
            rules += renames({f"{layer}attn.Wo": f"{LAYER}self_attn.o_proj"}, [kind])
        if kind == "weight" or config.mlp_bias:
            halves = (f"{LAYER}mlp.gate_proj.{kind}", f"{LAYER}mlp.up_proj.{kind}")
            rules.append(Rule((f"{layer}mlp.Wi.{kind}",), halves, Split((config.intermediate_size,) * 2)))
            rules += renames({f"{layer}mlp.Wo": f"{LAYER}mlp.down_proj"}, [kind])
    return rules


def _head_rules(config: Any, head: str) -> list[Rule]:
    """The layer in front of the head, and the head itself."""
    if head == "Model":
        return []
    names = {"head.dense.weight": "prediction_head.dense.weight", "head.norm.weight": "prediction_head.norm.weight"}
    names |= {"head.dense.bias": "prediction_head.dense.bias"} if config.classifier_bias else {}
    names |= {"head.norm.bias": "prediction_head.norm.bias"} if config.norm_bias else {}
    if head == "ForMaskedLM":
        names |= {"decoder.bias": "lm_head.bias"} if config.decoder_bias else {}
        names |= {} if config.tie_word_embeddings else {"decoder.weight": "lm_head.weight"}
    else:
        names |= {f"classifier.{kind}": f"classifier.{kind}" for kind in ("weight", "bias")}
    return renames(names)


MODERNBERT = Parent(("modernbert",), "dcmodernbert", to_fields, restore, weight_map, ENCODER)
