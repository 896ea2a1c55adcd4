"""A table's content in parts: from a table into files, and from files into staged content.

An op gives the table a number (`EmbeddingVariable.register_for_read`). With this number, functions
of the op library are called by ctypes, because Python code within a graph has no tensors. So a dump
or a restore needs only a few parts of memory beside the table, whatever its size.

While a table is read, calls that change it wait, so all parts are of one instant. In host memory,
lookups that insert nothing go on. With `beside` all calls go on (`TableReader` of
cpp/core/table.h).
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sok_like.runtime.native import libraries
from sok_like.table.content import BY_KEY, TableShard, unread

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _StreamContent(ctypes.Structure):
    """`StreamContent` of cpp/tf/streams.cc."""

    _fields_ = [
        *((name, _INT64) for name in (
            *("num_keys", "slot_width", "num_slots", "has_records", "num_waiting"),
            *("num_counters", "step", "optimizer_step", "num_erased", "whole", "num_steps"),
        )),
        ("initial_row_scale", ctypes.c_double),
        ("slot_names", ctypes.POINTER(ctypes.c_char_p)),
        *((name, _POINTER) for name in ("slot_widths", "waiting", "counters", "erased", "steps")),
        ("optimizer", ctypes.c_char_p),
    ]  # fmt: skip


# Kinds of arguments and results, as in Python's module `struct`; "z" is a string.
_KIND = {"q": _INT64, "P": _POINTER, "?": ctypes.c_bool, "d": ctypes.c_double, "z": ctypes.c_char_p}
_FUNCTIONS = {
    "sok_stream_open": "qq?PP>z",
    "sok_stream_about": "PP>z",
    "sok_stream_keys": "PqP>z",
    "sok_stream_rows": "PqPqPPP>z",
    "sok_stream_hurry": "P>",
    "sok_stream_close": "P>",
    "sok_aside_open": "qqP>z",
    "sok_aside_import": "PqPPPqPPPqPqPqqd>z",
    "sok_aside_keep": "P>q",
    "sok_aside_drop": "q>",
    "sok_aside_close": "P>",
}


@functools.cache
def _library():
    library = libraries.functions()
    for name, kinds in _FUNCTIONS.items():
        arguments, _, result = kinds.partition(">")
        function = getattr(library, name)
        function.argtypes = [_KIND[kind] for kind in arguments]
        function.restype = _KIND.get(result)
    return library


def see_problem(problem: bytes | None) -> None:
    """Raises the problem that an op or a function reported instead of failing by itself."""
    code, _, text = (problem or b"").decode().partition(": ")
    if code == "RESOURCE_EXHAUSTED":
        raise MemoryError(text)
    if code:
        raise ValueError(text)


class TableReader:
    """The content of a table at this instant, or what changed until then."""

    # With `since`, it is what changed since that instant (0: everything, and changes are recorded
    # from now on). With `beside`, calls that change the table go on; there is no other such stream.

    def __init__(self, number: int, since: int | None = None, beside: bool = False):
        self._closing, self._library, self._since = threading.Lock(), _library(), since
        self._stream = _POINTER()
        instant, after = _INT64(), -1 if since is None else int(since)
        opened = ctypes.byref(self._stream), ctypes.byref(instant)
        see_problem(self._library.sok_stream_open(int(number), after, beside, *opened))
        self.instant = instant.value

    def shard(self, dim: int) -> TableShard:
        """The content, as a shard that is read while it is written; called once."""
        library, stream, about = self._library, self._stream, self._about()

        def read(num_rows):
            for begin in range(0, about.num_keys, num_rows):
                n = min(num_rows, about.num_keys - begin)
                arrays = {
                    name: np.empty([n, *array.shape[1:]], array.dtype)
                    for name, array in shard.by_key().items()
                }
                keys = _address(arrays["keys"])
                see_problem(library.sok_stream_keys(stream, n, keys))
                others = (arrays.get(name) for name in BY_KEY[1:])
                wanted = [_address(a) if a is not None and a.size else None for a in others]
                see_problem(library.sok_stream_rows(stream, begin, keys, n, *wanted))
                yield arrays

        shard = TableShard(
            unread((about.num_keys,), np.int64),
            unread((about.num_keys, dim), np.float32),
            unread((about.num_keys, about.slot_width), np.float32),
            [about.slot_names[i].decode() for i in range(about.num_slots)],
            _copied(about.slot_widths, [about.num_slots], np.int64).tolist(),
            unread((about.num_keys, 3), np.int64) if about.has_records else None,
            _copied(about.waiting, [about.num_waiting, 3], np.int64),
            _copied(about.counters, [about.num_counters], np.int64),
            np.int64(about.step if about.has_records else -1),
            about.optimizer_step,
            about.initial_row_scale,
            read=read,
        )
        if self._since is not None:
            shard.erased = _copied(about.erased, [about.num_erased], np.int64)
            shard.whole, shard.optimizer = bool(about.whole), about.optimizer.decode()
            shard.steps = _copied(about.steps, [about.num_steps, 3], np.float64)
        return shard

    def keys(self) -> np.ndarray:
        """All keys, int64 `[num_keys]`, in place of `shard`."""
        keys = np.empty(self._about().num_keys, np.int64)
        see_problem(self._library.sok_stream_keys(self._stream, len(keys), keys.ctypes.data))
        return keys

    def _about(self):
        about = _StreamContent()
        see_problem(self._library.sok_stream_about(self._stream, ctypes.byref(about)))
        return about

    def hurry(self) -> None:
        """A stream beside training takes as much time as it can get; any thread may call it."""
        with self._closing:
            if self._stream:
                self._library.sok_stream_hurry(self._stream)

    def close(self) -> None:
        """Lets calls that change the table go on."""
        with self._closing:  # Python takes no signal between these lines
            stream, self._stream = self._stream, _POINTER()
            if stream:
                self._library.sok_stream_close(stream)

    def __del__(self):
        if getattr(self, "_stream", None):  # Ctrl-C came before somebody had it who would close it
            self.close()


@contextlib.contextmanager
def content(number: int, dim: int, since: int | None = None) -> Iterator[tuple[TableShard, int]]:
    """The shard and the instant of a `TableReader`, while the table stands still."""
    with contextlib.closing(TableReader(number, since)) as stream:
        yield stream.shard(dim), stream.instant


def stage_parts(number: int, rest: TableShard, num_keys: int, parts: Iterable[TableShard]) -> int:
    """Stages this content; the op of `stage` takes it by its number. `rest` belongs to no key."""
    library, staged = _library(), _POINTER()
    see_problem(library.sok_aside_open(int(number), num_keys, ctypes.byref(staged)))
    try:
        for part in _ahead(parts):
            _import(library, staged, part)
        _import(library, staged, rest)
        return library.sok_aside_keep(staged)
    finally:
        library.sok_aside_close(staged)


def drop_staged(number: int) -> None:
    """Frees what `stage_parts` made, if it will not be taken."""
    _library().sok_aside_drop(number)


def _ahead(items):
    """The items; the next one is made on a thread while the present one is used."""
    items = iter(items)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        coming = threads.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = threads.submit(next, items, None)
            yield item


def _import(library, staged, shard):
    names = [name.encode() for name in shard.slot_names]
    as_int64 = functools.partial(np.ascontiguousarray, dtype=np.int64)
    arrays: list[Any] = [
        *(as_int64(shard.keys), np.ascontiguousarray(shard.rows, np.float32)),
        *(np.ascontiguousarray(shard.slot_rows, np.float32), as_int64(shard.slot_widths)),
        None if shard.records is None else as_int64(shard.records),
        *(as_int64(shard.waiting), as_int64(shard.counters)),
    ]
    keys, rows, slot_rows, widths, records, waiting, counters = map(_address, arrays)
    see_problem(
        library.sok_aside_import(
            *(staged, len(shard.keys), keys, rows, slot_rows),
            *(len(names), (ctypes.c_char_p * len(names))(*names), widths, records),
            *(len(shard.waiting), waiting, len(shard.counters), counters),
            *(shard.step, shard.optimizer_step, shard.initial_row_scale),
        )
    )


def _address(array):
    return None if array is None else array.ctypes.data


def _copied(address, shape, dtype):
    array = np.zeros(shape, dtype)
    if array.nbytes:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
    return array
