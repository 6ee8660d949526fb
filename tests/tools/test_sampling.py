"""The cases of an expensive test are drawn so that few of them cover much."""

from dataclasses import dataclass

import sampling


@dataclass
class Kernel:
    width: int
    is_packed: bool


def test_three_of_six_kernels_have_every_width_and_both_layouts():
    cases = [
        {"kernel": Kernel(width, packed), "arch": "sm_90a"} for width in (64, 128, 256) for packed in (False, True)
    ]
    order = sampling.covering_order(cases)
    assert sorted(order) == list(range(6))
    drawn = [cases[i]["kernel"] for i in order[:3]]
    assert {kernel.width for kernel in drawn} == {64, 128, 256}
    assert {kernel.is_packed for kernel in drawn} == {False, True}


def test_the_words_of_a_name_are_features():
    names = ["causal", "float32", "float16 packed window", "packed", "float32 packed"]
    order = sampling.covering_order([{"name": name} for name in names])
    assert [names[i] for i in order] == ["float16 packed window", "float32 packed", "causal", "float32", "packed"]


def test_an_address_is_no_feature():
    """Every process has to draw the same cases."""
    first, second = ([{"id": f"{i}", "value": object()} for i in range(5)] for _ in range(2))
    assert sampling.covering_order(first) == sampling.covering_order(second) == [0, 1, 2, 3, 4]
