"""Random calls of `attention_decode` over all options, each repeatable from its seed, and their expected results.

The oracle has no caches: it gathers the keys of each sequence and calls `reference.attention`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from random_calls import edges_of, heads_or_none, some_side_negative
from random_modifiers import NAMES, OF_KERNELS, random_modifiers, with_layout_on
from torch import Tensor

import onepass
from onepass import reference
from onepass.testing import Comparison, compare, compare_lse, floor_of_out

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
# q and new keys are rounded once more where they are rotated, and partials where they are merged.
OUT_FACTOR = 3.0
MODIFIERS = tuple(name for name in NAMES if name != "dropout_p")
ATTENTION_OPTIONS = ("causal", "window", "softcap", "softmax_scale", "sinks", *MODIFIERS)


@dataclass
class DecodeCall:
    """The arguments of one call; the caches are NaN wherever no key lies.

    Attributes:
        filled: cache_seqlens on the host.
    """

    arguments: dict[str, Any]
    filled: tuple[int, ...]
    seed: int

    def __str__(self) -> str:
        described = {
            name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        return f"DecodeCall(seed={self.seed}, filled={self.filled}, {described})"

    def on(self, device: str) -> DecodeCall:
        moved = {n: t.to(device, copy=True) if isinstance(t, Tensor) else t for n, t in self.arguments.items()}
        moved |= {n: with_layout_on(self.arguments[n], device) for n in MODIFIERS if n in self.arguments}
        return DecodeCall(moved, self.filled, self.seed)

    @property
    def seqlen_new(self) -> int:
        return self.arguments["k_new"].shape[1] if "k_new" in self.arguments else 0

    def check(self, **extra: Any) -> None:
        """Run the call once and check out, lse and both caches. Args: extra: more arguments, such as a backend.

        Raises: AssertionError with the call in its message.
        """
        before = {name: self.arguments[f"{name}_cache"].clone() for name in "kv"}
        out, lse = onepass.attention_decode(**self.arguments, **extra, return_lse=True)
        bad = [message for name in "kv" if (message := self._check_cache(name, before[name]))]
        dtype = self.arguments["q"].dtype
        entries = self._entries(torch.float64)
        oracle, plain = self._joined(entries), self.expected(torch.float32 if dtype == torch.float64 else dtype)
        rows: list[Comparison] = [compare("out", out, oracle.out, plain.out, OUT_FACTOR, self._floor(entries))]
        if "rotary_cos" not in self.arguments:  # rounding q and k moves lse in proportion to them
            rows.append(compare_lse(lse, oracle.lse))
        bad += [str(row) for row in rows if not row.ok]
        if bad:
            raise AssertionError(f"{self}\n  " + "\n  ".join(bad))

    # ---------------------------------------------------------------- oracle

    def expected(self, dtype: torch.dtype) -> reference.Reference:
        """Attention over what the caches hold after the call, every intermediate in one dtype."""
        return self._joined(self._entries(dtype))

    def _entries(self, dtype: torch.dtype) -> list[reference.Reference]:
        """The expected result of each batch entry, as a batch of one."""
        return [
            reference.attention(*self._entry(b, dtype), compute_dtype=dtype, **self._options(b))
            for b in range(len(self.filled))
        ]

    def _joined(self, entries: list[reference.Reference]) -> reference.Reference:
        outs, lses = zip(*entries, strict=True)
        if "cu_seqlens_q" not in self.arguments:
            return reference.Reference(torch.cat(outs), torch.cat(lses))
        out, lse = torch.cat(outs, 1)[0], torch.cat(lses, 2)[0]
        behind = self.arguments["q"].shape[0] - len(out)  # rows of no sequence
        out = torch.cat((out, out.new_zeros(behind, *out.shape[1:])))
        return reference.Reference(out, torch.cat((lse, lse.new_full((len(lse), behind), -torch.inf)), 1))

    def _floor(self, entries: list[reference.Reference]) -> Tensor:
        """What rounding alone may do to out; see rounding.py."""
        dtype = self.arguments["q"].dtype
        floors = [
            floor_of_out(dtype, *self._entry(b, torch.float64), e, **self._options(b)) for b, e in enumerate(entries)
        ]
        return self._joined([reference.Reference(floor, e.lse) for floor, e in zip(floors, entries, strict=True)]).out

    def _options(self, b: int) -> dict[str, Any]:
        """The options of the attention of a batch entry, as a batch of one."""
        options = {name: self.arguments[name] for name in ATTENTION_OPTIONS if name in self.arguments}
        options, keys = {"causal": True} | options, self.filled[b] + self.seqlen_new
        ranges, of_keys = options.pop("query_ranges", None), {}
        if ranges is not None:
            own = ranges[b : b + 1] if len(ranges) > 1 else ranges
            of_keys = {"query_ranges": own[:, :, :keys], "query_ranges_of_positions": True}
        offsets = self.arguments.get("cu_seqlens_q")
        if offsets is not None:
            rows = slice(int(offsets[b]), int(offsets[b + 1]))
            return reference.of_sequence(options, b, rows, slice(0, keys)) | of_keys
        for name in set(MODIFIERS) & set(options):
            own = options[name]
            has_batch = own.dim() == 2 if name == "alibi_slopes" else len(own) > 1
            own = own[b : b + 1] if has_batch else own
            options[name] = own[..., :keys] if name == "bias" and own.shape[-1] > 1 else own
        return options | of_keys

    def _start(self, b: int) -> int:
        """The first key of an entry's sequence."""
        return int(self.arguments["seqstart_k"][b]) if "seqstart_k" in self.arguments else 0

    def _entry(self, b: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a batch entry, as a batch of one. Args: dtype: float64 keeps the exact rotation."""
        keys, q, offsets = self.filled[b] + self.seqlen_new, self.arguments["q"], self.arguments.get("cu_seqlens_q")
        q = q[b] if offsets is None else q[offsets[b] : offsets[b + 1]]
        if "rotary_cos" in self.arguments:
            positions = torch.arange(len(q)) + keys - len(q)
            for name in ("q_positions", "rotary_positions_q"):
                if name in self.arguments:
                    positions = self.arguments[name].expand(len(self.filled), -1)[b].long()
            q = self._rotated(q, positions.clamp(min=0)).to(q.dtype if dtype != torch.float64 else dtype)
        k, v = (self._sequence(name, b, keys)[None] for name in "kv")
        return q[None], k, v

    def _sequence(self, name: str, b: int, keys: int) -> Tensor:
        """The real values of the first keys of an entry, (keys, num_heads_kv, dim)."""
        cache, existing = self.arguments[f"{name}_cache"], torch.arange(self._start(b), keys)
        pages, rows = self._locate(b, existing)
        stored = _as_integers(cache)[pages, rows].view(cache.dtype)
        if cache.dtype == E4M3:
            stored = stored.to(torch.float32).double() * self._descales(name, b, pages, existing).double()[..., None]
        # zeros for keys before the sequence, which do not exist
        return torch.cat([stored.new_zeros(keys - len(existing), *stored.shape[1:]), stored])

    def _locate(self, b: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The page (or entry) of each key, and the row in it."""
        table, size = self.arguments.get("page_table"), self.arguments["k_cache"].shape[1]
        if table is None:
            return torch.full_like(keys, b), keys
        return table[b].cpu().long()[keys // size], keys % size

    def _descales(self, name: str, b: int, pages: Tensor, keys: Tensor) -> Tensor:
        """The descales of keys, (keys, num_heads_kv)."""
        shape, descale = (len(keys), self.arguments["k_cache"].shape[2]), self.arguments.get(f"{name}_descale")
        if descale is None:
            return torch.ones(shape, dtype=torch.float32, device=self.arguments["q"].device)
        if descale.dim() == 3:
            return descale[b].mT[keys // self.arguments["kv_block"]]
        if descale.dim() == 2:
            is_of_pages = "page_table" in self.arguments and self.arguments.get("kv_block") is not None
            return descale[pages] if is_of_pages else descale[b].expand(shape)
        return descale.expand(shape)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (rows, heads, dim) in float64, turned as complex numbers."""
        if not x.numel():  # torch refuses to view it as complex
            return x.double()
        cos, sin = (self.arguments[f"rotary_{name}"][positions].double() for name in ("cos", "sin"))
        half, x = cos.shape[1], x.double()
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        interleaved = self.arguments.get("rotary_interleaved", False)
        pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).mT
        turn = torch.complex(cos, sin)[:, None]
        pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        turned = pairs.flatten(-2) if interleaved else pairs.mT.flatten(-2)
        return torch.cat([turned, rest], -1)

    def _check_cache(self, name: str, before: Tensor) -> str:
        """What is wrong with a cache after the call, or "".

        New keys must lie in their rows, and everything else must be as it was, bit by bit.
        """
        cache, new = self.arguments[f"{name}_cache"], self.arguments.get(f"{name}_new")
        untouched = torch.ones(cache.shape[:2], dtype=torch.bool, device=cache.device)
        for b, n in enumerate(self.filled if new is not None else ()):
            keys = torch.arange(n, n + self.seqlen_new)
            pages, rows = self._locate(b, keys)
            untouched[pages, rows] = False
            assert new is not None
            exact = new[b].double()
            if name == "k" and "rotary_cos" in self.arguments:
                given = self.arguments.get("rotary_positions_k")
                exact = self._rotated(new[b], keys if given is None else given.expand(len(self.filled), -1)[b].long())
            actual = _as_integers(cache)[pages, rows].view(cache.dtype)
            actual = actual.to(torch.float32 if cache.dtype != torch.float64 else torch.float64).double()
            step = torch.finfo(cache.dtype).eps
            if cache.dtype == E4M3:
                stored = exact / self._descales(name, b, pages, keys).double()[..., None]
                exact = stored.clamp(-LARGEST_E4M3, LARGEST_E4M3)
            # one number of a rotated pair may cancel: both are exact to the rounding of the larger one
            slack = exact.abs().amax(-1, keepdim=True) * step + torch.finfo(cache.dtype).smallest_normal
            if not ((actual - exact).abs() <= slack).all():
                return f"{name}_cache: entry {b}: new keys are off by up to {float((actual - exact).abs().max()):.3e}"
        if not torch.equal(_as_integers(cache)[untouched], _as_integers(before)[untouched]):
            return f"{name}_cache: something was written where no new key lies"
        return ""


def _as_integers(t: Tensor) -> Tensor:
    """The bits of a tensor as integers: NaN equals NaN, and e4m3, which not every torch can index, can be indexed."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def random_decode_call(
    seed: int,
    dtype: torch.dtype | None = None,
    max_keys: int = 200,
    many_rows: bool = False,
    packed: bool = False,
    with_modifiers: bool = True,
    for_kernels: bool = False,
) -> DecodeCall:
    """A random call of `attention_decode` on the CPU; equal arguments give equal calls.

    Args:
        many_rows: whether each kv head has more than 32 rows, without e4m3, and with rows and pages in multiples of 8
            and of 16.
        packed: whether q packs sequences of different lengths, some of length 0, with rows behind them. There are no
            new keys and no rotation then.
        with_modifiers: also draw what `random_modifiers` does, and rotary positions.
        for_kernels: but not what no kernel takes.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = dtype or rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    batch, heads_kv = rng.choice([1, 2, 3, 5]), rng.choice([1, 1, 2, 3])
    heads_q = heads_kv * rng.choice([1, 1, 2, 3, 4, 5, 8, 16])
    edges = edges_of(seed)
    heads_q, heads_kv = heads_or_none(edges, heads_q, heads_kv)
    is_e4m3 = dtype.itemsize == 2 and not many_rows and rng.random() < 0.25
    head_dims = [8, 40, 64, 64, 96, 128, 128, 256]
    head_dim = rng.choice(head_dims if is_e4m3 or many_rows else [3, *head_dims])
    head_dim_v = head_dim if rng.random() < 0.7 else rng.choice([16, 64, 128, 192])
    seqlen_q = rng.choice([33, 40, 70, 150, 260] if many_rows else [1, 1, 2, 4, 7, 16, 33, 70])
    seqlen_new = 0 if rng.random() < 0.4 else rng.choice([1, 3, seqlen_q, 20])
    if packed:
        seqlen_new = 0
    filled = tuple(rng.choice([0, 1, 15, 16, 63, 64, 65, 128, rng.randint(0, max_keys)]) for _ in range(batch))
    room = max(1, max(filled) + seqlen_new + rng.choice([0, 1, 40]))
    arguments: dict[str, Any] = {"q": normal(batch, seqlen_q, heads_q, head_dim)}
    arguments["cache_seqlens"] = torch.tensor(filled, dtype=INT32)

    page_sizes = [16, 16, 32, 48, 64, 128, 256]
    page_size = rng.choice([None, None, *page_sizes] if many_rows else [None, None, 1, 3, *page_sizes])
    outer, size = (batch, room) if page_size is None else (batch * -(-room // page_size) + 3, page_size)
    if page_size is not None:
        order = torch.randperm(outer, generator=generator)[: outer - 3].view(batch, -1).int()
        shares = batch > 1 and min(filled[:2]) >= page_size and rng.random() < 0.5
        if shares:  # two sequences share a whole page, to which no key is appended
            order[1, 0] = order[0, 0]
        for b, n in enumerate(filled):  # behind the last key the table may hold anything
            order[b, -(-(n + seqlen_new) // page_size) :] = rng.choice([0, -7, 10**6])
        arguments["page_table"] = order
    cache_dtype = E4M3 if is_e4m3 else dtype
    call = DecodeCall(arguments, filled, seed)
    for name, columns in (("k", head_dim), ("v", head_dim_v)):
        is_transposed = rng.random() < 0.3
        shape = (outer, heads_kv, size, columns) if is_transposed else (outer, size, heads_kv, columns)
        cache = torch.full(shape, torch.nan, dtype=torch.float32).to(cache_dtype)
        cache = arguments[f"{name}_cache"] = cache.transpose(1, 2) if is_transposed else cache
        for b, n in enumerate(filled):
            keys = normal(n, heads_kv, columns, dtype=torch.float32).to(cache_dtype)
            _as_integers(cache)[call._locate(b, torch.arange(n))] = _as_integers(keys)
        if seqlen_new:
            arguments[f"{name}_new"] = normal(batch, seqlen_new, heads_kv, columns)
    if is_e4m3 and seqlen_new and rng.random() < 0.5:
        arguments["v_new"] *= 500  # some values are larger than e4m3 holds

    if is_e4m3 and rng.random() < 0.8:
        kind = rng.choice(["tensor", "head", "entry", "own"])
        shapes: dict[str, tuple[int, ...]] = {"tensor": (), "head": (heads_kv,), "entry": (batch, heads_kv)}
        if kind == "own":
            arguments["kv_block"] = page_size or rng.choice([16, 64])
            blocks = -(-size // arguments["kv_block"])
            shapes["own"] = (batch, heads_kv, blocks) if page_size is None else (outer, heads_kv)
        for name in "kv":
            arguments[f"{name}_descale"] = normal(*shapes[kind], dtype=torch.float32).exp()
    if head_dim > 3 and rng.random() < 0.3 and not packed:
        half = rng.choice([head_dim // 2, head_dim // 4])
        angles = torch.arange(size if page_size is None else arguments["page_table"].shape[1] * size)
        angles = angles[:, None] * 0.5 ** torch.arange(half, dtype=torch.float32)
        table_dtype = rng.choice([dtype, torch.float32])
        arguments |= {"rotary_cos": angles.cos().to(table_dtype), "rotary_sin": angles.sin().to(table_dtype)}
        arguments["rotary_interleaved"] = rng.random() < 0.5

    arguments["causal"] = rng.random() < 0.7
    if rng.random() < 0.3:
        arguments["window"] = some_side_negative(edges, tuple(rng.choice([None, 0, 5, 33, 100]) for _ in range(2)))
    if rng.random() < 0.25:
        arguments["softcap"] = rng.choice([0.5, 5.0, 30.0])
    if rng.random() < 0.2:
        arguments["softmax_scale"] = rng.choice([0.05, 0.3, 1.0])
    if rng.random() < 0.3:
        arguments["sinks"] = 2 * normal(heads_q, dtype=torch.float32)
    splits = rng.choice([None, "num_splits", "num_splits", "split_size"])
    if splits is not None:
        arguments[splits] = rng.choice([1, 2, 5, 32] if splits == "num_splits" else [64, 128, 192])
    if packed:
        counts = [rng.choice([0, 1, 1, rng.randint(0, seqlen_q), seqlen_q]) for _ in range(batch)]
        rows = [q[:n] for q, n in zip(arguments["q"], counts, strict=True)]
        arguments["q"] = torch.cat([*rows, normal(rng.choice([0, 0, 5]), heads_q, head_dim)])
        arguments["cu_seqlens_q"] = torch.tensor([0, *itertools.accumulate(counts)], dtype=INT32)
        if rng.random() < 0.5:  # it is only a hint: a sequence may have more queries
            arguments["max_seqlen_q"] = rng.choice([max(counts), max(counts), 1])
    if with_modifiers:
        _add_modifiers(call, [name for name in MODIFIERS if name in OF_KERNELS or not for_kernels])
    return call


def _add_modifiers(call: DecodeCall, names: list[str]) -> None:
    arguments, filled, seqlen_new = call.arguments, call.filled, call.seqlen_new
    q, cache, table = arguments["q"], arguments["k_cache"], arguments.get("page_table")
    capacity = cache.shape[1] if table is None else table.shape[1] * cache.shape[1]
    arguments |= random_modifiers(
        call.seed,
        dtype=q.dtype,
        heads=q.shape[-2],
        rows=q.shape[-3],
        lengths=[n + seqlen_new for n in filled],
        columns=capacity,
        rows_k=None,
        is_packed="cu_seqlens_q" in arguments,
        names=names,
    )
    rng, generator = random.Random(f"{call.seed}, rotary"), torch.Generator().manual_seed(call.seed)
    if "rotary_cos" in arguments:
        if "q_positions" in arguments and q.shape[1]:  # which go beyond the keys
            for name, function in (("rotary_cos", torch.cos), ("rotary_sin", torch.sin)):
                half = arguments[name].shape[1]
                angles = torch.arange(max(int(arguments["q_positions"].max()), 0) + 1)[:, None]
                rows = function(angles * 0.5 ** torch.arange(half, dtype=torch.float32)).to(arguments[name].dtype)
                arguments[name] = max(arguments[name], rows, key=len)
        for name, count in (("rotary_positions_q", q.shape[1]), ("rotary_positions_k", seqlen_new)):
            if count and rng.random() < 0.5:
                shape = rng.choice([1, len(filled)]), count
                positions = torch.randint(len(arguments["rotary_cos"]), shape, generator=generator)
                arguments[name] = positions.int()
    shares = table is not None and len(table[:, 0].unique()) < len(table)  # another sequence may see the first keys
    if "seqstart_k" in arguments and not shares:
        for b, start in enumerate(arguments["seqstart_k"].tolist()):
            unseen = torch.arange(min(start, filled[b]))
            for t in (cache, arguments["v_cache"]):
                nan = torch.full((1,), torch.nan, dtype=torch.float32).to(t.dtype)
                _as_integers(t)[call._locate(b, unseen)] = _as_integers(nan)
            if table is not None:
                table[b, : len(unseen) // cache.shape[1]] = rng.choice([0, -7, 10**6])
