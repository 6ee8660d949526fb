"""Functions that run on several ranks of a process group, each in a process of its own: gloo, or NCCL on GPUs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIMEOUT = 120.0


def run_ranks(
    num_ranks: int, function: Callable, *args: Any, device: str = "cpu", timeout: float = TIMEOUT
) -> list[Any]:
    """function(rank, *args) on each rank; the results by rank.

    Args:
        function: of a module that can be imported.
        device: "cuda": each rank has a GPU, its current one, and an NCCL group. timeout: seconds for all.
    Raises: AssertionError with the traceback of each rank that raised or did not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["onepass.distributed", "onepass.reference", function.__module__])
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        processes = [
            context.Process(target=_rank, args=(rank, num_ranks, store, results, device, function, args), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        failures = []
        try:
            for _ in processes:
                rank, result, failure = results.get(timeout=timeout)
                found[rank] = result
                if failure is not None:
                    failures.append(f"rank {rank}: {failure}")
        except queue.Empty:
            missing = [rank for rank in range(num_ranks) if rank not in found]
            failures.append(f"ranks {missing} have not ended within {timeout:g} s")
        for process in processes:
            process.join(timeout=0 if failures else 10)
            process.kill()
    assert not failures, "\n".join(failures)
    return [found[rank] for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, store: str, results: Any, device: str, function: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # what the process begins with is no garbage
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    try:
        on_gpu = {}
        if device == "cuda":
            torch.cuda.set_device(rank)
            on_gpu["device_id"] = torch.device("cuda", rank)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            rank=rank,
            world_size=num_ranks,
            store=dist.FileStore(store, num_ranks),
            timeout=timedelta(seconds=TIMEOUT),
            **on_gpu,
        )
        results.put((rank, function(rank, *args), None))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def loopback() -> str:
    """The network interface of this machine alone, for gloo, which otherwise looks up the machine's name."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else names[0]
