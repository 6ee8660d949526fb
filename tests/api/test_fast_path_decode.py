"""The fast path of repeated calls of `attention_decode`."""

import pytest
import torch
from repeated_calls import INT32, OPTIONS, SCORES, Seen, check_each_value_has_its_own_call, outcome, same

import onepass
from onepass.api import decode, fast_path
from onepass.dispatch import decode as decode_dispatch
from onepass.ops import decode as decode_ops
from onepass.problem.decode import MODIFIERS as MODIFIER_NAMES
from onepass.problem.decode import TENSORS


@pytest.fixture(autouse=True)
def _no_calls_before():
    fast_path.forget()


@pytest.fixture
def count_decode(monkeypatch):
    count = [0]
    real = decode_ops.run

    def counted(*arguments):
        count[0] += 1
        return real(*arguments)

    monkeypatch.setattr(decode_ops, "run", counted)
    return count


def step(**changes):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator) for n, h in ((3, 4), (40, 2), (40, 2)))
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": torch.tensor([30, 7], dtype=INT32)} | changes


def in_pages(arguments):
    table = torch.arange(10, dtype=INT32).view(2, 5)
    caches = {name: arguments[name].view(10, 8, 2, 16) for name in ("k_cache", "v_cache")}
    return arguments | caches | {"page_table": table}


@pytest.mark.parametrize("options", [{}, {"window": (5, 0), "softcap": 3.0}, {"num_splits": 3}, {"split_size": 64}])
def test_decoding_the_second_time(options, count_decode):
    for arguments in (step(**options), in_pages(step(**options))):
        count_decode[0] = 0
        first, again = (onepass.attention_decode(**arguments, return_lse=True) for _ in range(2))
        assert count_decode == [1]
        same(first.out, again.out)
        same(first.lse, again.lse)


MODIFIERS = {
    "seqstart_k": torch.tensor([4, 6], dtype=INT32),
    "key_ranges": torch.tensor([3, 20], dtype=INT32).expand(1, 1, 3, 2),
    "q_positions": torch.tensor([[9, 4, 6]], dtype=INT32),
    "alibi_slopes": torch.tensor([0.1, 0.3, 0.0, 0.2]),
    "bias": torch.linspace(-2, 2, 40).view(1, 1, 1, 40),
    "query_ranges": torch.stack([torch.arange(40) // 2, torch.arange(40) + 3], -1)[None, None].int(),
}


@pytest.mark.parametrize("name", MODIFIERS)
def test_decoding_with_a_modifier_the_second_time(name, count_decode):
    arguments, plain = step(**{name: MODIFIERS[name]}), onepass.attention_decode(**step(), return_lse=True)
    first, again = (onepass.attention_decode(**arguments, return_lse=True) for _ in range(2))
    assert count_decode == [2]
    same(first.out, again.out)
    same(first.lse, again.lse)
    assert not torch.equal(first.out, plain.out)
    # its values are read every time, and other sizes are validated again
    same(onepass.attention_decode(**step(), return_lse=True).out, plain.out)
    other = onepass.attention_decode(**step(**{name: MODIFIERS[name] + 1}), return_lse=True)
    assert count_decode == [2]
    assert not torch.equal(first.lse, other.lse)
    with pytest.raises(ValueError, match=name):
        onepass.attention_decode(**step(**{name: MODIFIERS[name][..., :1].repeat(*[5] * MODIFIERS[name].dim())}))


def test_rows_of_rotary_tables_the_second_time(count_decode):
    angles = torch.arange(40)[:, None] * torch.tensor([1.0, 0.1])
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    results = []
    for rows in ([[3, 4, 5]], [[3, 4, 6]]):
        arguments = step(**tables, rotary_positions_q=torch.tensor(rows, dtype=INT32))
        results += [onepass.attention_decode(**arguments) for _ in range(2)]
    assert count_decode == [1]
    same(results[0], results[1])
    assert not torch.equal(results[1], results[2])


@pytest.mark.parametrize("name", ["causal", *SCORES, "rotary_interleaved"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_an_option_of_decoding_is_that_of_each_call(is_paged, name):
    given = in_pages(step()) if is_paged else step()
    values = OPTIONS.get(name, (False, True))
    if name == "rotary_interleaved":
        angles = torch.arange(40)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    if name == "window":
        values = None, (9, 0), (2, 0)
    check_each_value_has_its_own_call(lambda **option: onepass.attention_decode(**given, **option), name, values)


def test_options_of_decoding_that_change_no_value_here_have_calls_of_their_own(count_decode):
    options = {"num_splits": 1}, {"num_splits": 2}, {"split_size": 64}, {"return_lse": True}, {"backend": "tiled"}
    for n, option in enumerate(({}, *options), 1):
        for _ in range(2):
            onepass.attention_decode(**step(**option))
        assert count_decode == [n]
    # caches whose rows are not aligned are validated again
    caches = {n: torch.randn(2, 40, 2, 17)[..., :16] for n in ("k_cache", "v_cache")}
    onepass.attention_decode(**step(**caches))
    assert count_decode == [n + 1]


def test_each_option_of_decoding_reaches_the_key(monkeypatch):
    def find(inputs, window, options):
        raise Seen(options)

    monkeypatch.setattr(decode, "find_kept", find)
    default = decode.KeyOptions(causal=True, softcap=None, softmax_scale=None)
    changed = {"causal": False, "softcap": 2.0, "softmax_scale": 0.3, "num_splits": 2, "split_size": 64}
    changed |= {"rotary_interleaved": True, "return_lse": True, "kv_block": 8, "max_seqlen_q": 3, "backend": "tiled"}
    assert changed.keys() == set(default._fields)
    for name, value in changed.items():
        packed = {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=INT32)} if name == "max_seqlen_q" else {}
        with pytest.raises(Seen) as seen:
            onepass.attention_decode(**step(**packed, **{name: value}))
        assert seen.value.args == (default._replace(**{name: value}),)


ROTARY = {"rotary_cos": torch.rand(40, 4), "rotary_sin": torch.rand(40, 4), "rotary_interleaved": True}


NEW_KEYS = {name: torch.ones(2, 2, 2, 16) for name in ("k_new", "v_new")}


DECODING = {
    "new keys": lambda: step(
        **NEW_KEYS, **ROTARY, num_splits=3, window=(9, -1), softcap=2.0, softmax_scale=0.3, sinks=torch.ones(4)
    ),
    "packed pages": lambda: (
        in_pages(step(cu_seqlens_q=torch.tensor([0, 1, 6], dtype=INT32), max_seqlen_q=3))
        | {"q": torch.ones(6, 4, 16), "split_size": 64, "causal": False}
    ),
    "e4m3": lambda: (
        step(kv_block=8, check_values=True, num_splits=2)
        | {name: torch.ones(2, 40, 2, 16).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        | {name: torch.rand(2, 2, 5) + 1 for name in ("k_descale", "v_descale")}
    ),
    "modifiers": lambda: step(**MODIFIERS, window=(None, 3), split_size=128),
    "positions": lambda: step(
        **NEW_KEYS,
        **ROTARY,
        rotary_positions_q=torch.tensor([[3, 4, 5]], dtype=INT32),
        rotary_positions_k=torch.tensor([[7, 8]], dtype=INT32),
    ),
}


@pytest.mark.parametrize("name", DECODING)
def test_what_decodes_is_what_was_checked(name, monkeypatch):
    """The operator makes the problem again from its arguments, and has every tensor of the call in its place."""
    real, checked = decode.check_decode, []

    def check(inputs, **options):
        assert {n: options[n] for n in arguments.keys() & options.keys()} == {
            n: value for n, value in arguments.items() if not isinstance(value, torch.Tensor)
        }
        checked.append(real(inputs, **options))
        return checked[-1]

    def run(problem, inputs):
        raise Seen(problem, inputs)

    monkeypatch.setattr(decode, "check_decode", check)
    monkeypatch.setattr(decode_dispatch, "load_decode", lambda name, device: run)
    arguments = DECODING[name]()
    with pytest.raises(Seen) as seen:
        onepass.attention_decode(**arguments)
    problem, inputs = seen.value.args
    assert [problem] == checked
    tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    names = TENSORS + (MODIFIER_NAMES if inputs.is_modified else ())
    found = {n: t for n, t in zip(names, inputs.tensors, strict=True) if t is not None}
    assert found.keys() == tensors.keys()
    for n, t in tensors.items():
        assert (found[n].data_ptr(), found[n].shape, found[n].stride()) == (t.data_ptr(), t.shape, t.stride())


@pytest.mark.parametrize(("window", "first_calls"), [(None, 3), ((99, 0), 140)])
def test_a_growing_cache_stays_on_the_fast_path(window, first_calls, count_decode):
    """A cache made by torch.cat has another length at each token; with a window, another backend may have to run."""
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 140, 16), torch.randn(2, 2, 140, 16)
    for length in range(1, 141):
        k_cache, v_cache = (t[:, :, :length].contiguous().transpose(1, 2) for t in (k, v))
        lengths = torch.full((2,), length, dtype=INT32)
        out = onepass.attention_decode(q, k_cache, v_cache, cache_seqlens=lengths, window=window)
        first = 0 if window is None else max(0, length - 100)
        seen = [t[:, :, first:length].repeat_interleave(2, 1) for t in (k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *seen)
        torch.testing.assert_close(out.transpose(1, 2), expected)
    assert count_decode == [first_calls]  # up to 64, 128 and 192 keys


def zeros(*shape):
    return torch.zeros(2, *shape)


OTHER_CACHES = {
    "a longer v_cache": {"v_cache": zeros(41, 2, 16)},
    "a shorter k_cache": {"k_cache": zeros(39, 2, 16)},
    "wider values": {"v_cache": zeros(40, 2, 24)},
    "more heads": {"k_cache": zeros(40, 4, 16), "v_cache": zeros(40, 4, 16)},
    "heads of v_cache alone": {"v_cache": zeros(40, 4, 16)},
    "fewer entries": {"k_cache": zeros(40, 2, 16)[:1], "v_cache": zeros(40, 2, 16)[:1]},
    "fewer entries of k_cache": {"k_cache": zeros(40, 2, 16)[:1]},
    "fewer entries of v_cache": {"v_cache": zeros(40, 2, 16)[:1]},
    "columns of k_cache apart": {"k_cache": zeros(40, 2, 32)[..., ::2]},
    "columns of v_cache apart": {"v_cache": zeros(40, 2, 32)[..., ::2]},
    "rows of k_cache apart": {"k_cache": zeros(40, 2, 17)[..., :16]},
    "rows of v_cache apart": {"v_cache": zeros(40, 2, 17)[..., :16]},
    "k_cache off by an element": {"k_cache": zeros(41, 2, 16).flatten()[1:2561].view(2, 40, 2, 16)},
    "v_cache off by an element": {"v_cache": zeros(41, 2, 16).flatten()[1:2561].view(2, 40, 2, 16)},
    "another dtype of v_cache": {"v_cache": zeros(40, 2, 16).half()},
    "a v_cache on another device": {"v_cache": zeros(40, 2, 16).to("meta")},
}


@pytest.mark.parametrize("name", OTHER_CACHES)
@pytest.mark.parametrize("length", [40, 50])  # both have one rounded length
def test_caches_unlike_those_of_the_call_before_are_validated(name, length, count_decode):
    call = step(**OTHER_CACHES[name])
    expected = outcome(lambda: (onepass.attention_decode(**call), ()))
    fast_path.forget()
    grown = {n: torch.zeros(2, length, 2, 16) for n in ("k_cache", "v_cache")}
    onepass.attention_decode(**step(**grown))
    count_decode[0] = 0
    found = outcome(lambda: (onepass.attention_decode(**call), ()))
    if isinstance(expected, str):
        assert found == expected
        assert "expected" in expected
    else:
        same(found[0], expected[0])
        assert count_decode == [1]


@pytest.mark.parametrize("name", ["k_new", "split_size", "bias", "page_table"])
def test_caches_of_other_lengths_are_checked_where_more_depends_on_the_length(name, count_decode):
    for length in (40, 41):
        caches = {n: torch.randn(2, length, 2, 16) for n in ("k_cache", "v_cache")}
        given = {
            "k_new": {n: torch.ones(2, 1, 2, 16) for n in ("k_new", "v_new")},
            "split_size": {"split_size": 64},
            "bias": {"bias": torch.zeros(1, 1, 1, length)},
            "page_table": {"page_table": torch.tensor([[0], [1]], dtype=INT32)},
        }
        onepass.attention_decode(**step(**caches, **given[name]))
    assert count_decode == [2]


def test_a_bias_of_the_call_before_is_too_short_for_a_longer_cache():
    bias = torch.zeros(1, 1, 1, 40)
    onepass.attention_decode(**step(bias=bias))
    caches = {n: torch.randn(2, 41, 2, 16) for n in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=r"bias: expected shape .*41\), got \(1, 1, 1, 40\)"):
        onepass.attention_decode(**step(**caches, bias=bias))


def test_decoding_appends_and_reads_lengths_every_time(count_decode):
    new = {name: torch.ones(2, 1, 2, 16) for name in ("k_new", "v_new")}
    arguments = step(**new)
    onepass.attention_decode(**arguments)
    arguments["cache_seqlens"] += 1
    onepass.attention_decode(**arguments)
    assert count_decode == [1]
    assert (arguments["k_cache"][0, 30:32] == 1).all()
    arguments["cache_seqlens"] += 100
    with pytest.raises(ValueError, match="cache_seqlens: expected 0 to 39"):
        onepass.attention_decode(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_cache": torch.zeros(2, 40, 16, 2).mT}, ValueError, "k_cache: expected a last dimension of stride 1"),
        (
            {"v_cache": torch.zeros(2, 40, 1, 16).expand(2, 40, 2, 16)},
            ValueError,
            "v_cache: expected memory of its own for every element",
        ),
        ({"cache_seqlens": torch.zeros(2).long()}, TypeError, "cache_seqlens: expected dtype int32"),
        ({"k_cache": torch.zeros(2, 40, 2, 16, requires_grad=True)}, NotImplementedError, "where new keys are written"),
        ({"causal": 1}, TypeError, "causal"),
        ({"num_splits": True}, TypeError, "num_splits"),
    ],
)
def test_decoding_still_refuses(changes, error, message):
    new = {name: torch.ones(2, 1, 2, 16) for name in ("k_new", "v_new")}
    for options in ({}, {"num_splits": 1}):
        onepass.attention_decode(**step(**new, **options))
    for _ in range(2):
        with pytest.raises(error, match=message):
            onepass.attention_decode(**step(**(new | changes)))


def test_checked_values_prevent_the_fast_path(count_decode):
    for _ in range(2):
        onepass.attention_decode(**step(), check_values=True)
    assert count_decode == [2]
