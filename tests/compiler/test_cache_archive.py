"""The cache in one file, and its size limit."""

import contextlib
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import zlib

import pytest
from typer.testing import CliRunner

from onepass.cli.app import app
from onepass.kernels.compiler import cache_archive, compile, cpu, disk_cache


def put(directory, key, size, used):
    """An entry that was used at a time."""
    disk_cache.make_usable(directory)
    entry = directory / f"{key}.o"
    disk_cache.write(entry, lambda path: path.write_bytes(key.encode()[:1] * size), lambda: {"name": "forward"})
    for path in (entry, entry.with_suffix(".json")):
        os.utime(path, (used, used))


KEYS = ["a1" * 16, "b2" * 16, "c3" * 16]


@pytest.fixture
def cache(tmp_path):
    directory = tmp_path / "cache"
    for used, key in enumerate(KEYS):
        put(directory, key, 5000, 1000 + used)
    return directory


def keys(directory):
    return [entry.key for entry in disk_cache.entries(directory)]


@pytest.mark.parametrize(("suffix", "magic"), [("gz", b"\x1f\x8b"), ("xz", b"\xfd7zXZ")])
def test_there_and_back(cache, tmp_path, suffix, magic):
    (cache / f"{KEYS[1]}.o").write_bytes(b"broken")
    file, other = tmp_path / f"kernels.tar.{suffix}", tmp_path / "other"
    assert [entry.key for entry in cache_archive.export_entries(cache, file)] == [KEYS[0], KEYS[2]]
    assert list(tmp_path.glob("*.part")) == []
    assert file.read_bytes().startswith(magic)
    found = cache_archive.import_entries(other, file)
    assert (found.added, found.present, found.broken) == ([KEYS[0], KEYS[2]], [], {})
    assert disk_cache.verify(other / f"{KEYS[0]}.o")["name"] == "forward"
    assert (other / f"{KEYS[0]}.o").read_bytes() == (cache / f"{KEYS[0]}.o").read_bytes()
    assert cache_archive.import_entries(other, file).present == [KEYS[0], KEYS[2]]
    assert found.added == [KEYS[0], KEYS[2]]


def test_an_export_leaves_what_lies_where_it_writes_alone(cache, tmp_path):
    file, victim = tmp_path / "kernels.tar.gz", tmp_path / "victim"
    own, link = (tmp_path / f"{file.name}.{suffix}" for suffix in ("part", f"{os.getpid()}.part"))
    own.write_text("the user's")
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        cache_archive.export_entries(cache, file)
    link.unlink()
    cache_archive.export_entries(cache, file)
    assert own.read_text() == "the user's"
    assert not victim.exists()


def add(archive, name, content):
    about = tarfile.TarInfo(name)
    about.size = len(content)
    archive.addfile(about, io.BytesIO(content))


def test_what_is_broken_is_not_added(cache, tmp_path):
    file = tmp_path / "kernels.tar.gz"
    good = json.loads((cache / f"{KEYS[0]}.json").read_text())
    with tarfile.open(file, "w:gz") as archive:
        add(archive, f"{KEYS[0]}.json", json.dumps(good).encode())
        add(archive, f"{KEYS[0]}.o", b"another object")
        add(archive, f"{KEYS[1]}.o", b"alone")
        add(archive, f"{KEYS[2]}.json", b"[]")
        add(archive, f"{KEYS[2]}.o", b"code")
        add(archive, "../outside.o", b"code")
        add(archive, "notes.txt", b"text")
    found = cache_archive.import_entries(tmp_path / "other", file)
    assert found.added == []
    assert found.broken == {
        KEYS[0]: "the .o is not what the .json says",
        KEYS[1]: "the archive has only its o",
        KEYS[2]: "its .json cannot be read, or is another entry's",
    }
    assert not (tmp_path / "outside.o").exists()
    assert not keys(tmp_path / "other")
    broken = [b"no archive"]
    for whole in (tmp_path / "whole.tar.xz", tmp_path / "whole.tar.gz"):
        cache_archive.export_entries(cache, whole)
        broken.append(whole.read_bytes()[:200])  # of 430 and more
    for content in broken:
        file.write_bytes(content)
        with pytest.raises(ValueError, match="expected an archive of onepass cache export"):
            cache_archive.import_entries(tmp_path / "other", file)


def test_a_python_without_xz_says_so(cache, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise tarfile.CompressionError("lzma module is not available")

    monkeypatch.setattr(tarfile, "open", refuse)
    with pytest.raises(OSError, match=r"kernels.tar.xz: lzma module is not available"):
        cache_archive.export_entries(cache, tmp_path / "kernels.tar.xz")


KERNEL = ("forward", "(('head_dim', 64),)", "sm_90a", "these versions")


@pytest.fixture
def archive_of_another_cpu(tmp_path, monkeypatch):
    """An archive with one entry, compiled on a CPU with avx and avx2, and the entry's key there."""
    directory, file = tmp_path / "there", tmp_path / "kernels.tar.gz"
    monkeypatch.setattr(cpu, "features", lambda: "avx avx2 x86_64")
    key = compile.entry_key(*KERNEL)
    about = dict(zip(("name", "key", "arch", "environment"), KERNEL, strict=True)) | {"cpu": cpu.features()}
    disk_cache.make_usable(directory)
    disk_cache.write(directory / f"{key}.o", lambda path: path.write_bytes(b"code"), lambda: about)
    cache_archive.export_entries(directory, file)
    return file, key


def test_kernels_of_another_cpu_run_on_one_with_more_features(archive_of_another_cpu, tmp_path, monkeypatch):
    file, key_there = archive_of_another_cpu
    monkeypatch.setattr(cpu, "features", lambda: "amx avx avx2 x86_64")
    key = compile.entry_key(*KERNEL)
    assert key != key_there
    found = cache_archive.import_entries(tmp_path / "here", file)
    assert (found.added, found.present, found.broken) == ([key], [], {})
    assert keys(tmp_path / "here") == [key]
    assert disk_cache.verify(tmp_path / "here" / f"{key}.o")["cpu"] == "avx avx2 x86_64"
    assert cache_archive.import_entries(tmp_path / "here", file).present == [key]
    # what was imported can be carried on, to a CPU like the first one
    cache_archive.export_entries(tmp_path / "here", file)
    monkeypatch.setattr(cpu, "features", lambda: "avx avx2 x86_64")
    assert cache_archive.import_entries(tmp_path / "back", file).added == [key_there]


def test_kernels_of_another_cpu_are_refused_on_one_with_fewer_features(archive_of_another_cpu, tmp_path, monkeypatch):
    file, key_there = archive_of_another_cpu
    monkeypatch.setattr(cpu, "features", lambda: "amx avx x86_64")
    found = cache_archive.import_entries(tmp_path / "here", file)
    assert found.broken == {key_there: "it was compiled for a CPU with features that this one lacks: avx2"}
    assert (found.added, keys(tmp_path / "here")) == ([], [])


def test_commands(cache, tmp_path, monkeypatch):
    file = tmp_path / "kernels.tar.gz"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(cache))
    result = CliRunner().invoke(app, ["cache", "export", str(file)])
    assert (result.exit_code, "entries written" in result.output) == (0, True)
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "other"))
    assert CliRunner().invoke(app, ["cache", "export", str(tmp_path / "none.tar.gz")]).exit_code == 1
    result = CliRunner().invoke(app, ["cache", "import", str(file)])
    assert (result.exit_code, "entries added: 3, there before: 0" in result.output) == (0, True)
    assert CliRunner().invoke(app, ["cache", "import", str(tmp_path / "absent")]).exit_code == 1


def test_an_import_that_leaves_one_out_fails(cache, tmp_path, monkeypatch):
    file = tmp_path / "kernels.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for key in KEYS[:2]:
            add(archive, f"{key}.json", (cache / f"{key}.json").read_bytes())
        add(archive, f"{KEYS[0]}.o", (cache / f"{KEYS[0]}.o").read_bytes())
        add(archive, f"{KEYS[1]}.o", b"another object")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "other"))
    result = CliRunner().invoke(app, ["cache", "import", str(file)])
    assert result.exit_code == 1
    assert "entries added: 1, there before: 0" in result.output
    assert f"not added {KEYS[1][:8]}: the .o is not what the .json says" in result.output


def test_an_archive_that_was_packed_anew_has_its_files_in_any_order(cache, tmp_path):
    file = tmp_path / "kernels.tar.gz"
    names = [f"{key}.{kind}" for kind in ("json", "o") for key in KEYS]
    with tarfile.open(file, "w:gz") as archive:
        for name in names:
            add(archive, name, (cache / name).read_bytes())
    assert cache_archive.import_entries(tmp_path / "other", file).added == KEYS


def gnu_sparse(name, size):
    """The header of a file of this size without any data, of an extended form."""
    member = tarfile.TarInfo(name)
    member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": name}
    member.pax_headers |= {"GNU.sparse.size": str(size), "GNU.sparse.map": f"{size},0"}
    return member


def pax_bomb():
    """A header of 20 TB before a file."""
    member = tarfile.TarInfo("bomb")
    member.type, member.size = tarfile.XHDTYPE, 20 * 10**12
    return member.tobuf(tarfile.GNU_FORMAT) + b"1" * 512


def hostile_archives(good):
    """Contents of files that no export wrote, by name."""
    whole = gzip.decompress(good)
    foreign = io.BytesIO()
    with tarfile.open(fileobj=foreign, mode="w:gz") as archive:
        add(archive, "notes.txt", b"text")
    deflate = zlib.compressobj(wbits=31)
    large = io.BytesIO()  # its header is read before what is garbled
    with tarfile.open(fileobj=large, mode="w") as archive:
        add(archive, f"{KEYS[0]}.o", random.Random(0).randbytes(2**19))
    garbled = deflate.compress(large.getvalue()[: 2**18]) + deflate.flush(zlib.Z_SYNC_FLUSH) + b"\xff" * 20
    return {
        "empty": b"",
        "text": b"no archive",
        "garbled deflate": garbled,
        "garbled xz": lzma.compress(whole)[:100] + bytes(100),
        "garbled numbers": gzip.compress(whole[:124] + b"zzzzzzzzzzz" + whole[135:]),
        "cut": good[: len(good) // 2],
        "foreign": foreign.getvalue(),
        "no members": gzip.compress(bytes(10240)),
        "pax bomb": gzip.compress(pax_bomb()),
    }


HOSTILE = (
    "empty",
    "text",
    "garbled deflate",
    "garbled xz",
    "garbled numbers",
    "cut",
    "foreign",
    "no members",
    "pax bomb",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_archive_is_refused_in_words(cache, tmp_path, monkeypatch, name):
    file = tmp_path / "\x1b[31mkernels.tar.gz"
    cache_archive.export_entries(cache, file)
    file.write_bytes(hostile_archives(file.read_bytes())[name])
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "other"))
    result = CliRunner().invoke(app, ["cache", "import", str(file)])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert "expected an archive of onepass cache export, got" in result.output
    assert "\x1b" not in result.output
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["o", "json"])
def test_a_file_too_large_for_memory_is_not_read(cache, tmp_path, kind):
    file = tmp_path / "kernels.tar.gz"
    other = {"o": "json", "json": "o"}[kind]
    with tarfile.open(file, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(gnu_sparse(f"{KEYS[0]}.{kind}", 20 * 10**12))
        add(archive, f"{KEYS[0]}.{other}", (cache / f"{KEYS[0]}.{other}").read_bytes())
        for last in ("o", "json"):
            add(archive, f"{KEYS[1]}.{last}", (cache / f"{KEYS[1]}.{last}").read_bytes())
    found = cache_archive.import_entries(tmp_path / "other", file)
    assert found.broken == {KEYS[0]: f"the .{kind} is too large: {20 * 10**12} bytes"}
    assert found.added == [KEYS[1]]


ODD_JSON = [b"null", b"[]", b"5", b"[" * 200_000, b'{"a":' * 100_000, b"\xff", b"", b'{"name": null}', b'{"cpu": 5}']
ODD_JSON += [
    b'{"cpu": ["avx"]}',
    b'{"summary": [1]}',
    b'{"compile_s": {}}',
    b'{"entry": 1e999}',
    b"1" * 5000,
    b" " * 2**21,
]


@pytest.mark.parametrize("content", ODD_JSON, ids=lambda content: repr(content[:20]))
def test_a_json_may_hold_anything(cache, tmp_path, monkeypatch, content):
    """In an archive, and in the cache, which is listed, used and cleared in spite of it."""
    with contextlib.suppress(ValueError, RecursionError):  # with what belongs to the entry, what is odd has to do
        about = json.loads(content)
        if isinstance(about, dict):
            content = json.dumps(json.loads((cache / f"{KEYS[0]}.json").read_text()) | about).encode()
    file = tmp_path / "kernels.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        add(archive, f"{KEYS[0]}.json", content)
        add(archive, f"{KEYS[0]}.o", (cache / f"{KEYS[0]}.o").read_bytes())
    assert list(cache_archive.import_entries(tmp_path / "other", file).broken) == [KEYS[0]]
    (cache / f"{KEYS[0]}.json").write_bytes(content)
    with pytest.raises(disk_cache.BrokenEntry, match=r"\.json"):
        disk_cache.verify(cache / f"{KEYS[0]}.o")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(cache))
    result = CliRunner().invoke(app, ["cache"])
    assert (result.exit_code, "entries: 3" in result.output) == (0, True), result.output
    assert CliRunner().invoke(app, ["cache", "clear", "--yes"]).exit_code == 0
    assert list(cache.iterdir()) == []


def make_fifo(path):
    os.mkfifo(path)


def make_link(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["o", "json", "lock"])
@pytest.mark.parametrize("make", [make_fifo, make_link, os.mkdir])
def test_a_cache_may_hold_anything(cache, monkeypatch, kind, make):
    path = cache / f"{KEYS[0]}.{kind}"
    path.unlink(missing_ok=True)
    make(path)
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(cache))
    result = CliRunner().invoke(app, ["cache"])
    assert (result.exit_code, "entries: 3" in result.output) == (0, True), result.output
    if kind != "lock":
        with pytest.raises(disk_cache.BrokenEntry, match=kind):
            disk_cache.verify(cache / f"{KEYS[0]}.o")
    result = CliRunner().invoke(app, ["cache", "clear", "--yes"])
    is_kept = make is os.mkdir
    assert (result.exit_code, f"kept {KEYS[0][:8]}" in result.output) == (int(is_kept), is_kept), result.output
    assert ("entries removed: 2" if is_kept else "entries removed: 3") in result.output
    assert path.exists() == is_kept


def test_a_file_of_the_cache_too_large_for_memory_is_not_read(cache):
    for kind in ("o", "json"):
        with open(cache / f"{KEYS[0]}.{kind}", "r+b") as file:
            file.truncate(2**33)
        with pytest.raises(disk_cache.BrokenEntry, match=f"the .{kind} is too large: {2**33} bytes"):
            disk_cache.read_private(cache / f"{KEYS[0]}.{kind}")


def test_escape_sequences_do_not_reach_the_terminal(cache, monkeypatch):
    path = cache / f"{KEYS[0]}.json"
    odd = "\x1b[2J\x9b31m\r[red]:key:\u202e"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": odd, "summary": odd, "arch": odd}))
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "300")
    output = CliRunner().invoke(app, ["cache"]).output
    assert not {"\x1b", "\x9b", "\r", "\u202e"} & set(output)
    assert output.count(r"\x1b[2J\x9b31m\r[red]:key:\u202e") == 3


@pytest.mark.parametrize("name", [".", "", "..", "/", "folder", "/dev/null", "notes.txt/kernels.tar.gz"])
def test_an_archive_is_a_file(cache, tmp_path, monkeypatch, name):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(cache))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("text")
    for command in ("export", "import"):
        result = CliRunner().invoke(app, ["cache", command, name])
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.exception
        assert "onepass: expected a" in result.output
    assert os.path.exists("/dev/null")
    assert not os.path.isfile("/dev/null")


def test_nothing_is_written_where_there_is_nothing_to_export(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "none"))
    file = tmp_path / "kernels.tar.gz"
    file.write_text("of yesterday")
    result = CliRunner().invoke(app, ["cache", "export", str(file)])
    assert (result.exit_code, "nothing was written" in result.output) == (1, True)
    assert file.read_text() == "of yesterday"


def test_a_link_to_a_cache_is_refused_as_one(cache, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(cache)
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(link))
    result = CliRunner().invoke(app, ["cache"])
    assert result.exit_code == 1
    assert "a symbolic link; name the directory that it leads to" in result.output
    path = cache / f"{KEYS[0]}.o"
    path.rename(cache / "elsewhere")
    path.symlink_to(cache / "elsewhere")
    with pytest.raises(disk_cache.BrokenEntry, match="it is a symbolic link"):
        disk_cache.verify(path)


def test_the_limit_removes_what_was_not_used_for_the_longest_time(cache):
    size = disk_cache.entries(cache)[0].size_bytes
    disk_cache.mark_used(cache / f"{KEYS[0]}.o")
    assert disk_cache.prune(cache, 3 * size, keep=KEYS[2]) == []
    assert [entry.key for entry in disk_cache.prune(cache, 2 * size, keep=KEYS[2])] == [KEYS[1]]
    assert [entry.key for entry in disk_cache.prune(cache, 1, keep=KEYS[2])] == [KEYS[0]]
    assert keys(cache) == [KEYS[2]]
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".o"]


def test_entries_that_are_being_built_stay(cache):
    with disk_cache.exclusive(cache / f"{KEYS[0]}.lock"):
        assert [entry.key for entry in disk_cache.prune(cache, 0, keep=KEYS[1])] == [KEYS[2]]
    assert set(keys(cache)) == {KEYS[0], KEYS[1]}
