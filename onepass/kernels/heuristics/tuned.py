"""Configurations that were measured to be faster than the heuristics': where they are kept, and when they are used.

A configuration is kept for a GPU (by name), a pass, a backend, a static problem and a bucket of lengths (`key_of`), in
tuned.json with the compiled kernels, under the rules of disk_cache.py for files of others; a table for the H200 comes
with the package. What this user's GPU has measured counts more than what comes with the package.

An entry says "faster than that configuration". It is used only where the heuristics still choose that one, and where
`check` takes what it offers instead; and one of tuned.json only with the kernels and the compiler that it was measured
with. So what the heuristics know of a single problem (how many tiles it has, whether its heads share a tile) stays
known, and nothing has to be thrown away when they learn more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ... import variables
from ...errors import UnsupportedError
from ...problem import AttentionProblem
from ..compiler import compile, disk_cache
from ..config import Config, LaunchConfig
from . import chooser

Direction = Literal["fwd", "bwd"]

SHIPPED = Path(__file__).with_name("tuned_h200.json")
FILE = "tuned.json"
FORMAT = 1
MOST_BYTES = 2**26  # of a table; the entry of one problem takes about 600
# Rows (batch * heads * seqlen_q) from which on a GPU is full whatever the problem: 8 waves of 128 rows on 132 SMs.
MANY_ROWS = 2**17


@dataclass(frozen=True)
class Entry:
    """The result of tuning for one key.

    Attributes:
        config: the text of the fastest configuration.
        instead_of: that of the heuristics' choice. The same text: nothing was faster.
        speedup: of config over instead_of, the median of the rounds.
        environment: `compile.environment()` of the kernels that were measured.
        problem: the one that was measured, human-readable.
    """

    config: str
    instead_of: str
    speedup: float
    environment: str
    problem: str

    @classmethod
    def of(cls, data: Any) -> Entry:
        """Raises: TypeError if it is not what `vars` of an entry would give."""
        entry = cls(**data)
        texts = entry.config, entry.instead_of, entry.environment, entry.problem
        if not all(isinstance(text, str) for text in texts) or type(entry.speedup) not in (int, float):
            raise TypeError("fields of other types")
        return entry


# by name of the GPU, then by key
Table = dict[str, dict[str, Entry]]


# ---------------------------------------------------------------- what a configuration is kept for


def bucket(length: int | None) -> int | None:
    """The power of two that is at least the length."""
    return length if length is None or length <= 1 else 1 << (length - 1).bit_length()


def num_rows(problem: AttentionProblem) -> int:
    """The rows of the scores, which the tiles of a launch share out."""
    return problem.num_heads_q * problem.seqlen_q * (1 if problem.is_packed else problem.batch)


def key_of(direction: Direction, backend: str, problem: AttentionProblem) -> str:
    """The problems that share a measurement: the same kernel, lengths and number of rows within a factor of two."""
    if direction == "fwd":
        problem = replace(problem, deterministic=False)  # the forward is, either way
    # only the total length of packed sequences is known: take their mean
    sequences = max(1, problem.batch) if problem.is_packed else 1
    sizes = {
        "seqlen_q": bucket(problem.seqlen_q // sequences),
        "seqlen_k": bucket(problem.seqlen_k // sequences),
        "rows": min(MANY_ROWS, bucket(num_rows(problem)) or 0),
        "window_left": bucket(problem.mask.window_left),
        "window_right": bucket(problem.mask.window_right),
    }
    lengths = " ".join(f"{name}<={size}" for name, size in sizes.items() if size is not None)
    return f"{direction} {backend}: {compile.summary((problem.static(),))}; {lengths}"


def gpu_name(device: torch.device | None = None) -> str | None:
    """The name of the current GPU, or of the given one; None where there is no GPU."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    return _name_of(torch.cuda.current_device() if device is None or device.index is None else device.index)


@functools.lru_cache(maxsize=64)
def _name_of(index: int) -> str:
    return torch.cuda.get_device_name(index)


# ---------------------------------------------------------------- what a launch uses


def choose(direction: Direction, backend: str, problem: AttentionProblem, arch: str) -> LaunchConfig:
    """The configuration that a call on the current GPU runs with. Raises: as the heuristics."""
    return refined(chooser.chooser(direction, backend).choose(problem, arch), direction, backend, problem, arch)


def refined(
    usual: Config,
    direction: Direction,
    backend: str,
    problem: AttentionProblem,
    arch: str,
    device: torch.device | None = None,
) -> Config:
    """The configuration that a call runs with: the tuned one if there is one, else the heuristics'.

    Args: usual: the heuristics'. device: of the call; None = the current GPU.
    """
    gpu = gpu_name(device)
    if gpu is None or not variables.TUNED.read():
        return usual
    own, shipped = _own().get(gpu, {}), _shipped().get(gpu, {})
    if not own and not shipped:
        return usual
    key = key_of(direction, backend, problem)
    for entries, environment in ((own, _environment()), (shipped, None)):
        entry = entries.get(key)
        if entry is None or environment not in (None, entry.environment):
            continue
        # not its text: one from before a field was added means that field's default
        if _parsed(entry.instead_of, usual) == usual:
            return _usable(entry, usual, problem, arch)
    return usual


def _parsed(text: str, usual: Config) -> Config | None:
    """The configuration of the usual one's type whose text this is; None if it is none."""
    try:
        return type(usual).from_text(text)
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _usable(entry: Entry, usual: Config, problem: AttentionProblem, arch: str) -> Config:
    """The entry's configuration, or the usual one if this problem cannot have it."""
    config = _parsed(entry.config, usual)
    if config is None:
        return usual
    try:
        config.check(problem, arch)
    except UnsupportedError:
        return usual
    return config


def _environment() -> str:
    """The circumstances in which an entry of tuned.json must have been measured, as text."""
    try:
        return compile.environment()
    except importlib.metadata.PackageNotFoundError:
        return "no kernel compiler"


@functools.lru_cache(maxsize=1)
def _shipped() -> Table:
    try:
        return parse(SHIPPED.read_bytes())
    except (OSError, ValueError) as error:
        warnings.warn(f"onepass: {SHIPPED} is not used: {error}", RuntimeWarning, stacklevel=2)
        return {}


@functools.lru_cache(maxsize=1)
def _own() -> Table:
    """This user's, read once; what is wrong with it is said once."""
    try:
        return load(own_path())
    except (OSError, ValueError) as error:
        warnings.warn(f"onepass: tuned configurations are not used: {error}", RuntimeWarning, stacklevel=2)
        return {}


def forget() -> None:
    """Read the files again at the next choice. (Launches that are prepared already keep what they have.)"""
    for cached in (_shipped, _own):
        cached.cache_clear()


# ---------------------------------------------------------------- files


def own_path() -> Path:
    return disk_cache.cache_directory() / FILE


def load(path: Path) -> Table:
    """The entries of the file; none if there is no file.

    Raises: OSError if it, or its directory, may be another user's work. ValueError if it is no such table.
    """
    if not os.path.lexists(path):
        return {}
    try:
        disk_cache.check_owner(path.parent)
        return parse(disk_cache.read_private(path, MOST_BYTES))
    except disk_cache.BrokenEntry as error:
        raise PermissionError(f"{path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(content: bytes) -> Table:
    """Raises: ValueError for what `dump` did not write."""
    try:
        data = json.loads(content)
    except RecursionError:
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"expected tuned configurations in format {FORMAT}")
    try:
        return {gpu: {key: Entry.of(entry) for key, entry in entries.items()} for gpu, entries in data["gpus"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a table of tuned configurations: {error}") from None


def dump(table: Table) -> str:
    gpus = {gpu: {key: vars(entry) for key, entry in sorted(entries.items())} for gpu, entries in table.items()}
    return json.dumps({"format": FORMAT, "gpus": gpus}, indent=1) + "\n"


def save(gpu: str, found: dict[str, Entry], path: Path | None = None) -> Path:
    """Put entries into a table, replacing those with the same keys. Returns: where it is.

    Several processes may do so at a time. A file that cannot be read is replaced.

    Args: path: of a table that is not this user's own (that directory may be anybody's, and is left as it is).
    Raises: OSError if the directory is another user's or cannot be written.
    """
    is_own, path = path is None, path or own_path()
    if is_own:
        disk_cache.make_usable(path.parent)
    lock = path.with_suffix(".lock")
    with disk_cache.exclusive(lock):
        try:
            table = load(path) if is_own else parse(path.read_bytes())
        except (OSError, ValueError):
            table = {}
        table[gpu] = table.get(gpu, {}) | found
        part = path.with_name(f"{path.stem}.{os.getpid()}.part.json")
        try:
            part.write_text(dump(table))
            part.chmod(0o600 if is_own else 0o644)  # whatever the umask is: `load` takes no file that others may write
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        if not is_own:
            lock.unlink(missing_ok=True)
    return path


def clear() -> bool:
    """Remove this user's table. Returns: whether there was one. Raises: OSError if it cannot be removed."""
    path = own_path()
    with contextlib.suppress(FileNotFoundError):
        disk_cache.check_owner(path.parent)
        path.unlink()
        path.with_suffix(".lock").unlink(missing_ok=True)
        return True
    return False
