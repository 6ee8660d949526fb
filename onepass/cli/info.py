"""`onepass info`: devices and versions on this machine, and what works on it."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

import onepass

from .. import variables
from ..bench.peers import PEERS, find_peers
from ..dispatch import backends, choice
from ..kernels.config.arch import unproven
from ..testing.machine import counted, cpu_model, package_versions
from .console import TABLE_STYLE, make_console, resolve_device


def info(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto: all of them")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """List devices, versions, backends and what they compute, the peers of a benchmark, and environment variables."""
    found = gather(None if device == "auto" else resolve_device(device))
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


def gather(only: str | None = None) -> dict[str, Any]:
    """What the command shows, of one device or of all. The library itself answers, as it would answer a call."""
    devices = [only] if only else ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    versions = {"onepass": onepass.__version__, "torch": torch.__version__, "python": platform.python_version()}
    probes = _probes()

    def answer(arguments: dict[str, Any], backend: str | None = None) -> dict[str, Any]:
        support = onepass.supports(**arguments, backend=backend)
        return {"ok": support.ok, "backend": support.backend, "reason": support.reason}

    return {
        "versions": versions | dict(package_versions()),
        "devices": {device: _describe(device) for device in devices},
        "unproven": {
            device: words
            for device in devices
            if device != "cpu" and (words := unproven(torch.device(device))) is not None
        },
        "chosen_backend": choice.current(),
        "backends": {
            name: {device: answer(probes["bfloat16"](device), name) for device in devices}
            for name in backends.backends()
        },
        "features": {
            feature: {device: answer(probe(device)) for device in devices} for feature, probe in probes.items()
        },
        "peers": _peers(devices),
        "variables": {variable.name: _of_environment(variable) for variable in variables.ALL},
    }


def _of_environment(variable: variables.Variable) -> dict[str, Any]:
    about = {"text": variable.text, "what": variable.what, "problem": None}
    try:
        variable.read()
    except ValueError as error:
        about["problem"] = str(error)
    return about


def _describe(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": cpu_model(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    capability = f"sm_{properties.major}{properties.minor}"
    return {"name": properties.name, "capability": capability, "memory_bytes": properties.total_memory}


def _peers(devices: list[str]) -> dict[str, dict[str, str]]:
    found = {device: find_peers(device.partition(":")[0]) for device in devices[:2]}
    peers = {}
    for name, peer in PEERS.items():
        found_there = [f for device, f in found.items() if device.startswith(peer.device_type)]
        reasons = [f.absent[name] for f in found_there if name in f.absent]
        here = reasons[0] if reasons else "yes" if found_there else f"no: needs {peer.device_type}"
        peers[name] = {"what": peer.what, "here": here}
    return peers


def show(found: dict[str, Any]) -> None:
    """Tables of what `gather` returns."""
    console, devices = make_console(), list(found["devices"])
    table = Table("", "version", title="Versions", **TABLE_STYLE)
    for name, version in found["versions"].items():
        table.add_row(name, version)
    console.print(table)

    table = Table("device", "name", "memory", title="Devices", **TABLE_STYLE)
    for device, about in found["devices"].items():
        if device == "cpu":
            table.add_row(device, f"{about['name']}, {counted(about['threads'], 'thread')}", "")
        else:
            memory = f"{about['memory_bytes'] / 2**30:.0f} GiB"
            table.add_row(device, f"{about['name']}, {about['capability']}", memory)
    console.print(table)
    for device, words in found["unproven"].items():
        console.print(f"{device}: {words}.", style="yellow", markup=False)
    if found["chosen_backend"] is not None:
        chosen = found["chosen_backend"]
        console.print(f"backend of calls that name none: {chosen}, as {variables.BACKEND.name} says", markup=False)

    table = Table("backend", *devices, title="Backends, asked for bfloat16 attention without options", **TABLE_STYLE)
    for name, answers in found["backends"].items():
        table.add_row(name, *(f"{'yes' if a['ok'] else 'no'}: {a['reason']}" for a in answers.values()))
    console.print(table)

    table = Table("", *devices, title="Which backend computes what", **TABLE_STYLE)
    for feature, answers in found["features"].items():
        table.add_row(feature, *(a["backend"] if a["ok"] else f"no: {a['reason']}" for a in answers.values()))
    console.print(table)

    table = Table("peer", "what", "here", title="Peers for the bench", **TABLE_STYLE)
    for name, peer in found["peers"].items():
        table.add_row(name, peer["what"], peer["here"])
    console.print(table)

    table = Table("variable", "here", "what it is for", title="Environment variables", **TABLE_STYLE)
    for name, about in found["variables"].items():
        here = "not set" if about["text"] is None else escape(about["text"])
        table.add_row(name, here if about["problem"] is None else f"[red]{escape(about['problem'])}[/]", about["what"])
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

    def ranges(device: str) -> torch.Tensor:
        return torch.tensor([0, 8], dtype=torch.int32, device=device).expand(1, 1, 8, 2)

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
        "left padding": call(seqstart_k=lambda device: torch.tensor([2], dtype=torch.int32, device=device)),
        "ranges": call(key_ranges=ranges),
        "query ranges": call(query_ranges=ranges),
        "positions": call(q_positions=lambda device: torch.arange(8, dtype=torch.int32, device=device)[None]),
        "ALiBi": call(alibi_slopes=lambda device: torch.ones(2, device=device)),
        "bias": call(bias=lambda device: torch.zeros(1, 2, 8, 8, device=device)),
        "dropout": call(dropout_p=0.1),
        "packed sequences": call(packed=True),
        "lse": call(return_lse=True),
        "deterministic": call(deterministic=True, backward=True),
    }
