"""What tensor parallelism splits of a layer: the parts' names, each with a style of Transformers or of this package."""

# Styles that `modeling/layers/tensor_parallel.py` defines, for attention where a device can have some of the heads.
WHOLE_HEADS, HEAD_GROUPS, HEAD_NORM = "whole_heads", "head_groups", "head_norm"
ATTENTION_PLAN = {
    "layers.*.self_attn": WHOLE_HEADS,
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    **{f"layers.*.self_attn.{name}_norm": HEAD_NORM for name in "qk"},
    "layers.*.self_attn.composition": HEAD_GROUPS,
    "layers.*.self_attn.o_proj": "rowwise",
}
MLP_PLAN = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
GATED_MLP_PLAN = {**MLP_PLAN, "layers.*.mlp.gate_proj": "colwise"}
