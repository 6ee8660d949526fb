"""Rotary positions: complex multiplication in float64 is the oracle."""

import inspect

import pytest
import torch

from onepass.compat.upstream.rotary import (
    ApplyRotaryEmb,
    ApplyRotaryEmbKV_,
    ApplyRotaryEmbQKV_,
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

ANGLES = torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 6
COS, SIN = ANGLES.cos(), ANGLES.sin()
OFFSETS = torch.tensor([0, 2])


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def turned(x, positions, interleaved, angles=ANGLES):
    """x (seqlen, heads, head_dim) with pairs as complex numbers; positions past the tables turn by nothing."""
    angles = torch.cat((angles, torch.zeros_like(angles[:1])))[positions.clamp(max=len(angles))][:, None]
    half = angles.shape[-1]
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.mT
    result = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    return torch.cat(((result if interleaved else result.mT).flatten(-2), x[..., 2 * half :]), -1)


def turned_batch(x, starts, interleaved):
    rows = torch.arange(x.shape[1])
    return torch.stack([turned(entry, start + rows, interleaved) for entry, start in zip(x, starts, strict=True)])


def assert_same(function, expected, x):
    """Values and gradients of two functions of x."""
    results = []
    for f in (function, expected):
        leaf = x.clone().requires_grad_()
        out = f(leaf)
        weights = randn(*out.shape, seed=5)
        results.append((out.detach(), *torch.autograd.grad((out * weights).sum(), leaf)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offsets", [0, 4, [0, 3], [7, 10]])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_dense(offsets, inplace, interleaved):
    starts = offsets if isinstance(offsets, list) else [offsets] * 2
    given = torch.tensor(offsets, dtype=torch.int32) if isinstance(offsets, list) else offsets
    assert_same(
        lambda x: apply_rotary_emb(x, COS, SIN, interleaved, inplace, seqlen_offsets=given),
        lambda x: turned_batch(x, starts, interleaved),
        randn(2, 5, 3, 8),
    )


@pytest.mark.parametrize("offsets", [0, 2, [1, 0, 5]])
@pytest.mark.parametrize("inplace", [False, True])
def test_packed(offsets, inplace):
    lengths, starts = [3, 0, 4], offsets if isinstance(offsets, list) else [offsets] * 3
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    positions = torch.cat((positions, torch.full((2,), 99)))  # two rows that belong to no sequence
    given = torch.tensor(offsets) if isinstance(offsets, list) else offsets
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    assert_same(
        lambda x: apply_rotary_emb(x, COS, SIN, inplace=inplace, seqlen_offsets=given, cu_seqlens=cu_seqlens),
        lambda x: turned(x, positions, False),
        randn(9, 2, 8),
    )


@pytest.mark.parametrize("function", ["qkv", "grouped", "kv"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_heads_are_rotated_in_place(function, interleaved):
    shape = {"qkv": (2, 5, 3, 2, 8), "grouped": (2, 5, 8, 8), "kv": (2, 5, 2, 3, 8)}[function]
    keys = (SIN * 0 + 1, COS * 0)  # keys are not rotated by these
    offsets = torch.tensor([1, 3])

    def ours(x):
        if function == "kv":
            return apply_rotary_emb_kv_(x, COS, SIN, interleaved, offsets)
        tables = keys if function == "grouped" else (None, None)
        heads = 4 if function == "grouped" else None
        return apply_rotary_emb_qkv_(x, COS, SIN, *tables, interleaved, offsets, num_heads_q=heads)

    def expected(x):
        if function == "kv":
            return torch.stack((turned_batch(x[:, :, 0], [1, 3], interleaved), x[:, :, 1]), 2)
        if function == "grouped":
            return torch.cat((turned_batch(x[:, :, :4], [1, 3], interleaved), x[:, :, 4:]), 2)
        return torch.stack((*(turned_batch(x[:, :, i], [1, 3], interleaved) for i in (0, 1)), x[:, :, 2]), 2)

    x = randn(*shape)
    assert_same(ours, expected, x)
    before = x.clone()
    assert ours(x).data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, expected(before))


def test_conjugate_undoes_a_rotation():
    x = randn(2, 5, 3, 8)
    there = apply_rotary(x, COS, SIN, 2)
    torch.testing.assert_close(apply_rotary(there, COS, SIN, 2, conjugate=True), x)


def test_tables_of_batch_entries():
    x, rows = randn(2, 5, 3, 8), torch.stack((torch.arange(5), torch.arange(3, 8)))
    out = apply_rotary_emb_torch(x, COS[rows], SIN[rows])
    torch.testing.assert_close(out, turned_batch(x, [0, 3], False))
    out = apply_rotary_emb_torch(x, COS[rows], SIN[rows], True)
    torch.testing.assert_close(out, turned_batch(x, [0, 3], True))
    out = apply_rotary_emb_torch(x, COS[:5], SIN[:5], True)
    torch.testing.assert_close(out, turned_batch(x, [0, 0], True))
    torch.testing.assert_close(apply_rotary_emb_torch(x, COS, SIN), turned_batch(x, [0, 0], False))


def test_16_bits_are_rounded_once():
    x = randn(2, 5, 3, 8, dtype=torch.bfloat16)
    tables = COS.bfloat16(), SIN.bfloat16()
    expected = apply_rotary_emb(x.double(), *(t.double() for t in tables))
    torch.testing.assert_close(apply_rotary_emb(x, *tables), expected.bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale_base", [None, 16.0])
def test_module(scale_base, interleaved):
    module = RotaryEmbedding(
        6, base=100.0, scale_base=scale_base, interleaved=interleaved
    ).bfloat16()  # and its buffers
    q, kv = randn(2, 5, 4, 8, dtype=torch.float32), randn(2, 5, 2, 2, 8, dtype=torch.float32, seed=1)
    frequencies = 100.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    angles = torch.outer(torch.arange(9.0, dtype=torch.float64), frequencies)
    scale = torch.ones_like(angles)
    if scale_base is not None:
        columns = (torch.arange(0, 6, 2, dtype=torch.float64) + 0.4 * 6) / (1.4 * 6)
        scale = columns ** ((torch.arange(9, dtype=torch.float64) - 4) / scale_base)[:, None]
    expected_q, expected_k = (
        apply_rotary_emb(x.double(), angles.cos() * s, angles.sin() * s, interleaved, seqlen_offsets=4)
        for x, s in ((q, scale), (kv[:, :, 0], 1 / scale))
    )
    qkv = torch.cat((q, kv[:, :, 0], kv[:, :, 1]), 2)
    both = module(qkv.clone(), seqlen_offset=4, num_heads_q=4)
    given_q, given_kv = q.clone(), kv.clone()
    out_q, out_kv = module(given_q, given_kv, seqlen_offset=4)
    assert torch.equal(given_q, out_q)  # in place
    assert torch.equal(given_kv, out_kv)
    for ours, expected in (
        (out_q, expected_q),
        (both[:, :, :4], expected_q),
        (out_kv[:, :, 0], expected_k),
        (both[:, :, 4:6], expected_k),
    ):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out_kv[:, :, 1], kv[:, :, 1])
    assert torch.equal(both[:, :, 6:], kv[:, :, 1])
    assert not module.state_dict()


def test_module_makes_longer_tables_when_it_needs_them():
    module, x = RotaryEmbedding(6), randn(1, 9, 3, 2, 8, dtype=torch.float32)
    first = module(x[:, :5].clone())
    assert torch.equal(module(x.clone()), RotaryEmbedding(6)(x.clone()))
    tables = module._cos_cached
    assert torch.equal(module(x[:, :5].clone()), first)
    assert module._cos_cached is tables
    assert module(x[:, :0].clone()).shape == (1, 0, 3, 2, 8)
    assert RotaryEmbedding(6)(x[:, :0].clone()).shape == (1, 0, 3, 2, 8)
    module = RotaryEmbedding(6)
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(module(x.clone()), RotaryEmbedding(6)(x.clone()))  # tables of 16 bits do not stay


def test_module_trains_after_inference():
    """Autograd cannot save tables that were made in inference mode, so a module in training makes them again."""
    module, x = RotaryEmbedding(6), randn(1, 5, 3, 2, 8, dtype=torch.float32)
    with torch.inference_mode():
        expected = module(x.clone())
        tables = module.eval()._cos_cached
        module(x.clone())
        assert module._cos_cached is tables
    leaf = x.clone().requires_grad_()
    out = module.train()(leaf * 1)
    assert torch.equal(out, expected)
    assert torch.autograd.grad(out.sum(), leaf)[0].shape == x.shape


def test_a_backward_in_place_leaves_its_gradient_alone():
    x, dout = randn(1, 5, 3, 2, 8).requires_grad_(), randn(1, 5, 3, 2, 8, seed=4)
    given = dout.clone()
    torch.autograd.grad(apply_rotary_emb_qkv_(x * 1, COS, SIN), x, given)
    assert torch.equal(given, dout)


ROTARY_ARGUMENTS = ("x", "cos", "sin", "interleaved", "inplace", "seqlen_offsets", "cu_seqlens", "max_seqlen")
SIGNATURES = [
    (RotaryEmbedding, ("dim", "base", "interleaved", "scale_base", "device")),
    (RotaryEmbedding.forward, ("self", "qkv", "kv", "seqlen_offset", "max_seqlen", "num_heads_q")),
    (apply_rotary_emb, ROTARY_ARGUMENTS),
    (
        apply_rotary_emb_qkv_,
        ("qkv", "cos", "sin", "cos_k", "sin_k", "interleaved", "seqlen_offsets", "num_heads_q"),
    ),
    (apply_rotary_emb_kv_, ("kv", "cos", "sin", "interleaved", "seqlen_offsets")),
    (
        apply_rotary,
        ("x", "cos", "sin", "seqlen_offsets", "cu_seqlens", "max_seqlen", "interleaved", "inplace", "conjugate"),
    ),
]


@pytest.mark.parametrize(("function", "names"), SIGNATURES)
def test_positional_arguments_are_in_the_order_of_flash_attn_2_8(function, names):
    parameters = inspect.signature(function).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == names


def test_module_with_offsets_in_a_tensor():
    module, x = RotaryEmbedding(6), randn(2, 5, 3, 2, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="max_seqlen: expected an int"):
        module(x.clone(), seqlen_offset=torch.tensor([0, 3]))
    out = module(x.clone(), seqlen_offset=torch.tensor([0, 3]), max_seqlen=8)
    torch.testing.assert_close(out[1:], module(x[1:].clone(), seqlen_offset=3))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: apply_rotary_emb(x[0], COS, SIN), "x: expected 4 dimensions"),
        (lambda x: apply_rotary_emb(x, COS[:4], SIN[:4]), "cos: expected a row for each of the 5 positions, got 4"),
        (lambda x: apply_rotary_emb(x, COS, SIN, seqlen_offsets=8), "cos: expected a row for each of the 13 positions"),
        (lambda x: apply_rotary_emb(x, COS, SIN[:4]), r"sin: expected shape \(12, 3\) like cos, got \(4, 3\)"),
        (lambda x: apply_rotary_emb(x[..., :4], COS, SIN), "cos: expected shape .* rotary_dim up to 4"),
        (lambda x: apply_rotary_emb(x, COS, SIN, seqlen_offsets=-1), "seqlen_offsets: expected an int from 0 on"),
        (lambda x: apply_rotary_emb(x, COS, SIN, seqlen_offsets="1"), "seqlen_offsets: expected an int from 0 on or"),
        (lambda x: apply_rotary_emb(x, COS[0], SIN), "cos: expected shape .* rotary_dim up to 8"),
        (lambda x: apply_rotary_emb(x, COS, SIN[0]), "sin: expected shape .* rotary_dim up to 8"),
        (lambda x: apply_rotary_emb(x, COS, SIN, seqlen_offsets=torch.ones(2)), "seqlen_offsets: expected an int or"),
        (
            lambda x: apply_rotary_emb(x, COS, SIN, seqlen_offsets=torch.tensor([1, 2, 3])),
            r"seqlen_offsets: expected an int or shape \(2,\) of int32 or int64, got \(3,\) of torch.int64",
        ),
        (
            lambda x: apply_rotary_emb(x[0], COS, SIN, cu_seqlens=torch.tensor([0, 2, 3, 5]), seqlen_offsets=OFFSETS),
            r"seqlen_offsets: expected an int or shape \(3,\) of int32 or int64, got \(2,\) of torch.int64",
        ),
        (lambda x: apply_rotary_emb(x, COS, SIN, cu_seqlens=OFFSETS), "x: expected 3 dimensions"),
        (lambda x: apply_rotary_emb_qkv_(x[0], COS, SIN), "qkv: expected shape"),
        (lambda x: apply_rotary_emb_qkv_(x[:, :, None], COS, SIN), "qkv: expected shape"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN, num_heads_q=0), "num_heads_q: expected .* got 0"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN, num_heads_q=3), "num_heads_q: expected .* got 3"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN, num_heads_q=1.0), "num_heads_q: expected .* got 1.0"),
        (lambda x: apply_rotary_emb_kv_(x[:, :, None], COS, SIN), "kv: expected shape"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN), "num_heads_q: expected .* got None"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN, num_heads_q=2), "num_heads_q: expected .* the 3 heads .* got 2"),
        (lambda x: apply_rotary_emb_kv_(x, COS, SIN), "kv: expected shape"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call(randn(2, 5, 3, 8))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: apply_rotary_emb((1,), COS, SIN), "x: expected a torch.Tensor"),
        (lambda x: apply_rotary_emb(x, (1,), SIN), "cos: expected a torch.Tensor"),
        (lambda x: apply_rotary_emb(x, COS, None), "sin: expected a torch.Tensor"),
        (lambda x: apply_rotary_emb(x, COS, SIN, 1), "interleaved: expected"),
        (lambda x: apply_rotary_emb(x, COS, SIN, inplace=1), "inplace: expected"),
        (lambda x: apply_rotary(x, COS, SIN, conjugate=1), "conjugate: expected"),
        (lambda x: apply_rotary_emb_qkv_(None, COS, SIN), "qkv: expected a torch.Tensor"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN, interleaved=1, num_heads_q=1), "interleaved: expected"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN, (1,), num_heads_q=1), "cos: expected a torch.Tensor"),
        (lambda x: apply_rotary_emb_qkv_(x, COS, SIN, sin_k=(1,), num_heads_q=1), "sin: expected a torch.Tensor"),
        (lambda x: apply_rotary_emb_kv_(None, COS, SIN), "kv: expected a torch.Tensor"),
        (lambda x: apply_rotary_emb_kv_(x[:, :, None].expand(-1, -1, 2, -1, -1), COS, SIN, 1), "interleaved: expected"),
        (lambda x: apply_rotary_emb_torch(x, COS.expand(2, 12, 3), SIN.expand(2, 12, 3), 1), "interleaved: expected"),
        (lambda x: RotaryEmbedding(6, pos_idx_in_fp32=1), "pos_idx_in_fp32: expected"),
    ],
)
def test_wrong_types_are_refused(call, match):
    with pytest.raises(TypeError, match=f"^{match}"):
        call(randn(2, 5, 3, 8))


def test_angles_in_16_bits_are_refused():
    with pytest.raises(NotImplementedError, match="pos_idx_in_fp32: expected True, got False"):
        RotaryEmbedding(6, pos_idx_in_fp32=False)


def test_positions_below_0_are_refused():
    with pytest.raises(ValueError, match=r"seqlen_offsets: expected positions from 0 on, got \[2, -1\]"):
        apply_rotary_emb(randn(2, 3, 2, 8), COS, SIN, seqlen_offsets=torch.tensor([2, -1]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_quarter_turn(interleaved):
    x = randn(2, 3, 2, 6)
    angles = torch.full((1, 3), torch.pi / 2, dtype=torch.float64)
    expected = torch.stack([turned(entry, torch.zeros(3, dtype=torch.int64), interleaved, angles) for entry in x])
    torch.testing.assert_close(rotate_half(x, interleaved), expected)
    assert torch.equal(rotate_half(x), rotate_half(x, False))


def test_names_of_autograd_functions():
    x, qkv, kv = randn(2, 3, 2, 8), randn(2, 3, 3, 2, 8), randn(2, 3, 2, 2, 8)
    assert torch.equal(ApplyRotaryEmb.apply(x, COS, SIN, True), apply_rotary_emb(x, COS, SIN, True))
    expected = apply_rotary_emb_qkv_(qkv.clone(), COS, SIN)
    assert torch.equal(ApplyRotaryEmbQKV_.apply(qkv, COS, SIN), expected)
    expected = apply_rotary_emb_kv_(kv.clone(), COS, SIN)
    assert torch.equal(ApplyRotaryEmbKV_.apply(kv, COS, SIN), expected)
