"""`sok.Saver`: whole tables to files and back, on any number of ranks.

Each rank writes the part it holds; on the way back each rank reads all parts and keeps the keys it
owns, so a dump of 4 ranks loads on 1, 3 or 64. `sok_like/table/dump_file.py` describes the files.
Both directions are collective: every rank calls, in the same order, and a failure on one rank is
raised on all of them, before anything was replaced.
"""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.table import dump_file, sok1_dump
from sok_like.table.export_assign import assign
from sok_like.table.keys import as_rows
from sok_like.table.variable import is_embedding_variable, unwrap


class Saver:
    """Dumps tables with their optimizer state, and restores them at any world size.

    Works eagerly; in a `tf.compat.v1` graph the methods return an op to be run.
    """

    def dump_to_file(self, embedding_variable: Any, filepath: str) -> tf.Tensor:
        """Writes keys, rows and slot rows of one instant into folder `filepath`.

        Of a table with policies also what it knows of its keys; GlobalStepEvict and L2WeightEvict
        are carried out first, as by `embedding_variable.evict()`.

        With several hosts the folder must be on a file system they share. The dump before it in
        the same folder stays whole until this one is.

        Args:
            embedding_variable: EmbeddingVariable.
            filepath: Folder; made where it is missing.

        Returns:
            `'OK'`.

        Raises:
            TypeError: `embedding_variable` is not an EmbeddingVariable, or rows are not real
                numbers.
            ValueError: no tensor at all.
            RuntimeError: a rank could not write; on all ranks, naming it (in a graph
                `tf.errors.UnknownError`).
        """
        variable, folder = _checked(embedding_variable), os.fspath(filepath)
        communicator = comm.current()
        rank, world_size = communicator.rank, communicator.world_size
        table, name = variable.table_name, f"sok_dump_{variable.table_name}"
        dump_id = communicator.broadcast(tf.constant(secrets.randbits(62)), 0, f"{name}_id")

        def file_of(number, rank):
            return dump_file.shard_name(table, f"{int(number):016x}", rank, world_size)

        def write_mine(number, keys, rows, slot_rows, slot_names, slot_widths, *policy):
            names = [text.decode() for text in slot_names]
            shard = dump_file.Shard(keys, rows, slot_rows, names, slot_widths.tolist(), *policy)
            dump_file.write_shard(folder, file_of(number, rank), shard)

        def write_manifest(number):
            if rank == 0:
                shards = [file_of(number, r) for r in range(world_size)]
                key_dtype = variable.key_dtype.name
                dump_file.write_manifest(folder, table, variable.dim, key_dtype, shards)

        problem = _run(write_mine, [dump_id, *variable.snapshot(evict=True)])
        with _after(_raise_on_all(communicator, problem, f"{name}_shards")):
            problem = _run(write_manifest, [dump_id])
        with _after(_raise_on_all(communicator, problem, f"{name}_manifest")):
            return tf.constant("OK")

    def restore_from_file(self, embedding_variable: Any, filepath: str) -> tf.Tensor:
        """Replaces the table's content by the dump in folder `filepath`.

        Args:
            embedding_variable: EmbeddingVariable of the name and row width that was dumped.
            filepath: Folder. A dump of SOK 1.x is read as well, from its folder or from the path of
                its file of keys: see `sok_like/table/sok1_dump.py`.

        Returns:
            `'OK'`.

        Raises:
            TypeError: `embedding_variable` is not an EmbeddingVariable, or rows are not real
                numbers.
            ValueError: no tensor at all.
            RuntimeError: no dump, a damaged file, another row width; on all ranks, naming the rank
                and the file (in a graph `tf.errors.UnknownError`). The table is as it was.
            tf.errors.ResourceExhaustedError: the table cannot hold that many keys.
        """
        variable, folder = _checked(embedding_variable), os.fspath(filepath)
        communicator = comm.current()
        dim, name = variable.dim, f"sok_restore_{variable.table_name}"

        def read_mine():
            files = _dump_of(variable, folder)
            mine = dump_file.owned_by(
                # One file at a time: only the part that is kept stays in memory.
                [
                    _kept(number, len(files), file, communicator, dim)
                    for number, file in enumerate(files)
                ],
                communicator.rank,
                communicator.world_size,
                dim,
            )
            names = np.asarray([text.encode() for text in mine.slot_names], dtype=object)
            widths = np.asarray(mine.slot_widths, np.int64)
            fields = (mine.keys, mine.rows, mine.slot_rows, names, widths)
            records = np.zeros([0, 3], np.int64) if mine.records is None else mine.records
            return *fields, records, mine.waiting, mine.counters, np.int64(mine.step)

        dtypes = [tf.int64, tf.float32, tf.float32, tf.string, tf.int64, *[tf.int64] * 4]
        problem, *fields = _run(read_mine, [], dtypes)
        with _after(_raise_on_all(communicator, problem, name)):
            load = variable.load_snapshot(*fields)
        with _after([load]):
            return tf.constant("OK")

    def load_embedding_values(self, embedding_variable: Any, tensors: Sequence[Any]) -> Any:
        """Writes rows of a dense table: row i becomes the row of key i.

        Args:
            embedding_variable: EmbeddingVariable.
            tensors: A tensor `[num_rows, embedding_dim]`, or a list of such, one after the other.
                The same on all ranks; each takes the keys it owns.

        Returns:
            `'OK'`.

        Raises:
            TypeError: `embedding_variable` is not an EmbeddingVariable, or rows are not real
                numbers.
            ValueError: no tensor at all.
            tf.errors.InvalidArgumentError: rows of another width.
        """
        variable = _checked(embedding_variable)
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        if not tensors:
            raise ValueError(
                "`tensors` must hold at least one tensor. "
                f"Received: tensors=[] (table '{variable.table_name}')"
            )
        parts = [as_rows(tensor, "tensors", variable.table_name) for tensor in tensors]
        rows = tf.concat(parts, axis=0)
        keys = tf.range(tf.shape(rows, tf.int64)[0], dtype=tf.int64)
        with _after([assign(variable, keys, rows)]):
            return tf.constant("OK")


def _checked(variable):
    if not is_embedding_variable(variable):
        raise TypeError(
            f"`embedding_variable` must be an EmbeddingVariable. Received: {variable!r}"
        )
    return unwrap(variable)


def _dump_of(variable, folder):
    """The files of the table's dump: of this package, or where there is none, of SOK 1.x."""
    try:
        return dump_file.read_manifest(folder, variable.table_name, variable.dim)
    except FileNotFoundError:
        old = sok1_dump.find(folder, variable.table_name, variable.key_dtype.as_numpy_dtype)
        if old is None or any(pathlib.Path(folder).glob("*.json")):
            raise
        return [old]


def _kept(number, num_files, file, communicator, dim):
    old = isinstance(file, sok1_dump.Sok1Dump)
    shard = file.read(0, dim) if old else dump_file.read_shard(file, dim)
    if num_files == communicator.world_size and number != communicator.rank:
        # Every rank takes back its own Bloom filter, as it was.
        shard.counters = shard.counters[:0]
    return dump_file.owned_by([shard], communicator.rank, communicator.world_size, dim)


def _run(function: Callable, inputs: Sequence[Any], output_dtypes: Sequence[Any] = ()) -> Any:
    """Runs Python code in the graph; an exception becomes the first output, as bytes.

    A rank that raised by itself would leave the others waiting in the next collective.
    """

    def guarded(*arguments):
        try:
            results = function(*arguments) or ()
            return (np.zeros([0], np.uint8), *results)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            blanks = [_blank(dtype) for dtype in output_dtypes]
            return (np.frombuffer(text, np.uint8), *blanks)

    outputs = tf.numpy_function(guarded, list(inputs), [tf.uint8, *output_dtypes])
    # TF returns one output by itself when eager, in a list in a graph.
    outputs = [outputs] if tf.is_tensor(outputs) else list(outputs)
    outputs[0].set_shape([None])
    return outputs if output_dtypes else outputs[0]


def _blank(dtype):
    return np.zeros([0], object if dtype == tf.string else dtype.as_numpy_dtype)


def _raise_on_all(communicator, problem, name):
    """Ops after which either no rank has a problem, or every rank raises the first one's."""
    lengths = communicator.all_gather(tf.shape(problem), f"{name}_lengths")
    texts = communicator.all_gather(problem, f"{name}_texts")

    def check(lengths, texts):
        begin = 0
        for rank, length in enumerate(lengths):
            if length:
                text = bytes(texts[begin : begin + length]).decode(errors="replace")
                raise RuntimeError(f"rank {rank}: {text}")
            begin += length
        return np.int32(0)

    return [tf.numpy_function(check, [lengths, texts], tf.int32)]


def _after(ops):
    if tf.executing_eagerly():
        ops = []  # has happened
    return tf.control_dependencies([op for op in ops if isinstance(op, (tf.Tensor, tf.Operation))])
