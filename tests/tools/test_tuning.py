"""`tuning=`: what a configuration may hold, and its way from the call to the kernel (which here only takes notes).

Without a GPU the tensors lie on the CPU, and the Hopper backend is made to take them.
"""

import dataclasses
import pickle
from ast import literal_eval
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass import ForwardConfigSm90
from onepass.api import fast_path
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.compiler import compile
from onepass.kernels.config import ForwardConfigSm80
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import forward_sm90 as launch

CONFIG = ForwardConfigSm90(tile_n=80, num_warpgroups=1, v_stages=3, rescale_threshold=8, overlap_tiles=False)


@pytest.fixture
def configs(monkeypatch):
    """Let the Hopper backend run here, with a kernel that writes ones and zeros. Returns: its configurations so far."""
    seen = []

    def get(name, key, arch, trace):
        def kernel(q, k, v, out, lse, *rest):
            seen.append(key[1])
            out.fill_(1)
            lse.fill_(0)

        return kernel

    monkeypatch.setattr(backends, "refusal", lambda name, problem, device: launch.unsupported(problem))
    monkeypatch.setattr(dispatch, "_backward_unsupported", lambda name, problem: "no GPU")
    monkeypatch.setattr(compile, "get", get)
    monkeypatch.setattr(launch, "tile_counter", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    launch.prepare.cache_clear()
    fast_path.forget()
    yield seen
    launch.prepare.cache_clear()
    fast_path.forget()


def qkv(head_dim=64, dtype=torch.bfloat16, **options):
    return tuple(torch.randn(2, 9, heads, head_dim, dtype=dtype, **options) for heads in (4, 2, 2))


def test_text_holds_every_field():
    for config in (CONFIG, ForwardConfigSm90(tile_n=128), heuristics.FORWARD_SM90[128, 128][-1].config):
        assert ForwardConfigSm90.from_text(config.text) == config
        assert repr(ForwardConfigSm90.from_text(config.text)) == repr(config)
    other = dataclasses.replace(CONFIG, tile_n=96)
    assert other.text == CONFIG.text.replace("tile_n=80", "tile_n=96")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_n": 128.0}, "tile_n: expected int, got 128.0"),
        ({"tile_n": True}, "tile_n: expected int, got True"),
        ({"tile_n": 128, "pingpong": 1}, "pingpong: expected bool, got 1"),
        ({"tile_n": 128, "v_stages": 2.0}, r"v_stages: expected int, got 2.0"),
        ({"tile_n": 128, "num_stages": None}, "num_stages: expected int, got None"),
        ({"tile_n": 128, "rescale_threshold": "8"}, "rescale_threshold: expected float, got '8'"),
    ],
)
def test_a_field_of_the_wrong_type(fields, message):
    with pytest.raises(TypeError, match=message):
        ForwardConfigSm90(**fields)


def test_it_reaches_the_kernel_on_both_ways(configs):
    for _ in range(2):
        out, lse = onepass.attention(*qkv(), causal=True, return_lse=True, tuning=CONFIG)
        assert (out == 1).all()
        assert (lse == 0).all()
    onepass.attention(*qkv(requires_grad=True), causal=True, tuning=CONFIG).sum().backward()
    onepass.attention(*qkv(), causal=True, backend="sm90", tuning=CONFIG)
    assert configs == [CONFIG] * 4


def test_it_is_told_apart_from_others(configs):
    other = dataclasses.replace(CONFIG, tile_n=96)
    for _ in range(2):
        for tuning in (CONFIG, None, other):
            onepass.attention(*qkv(), tuning=tuning)
    assert len(set(configs)) == 3
    assert configs[:3] == configs[3:]
    assert (configs[0], configs[2]) == (CONFIG, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_survives_compilation(configs, dynamic):
    torch._dynamo.reset()
    function = torch.compile(onepass.attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    other = dataclasses.replace(CONFIG, rescale_threshold=4.0)
    for tuning in (CONFIG, other, None, CONFIG):
        function(*qkv(), tuning=tuning)
    assert configs[2] not in (CONFIG, other)
    assert [configs[i] for i in (0, 1, 3)] == [CONFIG, other, CONFIG]


DOES_NOT_FIT = [
    ({"tile_n": 128, "num_warpgroups": 5}, r"num_warpgroups: expected 1 to 4, got 5"),
    ({"tile_n": 100}, r"tile_n: expected 1 x 16, 32, ... 256, got 100"),
    ({"tile_n": 128, "num_stages": 1}, r"stages: overlap_gemm_softmax needs 2 for K and V, got 1"),
    (
        {
            "tile_n": 64,
            "num_stages": 1,
            "overlap_gemm_softmax": False,
            "overlap_tiles": False,
            "warp_specialized": False,
        },
        r"stages: without warp_specialized K and V need 2, got 1",
    ),
    ({"tile_n": 64, "warp_specialized": False}, r"warp_specialized: overlap_tiles, dynamic_tiles and clusters need it"),
    ({"tile_n": 64, "cluster_size": 2, "dynamic_tiles": True}, r"cluster_size: above 1 it takes neither dynamic_tiles"),
    (
        {"tile_n": 176, "num_warpgroups": 3},
        r"registers: ForwardConfigSm90\(.* needs 196 for S, P and O, a thread has 160",
    ),
    ({"tile_n": 128, "num_stages": 9}, r"shared memory: .* needs 623616 bytes, a thread block has 232448"),
    ({"tile_n": 128, "rescale_threshold": 16.0}, r"rescale_threshold: expected 0 to 15, .*, got 16.0"),
    ({"tile_n": 128, "rescale_threshold": float("nan")}, r"rescale_threshold: expected 0 to 15, .*, got nan"),
]


@pytest.mark.parametrize(("fields", "message"), DOES_NOT_FIT)
def test_what_does_not_fit_is_refused(configs, fields, message):
    call = {"tuning": ForwardConfigSm90(**fields)}
    for backend in (None, "sm90"):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=f"tuning: {message}"):
                onepass.attention(*qkv(head_dim=128), **call, backend=backend)
        support = onepass.supports(*qkv(head_dim=128), **call, backend=backend)
        assert (support.ok, support.backend) == (False, "sm90")
    assert configs == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score_buffers": 2, "tile_n": 128}, "score_buffers: expected 1 in float32"),
        ({"tile_n": 128}, r"shared memory: .* needs 328704 bytes, a thread block has 232448"),
        ({"num_warpgroups": 3}, r"registers: ForwardConfigSm90\(.* needs 1\d\d for S, P and O, a thread has 160"),
    ],
)
def test_what_does_not_fit_in_float32(configs, fields, message):
    tensors = qkv(head_dim=128, dtype=torch.float32)
    config = ForwardConfigSm90(**{"tile_n": 64, "two_level_sums": "score_buffers" not in fields} | fields)
    support = onepass.supports(*tensors, tuning=config)
    assert (support.ok, support.backend) == (False, "sm90")
    with pytest.raises(NotImplementedError, match=f"tuning: {message}"):
        onepass.attention(*tensors, tuning=config)
    assert configs == []


def test_supports_says_yes(configs):
    assert onepass.supports(*qkv(), tuning=CONFIG).ok
    assert onepass.supports(*qkv(), tuning=CONFIG).backend == "sm90"


def test_a_backend_without_kernels_takes_none(configs):
    for call in ({"backend": "tiled"}, {"dtype": torch.float64}):
        tensors = qkv(dtype=call.pop("dtype", torch.bfloat16))
        with pytest.raises(NotImplementedError, match="tuning: backend tiled takes none, expected None"):
            onepass.attention(*tensors, **call, tuning=CONFIG)
        assert not onepass.supports(*tensors, **call, tuning=CONFIG).ok


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ForwardConfigSm90, "tile_n=64 q_in_registers=False exp2_fma_period=0 softmax_before_wait=False"),
        (ForwardConfigSm80, "tile_n=64 exp2_fma_period=0 fresh_sums=True"),
    ],
)
def test_fields_that_were_removed(kind, text):
    """Texts, pickles and calls with a removed field are taken if kernels do what it says, and refused otherwise."""
    assert kind.from_text(text) == kind(tile_n=64)
    values = {name: literal_eval(value) for name, value in (pair.split("=") for pair in text.split())}
    with pytest.warns(FutureWarning, match=f"{kind.__name__} no longer has exp2_fma_period, "):
        assert kind(**values) == kind(tile_n=64)
    config = pickle.loads(pickled(kind, values | {"text": text}))
    assert config == kind(tile_n=64)
    assert config.text == kind(tile_n=64).text
    assert pickle.loads(pickle.dumps(config)) == config
    changed = values | {"exp2_fma_period": 4}
    for make in (
        lambda: kind.from_text(text.replace("period=0", "period=4")),
        lambda: pickle.loads(pickled(kind, changed)),
        lambda: kind(**changed),
    ):
        with pytest.raises(ValueError, match="exp2_fma_period: expected 0, the one value that kernels have now, got 4"):
            make()


def pickled(kind, state):
    """The pickle of a configuration of an earlier version, which had this state."""
    config = object.__new__(kind)
    config.__dict__.update(state)
    return pickle.dumps(config)
