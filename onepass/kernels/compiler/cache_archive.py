"""The cache in one file: compiled kernels for other machines with the same versions, such as containers.

A GPU is not needed to compile. Kernels compiled on an x86-64 CPU run on every other one; elsewhere the CPU of the
machine that imports must have the features of the one that compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

from . import compile, cpu, disk_cache

# What an archive may have: its names are read into memory all at once, and of entries only those whose files are apart.
_MOST_MEMBERS = 50_000
_MOST_BYTES = 2**30
_MOST_NAME_BYTES = 2**16
_NAME = re.compile(r"(?P<key>[0-9a-f]{32})\.(?P<kind>o|json)")


class Imported(NamedTuple):
    """Keys of the entries of an archive: what was added, what was there, and what was not added, with the reason."""

    added: list[str]
    present: list[str]
    broken: dict[str, str]


def export_entries(directory: Path, file: Path) -> list[disk_cache.Entry]:
    """Write all intact entries into an archive, if there are any. Returns: these.

    Args: file: a name that ends in .xz makes a tar archive compressed by xz, any other name one compressed by gzip.
        Kernels are much alike, and xz looks farther back: of 2990 kernels, 346 MB, it makes 52 MB, and gzip 97 MB.

    Raises: OSError if the directory is another user's, or the archive cannot be written.
    """
    intact = [entry for entry in disk_cache.entries(directory) if not entry.problem]
    written = []
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        archive = _new_archive(part, file.suffix == ".xz")
    except tarfile.CompressionError as error:
        raise OSError(f"{file}: {error}") from None  # this Python was built without xz
    try:
        with archive:
            for entry in intact:
                names = [f"{entry.key}.{kind}" for kind in ("o", "json")]
                try:
                    contents = [disk_cache.read_private(directory / name) for name in names]
                except disk_cache.BrokenEntry:  # it was removed meanwhile
                    continue
                for name, content in zip(names, contents, strict=True):
                    about = tarfile.TarInfo(name)
                    about.size, about.mtime = len(content), int(entry.modified)
                    archive.addfile(about, io.BytesIO(content))
                written.append(entry)
        if written:
            part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return written


def _new_archive(file: Path, is_xz: bool) -> tarfile.TarFile:
    """An archive at a path where nothing lies, neither a file nor a link. Raises: FileExistsError if something does."""
    # the dictionary of this preset, 2 MiB, holds about 18 kernels
    return tarfile.open(file, "x:xz", preset=2) if is_xz else tarfile.open(file, "x:gz")


def import_entries(directory: Path, file: Path) -> Imported:
    """Put the entries of an archive into the cache. Entries that are there and intact stay as they are.

    The objects are machine code that this user's processes will run: import only archives you trust. Names in an
    archive that are not those of entries are left alone, and nothing is written outside of the directory. An entry that
    another CPU compiled gets the key that it has on this one, or is refused if this one has fewer features.

    Raises: OSError if the archive cannot be read, or the cache cannot be used; ValueError if it is no archive, or one
        without entries.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file}: expected an archive of onepass cache export, got no file")
    found = Imported([], [], {})
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(tarfile.open(file, "r:*", tarinfo=_Member))
            members = _members(archive)
        except Exception as error:  # whatever its reader stumbles over: an archive may hold anything
            reason = str(error) or type(error).__name__
            raise ValueError(f"{file}: expected an archive of onepass cache export, got {reason}") from None
        if not members:
            raise ValueError(f"{file}: expected an archive of onepass cache export, got one without compiled kernels")
        disk_cache.make_usable(directory)
        halves: dict[str, dict[str, bytes]] = {}  # of entries whose other file comes later
        for (key, kind), member in members.items():  # in the order of the archive: going back in one takes long
            if key in found.broken:
                continue
            files = halves.pop(key, {})
            try:
                files[kind] = _content(archive, member)
                if files.keys() == {"o", "json"}:
                    _add(directory, key, files, found)
                elif sum(len(content) for half in halves.values() for content in half.values()) > _MOST_BYTES:
                    raise disk_cache.BrokenEntry("its files are too far apart")
                else:
                    halves[key] = files
            except disk_cache.BrokenEntry as error:
                found.broken[key] = str(error)
    for key, files in halves.items():
        found.broken[key] = f"the archive has only its {', '.join(files)}"
    return found


class _Member(tarfile.TarInfo):
    """A member of an archive. A header that claims more bytes than a name has is refused before it is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        is_plain = member.type in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
        if not is_plain and member.size > _MOST_NAME_BYTES:
            raise tarfile.ReadError(f"a header of {member.size} bytes")
        return member


def _members(archive: tarfile.TarFile) -> dict[tuple[str, str], tarfile.TarInfo]:
    """The files of entries, by key and kind. The whole archive is read, so that a part of one adds nothing."""
    found: dict[tuple[str, str], tarfile.TarInfo] = {}
    for count, member in enumerate(archive):
        if count == _MOST_MEMBERS:
            raise ValueError(f"more than {_MOST_MEMBERS} files")
        match = _NAME.fullmatch(member.name)
        if match and member.isfile():
            found[match["key"], match["kind"]] = member
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    suffix = Path(member.name).suffix
    if member.size > disk_cache.MOST_BYTES[suffix]:
        raise disk_cache.BrokenEntry(f"the {suffix} is too large: {member.size} bytes")
    try:
        stream = archive.extractfile(member)
        content = stream.read() if stream is not None else b""
    except Exception as error:  # as above
        raise disk_cache.BrokenEntry(f"the {suffix} cannot be read: {str(error) or type(error).__name__}") from None
    if len(content) != member.size:
        raise disk_cache.BrokenEntry(f"the {suffix} ends early")
    return content


def _add(directory: Path, key: str, files: dict[str, bytes], found: Imported) -> None:
    """Add an entry to the cache, unless it is there. Raises: BrokenEntry with the reason why it cannot be added."""
    about = _about(key, files)
    key = _key_here(key, about)
    entry = directory / f"{key}.o"
    with disk_cache.exclusive(entry.with_suffix(".lock")):
        with contextlib.suppress(disk_cache.BrokenEntry):
            disk_cache.verify(entry)
            found.present.append(key)
            return
        _put(entry, files["o"], about)
        found.added.append(key)


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
    """An archive's facts about an entry, without what `disk_cache.write` adds. Raises: BrokenEntry with the reason."""
    about: dict[str, Any] = {}
    with contextlib.suppress(disk_cache.BrokenEntry):
        about = disk_cache.parse_about(files["json"])
    if about.get("entry") != key:
        raise disk_cache.BrokenEntry("its .json cannot be read, or is another entry's")
    if about.get("sha256") != hashlib.sha256(files["o"]).hexdigest():
        raise disk_cache.BrokenEntry("the .o is not what the .json says")
    return {name: value for name, value in about.items() if name not in ("entry", "sha256")}
