"""The cache in one file: compiled kernels for other machines with the same versions, such as containers.

A GPU is not needed to compile. The CPU of the machine that imports must have the features of the one that compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

from . import compile, cpu, disk_cache

try:
    from lzma import LZMAError
except ImportError:  # this Python was built without it, and tarfile says so
    LZMAError = EOFError  # type: ignore[assignment, misc]

_NAME = re.compile(r"(?P<key>[0-9a-f]{32})\.(?P<kind>o|json)")


class Imported(NamedTuple):
    """Keys of the entries of an archive: what was added, what was there, and what was not added, with the reason."""

    added: list[str]
    present: list[str]
    broken: dict[str, str]


def export_entries(directory: Path, file: Path) -> list[disk_cache.Entry]:
    """Write all intact entries into an archive. Returns: these.

    Args: file: a name that ends in .xz makes a tar archive compressed by xz, any other name one compressed by gzip.
        Kernels are much alike, and xz looks farther back: of 2990 kernels, 346 MB, it makes 52 MB, and gzip 97 MB.

    Raises: OSError if the directory is another user's, or the archive cannot be written.
    """
    intact = [entry for entry in disk_cache.entries(directory) if not entry.problem]
    part = file.with_name(f"{file.name}.part")
    try:
        with _new_archive(part, file.suffix == ".xz") as archive:
            for entry in intact:
                for kind in ("o", "json"):
                    content = disk_cache.read_private(directory / f"{entry.key}.{kind}")
                    about = tarfile.TarInfo(f"{entry.key}.{kind}")
                    about.size, about.mtime = len(content), int(entry.modified)
                    archive.addfile(about, io.BytesIO(content))
        part.replace(file)
    except tarfile.CompressionError as error:
        raise OSError(f"{file}: {error}") from None  # this Python was built without xz
    finally:
        part.unlink(missing_ok=True)
    return intact


def _new_archive(file: Path, is_xz: bool) -> tarfile.TarFile:
    # the dictionary of this preset, 2 MiB, holds about 18 kernels
    return tarfile.open(file, "w:xz", preset=2) if is_xz else tarfile.open(file, "w:gz")


def import_entries(directory: Path, file: Path) -> Imported:
    """Put the entries of an archive into the cache. Entries that are there and intact stay as they are.

    The objects are machine code that this user's processes will run: import archives of people you trust. Names in an
    archive that are not those of entries are left alone, and nothing is written outside of the directory. An entry that
    another CPU compiled gets the key that it has on this one, or is refused if this one has fewer features.

    Raises: OSError if the archive cannot be read, or the cache cannot be used; ValueError if it is no archive.
    """
    contents: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(file, "r:*") as archive:
            for member in archive:
                match = _NAME.fullmatch(member.name)
                stream = archive.extractfile(member) if match and member.isfile() else None
                if match and stream is not None:
                    contents.setdefault(match["key"], {})[match["kind"]] = stream.read()
    except (tarfile.TarError, LZMAError, EOFError) as error:
        raise ValueError(f"{file}: expected an archive of onepass cache export, got {error}") from None
    disk_cache.make_usable(directory)
    found = Imported([], [], {})
    for key, files in contents.items():
        try:
            about = _about(key, files)
            key = _key_here(key, about)
            entry = directory / f"{key}.o"
            with disk_cache.exclusive(entry.with_suffix(".lock")):
                with contextlib.suppress(disk_cache.BrokenEntry):
                    disk_cache.verify(entry)
                    found.present.append(key)
                    continue
                _put(entry, files["o"], about)
                found.added.append(key)
        except disk_cache.BrokenEntry as error:
            found.broken[key] = str(error)
    return found


def _put(entry: Path, content: bytes, about: dict[str, Any]) -> None:
    disk_cache.write(entry, lambda path: path.write_bytes(content), lambda: about)


def _key_here(key: str, about: dict[str, Any]) -> str:
    """The key of an entry on this machine. Raises: BrokenEntry if this CPU cannot run its host code."""
    if lacking := cpu.missing(about.get("cpu", "")):
        raise disk_cache.BrokenEntry(
            f"it was compiled for a CPU with features that this one lacks: {', '.join(lacking)}"
        )
    described = [about[name] for name in ("name", "key", "arch", "environment") if isinstance(about.get(name), str)]
    return compile.entry_key(*described) if len(described) == 4 else key


def _about(key: str, files: dict[str, bytes]) -> dict[str, Any]:
    """What an archive says of an entry, without what `disk_cache.write` adds. Raises: BrokenEntry with the reason."""
    if set(files) != {"o", "json"}:
        raise disk_cache.BrokenEntry(f"the archive has only its {', '.join(files)}")
    try:
        about = json.loads(files["json"])
    except ValueError:
        about = None
    if not isinstance(about, dict) or about.get("entry") != key:
        raise disk_cache.BrokenEntry("its .json cannot be read, or is another entry's")
    if about.get("sha256") != hashlib.sha256(files["o"]).hexdigest():
        raise disk_cache.BrokenEntry("the .o is not what the .json says")
    return {name: value for name, value in about.items() if name not in ("entry", "sha256")}
