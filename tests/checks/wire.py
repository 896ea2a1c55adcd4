"""Lookups whose rows and gradients are rounded on their way between two ranks."""

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

KEYS, COUNT, DIM, RATE = 40, 24, 5, 0.5
# The door, its wire's dtype, and whether its steps are a function.
TRAINED = [
    ("all2all", "bfloat16", True),
    ("all2all", "float16", False),
    ("combined", "float16", True),
    ("group_layer", "bfloat16", True),
    ("group_lookup", "bfloat16", False),
    ("dmp", "bfloat16", True),
    ("dmp_rows", "float16", True),
    ("dmp_hashed", "bfloat16", False),
    ("dmp_model", "bfloat16", True),
    ("dmp_model", "float16", False),
]


def checks(world_size):
    if world_size != 2:
        return {}
    return {
        **{"-".join(map(str, case)): lambda case=case: train(*case) for case in TRAINED},
        "failures": failures,
        "overflow": overflow,
        "other_dtype": other_dtype,
    }


def values():
    return np.random.default_rng(1).normal(size=[KEYS, DIM]).astype(np.float32)


def keys_of(rank):
    """Each once, so that what a rank sends for a key is one gradient, not a sum."""
    return np.random.default_rng([2, rank]).permutation(KEYS)[:COUNT]


def weights_of(rank):
    return np.random.default_rng([3, rank]).normal(size=[COUNT, DIM]).astype(np.float32)


def all2all(name, wire_dtype, **kwargs):
    return sok.All2AllDenseEmbedding(
        kwargs.pop("capacity", None), DIM, 1, 1, dynamic_input=True, name=name,
        embedding_initializer="ones", gradient_scale="sum", wire_dtype=wire_dtype, **kwargs,
    )  # fmt: skip


def door(kind, name, wire_dtype):
    """`look_up(keys)`, what holds the variables, and the hash table, None where there is none."""
    if kind == "all2all":
        layer = all2all(name, wire_dtype)
        return layer, layer, layer.table
    options = {"gradient_scale": "sum", "wire_dtype": wire_dtype}
    if kind == "combined":
        layer = sok.DistributedEmbedding("mean", None, DIM, 1, 1, name=name, **options)
        return lambda keys: layer(keys[:, None])[:, 0], layer, layer.table
    if kind == "group_layer":
        layer = sok.GroupEmbedding({"f": DIM}, name=name, **options)
        return lambda keys: layer({"f": keys})["f"], layer, layer.tables["f"]
    if kind == "group_lookup":
        table = sok.EmbeddingVariable(DIM, name=name)

        def look_up(keys):
            ids = tf.RaggedTensor.from_uniform_row_length(keys, 1)
            (rows,) = sok.group_embedding_lookup_sparse(table, [ids], "sum", **options)
            return rows

        return look_up, table, table
    description = sok.HashEmbedding(DIM) if kind == "dmp_hashed" else dmp.Embedding(KEYS, DIM)
    layer = dmp.DistributedEmbedding(
        [description],
        row_slice_threshold=1 if kind == "dmp_rows" else None,
        dp_input=kind != "dmp_model",
        wire_dtype=wire_dtype,
        name=name,
    )
    return lambda keys: layer([keys])[0], layer, None


def train(kind, wire_dtype, compiled):
    """The rows of this rank's keys, and all rows that this rank can read after a step."""
    rank = comm.current().rank
    keys, weights = tf.constant(keys_of(rank)), tf.constant(weights_of(rank))
    if kind == "dmp_model":  # a slice of columns on each rank, which gets the keys of both
        keys = tf.constant(np.concatenate([keys_of(0), keys_of(1)]))
    look_up, holder, table = door(kind, f"wire_{kind}_{compiled}", wire_dtype)
    hashed = kind == "dmp_hashed"
    wrap = sok.OptimizerWrapper if hashed or table is not None else dmp.DistributedOptimizer
    optimizer = wrap(tf.keras.optimizers.SGD(RATE))
    if table is not None:
        sok.assign(table, np.arange(KEYS), values())
    else:
        holder.set_weights([(np.arange(KEYS), values()) if hashed else values()])

    def step(keys):
        with tf.GradientTape() as tape:
            rows = look_up(keys)
            loss = tf.reduce_sum(rows * weights)
        variables = [holder] if holder is table else holder.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return rows

    found = (tf.function(step) if compiled else step)(keys).numpy()
    if table is not None:
        return found, [part.numpy() for part in sok.export(table)]
    (trained,) = holder.get_weights(all_ranks=True)
    return found, trained if hashed else [np.arange(KEYS), trained]


def tried(call, *args):
    try:
        return np.array(call(*args)).tolist()
    except tf.errors.OpError as error:
        # Without what Keras adds to it.
        text = error.message.rpartition("}} ")[2].partition(" [Op:")[0]
        return f"{type(error).__name__}: {text}"


def failures():
    """Errors of a lookup in floats and of one in 16 bits; each followed by one that is fine."""
    rank, seen = comm.current().rank, {}
    for wire_dtype in (None, "bfloat16"):
        places = all2all(f"wire_places_{wire_dtype}", wire_dtype, capacity=5, use_hashtable=False)
        full = all2all(f"wire_full_{wire_dtype}", wire_dtype, capacity=3)
        fine = tf.constant([1, 2, 3], tf.int64)
        seen[wire_dtype] = [
            str(tried(layer, keys)).replace(str(wire_dtype), "?")
            for layer, keys in [
                (places, tf.constant([1, 99], tf.int64) if rank else fine),
                (places, fine),
                (full, tf.range(20, dtype=tf.int64)),
                (full, fine),
            ]
        ]
    return seen


def overflow():
    """A row and a gradient that float16 cannot hold: on both ranks, and what is left of them."""
    rank = comm.current().rank
    layer = all2all("wire_overflow", "float16")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
    sok.assign(layer.table, [1, 2], [[7e4] * DIM, [2.0] * DIM])

    def step(key, factor):
        with tf.GradientTape() as tape:
            rows = layer(tf.reshape(key, [1]))
            loss = tf.reduce_sum(rows) * factor
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return rows

    def int64(key):
        return tf.constant(key, tf.int64)

    compiled = tf.function(step)
    return {
        "row": [tried(call, int64(1), 1.0) for call in (step, compiled)],
        "gradient": [
            tried(call, int64(2), tf.constant(1e5 if rank else 1.0)) for call in (step, compiled)
        ],
        "infinite": tried(step, int64(4), tf.constant(np.inf)),
        "after": tried(layer, int64([2])),
    }


def other_dtype():
    """Ranks that differ in `wire_dtype`, and what the same lookups give once they agree."""
    rank, seen = comm.current().rank, {}
    keys = tf.constant([5, 6], tf.int64)
    for name, pair in {"none": (None, "bfloat16"), "other": ("float16", "bfloat16")}.items():
        layers = [all2all(f"wire_other_{name}", wire_dtype) for wire_dtype in (pair[rank], pair[0])]
        seen[name] = [tried(layers[0], keys), int(layers[0].table.size()), tried(layers[1], keys)]
    for dp_input in (True, False):
        layer = dmp.DistributedEmbedding(
            [dmp.Embedding(KEYS, DIM)], dp_input=dp_input, name=f"wire_dmp_{dp_input}"
        )
        layer.set_weights([np.ones([KEYS, DIM], np.float32)])
        layer.wire_dtype = (None, "float16")[rank]
        seen[dp_input] = [tried(layer, [keys]), 0]
        layer.wire_dtype = None
        seen[dp_input].append(tried(lambda layer=layer: layer([keys])[0][:1]))
    return seen
