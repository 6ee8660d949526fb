"""The cache in one file, and its size limit."""

import io
import json
import os
import tarfile

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
