"""What every rank sees when one of them fails, and that all can continue afterwards."""

import time

import numpy as np
import tensorflow as tf

ROOM = 4  # keys a rank may hold in the table that gets full


def _place():
    from sok_like.runtime.ranks import comm

    return comm.current().rank, comm.current().world_size


def _fault(layer, bad, good, rank_of_fault):
    """`bad` input on one rank, `good` on the others, eager and compiled; then `good` on all."""
    rank, _ = _place()
    seen = {}
    compiled = tf.function(layer, input_signature=[_of_any_length(good)])
    for name, call in (("eager", layer), ("graph", compiled)):
        size, start = int(layer.table.size()), time.monotonic()
        try:
            call(bad if rank == rank_of_fault else good)
            kind = message = None
        except tf.errors.OpError as error:
            kind, message = type(error).__name__, error.message
        seen[name] = {
            "kind": kind,
            "message": message,
            "seconds": time.monotonic() - start,
            "grown": int(layer.table.size()) - size,
        }
    seen["afterwards"] = layer(good, training=True).numpy()
    return seen


def _of_any_length(keys):
    if isinstance(keys, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None] * keys.shape.rank, tf.int64)
    return tf.TensorSpec([None, *keys.shape[1:]], tf.int64)


def key_out_of_range():
    import sok_like as sok

    _, world_size = _place()
    layer = sok.DistributedEmbedding(
        "sum", 10, 2, slot_num=2, max_nnz=1, use_hashtable=False, name="rows_only",
        embedding_initializer="ones",
    )  # fmt: skip
    bad = tf.constant([[1, 2], [3, 10 * world_size]], tf.int64)
    return _fault(layer, bad, tf.constant([[1, 2]], tf.int64), world_size - 1)


def too_many_keys():
    import sok_like as sok

    layer = sok.DistributedEmbedding(
        "mean", None, 2, slot_num=1, max_nnz=2, name="short", embedding_initializer="ones"
    )
    bad, good = tf.ragged.constant([[1], [2, 3, 4]], tf.int64), tf.ragged.constant([[1, 2]])
    return _fault(layer, bad, tf.cast(good, tf.int64), 0)


def rows_not_multiple_of_slots():
    import sok_like as sok

    layer = sok.DistributedEmbedding(
        "sum", None, 2, slot_num=2, max_nnz=2, name="pairs", embedding_initializer="ones"
    )
    bad = tf.ragged.constant([[1], [2], [3]], dtype=tf.int64)
    good = tf.ragged.constant([[1], [2]], dtype=tf.int64)
    return _fault(layer, bad, good, 0)


def samples_of_other_slots():
    """As many rows as two samples have, but not two in each sample."""
    import sok_like as sok

    layer = sok.DistributedEmbedding(
        "sum", None, 2, slot_num=2, max_nnz=2, name="uneven", embedding_initializer="ones"
    )
    bad = tf.ragged.constant([[[1]], [[2], [3], [4]]], dtype=tf.int64)
    return _fault(layer, bad, tf.ragged.constant([[[1], [2]]], dtype=tf.int64), 0)


def table_full():
    """Rank 0 sends too many keys of the last rank's; nothing is lost, and no rank goes on."""
    import sok_like as sok

    rank, world_size = _place()
    layer = sok.All2AllDenseEmbedding(
        ROOM, 2, 1, 1, dynamic_input=True, name="full", embedding_initializer="ones"
    )
    mine = np.arange(3, dtype=np.int64) * world_size + world_size - 1
    layer(tf.constant(mine), training=True)
    before = [t.numpy() for t in sok.export(layer.embedding_variable)]
    bad = tf.constant(np.arange(ROOM + 1, dtype=np.int64) * world_size + world_size - 1)
    seen = _fault(layer, bad, tf.constant(mine), 0)
    seen["before"], seen["rank"] = before, rank
    seen["after"] = [t.numpy() for t in sok.export(layer.embedding_variable)]
    return seen
