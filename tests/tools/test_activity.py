"""What a GPU does during a call: kinds of kernels, sums of their times, and the picture."""

import pytest

from benchmarks.harness.activity import Activity, kind_of, picture, summary

# attention, a message that is half beside it, a copy beside nothing, a pause, and another kernel
CALL = [
    Activity("attention", 0.0, 4000.0),
    Activity("messages", 2000.0, 6000.0),
    Activity("copies", 5000.0, 7000.0),
    Activity("others", 8000.0, 9000.0),
    Activity("others", 8500.0, 10000.0),
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kernel_cutlass_kernel_onepasskernelsdevicesm90forwardkernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "messages"),
        ("Memcpy PtoP (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "others"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_summary():
    assert summary(CALL[::-1]) == {
        "whole": 10.0,
        "messages": 4.0,
        "copies": 2.0,
        "attention": 4.0,
        "others": 2.0,
        "idle": 1.0,
        "beside_attention": 3.0,
    }
    assert summary([]) == {}


def test_picture():
    assert picture(CALL, 10) == [
        "messages  |  ====    |",
        "copies    |     --   |",
        "attention |####      |",
        "others    |        ..|",
    ]
    assert picture([]) == []
