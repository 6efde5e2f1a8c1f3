"""`torch.nn.MultiheadAttention` with dynamically composed heads (DCMHA, arXiv 2405.08553)."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...configuration.multihead_config import ComposeOptions, make_config
from ..layers.differential_heads import DifferentialHeads, init_differential
from ..layers.head_composition import init_composition
from ..ops.autocast import is_autocast_on
from ..ops.dcmha.attention import dcmha_attention, resolve_implementation
from ..ops.dcmha.eager import dcmha_eager
from .multihead_inputs import check_masks_fit, check_shapes, merge_masks
from .side_generators import SideGenerators


class ComposedMultiheadAttention(SideGenerators, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose heads are composed before and after the softmax (DCMHA, arXiv 2405.08553).

    It takes the place of PyTorch's module: constructor, `forward`, and the names and shapes of all projection weights
    are the same; `composition.*` (and `key_composition.*`) are added. Query-side factors are generated from `query`,
    key-side factors from `key`. It differs from PyTorch's module only where heads are composed or one of the keywords
    below is used that PyTorch's module does not have:

    * Attention goes through `dynattn.dcmha_attention`. With `need_weights=False` its memory is linear in `T`, apart
      from the mask that joins `attn_mask` and `key_padding_mask` if both are given. PyTorch's default,
      `need_weights=True`, runs `eager`, with all maps in memory.
    * The weights that are returned are the composed probabilities. They can be negative and need not sum to one.
    * `is_causal` hides later keys, with or without a mask; PyTorch's module needs one.
    * A query that sees no key gives zeros (before the output projection), where PyTorch gives NaN.
    * Dropout of probabilities, `add_bias_kv`, `add_zero_attn` and nested tensors are refused. PyTorch's fused inference
      path of encoder layers, which would leave the composition out, is switched off.
    * `torch.jit.script` does not take it; `torch.jit.trace`, `torch.compile` and `torch.export` do.

    With composition off and none of those keywords, `forward` is that of PyTorch's module.

    Weights (`E` embed_dim, `D` head width, `H_kv` heads of keys and values):
        in_proj_weight: `[3 E, E]`, if all three projections have that shape; else
        q_proj_weight, k_proj_weight, v_proj_weight: `[E, E]`, `[H_kv D, kdim]`, `[H_kv D, vdim]`.
        in_proj_bias: `[E + 2 H_kv D]`.
        out_proj: `[E, E]` and `[E]`.
        composition: a `DynamicComposition` for both sides; in cross-attention for queries, with the static matrices.
        key_composition: a `DynamicComposition` for keys, in cross-attention with key-wise composition only.
        differential: `DifferentialHeads`, with `differential_heads=True` only.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            `torch.nn.MultiheadAttention`.
        num_key_value_heads: fewer than `num_heads` is grouped-query attention, with separate projection weights.
        cross_attention: make two generators, one for queries and one for keys, as the authors' code does in
            cross-attention; implied by `kdim`. A single generator can serve cross-attention too, but computes the
            factors of both sides for queries and for keys, and drops half of them.
        q_norm, k_norm: modules that are applied to the queries `[B, T, H, D]` and keys `[B, S, H_kv, D]` of each head,
            such as `nn.LayerNorm(D, eps=1e-6, bias=False)` in the authors' vision transformers.
        implementation: of `dynattn.dcmha_attention`; `None` takes the default, see there.
        layer_idx: number of the layer, from 0; the initial lambda of `differential_heads` depends on it.
        compose: the `compose_*` fields of the configurations, `differential_heads` and `head_norm_eps`, with the same
            meaning and defaults (`CompositionConfig`). `compose_pre=False, compose_post=False` composes nothing.

    Raises:
        TypeError: an option of composition does not exist.
        ValueError: a value is out of range, or cannot be combined with composition.

    ```python
    >>> attention = dynattn.ComposedMultiheadAttention(512, 8, batch_first=True, compose_rank=2)
    >>> x = torch.randn(2, 100, 512)
    >>> output, _ = attention(x, x, x, need_weights=False, is_causal=True)  # [2, 100, 512]
    ```
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_key_value_heads: int | None = None,
        cross_attention: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        implementation: str | None = None,
        layer_idx: int = 0,
        **compose: Unpack[ComposeOptions],
    ) -> None:
        config = make_config(embed_dim, num_heads, num_key_value_heads, compose)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        self.q_norm, self.k_norm, self.implementation = q_norm, k_norm, implementation
        if self.num_key_value_heads != num_heads:
            self._separate_projections()
        across = cross_attention or kdim is not None
        self.add_generators(config, cross_attention=across, key_size=self.kdim, device=device, dtype=dtype)
        self.differential: DifferentialHeads | None = None
        if config.differential_heads:
            self.differential = DifferentialHeads(config, layer_idx).to(device=device, dtype=dtype)
            init_differential(self.differential)
        resolve_implementation(implementation, composed=config.composes)
        self._computes_as_torch = (
            not config.composes
            and self.num_key_value_heads == num_heads
            and q_norm is None
            and k_norm is None
            and implementation is None
        )
        if not self._computes_as_torch:
            # nn.TransformerEncoder, its layers and PEFT read the projection weights directly and bypass `forward` where
            # this attribute is True.
            self._qkv_same_embed_dim = False
            self._refuse_unsupported()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in `torch.nn.MultiheadAttention`.

        Args:
            query: `[T, B, E]`, `[B, T, E]` with `batch_first`, or unbatched `[T, E]`.
            key, value: `[S, B, kdim]` and `[S, B, vdim]`, in the same layout.
            key_padding_mask: `[B, S]` (unbatched `[S]`): boolean, True = hidden, or added to the composed scores.
            need_weights: return the composed probabilities, computed by `eager` with all maps in memory.
            attn_mask: `[T, S]` or `[B * H, T, S]`: boolean, True = hidden, or added to the composed scores.
            average_attn_weights: return the mean of the probabilities over heads.
            is_causal: a query sees no later key. Needs as many keys as queries; with other numbers, `attn_mask` has to
                be given and alone decides what a query sees.

        Returns:
            The output in the layout of `query`, and the composed probabilities, `[B, T, S]` if averaged over heads,
            else `[B, H, T, S]` (unbatched without `B`), or None. They can be negative and need not sum to one.

        Raises:
            ValueError: shapes or dtypes do not fit, or an option was set that composed heads do not support.
        """
        if self._computes_as_torch:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._refuse_unsupported()
        self._check_inputs(query, key, value)
        is_batched = query.dim() == 3
        query, key, value = self._to_batch_first(query, key, value)
        check_masks_fit(query, key, self.num_heads, attn_mask, key_padding_mask, is_batched)
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask[None]
        output, probs = self._attend(query, key, value, attn_mask, key_padding_mask, need_weights, is_causal)
        if probs is not None and average_attn_weights:
            probs = probs.mean(dim=1)
        if not is_batched:
            return output[0], None if probs is None else probs[0]
        return output if self.batch_first else output.transpose(0, 1), probs

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` for batch-first inputs: returns the output `[B, T, E]` and probabilities `[B, H, T, S]` or None.

        Args:
            query, key, value: `[B, T, E]`, `[B, S, kdim]` and `[B, S, vdim]`.
        """
        queries, keys = query.shape[1], key.shape[1]
        if is_causal and attn_mask is None and queries != keys:
            raise ValueError(
                f"is_causal=True is ambiguous for {queries} queries and {keys} keys; "
                "give an attn_mask that says which keys a query sees"
            )
        pre, post = self.compose(query, key)
        if self.differential is not None:
            post = self.differential(post)
        heads = self._project(query, key, value)
        options: dict[str, Any] = {
            "pre": pre,
            "post": post,
            "attention_mask": merge_masks(attn_mask, key_padding_mask, self.num_heads, heads[0].dtype),
            "is_causal": is_causal and queries == keys,
        }
        probs = None
        if need_weights:
            output, probs = dcmha_eager(*heads, scaling=self.head_dim**-0.5, sliding_window=None, **options)
        else:
            output = dcmha_attention(*heads, implementation=self.implementation, **options)
        if self.differential is not None:
            output = self.differential.normalize(output)
        return self.out_proj(output.flatten(2)), probs

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects to queries `[B, H, T, D]`, keys and values `[B, H_kv, S, D]`; the inputs are as in `_attend`."""
        parts: Iterable[Tensor]
        if self.in_proj_weight is not None and query is key and key is value:
            parts = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            parts = map(F.linear, (query, key, value), *self._split_projections())
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        query = query if self.q_norm is None else self.q_norm(query)
        key = key if self.k_norm is None else self.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _split_projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """The projection weights and biases of queries, keys and values.

        Weights are `[E, E]`, `[H_kv D, kdim]` and `[H_kv D, vdim]`, biases `[E]`, `[H_kv D]` and `[H_kv D]` or None.
        """
        key_size = self.num_key_value_heads * self.head_dim
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split([self.embed_dim, key_size, key_size])
        if self.in_proj_weight is not None:
            return self.in_proj_weight.chunk(3), biases
        return (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight), biases

    def _to_batch_first(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs as `[B, T or S, width]`.

        Inputs that are the same object stay the same object, by which `compose` and `_project` know self-attention.
        """

        def arrange(x: Tensor) -> Tensor:
            """One input of any layout as `[B, length, width]`."""
            if x.dim() == 2:
                return x[None]
            return x if self.batch_first else x.transpose(0, 1)

        arranged = arrange(query)
        arranged_key = arranged if key is query else arrange(key)
        return arranged, arranged_key, arranged_key if value is key else arrange(value)

    def _separate_projections(self) -> None:
        """Replaces the packed projections by separate ones, those of keys and values with `num_key_value_heads`."""
        like = self.out_proj.weight
        key_size = self.num_key_value_heads * self.head_dim
        self.in_proj_weight = None  # type: ignore[assignment]
        self.q_proj_weight = nn.Parameter(like.new_empty(self.embed_dim, self.embed_dim))
        self.k_proj_weight = nn.Parameter(like.new_empty(key_size, self.kdim))
        self.v_proj_weight = nn.Parameter(like.new_empty(key_size, self.vdim))
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(like.new_empty(self.embed_dim + 2 * key_size))
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Draws the initial weights: of the projections as PyTorch does, of the composition as `init_composition`."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)
        for generator in self.generators():
            init_composition(generator, self._init_scale)
        differential = getattr(self, "differential", None)  # the constructor of PyTorch's module calls this too
        if differential is not None:
            init_differential(differential)

    def _refuse_unsupported(self) -> None:
        """Raises ValueError for what PyTorch's module can do and `dcmha_attention` cannot."""
        no_token = "adds a key that is no token, so that no composition factors can be generated for it"
        unsupported = {
            "dropout": (self.dropout, "drops probabilities, which are never all in memory at once"),
            "add_bias_kv": (self.bias_k is not None, no_token),
            "add_zero_attn": (self.add_zero_attn, no_token),
        }
        for option, (given, reason) in unsupported.items():
            if given:
                off = type(given)(0)
                raise ValueError(f"{option}={given} {reason}; use {option}={off}, or torch.nn.MultiheadAttention")

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises ValueError unless `forward` can run on these inputs: dense, with its shapes, in the weights' dtype."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "nested tensors are not supported; pad them (torch.nested.to_padded_tensor) and give key_padding_mask; "
                "in an nn.TransformerEncoder set use_nested_tensor = False"
            )
        check_shapes(query, key, value, (self.embed_dim, self.kdim, self.vdim), self.batch_first)
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        dtypes = [x.dtype for x in (query, key, value)]
        if set(dtypes) != {weight.dtype} and not is_autocast_on(query.device):
            raise ValueError(
                f"query, key and value are {', '.join(map(str, dtypes))} and the weights {weight.dtype}; "
                "convert inputs or module with .to(dtype)"
            )
