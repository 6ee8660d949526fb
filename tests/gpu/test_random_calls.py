"""Random calls over all options on the Hopper kernel. A failure names its seed, and this call repeats it:

    random_call(seed, "cuda", MAX_SEQLEN, DTYPES[seed % 2], with_modifiers).check(gradients=False, with_floor=True)

In these tests, rows that no kernel may read are NaN as well (see GpuCall).
"""

import itertools

import torch
from gpu_cases import BF16, FP16, RandomCase, cases, check, needs_hopper, size
from random_modifiers import OF_KERNELS

pytestmark = needs_hopper

NUM_CALLS = 150
MAX_SEQLEN = size(700, 160)
DTYPES = (BF16, FP16)


def is_for_the_kernel(case: RandomCase) -> bool:
    """Whether the kernel must take the call: head dims are multiples of 8, and larger scores mean larger weights."""
    call = case.call("meta")
    scale, softcap = call.options.get("softmax_scale", 1.0), call.options.get("softcap")
    return all(t.shape[-1] % 8 == 0 for t in call.tensors.values()) and (scale > 0 or softcap is not None)


def first_cases(count: int, first_seed: int = 0, with_modifiers: bool = False) -> list[RandomCase]:
    """The first cases for the kernel, from a seed on; with modifiers, those that have some."""
    seeds = itertools.count(first_seed)
    found = (RandomCase(seed, DTYPES[seed % 2], MAX_SEQLEN, with_modifiers) for seed in seeds)
    if with_modifiers:
        found = (case for case in found if set(OF_KERNELS) & set(case.call("meta").options))
    return list(itertools.islice(filter(is_for_the_kernel, found), count))


CASES = first_cases(NUM_CALLS)
MODIFIED = first_cases(NUM_CALLS, 5000, with_modifiers=True)


@cases(CASES)
def test_random_calls(case):
    check(case.call(), with_floor=True)


@cases(MODIFIED)
def test_random_calls_with_modifiers(case):
    check(case.call(), with_floor=True)


def test_the_calls_cover_the_options():
    """Each option occurs so often that a fault which needs an option and a length to show is found."""
    calls = [case.call("meta") for case in CASES]
    counts = {name: sum(name in call.options for call in calls) for call in calls for name in call.options}
    assert set(counts) == {
        "causal", "window", "softcap", "softmax_scale", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"
    }  # fmt: skip
    assert min(counts.values()) > 20
    assert sum("cu_seqlens_q" in call.options and "seqused_k" in call.options for call in calls) > 10
    assert {call.tensors["q"].dtype for call in calls} == {torch.bfloat16, torch.float16}


def test_the_modified_calls_cover_the_options():
    calls = [case.call("meta").options for case in MODIFIED]
    options = {"causal", "window", "softcap", "softmax_scale", "sinks", "cu_seqlens_q", "seqused_k"}
    for name in OF_KERNELS:
        having = [call for call in calls if name in call]
        assert len(having) > 35, name
        for other in {*OF_KERNELS, *options} - {name}:  # each pair of options
            assert sum(other in call for call in having) > 5, (name, other)
