"""Calls of `attention` and `attention_varlen` that are refused, with the error type and the pattern of its message."""

from __future__ import annotations

import pytest
import torch

import onepass


def tensors(**changes):
    made = {name: torch.randn(2, 6, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return made | {name: change(made[name]) if callable(change) else change for name, change in changes.items()}


def packed(**changes):
    made = {name: torch.randn(6, heads, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    made["cu_seqlens_q"] = made["cu_seqlens_k"] = torch.tensor([0, 2, 6], dtype=torch.int32)
    return made | {name: change(made[name]) if callable(change) else change for name, change in changes.items()}


def nested(t, layout=torch.strided):
    return torch.nested.nested_tensor(list(t), layout=layout)


INT32 = torch.int32
NAN = float("nan")

DENSE = [
    ({"sinks": torch.zeros(4).to(torch.float8_e4m3fn)}, TypeError, r"sinks: expected .*dtype.*got float8_e4m3fn"),
    # types, devices, dtypes
    ({"q": [1.0]}, TypeError, r"q: expected a torch.Tensor, got list"),
    ({"v": None}, TypeError, r"v: expected a torch.Tensor, got NoneType"),
    ({"k": lambda t: t.to("meta")}, ValueError, r"k: expected device cpu like q, got meta"),
    ({"q": lambda t: t.int()}, TypeError, r"q: expected dtype float64, float32, bfloat16 or float16, got int32"),
    ({"q": lambda t: t.to(torch.complex64)}, TypeError, r"q: expected dtype .*, got complex64"),
    ({"q": lambda t: t.to(torch.float8_e4m3fn)}, TypeError, r"q: expected dtype .*, got float8_e4m3fn"),
    ({"k": lambda t: t.half()}, TypeError, r"k: expected dtype float32 like q, got float16"),
    ({"v": lambda t: t.double()}, TypeError, r"v: expected dtype float32 like q, got float64"),
    (
        {"q": lambda t: t.to_sparse()},
        TypeError,
        r"q: expected a strided \(dense\) tensor, got layout torch.sparse_coo",
    ),
    # ranks and shapes
    ({"q": lambda t: t[0]}, ValueError, r"q: expected 4 dimensions \(batch, seqlen, .*, got 3 in shape \(6, 4, 8\)"),
    ({"k": lambda t: t[None]}, ValueError, r"k: expected 4 dimensions .*, got 5"),
    ({"k": lambda t: t[:1], "v": lambda t: t[:1]}, ValueError, r"k: expected batch 2 like q, got 1"),
    (
        {"v": lambda t: t[:, :5]},
        ValueError,
        r"v: expected shape \(2, 6, 2, head_dim_v\) like k, got \(2, 5, 2, 8\)",
    ),
    (
        {"v": lambda t: t[:, :, :1]},
        ValueError,
        r"v: expected shape \(2, 6, 2, head_dim_v\) like k, got \(2, 6, 1, 8",
    ),
    ({"k": lambda t: t[..., :7]}, ValueError, r"k: expected head_dim 8 like q, got 7"),
    ({"v": lambda t: t[..., :0]}, ValueError, r"v: expected a head_dim of at least 1, got shape \(2, 6, 2, 0\)"),
    (
        {"k": lambda t: t[:, :, :0], "v": lambda t: t[:, :, :0]},
        ValueError,
        r"q: expected a number of heads divisible by the 0 heads of k and v, got 4",
    ),
    ({"q": lambda t: t[:, :, :3]}, ValueError, r"q: expected a number of heads divisible by the 2 heads .*, got 3"),
    # options
    ({"causal": 1}, TypeError, r"causal: expected a bool, got 1"),
    ({"return_lse": None}, TypeError, r"return_lse: expected a bool, got None"),
    ({"deterministic": "yes"}, TypeError, r"deterministic: expected a bool or None, got 'yes'"),
    ({"window": 3}, TypeError, r"window: expected a pair \(left, right\) of int or None, got 3"),
    ({"window": (1, 2, 3)}, TypeError, r"window: expected a pair .*, got \(1, 2, 3\)"),
    ({"window": (1.5, 0)}, TypeError, r"window: expected an int or None for its left side, got 1.5"),
    ({"window": (0, True)}, TypeError, r"window: expected an int or None for its right side, got True"),
    ({"softcap": 0}, ValueError, r"softcap: expected a number above 0 \(None = no cap\), got 0.0"),
    ({"softcap": -1.0}, ValueError, r"softcap: expected a number above 0 .*, got -1.0"),
    ({"softcap": NAN}, ValueError, r"softcap: expected a finite number, got nan"),
    ({"softcap": "30"}, TypeError, r"softcap: expected a float, got str"),
    ({"softmax_scale": NAN}, ValueError, r"softmax_scale: expected a finite number, got nan"),
    ({"softmax_scale": float("inf")}, ValueError, r"softmax_scale: expected a finite number, got inf"),
    ({"softmax_scale": True}, TypeError, r"softmax_scale: expected a float, got bool"),
    (
        {"softmax_scale": torch.ones((), requires_grad=True)},
        TypeError,
        r"softmax_scale: expected a float, got a tensor \(no gradient flows through it\)",
    ),
    ({"sinks": [0.0] * 4}, TypeError, r"sinks: expected a torch.Tensor, got list"),
    ({"sinks": torch.zeros(4, dtype=INT32)}, TypeError, r"sinks: expected a floating-point dtype, got int32"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks: expected shape \(4,\), one per query head, got \(2,\)"),
    ({"sinks": torch.zeros(4, device="meta")}, ValueError, r"sinks: expected device cpu like q, got meta"),
    ({"seqused_k": [1, 2]}, TypeError, r"seqused_k: expected an int32 torch.Tensor, got list"),
    ({"seqused_k": torch.tensor([1, 2])}, TypeError, r"seqused_k: expected dtype int32, got int64"),
    ({"seqused_k": torch.ones(3, dtype=INT32)}, ValueError, r"seqused_k: expected shape \(2,\), .*, got \(3,\)"),
    (
        {"seqused_k": torch.ones(2, dtype=INT32, device="meta")},
        ValueError,
        r"seqused_k: expected device cpu like q, got meta",
    ),
    ({"seqused_k": torch.tensor([1, 7], dtype=INT32)}, ValueError, r"seqused_k\[1\]: expected 0 to 6, .*, got 7"),
    ({"seqused_k": torch.tensor([-1, 2], dtype=INT32)}, ValueError, r"seqused_k\[0\]: expected 0 to 6, .*, got -1"),
    # tensors that are not one block of memory
    (
        {"q": lambda t: nested(t)},
        TypeError,
        r"q: expected a torch.Tensor of one shape, got a nested tensor \(sequences",
    ),
    ({"v": lambda t: nested(t, torch.jagged)}, TypeError, r"v: expected .* of one shape, got a nested tensor"),
    ({"sinks": torch.zeros(4).to_sparse()}, TypeError, r"sinks: expected a strided \(dense\) tensor, got layout"),
    # numbers beyond the range of 64 bits
    ({"softmax_scale": 1e300}, ValueError, r"softmax_scale: .* at most 1e\+36, for float32 scores, got 1e\+300"),
    ({"softmax_scale": -1e37}, ValueError, r"softmax_scale: expected a magnitude of at most 1e\+36, .*, got -1e\+37"),
    ({"softcap": 1e38}, ValueError, r"softcap: expected 1e-36 to 1e\+36, for float32 scores, got 1e\+38"),
    ({"softcap": 1e-40}, ValueError, r"softcap: expected 1e-36 to 1e\+36, for float32 scores, got 1e-40"),
    ({"softcap": 1e-20, "softmax_scale": 1e20}, ValueError, r"softcap: expected softmax_scale / softcap of at most"),
    ({"softcap": 10**400}, ValueError, r"softcap: expected a finite number, got one beyond the range of a float"),
    # heads before seqlen
    (
        {"q": lambda t: t[:, :1].transpose(1, 2), "k": lambda t: t.transpose(1, 2), "v": lambda t: t.transpose(1, 2)},
        ValueError,
        r"q: .* divisible by the 6 heads of k and v, got 1 \(are q, k and v \(batch, num_heads, seqlen, head_dim"
        r"\)\? Then pass q.transpose\(1, 2\), k.transpose\(1, 2\), v.transpose\(1, 2\)\)",
    ),
    (
        {"q": lambda t: t[:, :1].transpose(1, 2)},
        ValueError,
        r"q: .* got 1 \(is q \(batch, num_heads, seqlen, head_dim\)\? Then pass q.transpose\(1, 2\)\)",
    ),
    (
        {"k": lambda t: t.transpose(1, 2), "v": lambda t: t.transpose(1, 2)},
        ValueError,
        r"q: .* got 4 \(are k and v \(batch, num_heads, seqlen, head_dim\)\? Then pass k.transpose\(1, 2\), v.trans",
    ),
    (
        {"v": lambda t: t.transpose(1, 2)},
        ValueError,
        r"v: expected shape \(2, 6, 2, .* \(is v \(batch, num_heads, seqlen, head_dim\)\? Then pass v.transpose\(1",
    ),
    (
        {"q": lambda t: t.transpose(1, 2), "k": lambda t: t.transpose(1, 2), "v": lambda t: t.transpose(1, 2)}
        | {"sinks": torch.zeros(4)},
        ValueError,
        r"sinks: expected shape \(6,\), .*, got \(4,\) \(is q \(batch, num_heads, seqlen, head_dim\)\? Then pass q",
    ),
    ({"q": lambda t: t[:, :1, :3]}, ValueError, r"q: .* divisible by the 2 heads of k and v, got 3$"),
    # wrong heads in the right layout: with seqlen and heads exchanged the call would run, and give wrong values
    (
        {"q": torch.zeros(2, 64, 8, 32), "k": torch.zeros(2, 64, 3, 32), "v": torch.zeros(2, 64, 3, 32)},
        ValueError,
        r"q: expected a number of heads divisible by the 3 heads of k and v, got 8$",
    ),
    ({"q": torch.zeros(2, 64, 3, 8)}, ValueError, r"q: .* divisible by the 2 heads of k and v, got 3$"),
    (
        {"k": torch.zeros(2, 6, 3, 8), "v": torch.zeros(2, 6, 3, 8)},
        ValueError,
        r"q: .* divisible by the 3 heads of k and v, got 4$",
    ),
    (
        {"k": torch.zeros(2, 8, 4, 8), "v": torch.zeros(2, 4, 8, 8)},
        ValueError,
        r"v: expected .* \(is v \(batch, num_heads, seqlen, head_dim\)\? Then pass v.transpose\(1, 2\)\)$",
    ),
    (
        {"k": torch.zeros(2, 4, 8, 8), "v": torch.zeros(2, 8, 4, 8)},
        ValueError,
        r"v: expected shape \(2, 4, 8, head_dim_v\) like k, got \(2, 8, 4, 8\)$",
    ),
    ({"sinks": torch.zeros(6)}, ValueError, r"sinks: expected shape \(4,\), one per query head, got \(6,\)$"),
    ({"backend": "cuda9"}, ValueError, r"backend: expected one of .*tiled.* or None, got 'cuda9'"),
    (
        {"tuning": object()},
        TypeError,
        r"tuning: expected a ForwardConfigSm90, a ForwardConfigSm80 or None, got <object",
    ),
    (
        {"tuning": onepass.ForwardConfigSm90(tile_n=128)},
        NotImplementedError,
        r"tuning: backend cpu takes none, expected None, got ForwardConfigSm90\(tile_n=128, .*C\+\+ attention",
    ),
    (
        {"tuning": onepass.ForwardConfigSm90(tile_n=128), "backend": "tiled"},
        NotImplementedError,
        r"tuning: backend tiled takes none",
    ),
]

PACKED = [
    ({"q": lambda t: t[None]}, ValueError, r"q: expected 3 dimensions \(total_tokens, .*, got 4"),
    ({"v": lambda t: t[:5]}, ValueError, r"v: expected shape \(6, 2, head_dim_v\) like k, got \(5, 2, 8\)"),
    (
        {"q": lambda t: t[:1].transpose(0, 1), "k": lambda t: t.transpose(0, 1), "v": lambda t: t.transpose(0, 1)},
        ValueError,
        r"q: .* got 1 \(are q, k and v \(num_heads, total_tokens, head_dim\)\? Then pass q.transpose\(0, 1\), k.tran",
    ),
    ({"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q: expected an int32 torch.Tensor, got NoneType"),
    ({"cu_seqlens_q": lambda t: t.long()}, TypeError, r"cu_seqlens_q: expected dtype int32, got int64"),
    ({"cu_seqlens_q": lambda t: t[None]}, ValueError, r"cu_seqlens_q: expected shape \(batch \+ 1,\), got \(1, 3\)"),
    ({"cu_seqlens_q": lambda t: t[:0]}, ValueError, r"cu_seqlens_q: expected shape \(batch \+ 1,\), got \(0,\)"),
    ({"cu_seqlens_k": lambda t: t[:2]}, ValueError, r"cu_seqlens_k: expected shape \(3,\), .*, got \(2,\)"),
    ({"cu_seqlens_k": lambda t: t.to("meta")}, ValueError, r"cu_seqlens_k: expected device cpu like q, got meta"),
    ({"cu_seqlens_q": lambda t: t + 1}, ValueError, r"cu_seqlens_q: expected to start at 0, got 1"),
    (
        {"cu_seqlens_k": torch.tensor([0, 4, 3], dtype=INT32)},
        ValueError,
        r"cu_seqlens_k: expected offsets that never decrease, got \[0, 4, 3\]",
    ),
    (
        {"cu_seqlens_k": torch.tensor([0, 4, 7], dtype=INT32)},
        ValueError,
        r"cu_seqlens_k: expected a last offset of at most 6 tokens, got 7",
    ),
    ({"seqused_k": torch.ones(3, dtype=INT32)}, ValueError, r"seqused_k: expected shape \(2,\), .*, got \(3,\)"),
    ({"seqused_k": torch.tensor([3, 1], dtype=INT32)}, ValueError, r"seqused_k\[0\]: expected 0 to 2, .*, got 3"),
    ({"max_seqlen_q": 2.5}, TypeError, r"max_seqlen_q: expected an int, a tensor of one integer or None, got 2.5"),
    ({"max_seqlen_k": torch.ones(2, dtype=INT32)}, TypeError, r"max_seqlen_k: .*, got int32 of shape \(2,\)"),
    ({"max_seqlen_k": torch.ones(())}, TypeError, r"max_seqlen_k: .*, got float32 of shape \(\)"),
    ({"max_seqlen_q": -1}, ValueError, r"max_seqlen_q: expected at least 0, got -1"),
]


def refused(function, make, changes, error, message):
    arguments = make(**changes)
    is_copied = {n: isinstance(t, torch.Tensor) and t.is_cpu and not t.is_nested for n, t in arguments.items()}
    before = {n: t.clone() for n, t in arguments.items() if is_copied[n]}
    with pytest.raises(error, match=message):
        function(**arguments)
    for name, copy in before.items():
        same = arguments[name].to_dense() if arguments[name].is_sparse else arguments[name]
        assert torch.equal(same, copy.to_dense() if copy.is_sparse else copy), f"{name} was changed"
    return arguments
