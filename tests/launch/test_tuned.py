"""Kept configurations: the problems that they serve, their use by launches, and the files that hold them."""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass.api import fast_path
from onepass.bench.ablation import problem_of
from onepass.bench.cases import get_case_set, select
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.compiler import compile
from onepass.kernels.config import HOPPER, ForwardConfigSm80, ForwardConfigSm90
from onepass.kernels.heuristics import chooser, tuned
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.kernels.launch import forward_sm80 as launch_sm80
from onepass.kernels.launch import forward_sm90 as launch
from onepass.problem import AttentionProblem, Mask

GPU = "Imagined GPU"
PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 4, 4096, 4096, 16, 16, 128, 128, 0.1, Mask(None, 0))
USUAL = heuristics.forward_config_sm90(PROBLEM)
FASTER = dataclasses.replace(USUAL, tile_n=96)
KEY = tuned.key_of("fwd", "sm90", PROBLEM)


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    """The path of the user's table in a temporary directory, with an empty shipped table and an imaginary GPU."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ONEPASS_TUNED", raising=False)
    monkeypatch.setattr(compile, "environment", lambda: "these kernels")
    monkeypatch.setattr(tuned, "gpu_name", lambda device=None: GPU)
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped.json")
    (tmp_path / "shipped.json").write_text(tuned.dump({}))
    tuned.forget()
    yield tmp_path / "cache" / "tuned.json"
    tuned.forget()


def entry(config=FASTER, instead_of=USUAL, environment="these kernels"):
    return tuned.Entry(config.text, instead_of.text, 1.05, environment, "a problem")


def chosen(problem=PROBLEM, direction="fwd", backend="sm90"):
    tuned.forget()
    return tuned.choose(direction, backend, problem, HOPPER)


def changed(**changes):
    return dataclasses.replace(PROBLEM, **changes)


# ---------------------------------------------------------------- keys


def test_buckets():
    assert [tuned.bucket(n) for n in (None, 0, 1, 2, 3, 4, 5, 4096, 4097)] == [None, 0, 1, 2, 4, 4, 8, 4096, 8192]


SAME = {
    "shorter": {"seqlen_q": 2049, "seqlen_k": 2049},
    "more rows than a GPU holds": {"batch": 9},
    "another scale": {"softmax_scale": 0.3},
    "the forward is deterministic anyway": {"deterministic": True},
}
OTHER = {
    "longer": {"seqlen_q": 4097, "seqlen_k": 4097},
    "short": {"seqlen_q": 2048, "seqlen_k": 2048},
    "more keys": {"seqlen_k": 9000},
    "few rows": {"batch": 1, "num_heads_q": 4, "num_heads_kv": 4},
    "dtype": {"dtype": torch.float16},
    "head_dim": {"head_dim": 120},
    "no mask": {"mask": Mask()},
    "window": {"mask": Mask(100, 0)},
    "group": {"num_heads_kv": 4},
    "softcap": {"softcap": 20.0},
    "sinks": {"has_sinks": True},
    "lengths on the device": {"has_seqused_k": True},
    "packed": {"is_packed": True},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_problems_that_share_a_key(changes):
    assert tuned.key_of("fwd", "sm90", changed(**changes)) == KEY


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_problems_that_do_not(changes):
    assert tuned.key_of("fwd", "sm90", changed(**changes)) != KEY


def test_passes_backends_and_windows_have_keys_of_their_own():
    keys = {tuned.key_of(d, b, PROBLEM) for d in ("fwd", "bwd") for b in ("sm90", "sm80")}
    windows = {tuned.key_of("fwd", "sm90", changed(mask=Mask(left, 0))) for left in (100, 128, 129, 4000)}
    assert (len(keys), len(windows)) == (4, 3)
    both = [tuned.key_of("bwd", "sm90", changed(deterministic=is_so)) for is_so in (False, True)]
    assert both[0] != both[1]


def test_packed_sequences_are_keyed_by_their_mean():
    packed = changed(is_packed=True, batch=4, seqlen_q=16000, seqlen_k=16000)
    key = tuned.key_of("fwd", "sm90", packed)
    assert "seqlen_q<=4096 seqlen_k<=4096 rows<=131072" in key
    assert key == tuned.key_of("fwd", "sm90", dataclasses.replace(packed, batch=6, seqlen_q=24000, seqlen_k=24000))


# ---------------------------------------------------------------- choosing


def test_without_entries_the_heuristics_choose():
    assert chosen() == USUAL


def test_an_entry_is_used_for_its_bucket(own):
    tuned.save(GPU, {KEY: entry()})
    assert chosen() == FASTER
    assert chosen(changed(batch=8, seqlen_q=3000, seqlen_k=3000)) == FASTER
    assert chosen(changed(mask=Mask())) == heuristics.forward_config_sm90(changed(mask=Mask()))
    assert tuned.load(own) == {GPU: {KEY: entry()}}


def test_not_on_another_gpu(monkeypatch):
    tuned.save(GPU, {KEY: entry()})
    for name in ("Another GPU", None):
        monkeypatch.setattr(tuned, "gpu_name", lambda device=None, name=name: name)
        assert chosen() == USUAL


def test_the_name_of_a_gpu(monkeypatch):
    monkeypatch.undo()  # the imaginary GPU
    devices = ["First GPU", "Second GPU"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: devices[index])
    tuned._name_of.cache_clear()
    for current in (0, 1):
        assert tuned.gpu_name() == tuned.gpu_name(torch.device("cuda")) == devices[current]
        assert tuned.gpu_name(torch.device("cuda", 1)) == "Second GPU"
    assert tuned.gpu_name(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuned.gpu_name() is None
    tuned._name_of.cache_clear()


def test_the_switch(monkeypatch):
    tuned.save(GPU, {KEY: entry()})
    monkeypatch.setenv("ONEPASS_TUNED", "0")
    assert chosen() == USUAL
    monkeypatch.setenv("ONEPASS_TUNED", "1")
    assert chosen() == FASTER


def test_not_if_the_heuristics_choose_something_else_now():
    tuned.save(GPU, {KEY: entry(instead_of=dataclasses.replace(USUAL, tile_n=80))})
    assert chosen() == USUAL


def test_an_entry_from_before_a_field_was_added_still_holds():
    """A field that an entry lacks has its default value."""
    fields = [f.name for f in dataclasses.fields(USUAL)]
    assert fields[-1] == "blocks_per_sm"
    found, older = entry(), f" {fields[-1]}=1"
    assert older in found.config
    assert older in found.instead_of
    texts = {name: getattr(found, name).replace(older, "") for name in ("config", "instead_of")}
    tuned.save(GPU, {KEY: dataclasses.replace(found, **texts)})
    assert chosen() == FASTER


def test_not_with_other_kernels():
    tuned.save(GPU, {KEY: entry(environment="older kernels")})
    assert chosen() == USUAL


def test_what_is_shipped_holds_for_all_kernels_and_gives_way(monkeypatch):
    tuned.SHIPPED.write_text(tuned.dump({GPU: {KEY: entry(environment="older kernels")}}))
    assert chosen() == FASTER
    own_choice = dataclasses.replace(USUAL, tile_n=112)
    tuned.save(GPU, {KEY: entry(own_choice)})
    assert chosen() == own_choice
    tuned.save(GPU, {KEY: entry(USUAL)})  # the candidate is not faster here
    assert chosen() == USUAL
    tuned.save(GPU, {KEY: entry(own_choice, environment="older kernels")})
    assert chosen() == FASTER


@pytest.mark.parametrize(
    "text",
    [
        FASTER.text.replace("tile_n=96", "tile_n=100"),  # there is no such tile
        FASTER.text.replace("tile_n=96", "tile_n=256"),  # too large
        FASTER.text.replace("tile_n=96", "tile_n=96.0"),
        FASTER.text.replace("tile_n=96", "tile_n=__import__('os')"),
        FASTER.text.replace("tile_n=", "tile_k="),
        FASTER.text.replace("=", ""),
        ForwardConfigSm80().text,
        "",
    ],
)
def test_a_configuration_that_cannot_be_is_not_used(text):
    tuned.save(GPU, {KEY: dataclasses.replace(entry(), config=text)})
    assert chosen() == USUAL


def test_without_the_compiler_no_own_entry_counts(monkeypatch):
    def missing():
        raise importlib.metadata.PackageNotFoundError

    tuned.save(GPU, {KEY: entry()})
    monkeypatch.setattr(compile, "environment", missing)
    assert chosen() == USUAL


def test_the_shipped_table_can_be_used():
    """Each entry can replace the configuration that the heuristics chose, if they still choose it."""
    import onepass.kernels.heuristics

    with open(os.path.join(os.path.dirname(onepass.kernels.heuristics.__file__), "tuned_h200.json"), "rb") as file:
        table = tuned.parse(file.read())
    for gpu, entries in table.items():
        assert gpu.startswith("NVIDIA H200")
        for key, one in entries.items():
            direction, backend = key.partition(":")[0].split()
            kind = chooser.chooser(direction, backend).config_type
            assert isinstance(kind.from_text(one.config), kind)
            assert one.speedup > 1
        used = {}
        for case in select(get_case_set("paper"), None, "bfloat16").cases:
            problem = problem_of(case, "cuda")
            key = tuned.key_of(case.direction, "sm90", problem)
            if key in entries:
                used[key] = chooser.chooser(case.direction, "sm90").choose(problem, HOPPER)
        assert used.keys() == entries.keys()
        for key, config in used.items():
            assert type(config).from_text(entries[key].instead_of) == config


# ---------------------------------------------------------------- launches


@pytest.fixture
def launched(monkeypatch):
    """A list of the configurations of all launched kernels: the Hopper backend runs, but its kernels do nothing."""
    seen = []

    def get(name, key, arch, trace):
        if name in ("forward", "backward", "forward_sm80"):
            seen.append(key[1])
        return lambda *arguments: None

    monkeypatch.setattr(backends, "refusal", lambda name, problem, device: None)
    monkeypatch.setattr(backends, "arch_of", lambda name, device=None: HOPPER)
    monkeypatch.setattr(compile, "get", get)
    monkeypatch.setattr(launch, "tile_counter", lambda device: None)
    monkeypatch.setattr(backward_launch, "tile_counter", lambda device: None)
    monkeypatch.setattr(backward_launch, "zero_counters", lambda purpose, device, count: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(launch_sm80, "arch_of", lambda device: HOPPER)
    forget()
    yield seen
    forget()


def forget():
    launch_sm80.kernel_of.cache_clear()
    dispatch.forget_prepared()
    fast_path.forget()
    tuned.forget()


def qkv(requires_grad=False):
    return tuple(torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16, requires_grad=requires_grad) for _ in "qkv")


def keep(direction, backend, **changes):
    """Keep an entry for the calls with `qkv`, and have all calls prepared anew. Returns: its configuration."""
    q = qkv()[0]
    problem = AttentionProblem(q.dtype, "cpu", 2, 300, 300, 4, 4, 64, 64, 0.125, Mask())
    usual = chooser.chooser(direction, backend).choose(problem, HOPPER)
    config = dataclasses.replace(usual, **changes)
    tuned.save(GPU, {tuned.key_of(direction, backend, problem): entry(config, usual)})
    forget()
    return config


def test_launches_use_it(launched):
    onepass.attention(*qkv())
    assert not any(config.tile_n == 48 for config in launched)
    config = keep("fwd", "sm90", tile_n=48)
    for _ in range(2):
        onepass.attention(*qkv())
    onepass.attention(*qkv(), tuning=ForwardConfigSm90(tile_n=80))
    assert launched[1:] == [config, ForwardConfigSm90(tile_n=80)]
    assert (
        dispatch.forward_config("sm90", AttentionProblem(torch.bfloat16, "cpu", 2, 300, 300, 4, 4, 64, 64, 0.1, Mask()))
        == config
    )


def test_launches_of_the_other_kernels_use_it(launched):
    config = keep("fwd", "sm80", tile_n=32)
    onepass.attention(*qkv(), backend="sm80")
    assert launched == [config]
    launched.clear()
    config = keep("bwd", "sm90", do_stages=1)
    onepass.attention(*qkv(requires_grad=True)).sum().backward()
    assert config in launched


def test_a_compiled_function_uses_it(launched):
    torch._dynamo.reset()
    function = torch.compile(onepass.attention, fullgraph=True, backend="aot_eager")
    function(*qkv())
    config = keep("fwd", "sm90", tile_n=48)
    function(*qkv())
    assert launched[-1] == config != launched[0]


def test_the_file_is_read_once(launched, monkeypatch):
    keep("fwd", "sm90", tile_n=48)
    reads = []
    monkeypatch.setattr(tuned, "load", lambda path: reads.append(path) or {})
    for seqlen in range(1, 9):
        for _ in range(2):
            onepass.attention(*(t[:, :seqlen] for t in qkv()))
    assert len(reads) == 1


# ---------------------------------------------------------------- files


def warned(problem=PROBLEM):
    """Return the warnings of a first choice. A second must give none, and both must be the choice of the heuristics."""
    tuned.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tuned.choose("fwd", "sm90", problem, HOPPER) == USUAL
        assert tuned.choose("fwd", "sm90", problem, HOPPER) == USUAL
    assert all(w.category is RuntimeWarning for w in caught)
    return [str(w.message) for w in caught]


GOOD = {"format": 1, "gpus": {GPU: {KEY: vars(entry())}}}
CORRUPT = {
    "empty": "",
    "no JSON": "{",
    "no object": "[]",
    "another format": json.dumps(GOOD | {"format": 2}),
    "no gpus": json.dumps({"format": 1}),
    "a list of gpus": json.dumps({"format": 1, "gpus": [1]}),
    "entries": json.dumps({"format": 1, "gpus": {GPU: 3}}),
    "a field too few": json.dumps({"format": 1, "gpus": {GPU: {KEY: {"config": "x"}}}}),
    "a field of another type": json.dumps({"format": 1, "gpus": {GPU: {KEY: vars(entry()) | {"config": 3}}}}),
    "binary": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_said_once_and_replaced(own, content):
    own.parent.mkdir(mode=0o700)
    own.write_bytes(content if isinstance(content, bytes) else content.encode())
    own.chmod(0o600)
    (message,) = warned()
    assert str(own) in message
    tuned.save(GPU, {KEY: entry()})
    assert chosen() == FASTER


def test_a_corrupt_shipped_table(monkeypatch):
    tuned.SHIPPED.write_text("{")
    (message,) = warned()
    assert "shipped.json is not used" in message


def test_no_file_is_no_news(own):
    assert warned() == []
    own.parent.mkdir()
    assert warned() == []


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write(own, mode):
    tuned.save(GPU, {KEY: entry()})
    own.chmod(mode)
    (message,) = warned()
    assert "others may have written the .json" in message


def test_a_link(own, tmp_path):
    tuned.save(GPU, {KEY: entry()})
    own.rename(tmp_path / "elsewhere.json")
    own.symlink_to(tmp_path / "elsewhere.json")
    (message,) = warned()
    assert "cannot be read" in message


def test_a_directory_of_another_user(own, monkeypatch):
    tuned.save(GPU, {KEY: entry()})
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (message,) = warned()
    assert "is not a directory of this user" in message
    with pytest.raises(PermissionError):
        tuned.save(GPU, {KEY: entry()})
    with pytest.raises(PermissionError):
        tuned.clear()
    assert own.exists()


def test_what_is_written_is_private(own):
    previous = os.umask(0)
    try:
        tuned.save(GPU, {KEY: entry()})
    finally:
        os.umask(previous)
    assert own.stat().st_mode & 0o777 == 0o600
    assert own.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in own.parent.iterdir()) == ["tuned.json", "tuned.lock"]


def test_a_table_elsewhere(tmp_path, own):
    path = tmp_path / "table.json"
    tuned.save(GPU, {KEY: entry()}, path)
    tuned.save("Another GPU", {KEY: entry()}, path)
    assert set(tuned.parse(path.read_bytes())) == {GPU, "Another GPU"}
    assert not own.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shipped.json", "table.json"]


@pytest.mark.slow
def test_concurrent_writers_lose_nothing(own):
    code = f"""
import sys
from onepass.kernels.heuristics import tuned
for i in range(20):
    tuned.save({GPU!r}, {{f"{{sys.argv[1]}} {{i}}": tuned.Entry("a", "b", 1.0, "c", "d")}})
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    writers = [subprocess.Popen([sys.executable, "-c", code, name], env=environment) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert set(tuned.load(own)[GPU]) == {f"{name} {i}" for name in "abc" for i in range(20)}


def test_clear(own):
    assert not tuned.clear()
    tuned.save(GPU, {KEY: entry()})
    assert tuned.clear()
    assert list(own.parent.iterdir()) == []
    assert chosen() == USUAL
