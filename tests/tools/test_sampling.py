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
