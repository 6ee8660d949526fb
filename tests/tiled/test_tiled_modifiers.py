"""Key ranges, positions, ALiBi, bias and dropout on a CPU: random calls beside the oracle, with gradients."""

import importlib
import random
from dataclasses import replace

import pytest
import torch

import onepass
from onepass import cpu, reference, tiled
from onepass.cpu import masks, operators
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from onepass.tiled import forward, gradients
from onepass.tiled.tile_sizes import TileSizes

DTYPE = torch.float64
NOT_BY_OPERATORS = "softcap", "dropout_p", "dropout_state"
WITH_GRADIENT = {"sinks": 3, "alibi_slopes": 4, "bias": 5}  # and where `gradients` returns it


def random_options(rng, batch, seqlen_q, seqlen_k, heads):
    """Arguments of `reference.attention`, of which each has a chance to be there."""

    def given(chance):
        return rng.random() < chance

    options = {}
    if given(0.4):
        options["causal"] = True
    if given(0.4):
        options["window"] = rng.choice([None, 5, 20]), rng.choice([None, 3, 10])
    if given(0.2):
        options["softcap"] = 3.0
    if given(0.3):
        options["sinks"] = torch.randn(heads, dtype=DTYPE)
    if given(0.3):
        options["seqused_k"] = torch.randint(0, seqlen_k + 1, (batch,), dtype=torch.int32)
    if given(0.3):
        ends = options.get("seqused_k", torch.full((batch,), seqlen_k)).tolist()
        options["seqstart_k"] = torch.tensor([rng.randint(0, end) for end in ends], dtype=torch.int32)
    if given(0.3):
        low = torch.randint(-3, seqlen_k + 3, (rng.choice([1, batch]), rng.choice([1, heads]), seqlen_q, 1))
        options["key_ranges"] = torch.cat([low, low + torch.randint(0, seqlen_k + 1, low.shape)], -1).int()
    num_positions = max(seqlen_q, seqlen_k) + 3
    if given(0.3):
        rows = [torch.randperm(num_positions)[:seqlen_q] for _ in range(rng.choice([1, batch]))]
        options["q_positions"] = torch.stack(rows).int() + rng.choice([0, -5, num_positions - 4])
    if given(0.3):
        options["alibi_slopes"] = torch.rand((heads,) if given(0.5) else (batch, heads)) * 0.3 - rng.choice([0, 0.15])
    if given(0.4):
        rows = num_positions if "q_positions" in options else seqlen_q
        sizes = (1, batch), (1, heads), (1, rows), (1, seqlen_k)
        options["bias"] = bias = torch.randn(*map(rng.choice, sizes), dtype=DTYPE)
        if given(0.4):
            bias[torch.rand_like(bias) < 0.3] = -torch.inf
    if given(0.3):
        options["dropout_p"] = rng.choice([0.1, 0.5])
        options["dropout_state"] = torch.tensor([rng.getrandbits(60), rng.getrandbits(40)])
    if given(0.3):
        low = torch.randint(-3, seqlen_q + 3, (rng.choice([1, batch]), rng.choice([1, heads]), seqlen_k, 1))
        low = low.sort(2).values if given(0.5) else low
        options["query_ranges"] = torch.cat([low, low + torch.randint(0, seqlen_q + 1, low.shape)], -1).int()
    return options


@pytest.mark.parametrize("first", range(0, 160, 16))
def test_random_calls(first):
    for seed in range(first, first + 16):
        check(seed)


@pytest.mark.parametrize("first", range(0, 160, 16))
def test_random_calls_by_masks(first, monkeypatch):
    """The backend `cpu` computes random calls in blocks of few rows; where a NaN has spread, `tiled` computes them."""
    counts = {"_forward": 0, "_backward": 0}

    def counted(name, real):
        def run(*arguments, attn_mask, **options):
            counts[name] += attn_mask is not None
            return real(*arguments, attn_mask=attn_mask, **options)

        monkeypatch.setattr(operators, name, run)

    for name in counts:
        counted(name, getattr(operators, name))
    for seed in range(first, first + 16):
        monkeypatch.setattr(masks, "ROWS", 16 if seed % 3 else 256)
        monkeypatch.setattr(masks, "MASK_ELEMENTS", 1 if seed % 2 else 2**21)
        check(seed, "cpu")
    assert counts["_forward"] > 8
    assert counts["_backward"] > 8


def check(seed, backend="tiled"):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, seqlen_q, seqlen_k = rng.randint(1, 3), rng.choice([1, 17, 40, 70]), rng.choice([1, 9, 50, 80])
    num_kv, group, head_dim = rng.randint(1, 2), rng.randint(1, 3), 8
    heads = num_kv * group
    q = torch.randn(batch, seqlen_q, heads, head_dim, dtype=DTYPE)
    k, v = (torch.randn(batch, seqlen_k, num_kv, head_dim, dtype=DTYPE) for _ in range(2))
    options = random_options(rng, batch, seqlen_q, seqlen_k, heads)
    if backend == "cpu":
        options = {name: x for name, x in options.items() if name not in NOT_BY_OPERATORS}
    message = f"seed {seed}: {[(name, getattr(x, 'shape', x)) for name, x in options.items()]}"

    leaves = {name: x.clone().requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
    leaves |= {name: options[name].double().clone().requires_grad_() for name in WITH_GRADIENT if name in options}
    named = options | {name: leaves[name] for name in WITH_GRADIENT if name in leaves}
    expected = reference.attention(leaves["q"], leaves["k"], leaves["v"], **named)

    modifiers = Modifiers(*(options.get(name) for name in Modifiers._fields))
    inputs = AttentionInputs(q, k, v, options.get("sinks"), None, None, options.get("seqused_k"), modifiers)
    problem = AttentionProblem.of(
        inputs,
        softmax_scale=head_dim**-0.5,
        mask=Mask.from_options(options.get("causal", False), options.get("window")),
        softcap=options.get("softcap"),
        deterministic=False,
        dropout_p=options.get("dropout_p", 0.0),
    )
    sizes = TileSizes(rng.choice([4, 16]), rng.choice([8, 16]), rng.choice([1, 2, 8]))
    run = (tiled.forward, tiled.gradients, sizes) if backend == "tiled" else (cpu.forward, cpu.gradients)
    forward, gradients, *sizes = run
    if backend == "cpu":
        problem = replace(problem, constant_slopes=problem.has_alibi, constant_bias=problem.has_bias)
        assert importlib.import_module("onepass.cpu.forward").by_operators(problem, inputs) is not None, message
    out, lse = forward(problem, inputs, *sizes)
    for actual, right in ((out, expected.out), (lse, expected.lse)):
        torch.testing.assert_close(actual, right.detach(), rtol=1e-9, atol=1e-9, msg=message)

    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if backend == "tiled" else None
    of_lse = torch.where(expected.lse.isfinite(), expected.lse, 0.0)
    total = (expected.out * dout).sum() + (0.0 if dlse is None else (of_lse * dlse).sum())
    wanted = torch.autograd.grad(total, leaves.values(), allow_unused=True)
    found = gradients(problem, inputs, out, lse, dout, dlse, *sizes)
    for name, right in zip(leaves, wanted, strict=True):
        if backend == "cpu" and name in ("alibi_slopes", "bias"):
            continue
        actual = found[WITH_GRADIENT.get(name, "qkv".find(name))]
        right = torch.zeros_like(actual, dtype=DTYPE) if right is None else right.nan_to_num(nan=0.0)  # hidden pairs
        atol = 1e-6 if name == "alibi_slopes" else 1e-9  # these are float32
        torch.testing.assert_close(actual.double(), right, rtol=atol, atol=atol, msg=f"{message}: {name}")

    if seed % 2:
        check_hidden_values(rng, problem, inputs, options, run, (out, lse), (dout, dlse), found, message)


def check_hidden_values(rng, problem, inputs, options, run, clean_results, douts, clean_gradients, message):
    """NaN or infinity of a key reaches the rows that see it, and no others."""
    forward, gradients, *sizes = run
    q, k = inputs[:2]
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, num_kv = k.shape[1:3]
    group = heads // num_kv
    out, lse = clean_results
    visible = reference.pairs_of(
        q.transpose(1, 2),
        k.transpose(1, 2),
        problem.mask,
        **{name: x for name, x in options.items() if name not in ("causal", "window", "softcap", "sinks")},
    ).visible.expand(batch, heads, seqlen_q, seqlen_k)
    seen_by = visible.unflatten(1, (num_kv, group)).any(2)  # (batch, num_kv, seqlen_q, seqlen_k)
    unseen = ~seen_by.any(2).transpose(1, 2)  # (batch, seqlen_k, num_kv)
    key = torch.zeros_like(unseen)
    key[:, rng.randrange(seqlen_k)] = True
    value = rng.choice([torch.nan, torch.inf, -torch.inf])
    for hidden, name in ((unseen | key, "k"), (unseen | key, "v"), (unseen, "kv")):
        given = {n: getattr(inputs, n).masked_fill(hidden[..., None], value) for n in name}
        wild = inputs._replace(**given)
        results = forward(problem, wild, *sizes)
        is_clean = ~(visible & hidden.transpose(1, 2).repeat_interleave(group, 1)[:, :, None]).any(-1)
        for actual, clean in zip(results, (out.transpose(1, 2), lse), strict=True):
            actual = actual.transpose(1, 2) if actual.dim() == 4 else actual
            torch.testing.assert_close(
                actual[is_clean], clean[is_clean], rtol=1e-9, atol=1e-9, msg=f"{message}: {name}"
            )
        if name == "v" and not problem.dropout_p:
            assert not results[0].transpose(1, 2)[~is_clean].isfinite().any(), message
    for actual, clean in zip(gradients(problem, wild, *results, *douts, *sizes), clean_gradients, strict=True):
        torch.testing.assert_close(actual, clean, rtol=1e-6, atol=1e-6, msg=f"{message}: gradients")


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_that_no_query_sees_are_not_visited(is_causal, monkeypatch):
    """Documents of two tiles as ranges of queries; half of the last one's keys are seen by nobody."""
    visited, real = [], tiled.modifiers.ScoreModifiers.modify_scores_

    def counting(self, scores, window, queries, keys):
        visited.append((queries[0] // 8, keys[0] // 8))
        return real(self, scores, window, queries, keys)

    monkeypatch.setattr(tiled.modifiers.ScoreModifiers, "modify_scores_", counting)
    q, k, v = (torch.randn(1, 48, 2, 8, dtype=DTYPE) for _ in range(3))
    low = torch.arange(48) // 16 * 16
    ranges = torch.stack([low, low + 16], -1)[None, None].int()
    ranges[:, :, 40:] = torch.tensor([33, 33])
    inputs = AttentionInputs(q, k, v, *[None] * 4, Modifiers(query_ranges=ranges))
    mask = Mask.from_options(is_causal, None)
    problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=mask, softcap=None, deterministic=False)
    expected = {(m, n) for m in range(6) for n in range(5) if m // 2 == n // 2 and (n <= m or not is_causal)}
    out, lse = forward(problem, inputs, TileSizes(8, 8, 1))
    assert sorted(visited) == sorted([*expected, *expected])  # of both heads
    visited.clear()
    gradients(problem, inputs, out, lse, torch.ones_like(out), None, TileSizes(8, 8, 2))
    assert sorted(visited) == sorted(expected)


def test_dropout_of_some_heads_of_a_call():
    """Calls of some of the heads, which know their numbers, give what the call of all heads gives."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, heads, 8) for heads in (6, 3, 3))
    state = torch.tensor([12345, 678])

    def run(q_heads, kv_heads, **numbers):
        tensors = q[:, :, q_heads], k[:, :, kv_heads], v[:, :, kv_heads]
        inputs = AttentionInputs(*tensors, None, None, None, None, Modifiers(dropout_state=state))
        problem = AttentionProblem.of(
            inputs, softmax_scale=0.3, mask=Mask(), softcap=None, deterministic=False, dropout_p=0.4
        )
        problem = replace(problem, **numbers)
        out, lse = forward(problem, inputs)
        return (out, *gradients(problem, inputs, out, lse, torch.ones_like(out), None)[:3])

    whole = run(slice(None), slice(None))
    some = run(slice(2, 6), slice(1, 3), first_head=2, all_heads=6)
    for all_heads, own in zip(whole, some, strict=True):
        first = all_heads.shape[2] // 3
        torch.testing.assert_close(own, all_heads[:, :, first:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_does_not_exist_is_not_read(value):
    """Keys before the start, outside of ranges, and behind a bias of -inf may hold anything."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 2, 8) for _ in range(3))
    start = torch.tensor([0, 6], dtype=torch.int32)
    ranges = torch.tensor([3, 15], dtype=torch.int32).expand(1, 1, 20, 2)
    bias = torch.zeros(1, 1, 1, 20)
    bias[..., 9] = -torch.inf
    options = {"seqstart_k": start, "key_ranges": ranges, "bias": bias}

    def run():
        inputs = AttentionInputs(q, k, v, None, None, None, None, Modifiers(start, ranges, None, None, bias))
        problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=Mask(), softcap=None, deterministic=False)
        out, lse = forward(problem, inputs)
        return (out, lse, *gradients(problem, inputs, out, lse, torch.ones_like(out), None))

    clean = run()
    expected = reference.attention(q, k, v, softmax_scale=0.3, **options)
    torch.testing.assert_close(clean[0], expected.out.float())
    for t in (k, v):
        t[1, :6], t[:, :3], t[:, 15:], t[:, 9] = value, value, value, value
    for before, after in zip(clean, run(), strict=True):
        assert (before is None and after is None) or torch.allclose(before, after, rtol=1e-5, atol=1e-6)


def test_terms_that_are_constant_get_no_gradient():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 2, 8, dtype=DTYPE) for _ in range(3))
    given = Modifiers(alibi_slopes=torch.rand(2), bias=torch.randn(2, 2, 20, 20, dtype=DTYPE))
    inputs = AttentionInputs(q, k, v, None, None, None, None, given)
    problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=Mask(), softcap=None, deterministic=False)
    out, lse = forward(problem, inputs)
    every = gradients(problem, inputs, out, lse, torch.ones_like(out), None)
    for names in ({"constant_slopes"}, {"constant_bias"}, {"constant_slopes", "constant_bias"}):
        own = replace(problem, **dict.fromkeys(names, True))
        found = gradients(own, inputs, out, lse, torch.ones_like(out), None)
        for name, gradient, expected in zip((*"qkvs", "constant_slopes", "constant_bias"), found, every, strict=True):
            assert gradient is None if name in names else torch.equal(gradient, expected), names


@pytest.mark.parametrize("wants", [(), ("alibi_slopes",), ("bias",), ("alibi_slopes", "bias")])
def test_autograd_asks_for_the_gradients_that_are_required(monkeypatch, wants):
    problems = []

    def spy(problem, *args):
        problems.append(problem)
        return gradients(problem, *args)

    monkeypatch.setattr(tiled, "gradients", spy)
    q, k, v = (torch.randn(2, 20, 2, 8, requires_grad=True) for _ in range(3))
    terms = {"alibi_slopes": torch.rand(2), "bias": torch.randn(2, 1, 1, 20)}
    for name in wants:
        terms[name].requires_grad_()
    onepass.attention(q, k, v, **terms).sum().backward()
    assert [p.constant_slopes for p in problems] == ["alibi_slopes" not in wants]
    assert [p.constant_bias for p in problems] == ["bias" not in wants]
    assert all((t.grad is not None) == (name in wants) for name, t in terms.items())
    if wants:  # one level of torch.func
        tensors = torch.func.grad(lambda given: onepass.attention(q, k, v, **terms | given).sum())(
            {name: terms[name] for name in wants}
        )
        for name in wants:
            torch.testing.assert_close(tensors[name], terms[name].grad)


@pytest.mark.parametrize("kind", ["bias", "alibi_slopes", "both", "far below"])
def test_a_large_term(kind):
    """exp of such a score is infinite in float32, and a mask hides it; or exp of all scores of a row is 0."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 300, 2, 8) for _ in range(3)]
    terms, window = {}, (None, 0)
    if kind == "bias":
        terms["bias"] = torch.full((1, 1, 300, 300), 500.0).triu(1)
    elif kind == "far below":
        terms["bias"] = torch.randn(1, 1, 300, 300) - 200.0
    else:
        terms["alibi_slopes"] = torch.tensor([-1.0, 0.5])
        tensors[0][:, :] *= 0.01  # the visible keys farthest away have a large term, too
        window = (5, 0)
    if kind == "both":
        terms["bias"] = torch.rand(1, 1, 1, 300)
    results = []
    for function, dtype in ((onepass.attention, torch.float32), (reference.attention, torch.float64)):
        qkv = [t.to(dtype).requires_grad_() for t in (x.clone() for x in tensors)]
        result = function(*qkv, window=window, **terms)
        out = result if isinstance(result, torch.Tensor) else result.out
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in qkv)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5)


def test_a_bias_that_is_nowhere_above_zero():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=DTYPE) for _ in range(3))
    bias = torch.tensor([0.0, -1.0, -torch.inf], dtype=DTYPE)[torch.randint(0, 3, (1, 1, 40, 40))]
    out = onepass.attention(q, k, v, bias=bias)
    torch.testing.assert_close(out, reference.attention(q, k, v, bias=bias).out, rtol=1e-10, atol=1e-11)


POSITIONS = torch.tensor([[-7, -1, 0, 3, 8], [9, 50, 2, -1, 2**31 - 1]], dtype=torch.int32)


@pytest.mark.parametrize("kind", ["dense", "packed", "cache", "packed queries over a cache"])
def test_a_position_that_is_no_row_of_the_bias_has_the_nearest_row(kind):
    """out, and the gradient of the bias where there is one, beside a bias of rows that were looked up before."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    bias = torch.randn(4, 9, 7).requires_grad_()
    looked_up = torch.stack([bias[:, own.clamp(0, 8).long()] for own in POSITIONS])
    expected = onepass.attention(q, k, v, bias=looked_up)
    lengths = torch.tensor([7, 7], dtype=torch.int32)
    offsets_q, offsets_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 7))
    if kind == "dense":
        out = onepass.attention(q, k, v, bias=bias[None], q_positions=POSITIONS)
    elif kind == "packed":
        rows = (t.flatten(0, 1) for t in (q, k, v))
        offsets = {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k}
        out = onepass.attention_varlen(*rows, **offsets, bias=bias, q_positions=POSITIONS.flatten())
    else:
        packed = {} if kind == "cache" else {"cu_seqlens_q": offsets_q}
        terms = {"bias": bias[None] if kind == "cache" else bias, "q_positions": POSITIONS}
        if packed:
            q, terms["q_positions"] = q.flatten(0, 1), POSITIONS.flatten()
        out = onepass.attention_decode(q, k, v, cache_seqlens=lengths, causal=False, **packed, **terms)
    torch.testing.assert_close(out.view_as(expected), expected)
    if kind in ("dense", "packed"):
        dout = torch.randn_like(expected)
        (found,) = torch.autograd.grad(out.view_as(dout), bias, dout)
        torch.testing.assert_close(found, torch.autograd.grad(expected, bias, dout)[0])


def test_a_bias_with_fewer_columns_than_keys_of_a_sequence():
    q, k, v = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    offsets = {f"cu_seqlens_{name}": torch.tensor([0, 2, n], dtype=torch.int32) for name, n in (("q", 5), ("k", 7))}

    def run(columns, **options):
        return onepass.attention_varlen(q, k, v, **offsets, bias=torch.zeros(1, 5, columns), **options)

    with pytest.raises(ValueError, match=r"bias: expected at least 5 columns, .* \(or 1, .*\), got shape \(1, 5, 3\)"):
        run(3)
    with pytest.raises(ValueError, match=r"bias: expected at least 1 column, got shape \(1, 5, 0\)"):
        run(0)
    expected = onepass.attention_varlen(q, k, v, **offsets)
    used = torch.tensor([2, 3], dtype=torch.int32)
    shorter = onepass.attention_varlen(q, k, v, **offsets, seqused_k=used)
    for columns, options, right in (
        (1, {}, expected),
        (5, {}, expected),
        (9, {}, expected),
        (3, {"seqused_k": used}, shorter),
    ):
        torch.testing.assert_close(run(columns, **options), right)
    without_keys = torch.zeros(3, dtype=torch.int32)
    empty = onepass.attention_varlen(
        q, k[:0], v[:0], cu_seqlens_q=offsets["cu_seqlens_q"], cu_seqlens_k=without_keys, bias=torch.zeros(1, 5, 0)
    )
    assert not empty.any()


def test_a_packed_bias_of_two_rows_for_two_sequences():
    """Each sequence has its own row: the fewest rows that are not one row for all."""
    q, k, v = torch.randn(2, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    offsets_q, offsets_k = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1, 2], [0, 3, 6]))
    bias = torch.randn(4, 2, 3)
    out = onepass.attention_varlen(q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, bias=bias)
    for row in range(2):
        keys = slice(3 * row, 3 * row + 3)
        alone = onepass.attention(
            q[None, row : row + 1], k[None, keys], v[None, keys], bias=bias[None, :, row : row + 1]
        )
        torch.testing.assert_close(out[row], alone[0, 0])


def test_the_gradient_of_lse_alone():
    """The gradient of lse does not reach V, and the other gradients are the oracle's."""
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    weights = torch.randn(1, 2, 6, dtype=torch.float64)
    lse = onepass.attention(q, k, v, alibi_slopes=slopes, return_lse=True).lse
    dq, dk, dv, dslopes = torch.autograd.grad((lse * weights).sum(), (q, k, v, slopes))
    assert not dv.any()
    expected = torch.autograd.grad(
        (reference.attention(q, k, v, alibi_slopes=slopes).lse * weights).sum(), (q, k, slopes)
    )
    for actual, right in zip((dq, dk, dslopes), expected, strict=True):
        torch.testing.assert_close(actual, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slopes_of_16_bits_are_those_of_float32(dtype):
    q, k, v = (torch.randn(2, n, h, 8) for n, h in ((5, 4), (7, 2), (7, 2)))
    offsets = {f"cu_seqlens_{x}": torch.tensor([0, n], dtype=torch.int32) for x, n in (("q", 5), ("k", 7))}
    lengths = torch.tensor([7, 4], dtype=torch.int32)
    slopes = torch.tensor([0.1, 0.3, 0.0, -0.2]).to(dtype).requires_grad_()
    for run in (
        lambda slopes: onepass.attention(q, k, v, alibi_slopes=slopes),
        lambda slopes: onepass.attention_varlen(q[0], k[0], v[0], **offsets, alibi_slopes=slopes),
        lambda slopes: onepass.attention_decode(q, k, v, cache_seqlens=lengths, alibi_slopes=slopes.detach()),
    ):
        long = slopes.detach().float().requires_grad_()
        out, expected = run(slopes), run(long)
        assert torch.equal(out, expected)
        if expected.requires_grad:
            (found,), (wanted,) = (torch.autograd.grad(x.sum(), t) for x, t in ((out, slopes), (expected, long)))
            assert torch.equal(found, wanted.to(dtype))
    assert onepass.supports(q, k, v, alibi_slopes=slopes).ok
    assert onepass.supports(q, k_cache=k, v_cache=v, cache_seqlens=lengths, alibi_slopes=slopes).ok
