"""`AttentionProblem`: the frozen description of a call that every layer below the API works from.

A problem holds sizes, types and the mask; it holds no tensor and no tile. How a problem is computed (tile sizes,
stages, ...) is a backend's business.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

# A window_right that hides every key of a sequence of any length; positions can be added to it within an int64.
NO_KEYS = -(2**62)


@dataclass(frozen=True)
class Mask:
    """The keys that each query may see: an interval of keys around the query's own position.

    Query i of a sequence with seqlen_q queries and seqlen_k keys stands at key position i + shift, where
    shift = seqlen_k - seqlen_q (bottom-right alignment: the last query stands at the last key). It sees the keys

        i + shift - window_left <= j <= i + shift + window_right        (None = unbounded on that side)

    so causal attention is window_right = 0. A side may be negative: window_left = -3 leaves the keys from the third key
    after the query's position on, window_right = -1 the keys before its position.

    If both are given, left + right >= 0. A window in which no key can lie has window_right = NO_KEYS and no left side,
    so that no formula has to look at both sides (`from_options` ensures it).
    """

    window_left: int | None = None
    window_right: int | None = None

    @classmethod
    def from_options(cls, causal: bool, window: tuple[int | None, int | None] | None) -> Mask:
        """Fold `causal` into the window: it takes away the keys to the right of the query's position."""
        left, right = window if window is not None else (None, None)
        if causal:
            right = 0 if right is None or right > 0 else right
        if left is not None and right is not None and left + right < 0:
            return cls(None, NO_KEYS)
        return cls(left, right)

    @property
    def is_full(self) -> bool:
        """True if every query sees every key."""
        return self.window_left is None and self.window_right is None


class Descales(NamedTuple):
    """Descales of FP8 tensors, float32: real value = stored value * descale. Shapes: see `onepass.QuantizedQKV`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


V_KEYS = 64  # in `fp8.keys_last` the keys of a sequence begin and end at multiples of it


@dataclass(frozen=True)
class Quantization:
    """How the tensors of an FP8 call are quantized, besides their sizes.

    Attributes:
        out_dtype: dtype of out.
        q_block, kv_block: rows that share a descale of q, and of k and v, if their descales are by blocks.
        v_keys_last: v has the layout of `fp8.keys_last`.
        exact_lse: the caller or a backward uses lse, so P is not computed by integers (see kernels/config/sm90.py).
    """

    out_dtype: torch.dtype
    q_block: int | None = None
    kv_block: int | None = None
    v_keys_last: bool = False
    exact_lse: bool = True


class Modifiers(NamedTuple):
    """Tensors that change which keys are seen, or scores, or probabilities, as of `onepass.attention`.

    Few calls have any of them.

    Attributes:
        dropout_state: (2,) int64, seed and offset, with dropout_p.
    """

    seqstart_k: torch.Tensor | None = None
    key_ranges: torch.Tensor | None = None
    q_positions: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    query_ranges: torch.Tensor | None = None
    dropout_state: torch.Tensor | None = None


NO_MODIFIERS = Modifiers()


def modifier_flags(modifiers: Modifiers | None) -> dict[str, Any]:
    """The fields of `AttentionProblem` that say which of these tensors there are."""
    if modifiers is None:
        return {}
    return {
        "has_seqstart_k": modifiers.seqstart_k is not None,
        "has_key_ranges": modifiers.key_ranges is not None,
        "has_q_positions": modifiers.q_positions is not None,
        "has_alibi": modifiers.alibi_slopes is not None,
        "bias_dtype": None if modifiers.bias is None else modifiers.bias.dtype,
        "has_query_ranges": modifiers.query_ranges is not None,
    }


EMPTY, FULL = 0, 2  # kinds of a block: its block_mask hides all pairs, or none
WORD = 32  # keys of a word of `Blocks.bits`


class Blocks(NamedTuple):
    """The blocks of a `onepass.BlockMask`.

    Attributes:
        kinds: (batch or 1, num_heads_q or 1, blocks of queries, blocks of keys) int8, not 0 where queries see keys.
        size: queries and keys of a block.
        bits: (batch or 1, num_heads_q or 1, queries, words of 32 keys) int32, read where a kind is neither `EMPTY` nor
            `FULL`: bit j % 32 of word j // 32 says whether a query sees key j.
        most: in a compact mask the blocks that are not empty in the fullest row, and in the fullest column.
    """

    kinds: torch.Tensor
    size: tuple[int, int]
    bits: torch.Tensor | None = None
    most: tuple[int, int] | None = None


class AttentionInputs(NamedTuple):
    """The tensors of one call, which an `AttentionProblem` does not hold.

    Attributes:
        modifiers: None: the call has none.
        descales: of q, k and v in e4m3; None: they are not quantized.
        blocks: None: the call has no block_mask. A call that has one has modifiers, though they may be all None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    modifiers: Modifiers | None = None
    descales: Descales | None = None
    blocks: Blocks | None = None


@dataclass(frozen=True)
class AttentionProblem:
    """One call of attention, without its data.

    Sizes are those of the tensors as given: for packed sequences `batch` is the number of sequences and
    `seqlen_q`, `seqlen_k` are the total numbers of tokens.
    """

    dtype: torch.dtype
    device_type: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    # No default: torch.compile in torch 2.10 to 2.12 wraps even unused defaults, and can wrap constants only.
    mask: Mask
    softcap: float | None = None
    has_sinks: bool = False
    has_seqused_k: bool = False
    is_packed: bool = False
    deterministic: bool = False
    quantization: Quantization | None = None  # with FP8 q, k, v
    kv_dtype: torch.dtype | None = None  # dtype of a cache's k and v, if it differs from dtype
    has_seqstart_k: bool = False
    has_key_ranges: bool = False
    has_q_positions: bool = False
    has_alibi: bool = False
    bias_dtype: torch.dtype | None = None  # with a bias
    has_query_ranges: bool = False
    query_ranges_of_positions: bool = False  # they count positions of queries instead of rows of q
    block_size: tuple[int, int] | None = None  # with a block_mask
    has_block_bits: bool = False
    dropout_p: float = 0.0
    constant_slopes: bool = False  # the backward does not compute the gradient of alibi_slopes
    constant_bias: bool = False  # the backward does not compute the gradient of a bias
    float32_dkv: bool = False  # the backward leaves dk and dv in the dtype in which it sums them
    float32_out: bool = False  # out in the dtype in which it is summed, so that it can be merged without rounding
    first_head: int = 0  # for dropout, if q has some of a call's heads: the number of its first one
    all_heads: int | None = None  # and the number of heads of the call; None: those of q

    # Fields that only change the data of a launch, never the code that runs.
    _DYNAMIC: ClassVar = frozenset(
        {
            "batch",
            "seqlen_q",
            "seqlen_k",
            "num_heads_q",
            "num_heads_kv",
            "softmax_scale",
            "softcap",
            "mask",
            "dropout_p",
            "first_head",
            "all_heads",
        }
    )

    @classmethod
    def of(
        cls,
        inputs: AttentionInputs,
        *,
        softmax_scale: float,
        mask: Mask,
        softcap: float | None,
        deterministic: bool,
        quantization: Quantization | None = None,
        dropout_p: float = 0.0,
    ) -> AttentionProblem:
        """The problem that these tensors and options pose; they have been checked before."""
        q, k, v = inputs.q, inputs.k, inputs.v
        cu_seqlens_q = inputs.cu_seqlens_q
        return cls(
            dtype=q.dtype,
            device_type=q.device.type,
            batch=q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
            seqlen_q=q.shape[-3],
            seqlen_k=k.shape[-3],
            num_heads_q=q.shape[-2],
            num_heads_kv=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-2 if quantization is not None and quantization.v_keys_last else -1],
            softmax_scale=softmax_scale,
            mask=mask,
            softcap=softcap,
            has_sinks=inputs.sinks is not None,
            has_seqused_k=inputs.seqused_k is not None,
            is_packed=cu_seqlens_q is not None,
            deterministic=deterministic,
            quantization=quantization,
            dropout_p=dropout_p,
            block_size=None if inputs.blocks is None else inputs.blocks.size,
            has_block_bits=inputs.blocks is not None and inputs.blocks.bits is not None,
            **modifier_flags(inputs.modifiers),
        )

    @property
    def text(self) -> str:
        """The problem in a human-readable line."""
        pairs = (self.num_heads_q, self.num_heads_kv), (self.head_dim, self.head_dim_v)
        heads, head_dim = (f"{a}" if a == b else f"{a}/{b}" for a, b in pairs)
        left, right = self.mask.window_left, self.mask.window_right
        options = {
            "causal": (left, right) == (None, 0),
            f"window ({left}, {right})": not self.mask.is_full and (left, right) != (None, 0),
            f"softcap {self.softcap}": self.softcap is not None,
            "sinks": self.has_sinks,
            "seqused_k": self.has_seqused_k,
            "packed": self.is_packed,
            "deterministic": self.deterministic,
            "FP8": self.quantization is not None,
            self.modifiers_named: self.has_modifiers,
        }
        given = ", ".join(name for name, is_given in options.items() if is_given)
        sizes = f"batch {self.batch}, seqlen {self.seqlen_q} x {self.seqlen_k}, heads {heads}, head_dim {head_dim}"
        return f"{str(self.dtype).removeprefix('torch.')}, {sizes}{', ' * bool(given)}{given}"

    @property
    def qhead_per_kvhead(self) -> int:
        """The number of query heads of a kv head; 1 if there are no query heads, so that it can be a divisor."""
        return self.num_heads_q // self.num_heads_kv if self.num_heads_q else 1

    @property
    def has_bias(self) -> bool:
        return self.bias_dtype is not None

    @property
    def has_modifiers(self) -> bool:
        """Whether a call has `Modifiers`."""
        return self.has_seqstart_k or self.has_modifiers_beside_starts

    @property
    def has_modifiers_beside_starts(self) -> bool:
        return self.has_row_ranges or self.adds_terms or self.dropout_p > 0

    @property
    def modifiers_named(self) -> str:
        """The modifiers of the problem, for a message."""
        names = {
            "seqstart_k": self.has_seqstart_k,
            "key_ranges": self.has_key_ranges,
            "query_ranges": self.has_query_ranges,
            f"block_mask{' with bits' * self.has_block_bits}": self.block_size is not None,
            "q_positions": self.has_q_positions,
            "alibi_slopes": self.has_alibi,
            "bias": self.has_bias,
            "dropout_p": self.dropout_p > 0,
        }
        return ", ".join(name for name, is_given in names.items() if is_given)

    @property
    def has_row_ranges(self) -> bool:
        """Whether the keys that a query sees are not an interval around i + seqlen_k - seqlen_q."""
        return self.has_key_ranges or self.has_query_ranges or self.has_q_positions or self.block_size is not None

    @property
    def has_intervals(self) -> bool:
        """Whether kernels read from a tensor which keys each query sees."""
        return self.has_row_ranges or self.has_seqstart_k

    @property
    def has_lists(self) -> bool:
        """Whether the blocks of keys that a kernel's tile visits come from a list."""
        return self.has_query_ranges or self.block_size is not None

    @property
    def has_backward_lists(self) -> bool:
        """Whether the blocks of queries that a backward kernel's tile visits come from a list."""
        return self.has_intervals or self.has_lists

    @property
    def adds_terms(self) -> bool:
        """Whether something is added to scores."""
        return self.has_alibi or self.has_bias

    @property
    def hides_pairs(self) -> bool:
        """Whether a query may not see a key of its sequence."""
        return not self.mask.is_full or self.has_intervals or self.has_bias

    @property
    def dkv_dtype(self) -> torch.dtype | None:
        """The dtype of dk and dv; None: that of k and v."""
        return self.accum_dtype if self.float32_dkv else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no row, or no key. Then out is 0, and lse the row's sink or -inf."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k, self.num_heads_q)

    @property
    def has_e4m3_cache(self) -> bool:
        """Whether k and v are e4m3 and q is not."""
        return self.kv_dtype is not None

    @property
    def kv_itemsize(self) -> int:
        return (self.dtype if self.kv_dtype is None else self.kv_dtype).itemsize

    @property
    def out_dtype(self) -> torch.dtype:
        if self.float32_out:
            return self.accum_dtype
        return self.dtype if self.quantization is None else self.quantization.out_dtype

    @property
    def accum_dtype(self) -> torch.dtype:
        """The dtype of scores, sums and lse: float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def static(self) -> tuple:
        """The properties that change generated code, as (name, value) pairs.

        Lengths, strides and head counts are not among them. The group size is (one kv head serves `qhead_per_kvhead`
        query heads), and so is whether a window bound exists, but not its value.
        """
        kept = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in self._DYNAMIC]
        return (
            *kept,
            ("qhead_per_kvhead", self.qhead_per_kvhead),
            ("has_window_left", self.mask.window_left is not None),
            ("has_window_right", self.mask.window_right is not None),
            ("has_softcap", self.softcap is not None),
            ("has_dropout", self.dropout_p > 0),
        )
