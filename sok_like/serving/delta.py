"""`sok.export_delta`: what has changed in a model since its export, for servers that follow.

    every rank   agree | read its changes | place its keys | write its rows | agree | forget them
    rank 0                                                   | write the rest | merge |

What the exporter knows of the servers changes last, when all ranks have agreed that the delta is
written. So after an error the next call writes what this one should have written.
"""

import dataclasses
import functools
import os
import secrets
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.lookup.buckets import SLOTS, NoRoom, Placement
from sok_like.lookup.stock_rows import decay_of
from sok_like.lookup.stock_table import StockTables, encoded
from sok_like.runtime.checks import unmet, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none, check_same
from sok_like.saving.format import durable
from sok_like.serving import parts
from sok_like.serving.parts import Parts, Rows, Slice, key_of
from sok_like.serving.refresh import VERSIONS, Update, is_plain_name
from sok_like.serving.tables import ServedTable, to_ranks
from sok_like.table import table_reader
from sok_like.table.content import TableShard
from sok_like.table.variable import EmbeddingVariable

NEARLY_FULL = 0.9  # of the room for keys: from here on a full export is due
_DECAYS = "decays"  # in a delta


@dataclasses.dataclass(eq=False)
class Followed:
    """The last refreshable export of a model."""

    stock: StockTables
    tables: list[ServedTable]
    # Those that the served model has. `export_saved_model` sets them.
    spread: Any = None  # a pair, SpreadVariables and these names
    # On rank 0, by the name of the tensor.
    dense: dict[str, tf.Variable] = dataclasses.field(default_factory=dict)
    number: int = 0  # of deltas
    version: str = dataclasses.field(default_factory=lambda: f"{secrets.token_hex(8)}.0")

    @property
    def placements(self) -> list[Placement]:
        """The keys that this rank placed, of each table with an index."""
        return [table.placement for table in self.tables if table.placement is not None]

    def updates(
        self, dense: Sequence[tf.Variable], spread: Mapping[str, tf.Variable]
    ) -> list[Update]:
        """What a delta changes, on rank 0; `spread` are the variables that stand for shards."""
        updates, stock = [], self.stock
        for table in stock.tables:
            name = f"table_{table.number}/"
            updates.append(Update(stock.rows[table.dim], f"{name}rows", f"{name}at"))
            if stock.scales:
                updates.append(Update(stock.scales[table.dim], f"{name}scales", f"{name}at"))
            if table.layout is not None:
                updates.append(Update(stock.keys, f"{name}keys", f"{name}buckets"))
                updates.append(Update(stock.numbers, f"{name}numbers", f"{name}slots"))
        if stock.decays is not None:
            updates.append(Update(stock.decays, _DECAYS))
        updates += [Update(variable, key_of(name)) for name, variable in spread.items()]
        others = {id(variable) for variable in spread.values()}
        self.dense = {f"dense_{n}": v for n, v in enumerate(dense) if id(v) not in others}
        return updates + [Update(variable, name) for name, variable in self.dense.items()]


class Delta(NamedTuple):
    """What `export_delta` wrote.

    Attributes:
        version: The version that servers have after it.
        num_rows: Rows in it, of all tables.
        num_new: Keys that the served model did not have.
        num_erased: Keys that it no longer has.
        fullness: Keys of the fullest table by its room; at 1 the next new key needs a full export.
    """

    version: str
    num_rows: int
    num_new: int
    num_erased: int
    fullness: float


# The exports that `export_delta` continues, by model; a second one replaces the first.
followed_exports: weakref.WeakKeyDictionary[Any, Followed] = weakref.WeakKeyDictionary()


class FullExportDue(ValueError):
    """New keys have no room in the served tables; on all ranks."""


def export_delta(model: Any, path: str | os.PathLike) -> Delta:
    """Writes what changed in a model since its last refreshable export or delta.

    Every rank must call this, with the same arguments. They write new, changed and erased rows of
    all tables and all other weights as one checkpoint, `path.index` and `path.data-...`. The index
    appears last. Signature `refresh` of the served model takes its name (docs/serving.md).

    Args:
        model: A model that this process exported by
            `sok.export_saved_model(model, ..., refreshable=True)`.
        path: The new delta, in a folder that is made if it is missing. Its last part, the name, has
            letters, digits, `_`, `.`, `=` and `-`.

    Returns:
        On all ranks the same: `version`, `num_rows`, `num_new`, `num_erased`, and `fullness`, the
        part of the room for keys that is taken in the fullest table. From 0.9 on, rank 0 warns that
        a full export is due.

    Raises:
        ValueError: there was no such export, the model has other tables now, the name is not
            legal or exists, keys have no room, or it cannot be written. On all ranks; the next call
            writes what this one should have written.
        RuntimeError: TensorFlow is not executing eagerly, or the ranks make different calls.
    """
    communicator = comm.current()
    path = os.fspath(path)
    if not tf.executing_eagerly():
        raise RuntimeError("sok.export_delta must be called eagerly, not in a graph.")
    followed = all_or_none(lambda: _checked(model, path), communicator)
    calls = agreed(lambda: f"{path} {followed.number}", communicator, raises=ValueError)
    required = "Every rank must call sok.export_delta with the same path, after the same exports"
    check_same(calls, required, ValueError)
    work = _Writing(followed, communicator)
    try:
        work.read()
        for table, (changes, _) in zip(followed.tables, work.changes, strict=True):
            work.place(table, changes)
        work.write(path)
        reports = agreed(work.report, communicator, raises=ValueError)
    except BaseException:
        for placement in followed.placements:
            placement.undo()
        raise
    work.finish()
    versions, rows, new, erased, fullness = zip(*reports, strict=True)
    delta = Delta(versions[0], sum(rows), sum(new), sum(erased), max(fullness))
    if communicator.rank == 0 and delta.fullness >= NEARLY_FULL:
        warnings.warn(
            f"{delta.fullness:.0%} of the room for keys is taken: a full export is due, "
            "`sok.export_saved_model(..., refreshable=True)`, with more `headroom` if it comes "
            "too soon.",
            stacklevel=2,
        )
    return delta


def _checked(model, path):
    """The export that a delta continues."""
    if not is_plain_name(os.path.basename(path)):
        required = (
            "have letters, digits, '_', '.', '=' and '-' only, and begin with a letter or a digit"
        )
        raise unmet("The name of a delta", required, f"path={path!r}")
    try:
        followed = followed_exports.get(model)
    except TypeError:  # neither a model nor a module
        followed = None
    if followed is None:
        how = "sok.export_saved_model(model, path, refreshable=True)"
        required = f"have been exported by this process with refreshable=True: {how}"
        raise unmet("`model`", required, f"{model!r}")
    now = [v for v in parts.variables_of(model) if isinstance(v, EmbeddingVariable)]
    before = [table.variable for table in followed.tables]
    if [*map(id, now)] != [*map(id, before)]:
        before, now = ([table.table_name for table in of] for of in (before, now))
        raise unmet("`model`", f"have the tables that it had at the export, {before}", now)
    if comm.current().rank == 0 and durable.exists(f"{path}.index"):
        raise wrong_argument("path", "the name of a new delta", path)
    return followed


class _Writing:
    """One delta while it is made."""

    def __init__(self, followed, communicator):
        self._followed, self._communicator = followed, communicator
        self._rows: list[Rows] = []  # of this rank; their slices know neither shape nor place
        self._counts = {"num_rows": 0, "num_new": 0, "num_erased": 0}
        export = followed.version.partition(".")[0]
        self._version = f"{export}.{followed.number + 1}.{secrets.token_hex(4)}"

    def read(self):
        def read():
            tables = self._followed.tables
            self.changes = [changes_since(table.variable, table.instant) for table in tables]
            return [changes.whole for changes, _ in self.changes]

        self._whole = agreed(read, self._communicator, raises=ValueError)  # by rank and table

    def place(self, table, changes):
        """Finds where a table's changes go in the served model."""
        variable, stock, placement = table.variable, self._followed.stock, table.placement
        number = table.stock.number
        name, ranks = f"table_{number}/", range(self._communicator.world_size)
        whole = [rank for rank in ranks if self._whole[rank][number]]
        if variable.home is not None:
            whole = list(ranks) if variable.home in whole else []
        self._counts["num_rows"] += len(changes.keys)
        positions = self._placed(table, changes.keys, changes.erased, whole)
        # What an erased key has left in the server's memory is overwritten.
        freed = np.zeros(0, np.int64) if placement is None else placement.freed()
        positions = np.concatenate([positions, freed])
        order = np.argsort(positions)  # in which a server copies them much faster

        def changed(start, stop):
            part = order[start:stop]
            rows = np.zeros([len(part), variable.dim], np.float32)
            has_row = part < len(changes.rows)
            rows[has_row] = changes.rows[part[has_row]]
            coded = encoded(rows, stock.rows[variable.dim].dtype, variable.table_name)
            values = zip(("at", "rows", "scales"), (positions[part], *coded), strict=False)
            return [Slice(name + column, (), (), value) for column, value in values]

        def changed_index(columns, start, stop):
            return [Slice(name + column, (), (), index[column][start:stop]) for column in columns]

        self._rows.append(Rows(len(positions), 8 + 4 * variable.dim, changed))
        if placement is not None:
            index = placement.changed(table.stock.first_bucket)
            for columns in (("slots", "numbers"), ("buckets", "keys")):
                slices = functools.partial(changed_index, columns)
                self._rows.append(Rows(len(index[columns[0]]), 8 * (1 + SLOTS), slices))

    def _placed(self, table, keys, erased, whole):
        """The rows of these keys in the served table."""
        placement, world_size = table.placement, self._communicator.world_size
        if placement is None:
            return table.stock.first_row + keys
        name, layout = table.variable.table_name, placement.layout
        call = f"deltas of table '{name}'"
        erased, _ = to_ranks(erased, layout.ranks_of(erased, world_size), call)
        keys, answer = to_ranks(keys, layout.ranks_of(keys, world_size), call)
        positions = []

        def change():
            gone, before = erased, placement.size
            if whole:
                gone = np.r_[gone, placement.others(keys, np.asarray(whole), world_size)]
            try:
                rows, removed = placement.change(keys, gone)
            except NoRoom as error:
                return str(error)
            self._counts["num_erased"] += removed
            self._counts["num_new"] += placement.size - before + removed
            positions.append(rows.astype(np.int64))
            return ""

        for problem in filter(None, agreed(change, self._communicator, raises=ValueError)):
            raise FullExportDue(
                f"A full export is due, with more `headroom`. Received: {problem} (table '{name}')"
            )
        return answer(positions[0])

    def write(self, path):
        """Writes the delta."""
        spread, names = self._followed.spread
        counts = agreed(lambda: [rows.num_rows for rows in self._rows], self._communicator)
        with Parts(path, "sok.export_delta") as into:
            rest = Rows(int(not self._communicator.rank), 0, self._rest)
            rows = map(self._of_all_ranks, self._rows, zip(*counts, strict=True))
            into.write_rows([*rows, *spread.rows(into, names), rest])
            move = None if self._communicator.rank else functools.partial(_move, into, path)
            all_or_none(move, self._communicator)

    def _of_all_ranks(self, rows, counts):
        """These rows in tensors that hold what the ranks have, in rank order."""
        rank, total = self._communicator.rank, sum(counts)

        def slices(start, stop):
            begin = [sum(counts[:rank]) + start]
            for one in rows.slices(start, stop):
                yield one._replace(shape=[total, *one.value.shape[1:]], begin=begin)

        # Rank 0 writes an empty tensor if there are no rows.
        return Rows(rows.num_rows or int(not rank and not total), rows.row_bytes, slices)

    def _rest(self, *_):
        followed = self._followed
        tensors: dict[str, Any] = {VERSIONS: [followed.version, self._version]}
        # Reading a variable copies it after a sparse update.
        tensors |= {name: v.read_value_no_copy() for name, v in followed.dense.items()}
        if followed.stock.decays is not None:
            tensors[_DECAYS] = [decay_of(table.variable) for table in followed.tables]
        for name, value in tensors.items():
            value = tf.convert_to_tensor(value)
            yield Slice(name, value.shape.as_list(), (), value)

    def report(self):
        # A rank may have placed nothing.
        by_table = (p.size / max(1, p.capacity) for p in self._followed.placements)
        fullness = max(by_table, default=0.0)
        return [self._version, *self._counts.values(), fullness]

    def finish(self):
        followed = self._followed
        followed.number += 1
        followed.version = self._version
        for table, (_, now) in zip(followed.tables, self.changes, strict=True):
            table.instant = now
        for placement in followed.placements:
            placement.keep()


def _move(into, path):
    """Makes the delta of its parts. Its index appears last, and whole."""
    name = "merged"
    into.merge(durable.join(into.folder, name))
    files = [file for file in durable.names(into.folder) if file.startswith(f"{name}.")]
    try:
        for file in sorted(files):
            target = path + file.removeprefix(name)
            tf.io.gfile.rename(durable.join(into.folder, file), target, overwrite=True)
    except (OSError, tf.errors.OpError) as error:
        for left in tf.io.gfile.glob([f"{path}.index*", f"{path}.data-*"]):
            durable.remove(left)
        raise ValueError(f"{path} could not be written: {error}") from error


def changes_since(variable: EmbeddingVariable, since: int) -> tuple[TableShard, int]:
    """What changed in this rank's shard of a table since an instant, by its number; and now's."""
    try:
        read, now = _read(variable, since)
        # An optimizer may have moved rows outside of the batch.
        has_moved = bool(read.steps[:, 0].any())
    except ValueError:  # the log of changes had become larger than the table
        has_moved = True
    return _read(variable, 0) if has_moved else (read, now)


def _read(variable, since):
    number = int(variable.register_for_read())
    with table_reader.content(number, variable.dim, since) as (shard, now):
        keys = np.empty(shard.keys.shape, np.int64)
        rows = np.empty(shard.rows.shape, np.float32)
        end = 0
        for part in shard.parts(max(1, parts.CHUNK_BYTES // (8 + 4 * variable.dim))):
            at, end = end, end + len(part["keys"])
            keys[at:end], rows[at:end] = part["keys"], part["rows"]
        return dataclasses.replace(shard, keys=keys, rows=rows, read=None), now
