"""Steps of the Hopper backward, run as Python: what GEMMs in flight read is not released, nor their results read."""

import functools
import importlib.util
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from test_elements_in_python import fresh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)


class TensorCores:
    """The GEMMs of a warpgroup that may not have ended, and the buffers that were released."""

    def __init__(self):
        self.in_flight, self.released = [], []

    def issue(self, *buffers):
        """A GEMM that reads these buffers. Returns: its result."""
        result = object()
        self.in_flight.append((result, buffers))
        return result

    def wait(self, most):
        self.in_flight = self.in_flight[max(0, len(self.in_flight) - most) :]

    def read(self, result, *_):
        assert all(result is not other for other, _ in self.in_flight), "read before its GEMM has ended"

    def release(self, buffer):
        assert all(buffer not in buffers for _, buffers in self.in_flight), (
            f"{buffer} is released while a GEMM reads it"
        )
        self.released.append(buffer)


def module_and_consumer(name):
    """A module of a consumer with the kernel language replaced by Python, a consumer, and its tensor cores."""
    module, cores = fresh(f"onepass.kernels.device.sm90.backward.{name}"), TensorCores()
    module.cutlass = SimpleNamespace(const_expr=lambda value: value, range_constexpr=range)
    module.cute = module.order_after_words = MagicMock()
    module.warpgroup = SimpleNamespace(wait_group=cores.wait)
    module.after = lambda state: state + 1
    consumer = MagicMock()
    for buffer in ("q", "do"):
        pipe = getattr(consumer.pipes, buffer)
        pipe.consumer_release = lambda state, buffer=buffer: cores.release((buffer, state))
    gemms, scores, sums = consumer.gemms, consumer.scores, consumer.sums
    gemms.issue_s = lambda q: cores.issue(("q", q))
    gemms.issue_dp = lambda do, *_: cores.issue(("do", do))
    gemms.issue_dv = lambda p, do, *_: cores.issue(("do", do))
    gemms.issue_dk = lambda ds, q, *_: cores.issue(("q", q))
    gemms.issue_dq = lambda *_: cores.issue("ds")
    consumer.exchange.free_ds = lambda: cores.release("ds")
    for reader in ("make_ds", "make_p", "exponentials"):
        setattr(scores, reader, cores.read)
    for reader in ("add", "add_in_turn", "keep", "add_share"):
        setattr(sums, reader, cores.read)
    return module, consumer, cores


@pytest.mark.parametrize("delta_in_dp", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
@pytest.mark.parametrize("has_previous", [False, True])
def test_a_step_of_all_gradients(has_previous, has_next, overlaps, delta_in_dp):
    module, consumer, cores = module_and_consumer("consumer")
    consumer.overlaps, consumer.delta_in_dp = overlaps, delta_in_dp
    block = 0, 3
    module.BackwardConsumer.step.__wrapped__(consumer, None, block, block, block, 5, 7, 1, has_previous, has_next)
    assert (cores.released, cores.in_flight) == ([("do", 7), ("q", 5)], [])


@pytest.mark.parametrize("has_next", [False, True])
@pytest.mark.parametrize("is_paired", [False, True])
def test_a_step_of_dk(is_paired, has_next):
    module, consumer, cores = module_and_consumer("paired" if is_paired else "wide")
    wide, drawn = module_and_consumer("wide")[0].WideConsumer, []
    consumer.make_ds = functools.partial(wide.make_ds.__wrapped__, consumer)
    consumer.scores.draw_kept = lambda tile, head, m_block: drawn.append((head, m_block))
    kind = module.PairedConsumer if is_paired else module.WideConsumer
    kind.dk_step.__wrapped__(consumer, None, (0, 3), (0, 4), 5, 7, 1, has_next)
    assert cores.released == [("q", 5), *["ds"] * is_paired, *[("do", 7)] * has_next]
    assert drawn == [(0, 4)] * has_next  # dropout


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
@pytest.mark.parametrize("is_paired", [False, True])
def test_a_step_of_dv(is_paired, has_next, is_deterministic):
    module, consumer, cores = module_and_consumer("paired" if is_paired else "wide")
    consumer.kernel.adds_in_turns = is_deterministic
    kind = module.PairedConsumer if is_paired else module.WideConsumer
    kind.dv_step.__wrapped__(consumer, None, (0, 3), (0, 4), 5, 7, 1, has_next)
    expected = [("do", 7), *["ds"] * is_paired, *[("q", 5)] * has_next]
    assert sorted(cores.released, key=str) == sorted(expected, key=str)
