"""Timelines of the Hopper kernels without a GPU: stamps as they would lie in memory, traces, pictures, compilation."""

import json

import numpy
import pytest
from typer.testing import CliRunner

from benchmarks.timeline import __main__ as programs
from benchmarks.timeline import picture
from benchmarks.timeline.acts import (
    ACTS,
    GLOBAL_TIME,
    ROLES,
    STAMPS_PER_ROLE,
    Role,
    Span,
    gemms_in_flight,
    roles_of,
    shares,
    step_cycles,
)
from benchmarks.timeline.record import Timeline, record, refusal
from benchmarks.timeline.summary import summarize
from benchmarks.timeline.traces import cut, from_chrome, to_chrome
from onepass.bench.cases import Case
from onepass.cli.app import app
from onepass.errors import UnsupportedError

STEP = [("wait for the turn", 90), ("issue GEMMs", 40), ("wait for S", 300), ("softmax", 500), ("wait for P V", 20)]


def stamps_of(*roles):
    """Stamps of roles that do (act, cycles), one after the other."""
    stamps = numpy.zeros((ROLES, STAMPS_PER_ROLE), dtype=numpy.int64)
    for row, doing in zip(stamps, roles, strict=False):
        clock, words = 10**12, []
        for act, cycles in doing:
            if act == GLOBAL_TIME:  # half a nanosecond a cycle
                words += [(clock, act), (10**16 + clock // 2, act)]
            else:
                words.append((clock, act))
            clock += cycles
        row[: len(words)] = [time << 8 | ACTS.index(act) for time, act in words]
    return stamps


def timeline(label="full configuration", steps=30, shift=0):
    consumer = [(GLOBAL_TIME, shift), *STEP * steps, ("store", 700), (GLOBAL_TIME, 0), ("other", 5)]
    producer = [(GLOBAL_TIME, 0), *[("load K", 400), ("other", 30), ("load V", 500), ("other", 20)] * steps]
    return Timeline(label, {}, roles_of(stamps_of(producer, consumer, consumer)), 0.51, 0.5)


def test_stamps_become_spans():
    producer, first, second = timeline(steps=2).roles
    assert [role.name for role in (producer, first, second)] == [
        "producer",
        "consumer warpgroup 0",
        "consumer warpgroup 1",
    ]
    assert [(span.act, span.end - span.start) for span in first.spans] == [*STEP * 2, ("store", 700)]
    assert producer.spans[1] == Span("other", 10**12 + 400, 10**12 + 430)
    assert (producer.ns_per_cycle, first.ns_per_cycle) == (0.0, 0.5)


def test_gemms_are_in_flight_from_their_issue_to_the_end_of_the_last_wait():
    role = timeline(steps=2).roles[1]
    lengths = [(span.start - role.spans[0].start, span.end - span.start) for span in gemms_in_flight(role)]
    assert lengths == [(90, 860), (1040, 860)]


def test_gemms_without_overlap_are_in_flight_apart():
    """S until the wait for it is over, P V while it is waited for; the last P V of a tile stands alone, too."""
    role = Role("consumer", spans_of(STEP), 0.5)
    assert [(span.start, span.end) for span in gemms_in_flight(role, overlaps=False)] == [(90, 430), (930, 950)]
    last = [*STEP, ("rescale O", 30), ("wait for P V", 70), ("store", 100)]
    role = Role("consumer", spans_of(last), 0.5)
    assert [(span.start, span.end) for span in gemms_in_flight(role)] == [(90, 950), (980, 1050)]


def spans_of(doing, clock=0):
    spans = []
    for act, cycles in doing:
        spans.append(Span(act, clock, clock + cycles))
        clock += cycles
    return spans


def test_numbers_of_a_role():
    role = Role("consumer", spans_of(STEP * 3), 0.5)
    assert step_cycles(role) == 950
    assert shares(role)["softmax"] == pytest.approx(500 / 950)
    with pytest.raises(ValueError, match="expected at least 2 steps, got 1"):
        step_cycles(Role("consumer", spans_of(STEP), 0.5))


def test_a_summary_counts_what_happens_at_once():
    """Two warpgroups, half a step apart: each softmax is beside GEMMs of both, and only one issues at a time."""
    first = Role("consumer warpgroup 0", spans_of(STEP * 20), 0.5)
    second = Role("consumer warpgroup 1", spans_of(STEP * 20, clock=475), 0.5)
    found = summarize(Timeline("full configuration", {}, [first, second], 0.51, 0.5))
    assert (found.step, found.issuing_together) == (950, 0)
    assert found.beside_own > 0.9  # of a step that the window cuts, the issue is missing
    assert found.exponentials == pytest.approx(500 / 950, abs=0.02)
    assert found.beside_other == pytest.approx(410 / 500, abs=0.01)
    together = summarize(Timeline("in step", {}, [first, first._replace(name="consumer warpgroup 1")], 0.51, 0.5))
    assert together.issuing_together == 1
    alone = summarize(Timeline("no overlap", {"overlap_gemm_softmax": False}, [first, second], 0.51, 0.5))
    assert alone.beside_own == 0


def test_a_cut_trace_is_the_beginning_of_it():
    trace = to_chrome([timeline()], {"case": "c"})
    short = cut(trace, 5000)
    assert "5000 cycles" in short["otherData"]["cut"]
    (whole,), (begun,) = from_chrome(trace), from_chrome(short)
    for role, full in zip(begun.roles, whole.roles, strict=True):
        assert role.spans == [span for span in full.spans if span.end <= 5000]
        assert role.ns_per_cycle == full.ns_per_cycle


def test_stamps_that_cannot_be_are_refused():
    stamps = stamps_of(STEP)
    stamps[0, 1] = stamps[0, 1] & ~0xFF | len(ACTS)
    with pytest.raises(ValueError, match="numbers of acts below"):
        roles_of(stamps)
    stamps = stamps_of(STEP)
    stamps[0, [1, 2]] = stamps[0, [2, 1]]
    with pytest.raises(ValueError, match="clocks that rise"):
        roles_of(stamps)


def test_a_trace_is_read_back_as_it_was():
    timelines = [timeline(), timeline("no pingpong between warpgroups", shift=13)]
    trace = json.loads(json.dumps(to_chrome(timelines, {"case": "c", "device_name": "d"})))
    for found, expected in zip(from_chrome(trace), timelines, strict=True):
        origin = expected.roles[0].spans[0].start
        assert found._replace(roles=[]) == expected._replace(roles=[])
        for role, right in zip(found.roles, expected.roles, strict=True):
            assert role.name == right.name
            assert role.spans == [Span(s.act, s.start - origin, s.end - origin) for s in right.spans]
    event = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "softmax")
    assert event["dur"] == pytest.approx(0.25)  # microseconds


def test_a_picture_of_each_configuration(tmp_path):
    from matplotlib.image import imread

    timelines = [timeline(), timeline("no pingpong between warpgroups")]
    draw = tmp_path / "two.png"
    picture.draw(timelines, "two", draw)
    picture.draw(timelines[:1], "one", tmp_path / "one.png")
    assert imread(draw).shape[0] > imread(tmp_path / "one.png").shape[0]
    with pytest.raises(ValueError, match="expected at least 8 batches of GEMMs, got 3"):
        picture.draw([timeline(steps=3)], "short", draw)


def odd_traces(tmp_path):
    """Paths of files that are no trace, and of a trace whose consumers have too few steps."""
    trace = to_chrome([timeline(steps=1)], {"case": "c", "device_name": "d"})
    contents = {"text": "text", "null": "null", "list": "[]", "empty": "{}", "nested": "[" * 200_000, "bytes": "\udcff"}
    contents |= {"results": json.dumps({"traceEvents": [], "otherData": {"timelines": []}})}
    contents |= {
        "short": json.dumps(trace),
        "nameless": json.dumps(trace | {"otherData": trace["otherData"] | {"case": 1}}),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, errors="surrogateescape")
    (tmp_path / "rates").write_text(json.dumps(trace).replace('"ns_per_cycle": [', '"ns_per_cycle": [], "old": ['))
    return [tmp_path, tmp_path / "missing", *(tmp_path / name for name in (*contents, "rates"))]


@pytest.mark.parametrize("program", ["cut", "picture", "summary"])
def test_programs_refuse_what_is_no_trace(program, tmp_path, capsys):
    output = {"cut": [tmp_path / "cut.json", "--cycles", "9"], "picture": [tmp_path / "p.png"], "summary": []}[program]
    for path in odd_traces(tmp_path):
        if program == "cut" and path.name == "short":
            continue  # it can be cut
        with pytest.raises(SystemExit, match="2"):
            programs.main([program, str(path), *map(str, output)])
        assert "error: " in capsys.readouterr().err
    if output:
        (tmp_path / "good").write_text(json.dumps(to_chrome([timeline()], {"case": "c", "device_name": "d"})))
        for bad in (tmp_path, tmp_path / "text" / "file", "/dev/null"):
            with pytest.raises(SystemExit, match="2"):
                programs.main([program, str(tmp_path / "good"), str(bad), *map(str, output[1:])])
            assert "expected a file" in capsys.readouterr().err


def test_what_has_no_time_stamps_says_why():
    with pytest.raises(UnsupportedError, match="no time stamps"):
        record(Case.square(256, 2, 64, dtype="bfloat16"), device="cpu")
    result = CliRunner().invoke(app, ["trace", "--device", "cpu"])
    assert result.exit_code == 2
    assert "Hopper GPU" in result.output
    result = CliRunner().invoke(app, ["trace", "--direction", "sideways"])
    assert result.exit_code == 2
    assert "expected forward or backward" in result.output


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(("direction", "head_dim"), [("fwd", 64), ("fwd", 128), ("bwd", 64), ("bwd", 128)])
def test_stamps_cost_no_registers_in_memory_and_do_not_stay(direction, head_dim):
    """The stamped kernel neither spills nor drains its GEMMs one by one; afterwards the roles are the shipped ones."""
    machine_code = pytest.importorskip("machine_code")
    pytest.importorskip("cutlass")
    from benchmarks.timeline.stamps import stamping
    from onepass.bench.ablation import FULL, kernels, problem_of
    from onepass.kernels.device.sm90.backward import kernel as backward_kernel
    from onepass.kernels.device.sm90.backward.consumer import BackwardConsumer
    from onepass.kernels.device.sm90.backward.producer import BackwardProducer
    from onepass.kernels.device.sm90.forward import kernel as forward_kernel
    from onepass.kernels.device.sm90.forward.consumer import Consumer
    from onepass.kernels.device.sm90.forward.producer import Producer
    from onepass.kernels.launch import backward_sm90, forward_sm90

    case = Case.square(2048, 2048 // head_dim, head_dim, batch=8, dtype="bfloat16", direction=direction)
    problem = problem_of(case, "cuda")
    assert refusal(problem, direction) is None
    config = next(r.config for r in kernels(direction)["sm90"].table(problem).rows if r.label == FULL)
    if direction == "fwd":
        request = forward_sm90.compile_request(problem, config)
    else:
        (request,) = (r for r in backward_sm90.compile_requests(problem, False, config) if r.name == "backward")
    with stamping(0x7F0000000000):
        assert forward_kernel.Consumer is not Consumer
        stamped, _ = machine_code.compile_and_read(request.arch, request.trace)
    assert (stamped.spills, stamped.serialized) == (0, "")
    plain = machine_code.read(request.arch, request.trace)
    assert stamped.count("CS2R") > plain.count("CS2R")
    assert (forward_kernel.Consumer, forward_kernel.Producer) == (Consumer, Producer)
    assert (backward_kernel.BackwardConsumer, backward_kernel.BackwardProducer) == (BackwardConsumer, BackwardProducer)
