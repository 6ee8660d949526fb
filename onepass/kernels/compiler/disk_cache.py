"""The files of compiled kernels: where they lie, which of them may be loaded, what there is, and clearing it away.

An entry is a native object file, <key>.o, and <key>.json next to it, which says what it is and holds the object's
SHA-256. Next to them lie <key>.lock and, while it is built, <key>.<pid>.part.o and .part.json.

* No other user may write to the directory: entries are loaded as native code. It is made private (0700); one that is
  there already is taken as it is, or refused, if it is another user's or others may write to it, and its mode is never
  changed: it may serve other ends, too. What lies in it counts only if this user has written it.
* One process builds a key while the others wait for its lock; the lock dies with its process, also where that process
  was forked meanwhile.
* Files appear by atomic rename, the .json last: a build that is killed leaves no entry. An entry that is not what its
  .json says is built again. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ... import variables

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

# A kernel takes 0.1 to 0.5 MB, and its .json a few kB: what is larger is no entry, and is not read into memory.
MOST_BYTES = {".o": 2**26, ".json": 2**20}
BEING_BUILT = "being built"

_lock_files: set[IO[str]] = set()  # that are open, and may be locked

_FILE = re.compile(r"(?P<key>[0-9a-f]{32})\.(?P<kind>o|json|lock|\d+\.part\.(?:o|json))")


class BrokenEntry(Exception):
    """Why an entry is not to be loaded."""


def cache_directory() -> Path:
    """$ONEPASS_CACHE_DIR, or onepass/ in the user's cache directory.

    Raises: OSError if neither is set and there is no home directory; ValueError if one is not understood.
    """
    explicit = variables.CACHE_DIR.read()
    if explicit is not None:
        return explicit
    caches = variables.CACHE_HOME.read()
    if caches is None:
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:  # HOME is not set, and this user has no entry in the system's list
            raise OSError(f"this user has no home directory; {variables.CACHE_DIR.name} can name another one") from None
    return caches / "onepass"


def make_usable(directory: Path) -> None:
    """Make the directory, private, if there is none.

    Raises: OSError if it is another user's, if others may write to it, if it cannot be written, or on a system without
        file locks, such as Windows.
    """
    if fcntl is None:
        raise OSError("this system has no file locks that processes could share a cache by")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(check_owner(directory).st_mode)
    if mode & 0o022:
        raise PermissionError(
            f"{directory}: expected a directory that only this user may write to, got mode {mode:04o}; "
            "name one that does not exist yet, or take the permission away"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory} is not writable")


def check_owner(directory: Path) -> os.stat_result:
    """Raises: OSError if it is not a directory of this user; a link to one is not."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        link = ", but a symbolic link; name the directory that it leads to" if stat.S_ISLNK(status.st_mode) else ""
        raise PermissionError(f"{directory} is not a directory of this user{link}")
    return status


@contextlib.contextmanager
def exclusive(lock: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file; the system gives it back if this process dies.

    Raises: BlockingIOError if another process holds it and `wait` is False.
    """
    while True:
        with open(lock, "a", opener=_open_lock) as file, _closed_after_fork(file):
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # who clears the cache removes the file that was waited for: the lock is the file now under that name
            if _is_at(file.fileno(), lock):
                yield
                return


def _open_lock(path: str, flags: int) -> int:
    """Open a lock file. A link or a pipe of that name, which nobody can hold as a lock, is removed first."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            os.unlink(path)
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def _closed_after_fork(file: IO[str]) -> Iterator[None]:
    """A lock lasts until all processes have closed the file: a child must not hold that of a thread that it has not."""
    _lock_files.add(file)
    try:
        yield
    finally:
        _lock_files.discard(file)


def _after_fork_in_child() -> None:
    while _lock_files:
        _lock_files.pop().close()


if hasattr(os, "register_at_fork"):  # a POSIX system
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def write(entry: Path, export: Callable[[Path], object], about: Callable[[], dict[str, Any]]) -> None:
    """Put an entry in place. The caller holds its lock.

    Args:
        entry: of the .o.
        export: writes the object file to the path that it is given.
        about: what the .json shall say besides key and digest; asked after the export.
    """
    for leftover in entry.parent.glob(f"{entry.stem}.*.part.*"):  # left by a builder that was killed: we hold its lock
        leftover.unlink(missing_ok=True)
    part_o, part_json = (entry.with_name(f"{entry.stem}.{os.getpid()}.part.{kind}") for kind in ("o", "json"))
    try:
        export(part_o)
        digest = hashlib.sha256(part_o.read_bytes()).hexdigest()
        part_json.write_text(json.dumps({**about(), "entry": entry.stem, "sha256": digest}, indent=1))
        for part in (part_o, part_json):
            part.chmod(0o600)  # whatever the umask is: `verify` takes no file that others may write
        os.replace(part_o, entry)
        os.replace(part_json, entry.with_suffix(".json"))
    finally:
        part_o.unlink(missing_ok=True)
        part_json.unlink(missing_ok=True)


def verify(entry: Path) -> dict[str, Any]:
    """The contents of the .json of an entry that may be loaded. Raises: BrokenEntry with the reason."""
    about = _read_json(entry.with_suffix(".json"))
    if about.get("entry") != entry.stem:
        raise BrokenEntry("its .json is another entry's")
    if about.get("sha256") != hashlib.sha256(read_private(entry)).hexdigest():
        raise BrokenEntry("the .o is not what the .json says")
    return about


def _read_json(path: Path) -> dict[str, Any]:
    return parse_about(read_private(path))


def parse_about(content: bytes) -> dict[str, Any]:
    """What a .json says. Raises: BrokenEntry if it is not one that `write` has written."""
    try:
        about = json.loads(content)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or not all(isinstance(value, (str, int, float)) for value in about.values()):
        raise BrokenEntry("its .json cannot be read")
    for name in ("name", "summary", "key", "arch", "environment", "cpu", "entry", "sha256"):
        if not isinstance(about.get(name, ""), str):
            raise BrokenEntry(f"its .json cannot be read: expected text as {name}, got {about[name]!r:.40}")
    return about


def read_private(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a file that this user alone may have written.

    Args: most_bytes: that it may have; None means those of an entry's file.
    Raises: BrokenEntry with the reason.
    """
    try:
        # a pipe is not waited for
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BrokenEntry(f"the {path.suffix} is not a file")
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise BrokenEntry(f"others may have written the {path.suffix}")
            if status.st_size > (most_bytes or MOST_BYTES[path.suffix]):
                raise BrokenEntry(f"the {path.suffix} is too large: {status.st_size} bytes")
            return file.read()
    except FileNotFoundError:
        raise BrokenEntry(f"no {path.suffix}") from None
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else str(error.strerror).lower()
        raise BrokenEntry(f"the {path.suffix} cannot be read: {reason}") from None


# ---------------------------------------------------------------- looking and clearing


@dataclass(frozen=True)
class Entry:
    """The files of the cache under one key.

    Attributes:
        about: what a trustworthy .json says, even if the object is broken; else empty.
        problem: why it is not loaded; "" if it is intact.
        modified: newest file, in seconds since the epoch.
    """

    key: str
    about: dict[str, Any]
    problem: str
    files: tuple[Path, ...]
    size_bytes: int
    modified: float


def entries(directory: Path) -> list[Entry]:
    """All that is there, oldest first; nothing if there is no directory. Raises: OSError if it is another user's."""
    try:
        check_owner(directory)
    except FileNotFoundError:
        return []
    files: dict[str, list[Path]] = {}
    for path in sorted(directory.iterdir()):
        if match := _FILE.fullmatch(path.name):
            files.setdefault(match["key"], []).append(path)
    found = (_entry(directory / f"{key}.o", paths) for key, paths in files.items())
    return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.modified, entry.key))


def _entry(path: Path, files: list[Path]) -> Entry | None:
    sizes, times = [], []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a part that was renamed meanwhile
            status = os.lstat(file)
            sizes.append(status.st_size)
            times.append(status.st_mtime)
    if not times:
        return None
    about: dict[str, Any] = {}
    with contextlib.suppress(BrokenEntry):
        about = _read_json(path.with_suffix(".json"))
    return Entry(path.stem, about, _problem(path, files), tuple(files), sum(sizes), max(times))


def _problem(path: Path, files: list[Path]) -> str:
    lock = path.with_suffix(".lock")
    try:
        if lock in files:
            with exclusive(lock, wait=False):
                pass
    except BlockingIOError:
        return BEING_BUILT
    except OSError:
        return "its .lock is not a file that can be locked"
    kinds = {file.name.removeprefix(f"{path.stem}.") for file in files}
    if not kinds & {"o", "json"}:
        return "unfinished build"
    try:
        verify(path)
    except BrokenEntry as error:
        return str(error)
    return ""


def _remove(entry: Entry, lock: Path) -> None:
    """Remove the files of an entry whose lock is held."""
    # the lock last: who waits for it looks for the file again
    for file in sorted({*entry.files, lock}, key=lambda file: file == lock):
        file.unlink(missing_ok=True)


def clear(directory: Path) -> tuple[list[Entry], list[tuple[Entry, str]]]:
    """Remove what `entries` lists: (removed, kept because they are being built or cannot be removed, with the reason).

    Other files are left alone. Raises: OSError if the directory is another user's.
    """
    removed, kept = [], []
    for entry in entries(directory):
        lock = directory / f"{entry.key}.lock"
        try:
            with exclusive(lock, wait=False):
                _remove(entry, lock)
        except BlockingIOError:
            kept.append((entry, BEING_BUILT))
        except OSError as error:
            file = os.path.basename(error.filename or lock)
            kept.append((entry, f"{file}: {(error.strerror or str(error)).lower()}"))
        else:
            removed.append(entry)
    return removed, kept


# ---------------------------------------------------------------- a limit


def mark_used(entry: Path) -> None:
    """Note that an entry was loaded: entries that were not for the longest time go first."""
    with contextlib.suppress(OSError):
        os.utime(entry)


def prune(directory: Path, limit: int, keep: str) -> list[Entry]:
    """Remove what was not used for the longest time, until the cache is not larger than the limit.

    Args: keep: the key of an entry that stays, whatever its size is. Returns: what was removed.
    """
    found = entries(directory)
    total = sum(entry.size_bytes for entry in found)
    removed = []
    for entry in found:
        if total <= limit:
            break
        if entry.key == keep:
            continue
        lock = directory / f"{entry.key}.lock"
        with contextlib.suppress(OSError), exclusive(lock, wait=False):
            _remove(entry, lock)
            total -= entry.size_bytes
            removed.append(entry)
    return removed
