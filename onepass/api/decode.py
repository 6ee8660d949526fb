"""`attention_decode`: attention over a key/value cache, as a model computes it for each token that it generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, overrides

from ..dispatch import choice, decode
from ..dispatch.backends import Forward
from ..geometry import splits
from ..ops import decode as decode_ops
from ..ops import without_backward
from ..ops.autocast import autocast_inputs
from ..problem.decode import DecodeInputs
from ..validation.decode import check_decode, few_queries
from ..validation.lost_gradients import refuse_forward_mode
from ..validation.modifiers import in_float32
from ..validation.overlap import with_overlaps_refused
from ..validation.scalars import check_int
from . import fast_path, keywords
from .attention import AttentionOutput, CommonOptions, Window

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack


class DecodeOptions(CommonOptions, total=False):
    """The keyword arguments of `attention_decode` except return_lse: for type checkers."""

    cache_seqlens: Required[Tensor]
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | Tensor | None
    k_new: Tensor | None
    v_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_positions_q: Tensor | None
    rotary_positions_k: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    kv_block: int | None
    num_splits: int | None
    split_size: int | None
    check_values: bool


def autocast_rows(k_cache: Any, *rows: Any) -> tuple[Any, ...]:
    """Queries, new keys and new values as a call over a cache takes them: cast under torch.autocast; None stays None.

    A cache is never copied, so these rows are cast only if the cache has autocast's dtype.
    """
    if not isinstance(k_cache, Tensor) or k_cache.device.type == "meta":
        return rows
    device = k_cache.device.type
    if not torch.is_autocast_enabled(device) or k_cache.dtype != torch.get_autocast_dtype(device):
        return rows
    return tuple(autocast_inputs(t)[0] if isinstance(t, Tensor) else t for t in rows)


class KeyOptions(NamedTuple):
    """The options of a call of `attention_decode` that are in its key as they are given."""

    causal: bool
    softcap: float | None
    softmax_scale: float | None
    num_splits: int | None = None
    split_size: int | None = None
    rotary_interleaved: bool = False
    return_lse: bool = False
    kv_block: int | None = None
    max_seqlen_q: int | None = None
    backend: str | None = None


def find_kept(inputs: DecodeInputs, window: Window | None, options: KeyOptions) -> tuple[Forward | None, tuple]:
    """The forward that an earlier call like this one has left, and the keys under which this call may leave its own.

    A cache to which torch.cat adds each token has another length and other strides in each step. The forward of a call
    over such a cache is also kept under a second key, which holds the rounded length.

    Returns: the forward or None, and the keys: none for a call that must be treated as a first call.
    """
    tensors: Any = inputs.tensors if inputs.is_modified else inputs
    key = fast_path.key_of("attention_decode", tensors, window, options)
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    if key is None or k_cache is None or v_cache is None:
        return None, ()
    # validation looks at addresses, too
    addresses = (k_cache.data_ptr() | v_cache.data_ptr()) % 16
    exact = *key, k_cache.stride(), v_cache.stride(), addresses
    forward = fast_path.find(exact)
    if forward is not None:
        return forward, (exact,)
    # as in `DecodeProblem.of_rounded_length`; with new keys, validation looks at strides for memory that caches share
    may_grow = (
        inputs.k_new is inputs.page_table is inputs.cu_seqlens_q is options.kv_block is options.split_size is None
    )
    may_grow = may_grow and (inputs.modifiers is None or inputs.modifiers.bias is inputs.modifiers.query_ranges is None)
    # on a CPU the backend of a call with a window depends on the length
    may_grow = may_grow and (window is None or k_cache.is_cuda)
    rounded = fast_path.of_rounded_length(key, k_cache, v_cache) if may_grow else None
    if rounded is None:
        return None, (exact,)
    rounded = *rounded, addresses
    return fast_path.find(rounded), (exact, rounded)


@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[DecodeOptions]
) -> Tensor: ...


@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: bool, **options: Unpack[DecodeOptions]
) -> Tensor | AttentionOutput: ...


@keywords.hide_unknown
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *positional: Any,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    seqstart_k: Tensor | None = None,
    key_ranges: Tensor | None = None,
    query_ranges: Tensor | None = None,
    q_positions: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    rotary_positions_q: Tensor | None = None,
    rotary_positions_k: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    kv_block: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    check_values: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor | AttentionOutput:
    """Exact attention of a few new queries over the keys of a cache, after appending k_new and v_new to it.

    Batch entry b has seqlen_k = cache_seqlens[b] + seqlen_new keys. Masks are aligned at their end, as in `attention`:
    query i stands at key position seqlen_k - seqlen_q + i.

    Under torch.autocast, q, k_new and v_new are cast to its dtype if the caches have that dtype. Caches are never cast.

    There is no backward: tensors that require a gradient are taken, and a backward pass through the result raises
    NotImplementedError. New keys are written to the cache without their history.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim); float64, float32, bfloat16 or float16. seqlen_q is free: 1 in
            decoding, up to 16 where several tokens are proposed and verified at once, hundreds in a chunk of a prompt.
            With cu_seqlens_q (total_q, num_heads_q, head_dim), and out and lse in the shapes of `attention_varlen`.
        k_cache, v_cache: (batch, max_seqlen, num_heads_kv, head_dim) and (.., head_dim_v); with a page_table
            (num_pages, page_size, num_heads_kv, head_dim), any page_size from 1. In q's dtype, or float8_e4m3fn. Values
            past the filled length, and in pages that no sequence uses, have no effect, whatever they are.
        cache_seqlens: (batch,) int32 on q's device: keys in the cache before the call. It is not changed.
        page_table: (batch, max_pages) int32: key n of entry b is row n % page_size of page
            page_table[b, n // page_size]. Sequences may share pages; the result is undefined if a new key is written
            over another key that the call uses. Entries past the filled length may hold any number.
        cu_seqlens_q: (batch + 1,) int32: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, which
            stand at the end of its cache_seqlens[b] keys: prompts in chunks and single tokens. Rows past the last
            offset have out = 0, lse = -inf, even with sinks. k_new, v_new and rotary positions cannot be combined with
            packed queries.
        max_seqlen_q: with cu_seqlens_q, an upper bound on the queries of a sequence, if one is known: an int of up to
            32 lets a GPU take the kernel for few queries, which computes any number. A tensor is never read.
        k_new, v_new: (batch, seqlen_new, num_heads_kv, head_dim) and (.., head_dim_v), in q's dtype, both or neither:
            written to the cache in place, at positions cache_seqlens[b], cache_seqlens[b] + 1, .. (autograd treats it
            as one of torch's in-place operations). The caches may lie in one allocation if they share no element;
            no other tensor of the call may share memory with them.
            For an e4m3 cache new keys are divided by the descale of the position that they are written to (which must
            therefore be set before, even for a page that is still empty) and rounded to nearest; magnitudes beyond
            448 become 448.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or q's dtype, both or neither: the first rotary_dim
            columns of k_new (before it is written) and of q are rotated by the row of their key position.
        rotary_interleaved: rotated pairs are columns (0, 1), (2, 3), ..; else (0, d), (1, d + 1), .. with
            d = rotary_dim / 2.
        causal: query i sees key j only if j <= i + seqlen_k - seqlen_q. With one query it makes no difference.
        window, softcap, sinks, softmax_scale: as for `attention`.
        seqstart_k: (batch,) int32: the sequence of entry b begins at key seqstart_k[b]. Keys before it have no effect,
            whatever they are, and pages that hold no other keys may be any number; queries that stand before it give
            zeros. Lengths and positions still count from key 0 of the cache.
        key_ranges: (batch or 1, num_heads_q or 1, seqlen_q, 2) int32, packed (num_heads_q or 1, total_q, 2): query i
            sees only keys lo <= j < hi among the keys that other options leave.
        query_ranges: (batch or 1, num_heads_q or 1, max_seqlen, 2) int32, for packed queries, too: key j is seen by the
            queries that stand at the positions lo <= p < hi, among those that other options leave. Row j belongs to key
            j of the cache, of which there are max_pages * page_size with a page_table.
        q_positions: (batch or 1, seqlen_q) int32, packed (total_q,): the key at which each query stands, instead of
            i + seqlen_k - seqlen_q, for causal, window, alibi_slopes, rows of bias, and rotation.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q) float32 (bfloat16 and float16 are converted): slope *
            |position of the query - j| is subtracted from scores, after the softcap.
        bias: (batch or 1, num_heads_q or 1, seqlen_q or 1, max_seqlen or 1), packed without the batch: added to scores,
            after the softcap; -inf hides a pair. Column j belongs to key j of the cache, of which there are max_pages *
            page_size with a page_table. With q_positions, row i belongs to position i, for any number of rows; for a
            position outside the rows the nearest row counts.
        rotary_positions_q, rotary_positions_k: (batch or 1, seqlen_q) and (batch or 1, seqlen_new) int32: the rows of
            rotary_cos and rotary_sin by which q and k_new are rotated, instead of their key positions. A negative
            number counts as 0.
        k_descale, v_descale: float32, finite and not 0, on q's device, with an e4m3 cache only, both or neither (which
            means 1): real value = stored value * descale. They are not changed. Each has one of these shapes:
            (): one descale for the tensor;
            (num_heads_kv,): one for each head;
            (batch, num_heads_kv): one for each head of each batch entry (not with both a page_table and a kv_block);
            (num_pages, num_heads_kv): with a page_table and a kv_block, one for each head of each page;
            (batch, num_heads_kv, ceil(max_seqlen / kv_block)): with a kv_block and no page_table, one for each block of
                keys of each head.
        kv_block: the number of keys that share a descale, if not all keys of a sequence share one; with a page_table it
            is the page_size.
        num_splits: the number of splits (1 to 256) of the keys of each sequence, which a GPU computes in parallel and
            then merges, exactly; None: chosen from shapes, to fill the GPU, and for packed queries also from lengths.
            A given number gives a sequence the same bits in any batch. Packed queries that fill more than one tile of
            a kernel are not split.
        split_size: the keys of a split, instead of num_splits, a multiple of 64: splits begin at multiples of it, so
            that the result of a sequence depends neither on the batch nor on the size of the cache, bit by bit.
        check_values: check cache_seqlens, page_table and descales by value. Backends that work on the host (`cpu`,
            `tiled`) always do. On a GPU the check waits for the device: it is meant for debugging. Without the check,
            kernels clamp lengths to the capacity of the cache; instead of a page that the cache does not have they read
            the nearest one, and write none; descales of 0, infinity or NaN give undefined results.
        return_lse: also return lse.
        backend: name of the backend that must run ("sm90", "sm80", "cpu" or "tiled"); None = what `use_backend` or
            ONEPASS_BACKEND chose, else the best one that computes the call.

    Returns: out, (batch, seqlen_q, num_heads_q, head_dim_v), in q's dtype and laid out as q, or
    AttentionOutput(out, lse) with lse (batch, num_heads_q, seqlen_q), natural log. A query that sees no key has out = 0
    and lse = its sink, or -inf without sinks.

    Raises: TypeError, ValueError, or NotImplementedError for what no backend computes, each before any work and with
    what was expected and given; the caches are unchanged then.

    Source: FlashAttention-2, arXiv:2307.08691, section 2.3 (merging splits); Flash-Decoding, Dao et al. 2023 (splitting
    the keys); PagedAttention, arXiv:2309.06180 (page tables).
    """
    if unknown or positional:
        raise keywords.unexpected("attention_decode", unknown, positional=positional)
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor)) and overrides.has_torch_function((q, k_cache)):
        return keywords.overridden(attention_decode, locals())
    q, k_new, v_new = autocast_rows(k_cache, q, k_new, v_new)
    inputs = DecodeInputs(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        page_table,
        rotary_cos,
        rotary_sin,
        sinks,
        k_descale,
        v_descale,
        cu_seqlens_q,
        k_new,
        v_new,
    )
    rows_q, rows_k, by_key = rotary_positions_q, rotary_positions_k, query_ranges
    if not (seqstart_k is key_ranges is q_positions is alibi_slopes is bias is by_key is rows_q is rows_k is None):
        slopes = in_float32(alibi_slopes)
        inputs = inputs.with_modifiers((seqstart_k, key_ranges, q_positions, slopes, bias, by_key, rows_q, rows_k))
    most_queries = None if max_seqlen_q is None else few_queries(max_seqlen_q, cu_seqlens_q)
    options = KeyOptions(
        causal,
        softcap,
        softmax_scale,
        num_splits,
        split_size,
        rotary_interleaved,
        return_lse,
        kv_block,
        most_queries,
        backend,
    )
    keys: tuple = ()
    if check_values is False:
        forward, keys = find_kept(inputs, window, options)
        if forward is not None:
            out, lse = forward(inputs)
            return AttentionOutput(out, lse) if return_lse else out

    checked = dict(zip(KeyOptions._fields[:-1], options, strict=False))
    problem = check_decode(inputs, window=window, check_values=check_values, **checked)
    refuse_forward_mode(*inputs.tensors)
    name = decode.require_decode(problem, backend, q.device)
    sources = [t for t in inputs.tensors if t is not None and t.requires_grad] if torch.is_grad_enabled() else []
    out, lse = decode_ops.run(problem, inputs.detached() if sources else inputs, choice.backend_argument(name, backend))
    if sources:
        out, lse = without_backward.in_graph_of(sources, out, lse)
    if keys and not out.is_meta:
        forward = decode.prepare_decode(name, problem, q.device)
        forward = with_overlaps_refused(forward, inputs) if inputs.seqlen_new else forward
        for key in keys:
            fast_path.keep(key, forward)
    return AttentionOutput(out, lse) if return_lse else out


def split_workspace_bytes(num_splits: int, *, batch: int, seqlen_q: int, num_heads_q: int, head_dim_v: int) -> int:
    """Bytes of GPU memory that `attention_decode` needs besides its outputs while it runs with num_splits splits.

    It holds float32 out and lse of every split. One split needs 0 bytes, because it writes its outputs directly. The
    backend `tiled` needs none. Packed queries count as a batch of one.

    Raises: TypeError for a value that is not an integer, ValueError for a number below 1 (num_splits, head_dim_v) or
    below 0 (all others).
    """
    num_splits, head_dim_v = check_int("num_splits", num_splits, least=1), check_int("head_dim_v", head_dim_v, least=1)
    batch, seqlen_q = check_int("batch", batch, least=0), check_int("seqlen_q", seqlen_q, least=0)
    num_heads_q = check_int("num_heads_q", num_heads_q, least=0)
    return 0 if num_splits == 1 else splits.workspace_bytes(num_splits, batch * seqlen_q * num_heads_q, head_dim_v)
