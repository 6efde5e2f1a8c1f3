"""DCPythia: a GPT-NeoX-style decoder with dynamically composable attention heads (arXiv 2405.08553)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .composed_config import ComposedConfig
from .field_rules import check_rope_mapping
from .portable_config import model_size
from .tensor_parallel_plans import MLP_PLAN


@strict
class DCPythiaConfig(ComposedConfig):
    r"""
    Configuration of a DCPythia; the defaults are those of the released DCPythia-6.9B. Attention and composition fields
    are documented in `ComposedConfig`.

    Args:
        use_parallel_residual (`bool`, defaults to `True`): attention and MLP read the same hidden states and their
            outputs are added together; otherwise the MLP reads the attention's result.
        attention_bias, mlp_bias (`bool`, default to `True`): biases of the projections (the official
            `use_linear_bias` switches both).
        rope_parameters (`dict`, *optional*): `partial_rotary_factor` 0.25 by default, 1.0 for CARoPE, which turns whole
            heads; the names `rotary_pct` and `rotary_emb_base` of GPT-NeoX are understood.

    ```python
    >>> from dynattn import DCPythiaConfig, DCPythiaForCausalLM
    >>> model = DCPythiaForCausalLM(DCPythiaConfig.from_size("160m"))
    ```
    """

    model_type = "dcpythia"
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = MLP_PLAN

    vocab_size: int = 50257
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = False
    use_parallel_residual: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Folds GPT-NeoX's names into `rope_parameters` (called by `PreTrainedConfig`)."""
        self.validate_position_scheme()
        kwargs["rope_theta"] = kwargs.pop("rotary_emb_base", kwargs.get("rope_theta", self.default_theta))
        turned = 0.25 if "rope" in self.schemes else 1.0
        kwargs["partial_rotary_factor"] = kwargs.pop("rotary_pct", kwargs.get("partial_rotary_factor", turned))
        if {"rope", "carope"} <= self.schemes:
            given: Any = kwargs.pop("rope_scaling", None) or self.rope_parameters or {}
            self.rope_parameters = self._rope_by_layer_type(given)
        return super().convert_rope_params_to_dict(**kwargs)

    def _rope_by_layer_type(self, given: Any) -> dict[str, Any]:
        """`rope_parameters` for each layer type. Those with CARoPE turn whole heads unless the user says otherwise."""
        types = sorted(set(self.layer_types or ()))
        if not check_rope_mapping(given):
            given = dict.fromkeys(types, given)
        whole = {name: {"partial_rotary_factor": 1.0} for name in types if self.scheme_of(name) == "carope"}
        return {name: {**whole.get(name, {}), **own} for name, own in given.items() if own is not None}


def _pythia(hidden_size: int, layers: int, heads: int, vocab_size: int = 50304) -> dict[str, Any]:
    """A published shape of Pythia: its MLP is four times as wide as its hidden states, and the vocabulary is padded."""
    return model_size(hidden_size, layers, heads, 4 * hidden_size, vocab_size=vocab_size)


DCPythiaConfig.sizes = {
    "tiny": model_size(128, 4, 4, 512, vocab_size=2048, max_position_embeddings=512, sliding_window=64),
    "14m": _pythia(128, 6, 4),
    "31m": _pythia(256, 6, 8),
    "70m": _pythia(512, 6, 8),
    "160m": _pythia(768, 12, 12),
    "410m": _pythia(1024, 24, 16),
    "1b": _pythia(2048, 16, 8),
    "1.4b": _pythia(2048, 24, 16),
    "2.8b": _pythia(2560, 32, 32),
    "6.9b": _pythia(4096, 32, 32, vocab_size=50432),
    "12b": _pythia(5120, 36, 40, vocab_size=50688),
}

__all__ = ["DCPythiaConfig"]
