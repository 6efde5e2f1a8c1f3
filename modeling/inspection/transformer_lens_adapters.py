"""Decoders with composed heads in TransformerLens, whose bridge finds these adapters by the package's entry points.

TransformerLens is not imported anywhere else, and the package does not depend on it: `pip install transformer-lens`.
"""

from typing import Any

from transformer_lens.conversion_utils.conversion_steps import RearrangeTensorConversion
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    NormalizationBridge,
    ParallelBlockBridge,
    RMSNormalizationBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import PreTrainedModel

from ..ops.dcmha.eager import AttentionMaps
from .map_hooks import add_map_hooks, remove_map_hooks

# Names of hooks for copies of a layer's input, which TransformerLens makes for each head.
COPIES = {"hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input"}


class ComposedAttentionBridge(GeneralizedComponent):
    """The hooks of a `ComposedAttention`: of its projections, and of its maps before and after they are composed.

    `hook_attn_scores` and `hook_pattern` are the composed scores and probabilities `[B, H, T, S]`. Those that
    TransformerLens has no name for are `scores.hook_out` and `probs.hook_out`. `hook_q`, `hook_k` and `hook_v`
    `[B, T, heads, D]` are before norms of heads and rotation; `hook_z` `[B, T, H, D]` is what `o_proj` reads.
    """

    hook_aliases = {
        "hook_q": "q.hook_out",
        "hook_k": "k.hook_out",
        "hook_v": "v.hook_out",
        "hook_z": "o.hook_in",
        "hook_attn_scores": "composed_scores.hook_out",
        "hook_pattern": "composed_probs.hook_out",
    }

    def __init__(self, name: str, config: Any) -> None:
        parts = {letter: LinearBridge(name=f"{letter}_proj") for letter in "qkvo"}
        heads = RearrangeTensorConversion("batch pos (head width) -> batch pos head width", width=config.d_head)
        for hook in (parts["q"].hook_out, parts["k"].hook_out, parts["v"].hook_out, parts["o"].hook_in):
            hook.hook_conversion = heads
        maps = {field: GeneralizedComponent(name=f"map_hooks.{field}") for field in AttentionMaps._fields}
        for one in maps.values():
            one.mark_pos_dim(2)  # of queries
        super().__init__(name, config, submodules={**parts, **maps})


class ComposedDecoderAdapter(ArchitectureAdapter):
    """What the adapters of the families share. It gives the model map hooks, with which it runs as `eager` does."""

    # Folding norms into the weights behind them, as this mode does, would leave out the generators of composition
    # factors, which read the same norms; and its attention does not compose.
    supports_compatibility_mode = False
    # The maps come from the hooks.
    supports_hf_output_attentions = False

    def prepare_model(self, hf_model: PreTrainedModel) -> None:
        """Adds map hooks, in place of those that the model may have.

        Raises:
            ValueError: its layers normalize outputs, while the norms that TransformerLens hooks come first.
        """
        if (placement := getattr(hf_model.config, "norm_placement", "input")) != "input":
            raise ValueError(
                f"norm_placement={placement!r} has no norms before attention and MLP, which TransformerLens hooks; use "
                "a model with norm_placement='input', or add_map_hooks, which works with both"
            )
        remove_map_hooks(hf_model)
        add_map_hooks(hf_model)

    def _map_components(self, block: type[BlockBridge], norm: type[NormalizationBridge], mlp: Any) -> None:
        """Names the modules that TransformerLens hooks."""

        def exact(name: str) -> NormalizationBridge:
            return norm(name, self.cfg, use_native_layernorm_autograd=True)

        parts = {
            "ln1": exact("input_layernorm"),
            "ln2": exact("post_attention_layernorm"),
            "attn": ComposedAttentionBridge("self_attn", self.cfg),
            "mlp": mlp,
        }
        blocks = block(name="model.layers", submodules=parts)
        # A composed layer reads its input once, not with a copy of it for each head.
        blocks.hook_aliases = {name: hook for name, hook in blocks.hook_aliases.items() if name not in COPIES}
        self.component_mapping = {
            "embed": EmbeddingBridge(name="model.embed_tokens"),
            "blocks": blocks,
            "ln_final": exact("model.norm"),
            "unembed": UnembeddingBridge(name="lm_head", config=self.cfg),
        }


class DCFormerAdapter(ComposedDecoderAdapter):
    """The adapter of `DCFormerForCausalLM`."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._set_rms_rotary_defaults()
        self._map_components(BlockBridge, RMSNormalizationBridge, self._gated_mlp())


class DCPythiaAdapter(ComposedDecoderAdapter):
    """The adapter of `DCPythiaForCausalLM`."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        cfg.normalization_type, cfg.positional_embedding_type = "LN", "rotary"
        cfg.final_rms = cfg.gated_mlp = cfg.attn_only = False
        cfg.parallel_attn_mlp = cfg.use_parallel_residual
        block = ParallelBlockBridge if cfg.parallel_attn_mlp else BlockBridge
        self._map_components(block, NormalizationBridge, self._ungated_mlp())
