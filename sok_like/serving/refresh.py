"""The graph of a SavedModel that can be refreshed: stock ops only.

    sequence   | 2n | 2n+1, while delta n is being copied | 2n+2 |
    lookup     read sequence | compute | read sequence     equal and even: one version
                                                           else: once more, holding the lock
    refresh    read the delta | lock | check | odd | copy | even | unlock

So the answer of a signature is always that of one version, weights and tables alike. A reader waits
only if a delta was copied meanwhile, and then for at most the rest of the copy. The delta's file is
read and checked before, which disturbs nobody.

A copy that is cut off (a cancelled call) leaves the sequence odd. Lookups then raise until the same
delta is copied again.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.lookup.stock_table import seldom

_NAME = r"\w[\w.=-]*"  # of a file, without a folder
VERSIONS = "versions"  # in a delta: the version that it builds on, and the one that it makes


class Update(NamedTuple):
    """A variable of the served model, and the names of the tensors of a delta that change it."""

    variable: tf.Variable
    value: str  # its new value, or some of its rows
    at: str | None = None  # the positions of these rows; None: all are new


def is_plain_name(name: str) -> bool:
    """Whether a delta may have this name."""
    return re.fullmatch(_NAME, name, re.ASCII) is not None


class ServedState(tf.Module):
    """What a served model knows of its version, which is at first that of the SavedModel."""

    def __init__(self, version: str):
        super().__init__(name="served")
        self._lock_name = f"sok_refresh_{version}"
        with tf.device("/CPU:0"):
            self.sequence = tf.Variable(0, trainable=False, dtype=tf.int64, name="sequence")
            # The present version, and the one of the last delta that was begun.
            self.versions = tf.Variable([version, version], trainable=False, name="versions")

    def of_one_version(self, function: Any) -> Callable:
        """A concrete function of tensors by name, whose results are those of one version."""

        def served(**tensors):
            before = self.sequence.read_value()
            results, after = self._then_sequence([before], function, tensors)
            names = sorted(results)

            @seldom
            def again():
                lock = self._lock()
                text = "A refresh was cut off while it changed the model. It must be repeated."
                sequence = _after([lock], self.sequence.read_value)
                is_even = tf.debugging.Assert(tf.equal(sequence % 2, 0), [text])
                results, last = self._then_sequence([is_even], function, tensors)
                done = _after([last], lambda: tf.raw_ops.ConsumeMutexLock(mutex_lock=lock))
                return _after([done], lambda: [tf.identity(results[name]) for name in names])

            is_one = tf.equal(before, after) & tf.equal(before % 2, 0)
            values = tf.cond(is_one, lambda: [results[name] for name in names], again)
            return dict(zip(names, values, strict=True))

        return served

    def _then_sequence(self, before, function, tensors):
        """The function's results, after other ops, and the sequence after the results."""
        results = _after(before, lambda: function(**tensors))
        return results, _after(list(results.values()), self.sequence.read_value)

    def refresh(self, folder: str, updates: Sequence[Update]) -> Any:
        """The function of the signature `refresh`: takes a delta's name, returns its version."""
        dtypes = {value: variable.dtype for variable, value, _ in updates}
        dtypes |= {at: tf.dtypes.int64 for *_, at in updates if at is not None}

        @tf.function(input_signature=[tf.TensorSpec([], tf.string, "delta")], autograph=False)
        def refresh(delta):
            plain = tf.debugging.Assert(
                tf.strings.regex_full_match(delta, _NAME),
                ["`delta` must be the name of a file, without a folder. Received:", delta],
            )
            prefix = _after([plain], lambda: tf.strings.join([folder, "/", delta]))
            (versions,) = _restored(prefix, {VERSIONS: tf.string})
            versions.set_shape([2])
            # Checked first, so that a delta of another model is called so, and again with the lock.
            fits = self._check(delta, versions)
            tensors = _after([fits], lambda: _restored(prefix, dtypes))
            lock = _after(tensors, self._lock)
            fits = _after([lock], lambda: self._check(delta, versions))
            now = _after([fits], lambda: self.versions.read_value()[0])
            begun = _assign(self.versions, [now, versions[1]])
            odd = _after([begun], lambda: tf.bitwise.bitwise_or(self.sequence.read_value(), 1))
            begun = _assign(self.sequence, odd)
            of_delta = dict(zip(dtypes, tensors, strict=True))
            copied = _after([begun], lambda: _copy(updates, of_delta))
            named = _after(copied, lambda: _assign(self.versions, [versions[1], versions[1]]))
            even = _after([named], lambda: _assign(self.sequence, odd + 1))
            done = _after([even], lambda: tf.raw_ops.ConsumeMutexLock(mutex_lock=lock))
            return {"version": _after([done], lambda: tf.identity(versions[1]))}

        return refresh

    def _lock(self):
        mutex = tf.raw_ops.MutexV2(shared_name=self._lock_name)
        return tf.raw_ops.MutexLock(mutex=mutex)

    def _check(self, delta, versions):
        now = self.versions.read_value()
        was_cut = tf.equal(self.sequence.read_value() % 2, 1)
        fits = tf.where(was_cut, tf.equal(versions[1], now[1]), tf.equal(versions[0], now[0]))
        text = ["A delta must build on the version of the served model,", now[0], ". Received:"]
        return tf.debugging.Assert(fits, [*text, delta, "which builds on", versions[0]])


def _after(ops, make):
    """What `make` makes of ops that run after these."""
    with tf.control_dependencies(ops):
        return make()


def _restored(prefix, dtypes):
    """Tensors of a delta, whose checksums TensorFlow compares."""
    names = list(dtypes)
    return tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        dtypes=list(dtypes.values()),
    )


def _copy(updates, tensors):
    scatter = tf.raw_ops.ResourceScatterUpdate
    return [
        _assign(variable, tensors[value])
        if at is None
        else scatter(resource=variable.handle, indices=tensors[at], updates=tensors[value])
        for variable, value, at in updates
    ]


def _assign(variable, value):
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
