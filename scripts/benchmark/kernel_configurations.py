"""The configurations that the Triton kernels are compiled for ahead of time, by name."""

from typing import NamedTuple


class HeadByHeadConfiguration(NamedTuple):
    """What the kernels that go through the heads one after the other are compiled for."""

    heads: int = 16
    dtype: str = "bf16"
    # Numbers of packed terms (5: rank 2 and a gate) of queries and keys before the softmax, then of both after it.
    term_counts: tuple[int, int, int, int] = (5, 5, 5, 5)
    has_static: bool = False
    is_additive: bool = False
    has_documents: bool = False
    is_window: bool = False
    # Tables by distance, with gradients.
    has_bias: bool = False
    has_gain: bool = False
    composes_bias: bool = False


class TensorCoreConfiguration(NamedTuple):
    """What the kernels that compose all heads on the tensor cores are compiled for."""

    heads: int = 16
    dtype: str = "bf16"
    # Whether there are matrices: of queries and of keys before the softmax, then of both after it.
    sides: tuple[bool, bool, bool, bool] = (True,) * 4
    has_mask: bool = False
    has_static: bool = False
    is_window: bool = False
    dtype_of_terms: str = "bf16"
    # Tables by distance, with gradients.
    has_bias: bool = False
    has_gain: bool = False

    @property
    def padded(self) -> int:
        """The number of heads that a program holds."""
        return 16 if self.heads <= 16 else 32


class WindowConfiguration(NamedTuple):
    """What the matrix products of causal windows are compiled for."""

    width: int = 64
    dtype: str = "bf16"
    share: int = 1  # heads that share keys and values
    is_added: bool = False
    window: int = 256


class DecodeConfiguration(NamedTuple):
    """What the kernels for a single query are compiled for."""

    heads: int = 32
    kv_heads: int = 32
    width: int = 128
    dtype: str = "bf16"
    rank: int = 2
    groups: int = 1
    has_static: bool = False
    is_short: bool = False
    is_paged: bool = False
    has_tables: bool = False


Configuration = HeadByHeadConfiguration | TensorCoreConfiguration | WindowConfiguration | DecodeConfiguration
CONFIGURATIONS: dict[str, Configuration] = {
    "all terms, 16 heads": HeadByHeadConfiguration(),
    "all terms, 32 heads": HeadByHeadConfiguration(32),
    "all terms, 64 heads": HeadByHeadConfiguration(64),
    "all terms, 12 heads, float16": HeadByHeadConfiguration(12, "fp16"),
    "all terms, float32": HeadByHeadConfiguration(dtype="fp32"),
    "rank 1": HeadByHeadConfiguration(term_counts=(3, 3, 3, 3)),
    "rank 4": HeadByHeadConfiguration(32, term_counts=(9, 9, 9, 9)),
    "rank 4, float32": HeadByHeadConfiguration(dtype="fp32", term_counts=(9, 9, 9, 9)),
    "low rank alone": HeadByHeadConfiguration(term_counts=(4, 4, 4, 4)),
    "gates alone": HeadByHeadConfiguration(term_counts=(1, 1, 1, 1)),
    "queries alone": HeadByHeadConfiguration(term_counts=(5, 0, 5, 0)),
    "keys alone": HeadByHeadConfiguration(term_counts=(0, 5, 0, 5)),
    "pre alone": HeadByHeadConfiguration(term_counts=(5, 5, 0, 0)),
    "post alone": HeadByHeadConfiguration(term_counts=(0, 0, 5, 5)),
    "nothing": HeadByHeadConfiguration(term_counts=(0, 0, 0, 0)),
    "static": HeadByHeadConfiguration(has_static=True),
    "static, float32": HeadByHeadConfiguration(dtype="fp32", has_static=True),
    "static alone": HeadByHeadConfiguration(term_counts=(0, 0, 0, 0), has_static=True),
    "static, rank 4": HeadByHeadConfiguration(term_counts=(9, 9, 9, 9), has_static=True),
    "additive mask": HeadByHeadConfiguration(is_additive=True),
    "documents": HeadByHeadConfiguration(has_documents=True),
    "window": HeadByHeadConfiguration(is_window=True),
    "bias": HeadByHeadConfiguration(has_bias=True),
    "gain": HeadByHeadConfiguration(has_gain=True),
    "bias and gain, rank 4": HeadByHeadConfiguration(64, term_counts=(9, 9, 9, 9), has_bias=True, has_gain=True),
    "gain, float32, window": HeadByHeadConfiguration(dtype="fp32", is_window=True, has_gain=True),
    "composed bias": HeadByHeadConfiguration(has_bias=True, composes_bias=True),
    "composed bias, static": HeadByHeadConfiguration(has_static=True, has_bias=True, composes_bias=True),
    "matrices, 16 heads": TensorCoreConfiguration(),
    "matrices, 32 heads": TensorCoreConfiguration(32),
    "matrices, 12 heads, float16": TensorCoreConfiguration(12, "fp16", dtype_of_terms="fp16"),
    "matrices, rows in float32": TensorCoreConfiguration(dtype_of_terms="fp32"),
    "matrices, 24 heads, masks": TensorCoreConfiguration(24, has_mask=True),
    "matrices, static": TensorCoreConfiguration(has_static=True),
    "matrices, 32 heads, static": TensorCoreConfiguration(32, has_static=True),
    "matrices, window": TensorCoreConfiguration(is_window=True),
    "matrices, 32 heads, window": TensorCoreConfiguration(32, is_window=True),
    "matrices, queries alone": TensorCoreConfiguration(sides=(True, False, True, False)),
    "matrices, keys alone": TensorCoreConfiguration(sides=(False, True, False, True)),
    "matrices, pre alone": TensorCoreConfiguration(32, sides=(True, True, False, False)),
    "matrices, post alone": TensorCoreConfiguration(32, sides=(False, False, True, True)),
    "matrices, bias": TensorCoreConfiguration(has_bias=True),
    "matrices, gain": TensorCoreConfiguration(has_gain=True),
    "matrices, 32 heads, bias and gain": TensorCoreConfiguration(32, has_bias=True, has_gain=True),
    "window matmuls": WindowConfiguration(),
    "window matmuls, width 80, float16, several chunks": WindowConfiguration(80, "fp16", is_added=True),
    "window matmuls, width 128, shared keys": WindowConfiguration(128, share=4),
    "window matmuls, float32": WindowConfiguration(dtype="fp32"),
    "decoding, 32 heads": DecodeConfiguration(),
    "decoding, width 80, float16": DecodeConfiguration(width=80, dtype="fp16"),
    "decoding, 64 heads on 8, groups, static": DecodeConfiguration(64, 8, groups=2, has_static=True),
    "decoding, 16 heads, float32": DecodeConfiguration(16, 16, 64, "fp32"),
    "decoding, 12 heads, rank 1": DecodeConfiguration(12, 12, 64, rank=1),
    "decoding, 64 heads, rank 4": DecodeConfiguration(64, 64, rank=4),
    "decoding, 128 heads on 8": DecodeConfiguration(128, 8),
    "decoding, one block": DecodeConfiguration(is_short=True),
    "decoding, tables": DecodeConfiguration(has_tables=True),
    "decoding, pages, tables": DecodeConfiguration(is_paged=True, has_tables=True),
    "decoding, pages": DecodeConfiguration(is_paged=True),
    "decoding, pages, 64 heads on 8, static": DecodeConfiguration(64, 8, has_static=True, is_paged=True),
    "decoding, pages, 16 heads, float32": DecodeConfiguration(16, 16, 64, "fp32", is_paged=True),
}
