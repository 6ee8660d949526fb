"""Ranges of keys, positions, left padding, ALiBi, bias and dropout on the kernels, with gradients."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from gpu_cases import DEVICE, IS_READY, ON_GPU

from onepass import reference, testing
from onepass.dispatch import attention as dispatch
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from onepass.testing.budget import Scale, compare, compare_gradients, compare_lse

pytestmark = pytest.mark.gpu
GRADIENTS = ("q", "k", "v", "sinks", "alibi_slopes", "bias")  # in the order in which a backward returns them
SETS = {
    "ranges": {"key_ranges"},
    "start": {"seqstart_k"},
    "positions": {"q_positions", "causal"},
    "alibi": {"alibi_slopes"},
    "bias": {"bias"},
    "dropout": {"dropout_p"},
    "ranges, terms": {"key_ranges", "alibi_slopes", "bias", "causal"},
    "positions, terms": {"q_positions", "alibi_slopes", "bias", "dropout_p", "window"},
    "all": {
        "seqstart_k",
        "key_ranges",
        "q_positions",
        "alibi_slopes",
        "bias",
        "dropout_p",
        "causal",
        "softcap",
        "sinks",
    },
    "start, dropout": {"seqstart_k", "seqused_k", "dropout_p", "causal", "softcap"},
}


class Call(NamedTuple):
    tensors: dict
    options: dict


class ModifierCase(NamedTuple):
    names: str
    head_dim: int
    dtype: torch.dtype
    is_packed: bool = False
    deterministic: bool = False
    seed: int = 0
    backend: str = "sm90"

    def __str__(self):
        packed = " packed" if self.is_packed else ""
        turns = " deterministic" if self.deterministic else ""
        return f"{self.backend} {self.names} d{self.head_dim} {str(self.dtype)[6:]}{packed}{turns} {self.seed}"

    def call(self) -> Call:
        rng, generator = random.Random(str(self)), torch.Generator().manual_seed(self.seed)
        names = SETS[self.names]
        batch, (num_kv, group) = rng.randint(1, 3), rng.choice([(1, 1), (2, 2), (1, 4), (3, 1)])
        rows, keys = rng.choice([(200, 300), (333, 333), (130, 70), (64, 500), (1, 257), (700, 650)])
        heads = num_kv * group
        if ON_GPU is False:
            rows, keys = min(rows, 70), min(keys, 80)

        def normal(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        sizes = {"q": (heads, rows), "k": (num_kv, keys), "v": (num_kv, keys)}
        lead = (batch,)
        options = {}
        if self.is_packed:
            lead = ()
            for name, total in (("cu_seqlens_q", rows), ("cu_seqlens_k", keys)):
                cuts = sorted(rng.randint(0, total) for _ in range(batch - 1))
                # some rows and keys may belong to no sequence
                options[name] = torch.tensor(
                    [0, *cuts, max(total - rng.choice([0, 0, 5]), cuts[-1] if cuts else 0)], dtype=torch.int32
                )
        tensors = {n: normal(*lead, size, h, self.head_dim) for n, (h, size) in sizes.items()}
        lengths = [keys] * batch if not self.is_packed else options["cu_seqlens_k"].diff().tolist()
        entries = 1 if self.is_packed else rng.choice([1, batch])
        shape = () if self.is_packed else (entries,)
        longest = max(rows, keys) + 3
        if "causal" in names:
            options["causal"] = True
        if "window" in names:
            options["window"] = rng.choice([(40, None), (None, 30), (100, 20), (64, 0)])
        if "softcap" in names:
            options["softcap"] = 3.0
        if "sinks" in names:
            options["sinks"] = normal(heads, dtype=torch.float32)
        if "seqused_k" in names:
            options["seqused_k"] = torch.tensor([rng.randint(0, n) for n in lengths], dtype=torch.int32)
        if "seqstart_k" in names:
            ends = options["seqused_k"].tolist() if "seqused_k" in options else lengths
            options["seqstart_k"] = torch.tensor([rng.randint(0, n) for n in ends], dtype=torch.int32)
        if "key_ranges" in names:
            low = torch.randint(-3, keys, (*shape, rng.choice([1, heads]), rows, 1), generator=generator)
            if rng.random() < 0.5:  # as documents have it: rising
                low = low.sort(-2).values
            length = torch.randint(0, keys + 1, low.shape, generator=generator)
            options["key_ranges"] = torch.cat([low, low + length], -1).int()
        if "q_positions" in names:
            found = [torch.randperm(longest, generator=generator)[:rows] for _ in range(entries)]
            if rng.random() < 0.5:
                found = [x.sort().values for x in found]
            options["q_positions"] = torch.stack(found).int().view(*shape, rows)
        if "alibi_slopes" in names:
            by_entry = rng.random() < 0.5
            options["alibi_slopes"] = normal(*((batch,) if by_entry else ()), heads, dtype=torch.float32).abs() * 0.05
        if "bias" in names:
            bias_rows = rng.choice([1, longest if "q_positions" in names else rows])
            bias = normal(*shape, rng.choice([1, heads]), bias_rows, rng.choice([1, keys, keys]))
            if rng.random() < 0.5 and bias.shape[-1] > 1:
                bias[torch.rand(bias.shape, generator=generator) < 0.3] = -torch.inf
            options["bias"] = bias
        if "dropout_p" in names:
            options["dropout_p"] = rng.choice([0.1, 0.5])
            options["dropout_state"] = torch.tensor([rng.getrandbits(60), rng.getrandbits(40)])
        return Call(tensors, options)

    def problem(self, call: Call) -> AttentionProblem:
        options = call.options
        return AttentionProblem.of(
            inputs_of(call),
            softmax_scale=self.head_dim**-0.5,
            mask=Mask.from_options(options.get("causal", False), options.get("window")),
            softcap=options.get("softcap"),
            deterministic=self.deterministic,
            dropout_p=options.get("dropout_p", 0.0),
        )

    def requests(self) -> list[tuple]:
        """The kernels of the call and of its gradients, as `compile_ahead` takes them."""
        problem = replace(self.problem(self.call()), device_type="cuda")
        requests = [*dispatch.forward_requests(self.backend, problem, dispatch.forward_config(self.backend, problem))]
        return requests + [request for _, request in dispatch.backward_requests(self.backend, problem, True)]


def inputs_of(call: Call) -> AttentionInputs:
    lengths = (call.options.get(n) for n in ("sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    modifiers = Modifiers(*(call.options.get(n) for n in Modifiers._fields))
    return AttentionInputs(*call.tensors.values(), *lengths, modifiers)


def on(call: Call, device: str) -> Call:
    return Call(*({n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in part.items()} for part in call))


def oracle_of(call: Call, compute_dtype, weights=None):
    """out, lse and gradients by dense attention."""
    leaves = {n: x.to(compute_dtype, copy=True).requires_grad_() for n, x in call.tensors.items()}
    leaves |= {n: x.to(compute_dtype, copy=True).requires_grad_() for n, x in call.options.items() if n in GRADIENTS}
    named = call.options | {n: x for n, x in leaves.items() if n in call.options}
    attend = reference.attention_varlen if "cu_seqlens_q" in named else reference.attention
    found = attend(*(leaves[n] for n in "qkv"), compute_dtype=compute_dtype, **named)
    dout, dlse = (w.to(compute_dtype) for w in weights)
    lse = torch.where(found.lse.isfinite(), found.lse, 0.0)
    total = (found.out * dout).sum() + (lse * dlse).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    # a bias of -inf makes NaN of pairs that are hidden
    return found, {n: g.nan_to_num(nan=0.0) for n, g in zip(leaves, gradients, strict=True)}


def check(case: ModifierCase):
    call = case.call()
    generator = torch.Generator().manual_seed(case.seed + 1)
    q, options = call.tensors["q"], call.options
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    dlse = torch.randn((*q.shape[:-3], q.shape[-2], q.shape[-3]), generator=generator)
    expected, expected_gradients = oracle_of(call, torch.float64, (dout, dlse))
    plain, plain_gradients = oracle_of(call, q.dtype, (dout, dlse))

    there = on(call, DEVICE)
    inputs = inputs_of(there)
    problem = case.problem(there)
    backend = case.backend if ON_GPU else "tiled"
    assert dispatch.require(problem, backend) == backend
    out, lse = dispatch.prepare(backend, problem, there.tensors["q"].device)(inputs)
    backward = dispatch.load_backward(backend, problem)
    assert not ON_GPU or "tiled" not in backward.__name__
    dout, dlse = dout.to(DEVICE), dlse.to(DEVICE)
    found = dict(zip(GRADIENTS, backward.gradients(problem, inputs, out, lse, dout, dlse), strict=True))

    # Where a row sees a single key, gradients of scores cancel, and rounding is all that is left: one rounding of out,
    # of which delta is made, for the largest values there are. Where one row's probability makes up an element of dv,
    # the roundings of its score are seen there, as in all random calls.
    largest = {n: float(t.abs().max()) for n, t in call.tensors.items()}
    one = torch.finfo(q.dtype).eps * float(dout.abs().max()) * largest["v"]
    floors = {"q": one * largest["k"], "k": 4 * one * largest["q"], "v": 4 * torch.finfo(q.dtype).eps}
    floors["v"] = floors["v"] + testing.Call(call.tensors, call.options)._floors(dout.cpu(), dlse.cpu(), expected)["dv"]

    results = [compare("out", out, expected.out, plain.out), compare_lse(lse, expected.lse)]
    for name, right in expected_gradients.items():
        # sums over many scores, whose gradients add up to 0 in each row, are judged by their largest error alone
        is_sum = name in ("sinks", "alibi_slopes", "bias")
        floor = 0.06 * float(right.abs().max()) + one if is_sum else floors[name]
        actual, roughly = found[name].to(torch.float32 if name == "sinks" else found[name].dtype), plain_gradients[name]
        found_errors = compare_gradients(f"d{name}", actual, right, roughly.to(actual.dtype), floor)
        results.append(found_errors._replace(scale=Scale()) if is_sum else found_errors)
    wrong = [str(r) for r in results if not r.ok]
    assert not wrong, "\n".join([str({n: getattr(x, "shape", x) for n, x in options.items()}), *wrong])
    if case.deterministic:
        for _ in range(3):
            again = backward.gradients(problem, inputs, out, lse, dout, dlse)
            for name, value in zip(GRADIENTS, again, strict=True):
                assert value is None or torch.equal(value, found[name]), name


CASES = [
    ModifierCase(names, d, dtype, is_packed, seed=seed, backend=backend)
    for backend in ("sm90", "sm80")
    for names in SETS
    for d, dtype in ((64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16), (96, torch.float16))
    for is_packed in (False, True)
    for seed in range(2)
]
CASES += [ModifierCase(names, d, torch.float32, backend="sm80") for names in SETS for d in (64, 128)]
CASES += [
    ModifierCase(names, d, torch.bfloat16, is_packed, True, seed, backend)
    for backend in ("sm90", "sm80")
    for names in ("ranges, terms", "all", "bias")
    for d in (64, 128, 256)
    for is_packed in (False, True)
    for seed in range(2)
]


@pytest.mark.skipif(not IS_READY, reason="needs a GPU for sm90")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_calls(case):
    check(case)
