"""Ranks as threads of this process: checks of numbers and errors need no processes.

    thread 0   lookup ----+                 +---- rows         Each thread has a communicator of its
                          +-- a meeting of --+                 own, an initial seed, and Keras names
    thread 1   lookup ----+   the same name +---- rows         from the beginning.

What only processes show (starting, dying, files of several hosts, sessions side by side) stays in
tests/ranks.py.
"""

from __future__ import annotations

import contextvars
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm

LIMIT = 120.0  # seconds, for hangs alone
_lines = itertools.count(1)


class Left(Exception):
    """A rank that others wait for has ended or stays away."""


class Meetings:
    """Where ranks meet, by the name of a collective and how often it was called."""

    def __init__(self, ranks: int):
        self.ranks, self.values = ranks, {}
        self.changed, self.ended = threading.Condition(), False

    def meet(self, rank: int, key: tuple, value: Any) -> list:
        """The values of all ranks, in rank order, once all of them are there."""
        with self.changed:
            values = self.values.setdefault(key, {})
            values[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(values) == self.ranks or self.ended, LIMIT)
            if len(values) < self.ranks:
                missing = sorted({*range(self.ranks)} - {*values})
                why = "one has ended" if self.ended else f"for {LIMIT} s"
                raise Left(f"rank {rank} waits in {key} for ranks {missing}: {why}")
            self.values.pop(key, None)  # by the first that leaves; the others hold `values`
            return [values[r] for r in range(self.ranks)]


class MemoryCommunicator(comm.Communicator):
    """The `Communicator` of one thread among others.

    In a `tf.function` a waiting rank takes one of TensorFlow's threads between ops.
    """

    def __init__(self, rank: int, meetings: Meetings, line: int):
        self.rank, self.world_size, self.line = rank, meetings.ranks, line
        self.local_rank, self.local_size = rank, meetings.ranks
        self._meetings, self._calls, self._groups = meetings, Counter(), {}

    def subset(self, groups):
        groups = tuple(map(tuple, groups))
        meetings = {group: Meetings(len(group)) for group in groups}
        shared = self._all(("groups", groups), meetings)[0]
        (mine,) = (group for group in groups if self.rank in group)
        if mine not in self._groups:
            self._groups[mine] = MemoryCommunicator(mine.index(self.rank), shared[mine], self.line)
        return comm.SingleProcess() if len(mine) == 1 else self._groups[mine]

    def all_to_all(self, tensor, splits, name):
        def exchange(values, lengths):
            blocks = np.split(values, np.cumsum(lengths)[:-1])
            received = [blocks_of[self.rank] for blocks_of in self._all(name, blocks)]
            return np.concatenate(received), np.array(list(map(len, received)), np.int32)

        received, lengths = _run(exchange, [tensor, splits], [tensor.dtype, tf.int32])
        received = tf.ensure_shape(received, [None, *tensor.shape[1:]])
        return received, tf.ensure_shape(lengths, [self.world_size])

    def mean(self, tensors, name):
        sums = [self.sum(tensor, f"{name}{i}") for i, tensor in enumerate(tensors)]
        return [total / tf.cast(self.world_size, total.dtype) for total in sums]

    def broadcast(self, tensor, root_rank, name):
        return self._of_all(tensor, name, lambda values: values[root_rank])

    def all_gather(self, tensor, name):
        return self._of_all(tensor, name, np.concatenate, [None, *tensor.shape[1:]])

    def sum(self, tensor, name):
        return self._of_all(tensor, name, lambda values: sum(values[1:], values[0]))

    def reduce_scatter(self, tensor, name):
        def part(values):
            return np.array_split(sum(values[1:], values[0]), self.world_size)[self.rank]

        return self._of_all(tensor, name, part, [None, *tensor.shape[1:]])

    def barrier(self):
        self._all("barrier", None)

    def _of_all(self, tensor, name, function, shape=None):
        def run(value):
            return np.asarray(function(self._all(name, value)), value.dtype)

        tensor = tf.convert_to_tensor(tensor)
        (result,) = _run(run, [tensor], [tensor.dtype])
        return tf.ensure_shape(result, tensor.shape if shape is None else shape)

    def _all(self, name, value):
        self._calls[name] += 1
        return self._meetings.meet(self.rank, (name, self._calls[name]), value)


def _run(function, inputs, dtypes):
    if tf.executing_eagerly():
        results = function(*(tf.convert_to_tensor(value).numpy() for value in inputs))
        results = results if isinstance(results, tuple) else (results,)
        return [tf.constant(result) for result in results]
    return tf.numpy_function(function, inputs, dtypes)


def run(ranks: int, function: Callable[[], Any]) -> list:
    """What `function` returns, or the exception that it raises, on each rank."""
    meetings, results = Meetings(ranks), [None] * ranks

    def work(rank):
        try:
            comm.set_of_thread(MemoryCommunicator(rank, meetings, lines[rank]))
            results[rank] = function()
        except BaseException as error:
            results[rank] = error
            with meetings.changed:
                meetings.ended = True
                meetings.changed.notify_all()

    lines = [next(_lines) for _ in range(ranks)]
    threads = [
        threading.Thread(target=contextvars.Context().run, args=(work, rank), daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def raised(function: Callable) -> tuple[str, str] | None:
    """The class and text of what `function` raises; None."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def exchanges_in(function: Callable) -> int:
    """Exchanges in the graph of a function of int64 keys `[num_keys]`.

    Not those in loops, which run for messages beyond the transport's limit only.
    """
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    functions = [f for f in graph._functions.values() if hasattr(f, "graph")]
    bodies = r"while_(\d+_)?body"
    graphs = [graph, *(f.graph for f in functions if not re.search(bodies, f.graph.name))]
    nodes = {op.name for g in graphs for op in g.get_operations() if op.type == "SokCheckMessage"}
    return len(nodes)
