"""The arguments of every kernel, stated once.

A launch fills such a NamedTuple with tensors and numbers, a trace with stand-ins, and the kernel's `__call__` gets it
with the values of the kernel language. Between a launch and its kernel the fields are passed one by one, in their
order, and torch's current stream comes last: see device/entry.py. An argument that a problem has no use for is None.

What several kernels have under one name:

    q, out; dout, dq            (batch, seqlen_q, num_heads_q, head_dim or head_dim_v)
    k, v; dk, dv                (batch, seqlen_k, num_heads_kv, head_dim or head_dim_v)
    lse; dlse                   (batch, num_heads_q, seqlen_q) float32; packed sequences: all of these without batch
    sinks                       (num_heads_q,) float32
    cu_seqlens_q, cu_seqlens_k  (batch + 1,) int32
    seqused_k                   (batch,) int32
    page_table                  (batch, max_pages) int32; a cache in pages: (num_pages, page_size, num_heads_kv, ..)
    k_descale, v_descale        of an e4m3 cache: (batch or num_pages, num_heads_kv, blocks) float32
    kv_block                    keys of such a block, without pages
    scale_log2, tanh_scale      see `ScoreFactors` in device/blocks/softmax/online.py
    window_left, window_right   see `window_bounds` in launch/arguments.py
    heads_per_section           see geometry/tile_scheduler.py
    num_splits, split_blocks    see geometry/splits.py
    added_k                     keys beyond those that seqused_k counts
    dq_accum, stats, turns      see `Accumulator` in device/blocks/tiles/dq_sums.py, as blocks_per_head
    counter                     (1,) int32, zero: see device/blocks/tiles/queue.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

# of torch and Python at a launch, of the kernel language in a kernel
Tensor = Any
Int = Any
Float = Any


class ModifierTensors(NamedTuple):
    """The modifiers of a call as a kernel gets them.

    Rows are queries of a batch entry, or all queries of packed sequences, which have one entry. A tensor that is
    broadcast over a mode has a stride of 0 there.

    Attributes:
        ranges: (rows, 2, heads, entries) int32, a range of keys for each query.
        positions: (rows, entries) int32, where queries stand among their keys.
        starts: (batch,) int32, the first key of each sequence.
        slopes: (heads, batch) float32.
        bias: (rows, keys, heads, entries); with positions, rows are positions.
        dropout_state: (4,) int32: seed and offset, the low half of each first.
        keep_bytes: of the 256 values of a random byte, how many keep a pair.
        keep_scale: what a kept probability is multiplied with.
        first_head, all_heads: the number of q's first head in the call whose random bits these are, and its heads.
        query_ranges: (keys, 2, heads, entries) int32, a range of queries for each key; packed sequences have one entry.
        kinds: (blocks of queries, blocks of keys, heads, entries or sequences) int8, those of `Blocks`.
        bits: (queries, words of 32 keys, heads, entries or sequences) int32: the pairs of blocks that are not full.
        numbers, counts, turns: the blocks that tiles visit, as `BlockListsArguments` has them, with the dimensions in
            reverse order.
        term_scale: what brings a term to the unit of scores: scale_log2 of `ScoreFactors`, inverted, times log2(e).
        dslopes: (places, heads, batch) float32, what a backward adds gradients of slopes to. Each warp of a tile has a
            place of its own.
        dbias: like bias, float32; or (rows, keys, heads, entries) with rows that are queries, see `Modifiers`.
    """

    ranges: Tensor | None = None
    positions: Tensor | None = None
    starts: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    dropout_state: Tensor | None = None
    keep_bytes: Int | None = None
    keep_scale: Float | None = None
    first_head: Int | None = None
    all_heads: Int | None = None
    term_scale: Float | None = None
    query_ranges: Tensor | None = None
    kinds: Tensor | None = None
    bits: Tensor | None = None
    numbers: Tensor | None = None
    counts: Tensor | None = None
    turns: Tensor | None = None
    dslopes: Tensor | None = None
    dbias: Tensor | None = None


class ForwardSm90Arguments(NamedTuple):
    """The arguments of `ForwardSm90`. Splits: out and lse are (splits, ..) float32."""

    q: Tensor
    k: Tensor
    v: Tensor  # FP8: `fp8.keys_last`, or transposes_v
    out: Tensor
    lse: Tensor
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    float32: tuple[Tensor, Tensor, Tensor] | None = None  # q, k and v themselves, where the first three are halves
    q_scale: Tensor | None = None  # for FP8 and halves, like the next three: see device/blocks/softmax/scaled.py
    k_scale: Tensor | None = None  # with descales of a cache, like v_scale: (batch, num_heads_kv, 1), any strides
    v_scale: Tensor | None = None
    q_block: Int | None = None
    scale_log2: Float | None = None
    tanh_scale: Float | None = None
    window_left: Int | None = None
    window_right: Int | None = None
    modifiers: ModifierTensors | None = None
    counter: Tensor | None = None
    heads_per_section: Int | None = None
    num_ctas: Int | None = None
    page_table: Tensor | None = None
    added_k: Int | None = None
    num_splits: Int | None = None
    split_blocks: Int | None = None


class ForwardSm80Arguments(NamedTuple):
    """The arguments of `ForwardSm80` and `DecodeSm80`.

    Splits: out and lse are (splits, ..) float32, also of packed sequences, as a batch of one.
    """

    q: Tensor
    k: Tensor  # e4m3: (.., head_dim / 2) pairs, like v
    v: Tensor
    out: Tensor
    lse: Tensor
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    scale_log2: Float | None = None
    tanh_scale: Float | None = None
    window_left: Int | None = None
    window_right: Int | None = None
    modifiers: ModifierTensors | None = None
    heads_per_section: Int | None = None
    num_tiles: Int | None = None  # an upper bound for packed sequences
    page_table: Tensor | None = None
    added_k: Int | None = None
    num_splits: Int | None = None
    split_blocks: Int | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    kv_block: Int | None = None


class BackwardSm90Arguments(NamedTuple):
    """The arguments of `BackwardSm90`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dk: Tensor
    dv: Tensor
    dq: Tensor | None = None  # None: the postprocess kernel writes it
    out: Tensor | None = None  # None, as for the next three: the preprocess kernel reads them
    lse: Tensor | None = None
    dlse: Tensor | None = None
    progress: Tensor | None = None  # see device/sm90/backward/rows.py
    dq_accum: Tensor | None = None
    stats: Tensor | None = None
    turns: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    softmax_scale: Float | None = None
    scale_log2: Float | None = None
    tanh_scale: Float | None = None
    window_left: Int | None = None
    window_right: Int | None = None
    modifiers: ModifierTensors | None = None
    counter: Tensor | None = None
    blocks_per_head: Int | None = None
    heads_per_section: Int | None = None
    tiles_in_ring: Int | None = None
    num_ctas: Int | None = None


class BackwardSm80Arguments(NamedTuple):
    """The arguments of `BackwardSm80`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dk: Tensor
    dv: Tensor
    dq_accum: Tensor | None = None
    stats: Tensor | None = None
    turns: Tensor | None = None  # with one more number at the end: how many tiles have been drawn
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    softmax_scale: Float | None = None
    scale_log2: Float | None = None
    tanh_scale: Float | None = None
    window_left: Int | None = None
    window_right: Int | None = None
    modifiers: ModifierTensors | None = None
    blocks_per_head: Int | None = None
    heads_per_section: Int | None = None
    num_tiles: Int | None = None  # an upper bound for packed sequences


class PreprocessArguments(NamedTuple):
    """The arguments of `Preprocess`."""

    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor | None = None
    stats: Tensor | None = None
    dq_accum: Tensor | None = None  # None: no zeros
    cu_seqlens_q: Tensor | None = None
    blocks_per_head: Int | None = None


class PostprocessArguments(NamedTuple):
    """The arguments of `Postprocess`; for a problem that hides no pairs, those from q on are None."""

    dq_accum: Tensor
    dq: Tensor
    cu_seqlens_q: Tensor | None = None
    softmax_scale: Float | None = None
    blocks_per_head: Int | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    dout: Tensor | None = None
    stats: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    scale_log2: Float | None = None
    tanh_scale: Float | None = None
    window_left: Int | None = None
    window_right: Int | None = None
    modifiers: ModifierTensors | None = None


class BlockListsArguments(NamedTuple):
    """The arguments of `BlockLists`. Numbers of tiles and blocks are those of its module."""

    of_queries: Tensor  # (entries, heads, blocks of queries, 4) int32, for what the first launch leaves to the others
    of_keys: Tensor | None  # (entries, heads, blocks of keys, 4) int32: the same of keys, with query_ranges
    numbers: Tensor  # (entries, heads, tiles, blocks) int32: the blocks that a tile visits
    counts: Tensor  # (entries, heads, tiles, 2) int32: how many of them are full, and how many there are
    turns: Tensor | None  # (entries, heads, blocks of queries, tiles) int32: how many tiles before one visit a block
    modifiers: ModifierTensors  # only those that hide pairs
    seqlen_q: Int  # rows of q and of k, those of all packed sequences together
    seqlen_k: Int
    group: Int  # query heads that share lists
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    window_left: Int | None = None
    window_right: Int | None = None


class SinkGradientsArguments(NamedTuple):
    """The arguments of `SinkGradients`."""

    stats: Tensor
    sinks: Tensor
    dsinks: Tensor  # like sinks
    blocks_per_head: Int


class MergeArguments(NamedTuple):
    """The arguments of `Merge`."""

    partial_out: Tensor  # (splits, batch, seqlen_q, num_heads, head_dim_v)
    partial_lse: Tensor  # (splits, batch, num_heads, seqlen_q) float32
    out: Tensor
    lse: Tensor
    sinks: Tensor | None = None  # in none of the partials
    cu_seqlens_q: Tensor | None = None  # with sinks of packed queries, which are a batch of one
    num_blocks: Int | None = None


class AppendArguments(NamedTuple):
    """The arguments of `Append`."""

    q: Tensor | None = None  # to be rotated into q_out
    q_out: Tensor | None = None
    k_new: Tensor | None = None  # (batch, seqlen_new, num_heads_kv, head_dim)
    v_new: Tensor | None = None
    k_cache: Tensor | None = None  # (batch, max_seqlen, num_heads_kv, head_dim)
    v_cache: Tensor | None = None
    cache_seqlens: Tensor | None = None  # (batch,) int32
    page_table: Tensor | None = None
    cos: Tensor | None = None  # (positions, rotary_dim / 2), like sin
    sin: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    kv_block: Int | None = None
    seqlen_new: Int | None = None
    rows: Int | None = None  # thread blocks of a batch entry and a tensor
    num_blocks: Int | None = None


class QuantizeArguments(NamedTuple):
    """The arguments of `Quantize`."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_target: Tensor  # e4m3, the shape of q
    k_target: Tensor  # e4m3, the shape of k
    v_target: Tensor  # e4m3, the shape of v, or (batch, num_heads_kv, head_dim_v, 64 * blocks)
    q_descale: Tensor  # (batch, num_heads_q, blocks) float32
    k_descale: Tensor  # (batch, num_heads_kv, blocks) float32, like v_descale
    v_descale: Tensor
    k_mean: Tensor | None = None  # (sequences, num_heads_kv, head_dim) float32: subtracted after rotation
    v_mean: Tensor | None = None  # (sequences, num_heads_kv, head_dim_v) float32: subtracted
    signs: tuple[Int, ...] | None = None  # to rotate q and k: a bit for each column, 1 to flip its sign
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None  # later keys are not read, and become 0


class KeysLastArguments(NamedTuple):
    """The arguments of `KeysLast`."""

    v: Tensor  # e4m3
    target: Tensor  # e4m3, (batch, num_heads_kv, head_dim_v, 64 * blocks); packed sequences: without batch
    cu_seqlens: Tensor | None = None  # (batch + 1,) int32


class Float32HalvesArguments(NamedTuple):
    """The arguments of `Float32Halves`."""

    x: Tensor  # (batch, seqlen, num_heads, head_dim); packed sequences: without batch
    target: Tensor  # float16, (batch, seqlen, num_heads, 2 * columns): the high halves, then the low ones
    scale: Tensor  # (batch, num_heads, blocks) float32; packed sequences: without batch
    cu_seqlens: Tensor | None = None  # (batch + 1,) int32
    seqused: Tensor | None = None  # (batch,) int32: later rows are not read, and become 0
    num_blocks: Int | None = None
