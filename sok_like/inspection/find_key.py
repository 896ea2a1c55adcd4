"""`sok.find_key`: where a key still is, in memory and in files."""

from __future__ import annotations

import os
from typing import Any

from sok_like.inspection.key_in_files import (
    COUNTED,
    ROW,
    WAITS,
    About,
    KeyPlace,
    absent,
    in_buckets,
    may_be,
    read_about,
    search,
)
from sok_like.inspection.report import tables_of
from sok_like.runtime.checks import as_integer, require, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.table.policies import CBFFilter


def find_key(key: int, *places: Any, table: str | None = None) -> list[KeyPlace]:
    """Lists where a key is: what is left of a user whom `erase` has removed.

    Every rank must call this, with the same arguments. Tables are asked on all ranks. Files are
    read on rank 0, each with all its keys, at 8 bytes per key. Whatever a file holds counts, also
    a row that a later delta has replaced, and shards that a killed dump has left.

    Args:
        key: An integer.
        places: Where to look:
            tables, and models, layers and modules with tables: rows and filters of all ranks;
            models that `tf.saved_model.load` returned, as servers have them;
            files and folders (`str` or `os.PathLike`): dumps and deltas of `sok.Saver`, dumps of
            SOK 1.x and 2.x, checkpoints, backups, files of Keras, exports and their deltas. Folders
            are searched with all that is in them. So are `.tables` and `.deltas` beside a path.
        table: Name of the table, with or without its layer's; None: the key in any table. A place
            that does not know its table's name is listed in any case.

    Returns:
        One `KeyPlace` per place, on every rank; empty: none of the places has the key. Its `what`
        begins with "perhaps" where the place cannot tell: a Bloom filter, rows in the buffer of
        `pop_evicted`, a file that cannot be read.

    Raises:
        TypeError: there is no place, a place is something else, or `key` is no integer.
        ValueError: neither int64 nor uint64 can hold `key`, or no table has the name `table`.
        FileNotFoundError: there is no such file; on several ranks RuntimeError.
    """
    number = as_integer(key)
    if number is None or isinstance(key, bool):
        raise wrong_argument("key", "an integer", key, error=TypeError)
    require(-(2**63) <= number < 2**64, "key", "a number that int64 or uint64 can hold", key)
    if not places:  # an empty list would say that the key is gone
        raise wrong_argument("places", "tables, models, files or folders", places, error=TypeError)
    number -= 2**64 if number >= 2**63 else 0  # as tables and files store it
    communicator = comm.current_or_single()

    def looked_at():
        of_rank = []
        for place in places:
            if isinstance(place, (str, os.PathLike)):
                of_rank += search(number, os.fspath(place)) if not communicator.rank else []
            elif hasattr(place, "tensorflow_version"):  # that wrote a SavedModel
                of_rank += _in_server(number, place)
            else:
                of_rank += [each for held in tables_of(place) for each in _in_table(number, held)]
        return list(dict.fromkeys(of_rank))

    of_ranks = agreed(looked_at, communicator, "sok.find_key")
    everything = [KeyPlace(*place) for of_rank in of_ranks for place in of_rank]
    named = [place for place in everything if may_be(place.table, table)]
    if everything and not named:
        tables = sorted({place.table for place in everything})
        raise wrong_argument("table", f"the name of a table in `places`, one of {tables}", table)
    return list(dict.fromkeys(place for place in named if place.what))


def _in_table(key, table):
    where = f"on rank {comm.current_or_single().rank}"
    name, option = table.table_name, table.options["ev_option"]
    whats = [ROW] if bool(table.find([key])[1][0]) else []
    if table.keeps_records:
        seen = table.key_statistics([key])
        if not seen.present[0] and seen.frequencies[0] > 0:
            whats.append(COUNTED if isinstance(option.filter_option, CBFFilter) else WAITS)
        if table.statistics().buffered:
            whats.append("perhaps a row that waits for `pop_evicted`")
    return [absent(name), *(KeyPlace("table", where, name, what) for what in whats)]


def _in_server(key, model):
    places = []
    if not hasattr(model, "tables"):
        required = "a SavedModel that sok.export_saved_model has written"
        raise wrong_argument("places", required, model, error=TypeError)
    for number, served in enumerate(model.tables):
        about = read_about(served.about.numpy()) if hasattr(served, "about") else About()
        if about.layout is not None:
            whats = in_buckets(key, model.tables_keys.numpy(), about)
        elif hasattr(served, "keys"):  # of version 0.1
            whats = in_buckets(key, served.keys.numpy(), about)
        else:  # without an index: key k is row k
            num_rows = about.num_rows or served.rows.shape[0]
            whats = [ROW] if 0 <= key < num_rows else []
        name, where = about.table_name, f"table {number}"
        places += [absent(name), *(KeyPlace("server", where, name, what) for what in whats)]
    return places
