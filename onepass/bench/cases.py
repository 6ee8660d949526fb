"""The cases that are measured: `Case`, one problem in one direction, and the named sets of cases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..validation.tensors import SUPPORTED_DTYPES, short_name

Direction = Literal["fwd", "bwd"]
Measure = Literal["time", "memory", "decode"]

DTYPES = {short_name(dtype): dtype for dtype in SUPPORTED_DTYPES}


@dataclass(frozen=True)
class Case:
    """One attention problem and the pass that is measured.

    Attributes:
        dtype: by name ("float32", "bfloat16", ...), so that a case is plain data.
        window: (left, right) as in `onepass.attention`, or None.
        direction: "fwd" measures the forward pass, "bwd" the backward pass alone.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    direction: Direction = "fwd"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.direction not in get_args(Direction):
            raise ValueError(f"direction: expected fwd or bwd, got {self.direction!r}")

    @classmethod
    def square(cls, seqlen: int, heads: int, head_dim: int, *, batch: int = 1, **rest: Any) -> Case:
        """Self-attention: equal lengths, as many kv heads as query heads, head_dim_v = head_dim."""
        return cls(batch, seqlen, seqlen, heads, heads, head_dim, head_dim, **rest)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Case:
        """The inverse of `to_dict`."""
        window = data.get("window")
        return cls(**{**data, "window": None if window is None else tuple(window)})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def label(self) -> str:
        """A short text for tables, unique within a set."""
        lengths = f"s{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"s{self.seqlen_q}x{self.seqlen_k}"
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_kv else f"h{self.heads_q}/{self.heads_kv}"
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        mask = " causal" if self.causal else ""
        if self.window is not None:
            mask += " window " + ",".join("all" if side is None else str(side) for side in self.window)
        return f"{self.direction} {dims} {lengths} b{self.batch} {heads} {self.dtype}{mask}"


class Inputs(NamedTuple):
    """The tensors of a case, (batch, seqlen, heads, head_dim), with standard normal values.

    On a GPU they are contiguous, and a peer that wants heads first gets its own copy. On a CPU they are views of
    (batch, heads, seqlen, head_dim) memory, as torch's SDPA takes it: all contenders read the very same tensors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Random inputs. Equal cases, device types and seeds give equal data."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.torch_dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.is_cpu else x

    return Inputs(
        normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim),
        normal(case.batch, case.seqlen_k, case.heads_kv, case.head_dim),
        normal(case.batch, case.seqlen_k, case.heads_kv, case.head_dim_v),
        normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim_v),
    )


@dataclass(frozen=True)
class CaseSet:
    """Cases under a name, and what is measured: time, memory or steps of decoding."""

    name: str
    description: str
    cases: tuple[Case, ...]
    measure: Measure = "time"


def _paper() -> CaseSet:
    """The grid of FlashAttention-3, arXiv:2407.08608, section 4.1: 36 cases in each direction."""
    total_tokens, hidden = 16384, 2048
    cases = tuple(
        Case.square(
            seqlen,
            hidden // head_dim,
            head_dim,
            batch=total_tokens // seqlen,
            dtype="bfloat16",
            causal=causal,
            direction=direction,
        )
        for direction in get_args(Direction)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    )
    return CaseSet("paper", "the FlashAttention-3 paper's grid: 16k tokens, hidden size 2048", cases)


def _cpu(name: str = "cpu", dtype: str = "float32") -> CaseSet:
    cases = tuple(
        Case.square(seqlen, 4, head_dim, batch=2, dtype=dtype, causal=causal, direction=direction)
        for direction in get_args(Direction)
        for head_dim in (64, 128)
        for causal in (False, True)
        for seqlen in (512, 2048, 8192)
    )
    return CaseSet(name, f"{dtype} on a CPU: batch * heads = 8", cases)


def _window() -> CaseSet:
    # 512 keys for each query: itself and 511 before it, or 256 before and 255 after it
    cases = tuple(
        Case.square(16384, 4, 64, dtype="float32", causal=causal, window=window, direction=direction)
        for direction in get_args(Direction)
        for causal, window in ((False, (256, 255)), (True, (511, 0)))
    )
    return CaseSet("window", "512 visible keys at seqlen 16384, and the same call without the window", cases)


def _memory() -> CaseSet:
    cases = tuple(
        Case.square(32768, 1, head_dim, dtype="float32", direction=direction)
        for direction in get_args(Direction)
        for head_dim in (64, 128)
    )
    return CaseSet("memory", "peak extra memory at seqlen 32768, one head", cases, measure="memory")


# heads of q, heads of the cache, head_dim
DECODE_HEADS = ((32, 8, 128), (64, 8, 128), (16, 1, 128), (32, 8, 64), (32, 8, 256))


def decode_case(
    batch: int, seqlen_k: int, heads_q: int, heads_kv: int, head_dim: int, seqlen_q: int = 1, dtype: str = "bfloat16"
) -> Case:
    """One step of decoding: seqlen_q new queries a sequence over a cache of seqlen_k keys."""
    return Case(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim, dtype, causal=True)


def _decode(max_kv_bytes: int = 40 * 10**9) -> CaseSet:
    cases = (
        decode_case(batch, seqlen_k, *heads)
        for heads in DECODE_HEADS
        for seqlen_k in (1024, 8192, 65536, 524288)
        for batch in (1, 8, 64)
    )
    fitting = tuple(c for c in cases if 4 * c.batch * c.seqlen_k * c.heads_kv * c.head_dim <= max_kv_bytes)
    return CaseSet("decode", "a token for each sequence of a cache of up to 40 GB", fitting, measure="decode")


# batch, keys, new tokens
DECODE_ROWS = ((8, 8192, 4), (8, 8192, 16), (64, 8192, 16), (1, 65536, 16), (1, 65536, 128), (1, 65536, 1024))


def _decode_rows() -> CaseSet:
    cases = (
        decode_case(batch, seqlen_k, *heads, seqlen_q)
        for heads in DECODE_HEADS
        for batch, seqlen_k, seqlen_q in DECODE_ROWS
    )
    about = "several tokens for each sequence of a cache: drafts to be checked, chunks of a prompt"
    return CaseSet("decode-rows", about, tuple(cases), measure="decode")


def _decode_cpu() -> CaseSet:
    cases = tuple(decode_case(b, n, 8, 2, 64, dtype="float32") for n in (1024, 16384) for b in (1, 8))
    return CaseSet("decode-cpu", "a token for each sequence of a cache, on a CPU", cases, measure="decode")


def _smoke() -> CaseSet:
    small = Case.square(64, 2, 32, dtype="float32", causal=True)
    grouped = Case(2, 48, 80, 4, 2, 16, 24, "float32", causal=True)
    return CaseSet(
        "smoke",
        "seconds on any machine: does everything run?",
        (small, replace(small, direction="bwd"), replace(small, window=(7, 0)), grouped),
    )


_SETS = (
    _paper(),
    _cpu(),
    _cpu("cpu-bf16", "bfloat16"),
    _window(),
    _memory(),
    _decode(),
    _decode_rows(),
    _decode_cpu(),
    _smoke(),
)
CASE_SETS = {s.name: s for s in _SETS}


def get_case_set(name: str) -> CaseSet:
    """The set of that name. Raises: ValueError with the names that exist."""
    if name not in CASE_SETS:
        raise ValueError(f"case set: expected one of {', '.join(CASE_SETS)}, got {name!r}")
    return CASE_SETS[name]


def select(case_set: CaseSet, only: str | None = None, dtype: str | None = None) -> CaseSet:
    """Narrow a set down, or move it to another dtype.

    Args:
        only: "field=value" pairs joined by commas, all of which must hold: "direction=fwd,head_dim=128,causal=true".
            `seqlen` stands for seqlen_q. Values of one field are joined by "/": "seqlen=512/2048".
        dtype: replaces the dtype of every case.
    Raises: ValueError for an unknown field, or if no case is left.
    """
    cases = case_set.cases
    names = {f.name for f in fields(Case)}
    for condition in only.split(",") if only else []:
        key, separator, values = (part.strip() for part in condition.partition("="))
        field = {"seqlen": "seqlen_q"}.get(key, key)
        if not separator or field not in names:
            raise ValueError(f"only: expected field=value with a field of {sorted(names)}, got {condition!r}")
        wanted = {value.strip().lower() for value in values.split("/")}
        cases = tuple(case for case in cases if str(getattr(case, field)).lower() in wanted)
    if not cases:
        raise ValueError(f"only: no case of set {case_set.name!r} satisfies {only!r}")
    if dtype is not None:
        cases = tuple(replace(case, dtype=dtype) for case in cases)
    return replace(case_set, cases=cases)
