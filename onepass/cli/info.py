"""`onepass info`: devices and versions on this machine, and what works on it."""

from __future__ import annotations

import platform
from typing import Any

import torch
from rich.table import Table

import onepass

from ..bench.machine import cpu_model, package_versions
from ..bench.peers import PEERS, find_peers
from ..dispatch import backends, choice
from ..kernels.config.arch import unproven
from .console import TABLE_STYLE, make_console


def info() -> None:
    """List devices, versions, backends and what they compute, and the peers that a benchmark would find."""
    console = make_console()
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]

    versions = Table("", "version", title="Versions", **TABLE_STYLE)
    versions.add_row("onepass", onepass.__version__)
    versions.add_row("torch", torch.__version__)
    versions.add_row("python", platform.python_version())
    for name, version in package_versions().items():
        versions.add_row(name, version)
    console.print(versions)

    table = Table("device", "name", "memory", title="Devices", **TABLE_STYLE)
    table.add_row("cpu", f"{cpu_model()}, {torch.get_num_threads()} threads", "")
    for device in devices[1:]:
        properties = torch.cuda.get_device_properties(device)
        capability = f"sm_{properties.major}{properties.minor}"
        table.add_row(device, f"{properties.name}, {capability}", f"{properties.total_memory / 2**30:.0f} GiB")
    console.print(table)
    for device in devices[1:]:
        if (words := unproven(torch.device(device))) is not None:
            console.print(f"{device}: {words}.", style="yellow", markup=False)
    if (chosen := choice.current()) is not None:
        console.print(f"backend of calls that name none: {chosen}, as {choice.VARIABLE} says", markup=False)

    # The library itself answers, so that these tables cannot say more than a call would do.
    probes = _probes()
    table = Table("backend", *devices, title="Backends, asked for bfloat16 attention without options", **TABLE_STYLE)
    for name in backends.backends():
        answers = [onepass.supports(**probes["bfloat16"](device), backend=name) for device in devices]
        table.add_row(name, *(f"{'yes' if a.ok else 'no'}: {a.reason}" for a in answers))
    console.print(table)

    table = Table("", *devices, title="Which backend computes what", **TABLE_STYLE)
    for feature, probe in probes.items():
        answers = [onepass.supports(**probe(device)) for device in devices]
        table.add_row(feature, *(a.backend if a.ok else f"no: {a.reason}" for a in answers))
    console.print(table)

    table = Table("peer", "what", "here", title="Peers for the bench", **TABLE_STYLE)
    found = {device: find_peers(device.partition(":")[0]) for device in devices[:2]}
    for name, peer in PEERS.items():
        found_there = [f for device, f in found.items() if device.startswith(peer.device_type)]
        reasons = [f.absent[name] for f in found_there if name in f.absent]
        here = reasons[0] if reasons else "yes" if found_there else f"no: needs {peer.device_type}"
        table.add_row(name, peer.what, here)
    console.print(table)


def _probes() -> dict[str, Any]:
    """For each feature a function of the device that gives the arguments of a small call that uses the feature."""

    def call(**changes: Any) -> Any:
        def arguments(device: str) -> dict[str, Any]:
            options = {name: value(device) if callable(value) else value for name, value in changes.items()}
            dtype, heads_kv = options.pop("dtype", torch.float32), options.pop("heads_kv", 2)
            head_dim_v, backward = options.pop("head_dim_v", 16), options.pop("backward", False)
            packed = options.pop("packed", False)
            # one sequence of 8 either way
            shape = (8,) if packed else (1, 8)
            q, k, v = (
                torch.zeros(*shape, heads, dim, dtype=dtype, device=device).requires_grad_(backward)
                for heads, dim in ((2, 16), (heads_kv, 16), (heads_kv, head_dim_v))
            )
            if packed:
                offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
                options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
            return {"q": q, "k": k, "v": v, **options}

        return arguments

    return {
        "float64": call(dtype=torch.float64),
        "float32": call(),
        "bfloat16": call(dtype=torch.bfloat16),
        "float16": call(dtype=torch.float16),
        "backward": call(backward=True),
        "causal": call(causal=True),
        "window": call(window=(3, 0)),
        "softcap": call(softcap=30.0),
        "sinks": call(sinks=lambda device: torch.zeros(2, device=device)),
        "GQA / MQA": call(heads_kv=1),
        "head_dim_v != head_dim": call(head_dim_v=8),
        "seqused_k": call(seqused_k=lambda device: torch.tensor([5], dtype=torch.int32, device=device)),
        "packed sequences": call(packed=True),
        "lse": call(return_lse=True),
        "deterministic": call(deterministic=True, backward=True),
    }
