"""Time stamps of the Hopper kernels on a GPU: `record` compares results with those of the shipped kernel itself."""

import pytest
from gpu_cases import BACKEND, ON_GPU, needs_hopper

from benchmarks.timeline.acts import ISSUE, gemms_in_flight
from benchmarks.timeline.record import record
from onepass.bench.ablation import FULL
from onepass.bench.cases import Case

pytestmark = [*needs_hopper, pytest.mark.skipif(not ON_GPU or BACKEND != "sm90", reason="needs a GPU for sm90")]


@pytest.mark.parametrize(("direction", "loads"), [("fwd", {"load Q", "load K", "load V"}), ("bwd", {"load dO"})])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_timeline(direction, loads, head_dim, causal):
    case = Case.square(1024, 2048 // head_dim, head_dim, batch=8, dtype="bfloat16", causal=causal, direction=direction)
    (timeline,) = record(case, [FULL])
    producer, *consumers = timeline.roles
    assert loads <= {span.act for span in producer.spans}
    assert len(consumers) > 1
    for role in consumers:
        acts = {span.act for span in role.spans}
        assert {ISSUE, "wait for the turn", "store"} <= acts
        assert ("softmax" if direction == "fwd" else "add dQ") in acts
        assert all(span.end > span.start for span in role.spans)
        assert 0.3 < role.ns_per_cycle < 3  # a clock between 0.33 and 3.3 GHz
        assert len(gemms_in_flight(role)) > 10
    assert timeline.ms < 2 * timeline.ms_without
