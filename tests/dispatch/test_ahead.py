"""Which kernels a call that needs gradients lets other processes compile."""

from dataclasses import replace

import pytest
import torch

import onepass
from onepass import ForwardConfigSm90
from onepass.dispatch import ahead, backends
from onepass.dispatch import attention as dispatch
from onepass.kernels.compiler import compile, disk_cache, pool
from onepass.problem import AttentionProblem, Mask, Quantization

CUDA = torch.device("cuda", 0)


@pytest.fixture
def requested(monkeypatch, gpu):
    """The names of the kernels that are requested on a pretended Hopper GPU: of this process with a prefix."""
    names = []
    gpu(9, 0)
    monkeypatch.setattr(pool, "compile_behind", lambda requests, *_: bool(names.extend(r.name for r in requests)))
    monkeypatch.setattr(pool, "num_cpus", lambda: ahead.CPUS_FOR_OTHER_LENGTHS - 1)
    monkeypatch.setattr(compile, "is_cached", lambda *kernel: False)
    monkeypatch.setattr(compile, "get", lambda *request: names.append(f"here: {request[0]}"))
    ahead.compile_with_backward.cache_clear()
    yield names
    ahead.compile_with_backward.cache_clear()


def problem(head_dim, **changes):
    sizes = {"batch": 2, "seqlen_q": 8192, "seqlen_k": 8192, "num_heads_q": 8, "num_heads_kv": 8}
    dims = {"head_dim": head_dim, "head_dim_v": head_dim, "softmax_scale": 0.1, "mask": Mask()}
    return AttentionProblem(**{"dtype": torch.bfloat16, "device_type": "cuda", **sizes, **dims, **changes})


def test_forward_and_backward_at_once(requested):
    """This process begins with the kernel that takes longest."""
    ahead.compile_with_backward("sm90", problem(128), CUDA)
    assert requested == ["forward", "backward_preprocess", "backward_postprocess", "here: backward"]
    ahead.compile_with_backward("sm90", problem(128), CUDA)
    assert len(requested) == 4
    ahead.compile_with_backward("sm80", problem(64), CUDA)
    assert requested[4:] == ["forward_sm80", "backward_preprocess", "backward_postprocess", "here: backward_sm80"]


def test_processes_that_wait_for_work_get_all_of_it(requested, monkeypatch):
    monkeypatch.setattr(pool, "num_early", lambda: 4)
    ahead.compile_with_backward("sm90", problem(128), CUDA)
    assert requested == ["forward", "backward_preprocess", "backward", "backward_postprocess"]


def test_a_kernel_that_does_not_compile_is_left_to_the_backward(requested, monkeypatch):
    def fail(*request):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(compile, "get", fail)
    ahead.compile_with_backward("sm90", problem(128), CUDA)
    assert requested == ["forward", "backward_preprocess", "backward_postprocess"]


def test_what_is_cached_is_not_requested(requested, monkeypatch):
    monkeypatch.setattr(compile, "is_cached", lambda name, *_: name in ("forward", "backward"))
    monkeypatch.setattr(pool, "num_early", lambda: 2)
    ahead.compile_with_backward("sm90", problem(128), CUDA)
    assert requested == ["backward_preprocess", "backward_postprocess"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_other_lengths(requested, monkeypatch, is_packed):
    """Each kernel that the problem needs at another length is requested, and none that it needs itself."""
    crews = []
    monkeypatch.setattr(pool, "num_cpus", lambda: 16)
    monkeypatch.setattr(pool, "compile_behind", lambda requests, *options: crews.append((list(requests), *options)))
    asked = problem(128, mask=Mask(None, 0), is_packed=is_packed, batch=4)
    ahead.compile_with_backward("sm90", asked, CUDA)
    (behind,), (others, workers, make_worker) = crews
    assert workers == 8
    assert make_worker()._niceness > 0
    own = {r.kernel for r in [*behind, *ahead._requests("sm90", asked, None)]}
    kernels = {r.kernel for r in others}
    assert not kernels & own
    for length in (64, 500, 1000, 4096, 30000):
        for batch in (1, asked.batch):
            sizes = (
                {"seqlen_q": batch * length, "seqlen_k": batch * length}
                if is_packed
                else dict.fromkeys(("seqlen_q", "seqlen_k"), length)
            )
            needed = {r.kernel for r in ahead._requests("sm90", replace(asked, batch=batch, **sizes), None)}
            assert needed <= kernels | own, (length, batch)


@pytest.mark.parametrize(
    ("rank", "cpus", "changes"), [("1", 16, {}), ("0", 7, {}), (None, 16, {"seqlen_k": 4096, "seqlen_q": 1})]
)
def test_no_other_lengths(requested, monkeypatch, rank, cpus, changes):
    """Not in other ranks of a machine, not on few CPUs, and not for keys of another sequence."""
    monkeypatch.setattr(pool, "num_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_RANK", rank) if rank else monkeypatch.delenv("LOCAL_RANK", raising=False)
    ahead.compile_with_backward("sm90", problem(128, **changes), CUDA)
    assert sorted(set(requested)) == sorted(requested)


def test_the_kernels_of_a_given_configuration(requested, monkeypatch):
    """With a configuration, only the kernels of this call are compiled: other lengths and a gradient of lse are not."""
    crews, config, asked = [], ForwardConfigSm90(tile_n=64), problem(128)
    monkeypatch.setattr(pool, "num_cpus", lambda: 16)
    monkeypatch.setattr(pool, "num_early", lambda: 9)
    monkeypatch.setattr(pool, "compile_behind", lambda requests, *_: crews.append([r.kernel for r in requests]))
    ahead.compile_with_backward("sm90", asked, CUDA, config)
    backward = dispatch.backward_requests("sm90", asked, False)
    assert crews == [[dispatch.compile_request("sm90", asked, config).kernel, *(r.kernel for _, r in backward)]]


def test_other_lengths_have_as_many_tokens():
    """8192 tokens of packed sequences, or the batch or the number of tokens of 2 x 8192."""
    packed, dense = (
        list(ahead.at_other_lengths(problem(128, is_packed=is_packed, batch=2))) for is_packed in (True, False)
    )
    assert {(other.seqlen_q, other.seqlen_k) for other in packed} == {(8192, 8192)}
    assert [other.batch for other in packed] == [128, 64, 32, 16, 8, 4, 2, 1, 1, 1]
    assert {other.batch for other in dense if other.seqlen_q == 64} == {2, 256}
    assert {other.batch for other in dense if other.seqlen_q == 32768} == {2, 1}
    assert all(other.seqlen_q == other.seqlen_k for other in dense)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("tiled", {}), ("cpu", {}), ("sm90", {"num_heads_q": 0}), ("sm90", {"quantization": Quantization(torch.half)})],
)
def test_nothing_without_kernels(requested, name, changes):
    ahead.compile_with_backward(name, problem(128, **changes), CUDA)
    assert requested == []


def test_nothing_for_a_gpu_of_another_architecture(requested, monkeypatch):
    """Requests are for the current GPU."""
    monkeypatch.setattr(backends, "arch_of", lambda name, device=None: "sm_80" if device is None else "sm_86")
    ahead.compile_with_backward("sm80", problem(128), CUDA)
    ahead.compile_with_backward("sm80", problem(128), torch.device("cpu"))
    assert requested == []


def test_only_calls_that_need_gradients(monkeypatch):
    asked = []
    monkeypatch.setattr(ahead, "compile_with_backward", lambda *call: asked.append(call[0]))
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    with torch.no_grad():
        onepass.attention(q.requires_grad_(), k, v, backend="tiled")
    onepass.attention(q.detach(), k, v, backend="tiled")
    assert asked == []
    onepass.attention(q, k, v, backend="tiled")
    onepass.attention(q, k, v, backend="tiled", dropout_p=0.5)
    assert asked == ["tiled", "tiled"]
    onepass.attention(q.detach(), k, v, backend="tiled")
    assert asked == ["tiled", "tiled"]


def test_workers_start_early_where_no_kernel_is_cached(requested, monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError

    counts = []
    monkeypatch.setattr(pool, "start_early", counts.append)
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "kernels"))
    ahead.start_early()
    assert counts == [ahead.EARLY_WORKERS]
    with monkeypatch.context() as without_processes:
        without_processes.setattr(pool, "start_early", refuse)
        ahead.start_early()
    (tmp_path / "kernels" / f"{'0' * 32}.o").touch()
    ahead.start_early()
    with monkeypatch.context() as of_another_user:
        of_another_user.setattr(disk_cache, "cache_directory", refuse)
        ahead.start_early()
    monkeypatch.setattr(compile, "has_disk_cache", lambda: False)
    ahead.start_early()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ahead.start_early()
    assert counts == [ahead.EARLY_WORKERS]
