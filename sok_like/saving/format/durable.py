"""The only place where saving touches a file system: files appear whole, and errors name the file.

    with durable.written("FOLDER/items.json") as file:    # FOLDER/items.json.tmp
        file.write(data)
    # flushed to the disk, renamed, and the folder flushed; if anything failed, the file before

A path is a `str` or an `os.PathLike`. Without a scheme, and with `file://`, it is local and handled
by `os`. With another scheme (`ram://`, `gs://`) it is handled by `tf.io.gfile`, which keeps no
promise beyond those of that file system: an object store has no flush, and a rename may be a copy.
A scheme that TensorFlow has no file system for raises ValueError before anything is created.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sok_like.runtime.checks import unmet as wrong

ASIDE = ".tmp"  # the end of the names of files that are being written
_CHUNK = 2**24  # bytes copied at a time
_LARGE = 2**26  # bytes of a file whose removal takes milliseconds
_NOT_FOUND, _UNIMPLEMENTED = 5, 12  # codes of errors of TensorFlow
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")

Path = str | os.PathLike


def local(path: Path) -> str | None:
    """The path as `os` takes it; None if `tf.io.gfile` must handle it."""
    path = os.fspath(path)
    scheme = _SCHEME.match(path)
    if scheme is None:
        return path
    if not scheme[2]:
        required = "be a str with '://', which pathlib.Path shortens to ':/'"
        raise wrong("A path with a scheme", required, repr(path))
    # As TensorFlow does: what stands between the second and the third slash is a host.
    return re.sub("^file://[^/]*", "", path) if scheme[1] == "file" else None


def join(folder: Path, *names: str) -> str:
    """The path of a file in a folder."""
    return os.path.join(os.fspath(folder), *names)


def exists(path: Path) -> bool:
    """Whether there is a file or a folder."""
    return _by(path, os.path.exists, lambda gfile, at: gfile.exists(at))


def is_folder(path: Path) -> bool:
    """Whether there is a folder."""
    return _by(path, os.path.isdir, lambda gfile, at: gfile.isdir(at))


def size(path: Path) -> int:
    """Bytes of a file; raises FileNotFoundError if it is missing."""
    return _by(path, os.path.getsize, lambda gfile, at: gfile.stat(at).length)


def modified(path: Path) -> float:
    """When a file was written, in seconds since 1970."""
    return _by(path, os.path.getmtime, lambda gfile, at: gfile.stat(at).mtime_nsec / 1e9)


def names(folder: Path) -> list[str]:
    """Names of the files and folders in a folder, sorted; none if there is no such folder."""
    # TensorFlow's `listdir` calls a folder missing, too, if it has no file system for the scheme.
    if not exists(folder) or not is_folder(folder):
        return []
    listed = _by(folder, os.listdir, lambda gfile, at: gfile.listdir(at))
    return sorted(name.rstrip("/") for name in listed)  # object stores mark folders by "/"


def files_below(folder: Path) -> Iterator[str]:
    """The paths of all files in a folder and in those within it."""
    for name in names(folder):
        path = join(folder, name)
        if is_folder(path):
            yield from files_below(path)
        else:
            yield path


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, unless it is there."""
    _by(path, lambda at: os.makedirs(at, exist_ok=True), lambda gfile, at: gfile.makedirs(at))


def remove(path: Path) -> None:
    """Removes a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        _by(path, _unlink, lambda gfile, at: gfile.remove(at))


def _unlink(path):
    # Freeing the blocks of a large file takes longer than all else that the end of a dump does. It
    # happens when the last descriptor is closed, so a thread does that.
    descriptor = None
    if os.lstat(path).st_size >= _LARGE:
        with contextlib.suppress(OSError):  # it may be removed by whom it cannot be read
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.unlink(path)
    finally:
        if descriptor is not None:
            try:
                threading.Thread(target=os.close, args=[descriptor]).start()
            except RuntimeError:  # no thread can begin: the interpreter ends
                os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Removes a folder with its content if it is there; a link to a folder raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        _by(path, shutil.rmtree, lambda gfile, at: gfile.rmtree(at))


def rename(aside: Path, path: Path) -> None:
    """Gives a flushed file, or a folder, its final name at once, for good; replaces a file."""
    _by(
        path,
        lambda at: os.replace(local(aside) or aside, at),
        lambda gfile, at: gfile.rename(os.fspath(aside), at, overwrite=True),
    )

    def sync(at):
        opened = os.open(at, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    # So that the new name survives a power failure.
    _by(os.path.dirname(os.fspath(path)) or ".", sync, lambda gfile, at: None)


def rename_all(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Gives files that belong together their names: all, or after an exception all or none."""
    # The last one's old file goes first: a process that is killed leaves no mixture with it.
    last = pairs[-1][1]
    try:
        remove(last)
        for aside, path in pairs:
            rename(aside, path)
    except BaseException:
        for aside, path in [] if exists(last) else pairs:
            if exists(aside):
                rename(aside, path)
        raise


def open_to_read(path: Path) -> Any:
    """A binary file to read and to seek in, without a buffer."""

    def opened(gfile, at):
        file = gfile.GFile(at, "rb")
        file.seek(0)  # else it is opened, and found missing, at the first read
        return file

    return _by(path, lambda at: open(at, "rb", buffering=0), opened)


def read_into(path: Path, at: int, buffer: Any) -> None:
    """Fills a writable buffer with the bytes of a file from position `at` on."""
    left = memoryview(buffer)
    if not left.nbytes:  # such a view cannot be cast
        return
    left = left.cast("B")
    with _naming(path), open_to_read(path) as file:
        file.seek(at)
        while len(left):
            if local(path) is not None:
                count = file.readinto(left)
            else:
                data = file.read(min(len(left), _CHUNK))
                count = len(data)
                left[:count] = data
            if not count:
                raise ValueError(f"{os.fspath(path)} ends at byte {file.tell()} now")
            left = left[count:]


def read(path: Path, at: int = 0, num_bytes: int | None = None) -> bytes:
    """Bytes of a file from position `at` on; by default all of them."""
    data = bytearray(size(path) - at if num_bytes is None else num_bytes)
    read_into(path, at, data)
    return bytes(data)


def chunks(path: Path) -> Iterator[bytes]:
    """All bytes of a file, some MiB at a time."""
    num_bytes = size(path)
    for at in range(0, num_bytes, _CHUNK):
        yield read(path, at, min(_CHUNK, num_bytes - at))


@contextlib.contextmanager
def written(path: Path) -> Iterator[Any]:
    """A local binary file without a buffer; it replaces the one at `path` when the block ends."""
    # Until then its name ends with `ASIDE`; if the block raises, it is removed. For other file
    # systems it is temporary, and its bytes are copied when the block ends.
    there = os.fspath(path) + ASIDE
    place = local(there)
    try:
        with _naming(path):
            if place is not None:
                with open(place, "w+b", buffering=0) as file:
                    yield file
                    os.fsync(file.fileno())
            else:
                with tempfile.TemporaryFile(buffering=0) as file:
                    yield file
                    file.seek(0)
                    with _gfile().GFile(there, "wb") as target:
                        target.write(b"")  # else an empty file would not be made
                        while data := file.read(_CHUNK):
                            target.write(data)
        rename(there, path)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            remove(there)
        raise


def begin_flush(file: Any, at: int, num_bytes: int) -> None:
    """A hint that lets the disk begin with bytes of a file, so that its end is short (Linux)."""
    if _sync_file_range is not None:
        _sync_file_range(file.fileno(), at, num_bytes, 2)  # SYNC_FILE_RANGE_WRITE


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint


def write(path: Path, data: bytes) -> None:
    """Writes a whole small file, as `written` does."""
    with written(path) as file:
        write_all(file, data)


def write_all(file: Any, data: Any) -> None:
    """Writes bytes or an array into a file without a buffer, which may take less at a time."""
    left = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while left:
        left = left[file.write(left) :]


@contextlib.contextmanager
def explaining(table: str, path: Path | None = None) -> Iterator[None]:
    """A scope whose OSErrors name the table whose dump has failed."""
    try:
        yield
    except OSError as error:
        text = f"{error.strerror} (dump of table '{table}')"
        raise OSError(error.errno, text, error.filename or path) from error


def _by(path: Path, on_disk: Callable[[str], Any], elsewhere: Callable[[Any, str], Any]) -> Any:
    """Calls the function for the path's file system."""
    place = local(path)
    with _naming(path):
        if place is not None:
            return on_disk(place)
        return elsewhere(_gfile(), os.fspath(path))


def _gfile():
    # Local files need no TensorFlow, and those who read them need not wait for its import.
    import tensorflow as tf

    return tf.io.gfile


@contextlib.contextmanager
def _naming(path):
    """Errors of `os` that name no file get the path's name; those of TensorFlow become such."""
    there = os.fspath(path)
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EIO
        raise OSError(number, error.strerror or str(error), there) from error
    except Exception as error:
        code = getattr(error, "error_code", None) if local(path) is None else None
        if code is None:
            raise
        if code == _UNIMPLEMENTED:
            raise ValueError(
                "A path must be on a file system that TensorFlow can read and write. Received: "
                f"{there!r}, and no file system is registered for '{there.partition('://')[0]}'"
            ) from error
        number = errno.ENOENT if code == _NOT_FOUND else errno.EIO
        raise OSError(number, str(error) or os.strerror(number), there) from error
