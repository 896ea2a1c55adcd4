"""Files appear whole or not at all, on the local disk and where TensorFlow writes."""

import errno
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from sok_like.saving.format import durable


@pytest.fixture(params=["os", "ram", "gfile"])
def folder(request, tmp_path, monkeypatch):
    """A folder of the local disk, one in memory, and one of the disk written by TensorFlow."""
    if request.param == "os":
        return f"{tmp_path}/new"
    if request.param == "gfile":
        local = durable.local
        monkeypatch.setattr(
            durable, "local", lambda path: None if "file://" in str(path) else local(path)
        )
        return f"file://{tmp_path}/new"
    return f"ram://{tmp_path.name}/new"


def test_a_file_is_written_read_listed_and_removed(folder):
    path = durable.join(folder, "a.bin")
    assert durable.names(folder) == [] and not durable.exists(path)
    durable.make_folder(folder)
    durable.make_folder(folder)
    durable.write(path, b"first")
    durable.write(path, b"0123456789")
    assert durable.names(folder) == ["a.bin"] and durable.is_folder(folder)
    assert (durable.size(path), durable.read(path), durable.read(path, 7, 2)) == (
        *(10, b"0123456789"),
        b"78",
    )
    with durable.open_to_read(path) as file:
        file.seek(-2, os.SEEK_END)
        assert file.read(5) == b"89"
    with pytest.raises(ValueError, match=r"a\.bin ends at byte 10"):
        durable.read(path, 5, 6)
    durable.rename(path, durable.join(folder, "b.bin"))
    assert durable.names(folder) == ["b.bin"]
    durable.remove(path)
    durable.remove(durable.join(folder, "b.bin"))
    assert durable.names(folder) == []
    durable.remove_folder(folder)
    durable.remove_folder(folder)
    assert not durable.exists(folder)


def test_a_thread_frees_the_blocks_of_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_LARGE", 4)
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda fd: closed.append((threading.current_thread(), fd)))
    path, link = tmp_path / "large", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    durable.remove(link)
    assert path.exists() and not link.is_symlink()
    durable.remove(path)
    assert not path.exists()
    ((thread, fd),) = closed
    thread.join()
    assert thread is not threading.current_thread() and os.fstat(fd).st_nlink == 0
    close(fd)


def test_a_large_file_is_removed_where_no_thread_can_begin(tmp_path, monkeypatch):
    """As at the end of the interpreter."""

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(durable, "_LARGE", 4)
    monkeypatch.setattr(threading.Thread, "start", start)
    before = os.listdir("/proc/self/fd")
    (tmp_path / "large").write_bytes(b"12345")
    durable.remove(tmp_path / "large")
    assert os.listdir(tmp_path) == [] and len(os.listdir("/proc/self/fd")) == len(before)


def test_a_missing_file_raises_as_on_the_disk(folder):
    path = durable.join(folder, "none")
    for call in (durable.size, durable.read, durable.open_to_read):
        with pytest.raises(FileNotFoundError) as raised:
            call(path)
        assert raised.value.filename == path


def test_a_failure_leaves_the_file_before(folder):
    path = durable.join(folder, "a.bin")
    durable.make_folder(folder)
    durable.write(path, b"before")
    with pytest.raises(OSError, match="full") as raised, durable.written(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "full")
    assert raised.value.filename == path and raised.value.errno == errno.ENOSPC
    with pytest.raises(KeyboardInterrupt), durable.written(path) as file:
        raise KeyboardInterrupt
    assert durable.names(folder) == ["a.bin"] and durable.read(path) == b"before"


def test_what_is_written_can_be_read_before_it_has_its_name(folder):
    path = durable.join(folder, "a.bin")
    durable.make_folder(folder)
    with durable.written(path) as file:
        file.write(b"0123")
        assert os.pread(file.fileno(), 2, 1) == b"12"
        os.pwrite(file.fileno(), b"x", 3)
        assert not durable.exists(path)
    assert durable.read(path) == b"012x"


@pytest.mark.parametrize("scheme", ["s3", "hdfs", "nowhere"])
def test_a_scheme_without_a_file_system_is_named(scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = f"{scheme}://bucket/model"
    calls = [durable.exists, durable.names, durable.make_folder, durable.read, durable.remove]
    for call in [*calls, lambda path: durable.write(path, b"x")]:
        with pytest.raises(ValueError, match=f"'{scheme}://bucket/model.*for '{scheme}'"):
            call(path)
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_that_pathlib_has_shortened_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a str with '://'.*'gs:/bucket/model'"):
        durable.make_folder(pathlib.Path("gs://bucket/model"))
    assert list(tmp_path.iterdir()) == []


def test_file_uris_are_local_and_other_names_are_no_uris():
    assert durable.local("file:///a/b") == durable.local("file://localhost/a/b") == "/a/b"
    for name in ("a/b", "/a:b", "a:b/c", "C:/a", pathlib.Path("/a/b")):
        assert durable.local(name) == os.fspath(name)
    assert durable.local("ram://a") is None


def test_local_files_need_no_tensorflow(tmp_path):
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('durable', {durable.__file__!r})\n"
        "durable = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(durable)\n"
        f"durable.write({str(tmp_path / 'a')!r}, b'1')\n"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "a").read_bytes() == b"1"
