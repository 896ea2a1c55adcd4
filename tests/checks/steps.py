"""Ranks stay in step, or all of them say that they are not: what each rank saw."""

import functools

import numpy as np
import tensorflow as tf

DIM = 2


def _rank():
    from sok_like.runtime.ranks import comm

    return comm.current().rank


def _world_size():
    from sok_like.runtime.ranks import comm

    return comm.current().world_size


def _layer(name, value, capacity=None):
    """A layer of which every row is `value`."""
    import sok_like as sok

    initializer = tf.keras.initializers.Constant(value)
    return sok.All2AllDenseEmbedding(
        capacity, DIM, 1, 1, dynamic_input=True, name=name, embedding_initializer=initializer
    )


def _keys(*keys):
    return tf.constant(keys, tf.int64)


def _tried(function, *arguments):
    """What a call raised, as "Kind: message"; or what it returned."""
    try:
        return tf.nest.map_structure(lambda t: t.numpy(), function(*arguments))
    except tf.errors.OpError as error:
        return f"{type(error).__name__}: {error.message}"


def constant_on_one_rank():
    """On rank 0 a step's keys are constants of its graph, then none: its rows and gradients."""
    layer, given = _layer("constant", 3.0), {0: [[5], []]}.get(_rank(), [None, None])
    found = []
    for keys in given:

        @tf.function
        def step(fed, keys=keys):
            with tf.GradientTape() as tape:
                rows = layer(fed if keys is None else tf.constant(keys, tf.int64), training=True)
                loss = tf.reduce_sum(rows)
            gradient = tape.gradient(loss, layer.embedding_variable)
            return rows, gradient.indices, gradient.values

        found.append(_tried(step, _keys(7)))
    return found


def eager_order():
    """Rank 0 calls a, b and the others b, a: what each call did, then a and b on all."""
    layers = {"order_a": _layer("order_a", 1.0), "order_b": _layer("order_b", 2.0)}
    order = sorted(layers, reverse=_rank() > 0)
    seen = [_tried(layers[name], _keys(1, 2, 3)) for name in order]
    sizes = {name: int(layer.table.size()) for name, layer in layers.items()}
    after = {name: _tried(layers[name], _keys(4, 5)) for name in sorted(layers)}
    return {"seen": seen, "sizes": sizes, "after": after}


def after_an_error():
    """Two lookups on two devices in a function; one fails on one rank in some of the steps."""
    devices = tf.config.list_logical_devices("CPU")
    import sok_like as sok

    rows_only = sok.All2AllDenseEmbedding(
        8, DIM, 1, 1, dynamic_input=True, use_hashtable=False, name="step_rows",
        embedding_initializer="ones",
    )  # fmt: skip
    other = _layer("step_other", 3.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def step(bad, good):
        with tf.device(devices[-1].name):
            bad = bad + tf.zeros_like(bad)
        return rows_only(bad), other(good)

    rank, seen = _rank(), []
    for number in range(12):
        limit = 8 * _world_size()
        bad = _keys(limit if number % 3 == 1 and rank == number % 2 else number % 8)
        seen.append(_tried(step, bad, _keys(100 * rank + number)))
    keys = sok.export(other.embedding_variable)[0].numpy()
    return {"seen": seen, "keys": sorted(keys.tolist())}


def full_table_without_value():
    """The gradient of a sum does not read the rows; a full table must stop it all the same."""
    layer = _layer("no_value", 1.0, capacity=4)
    variable = layer.embedding_variable

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys, training=True))
        gradient = tape.gradient(loss, variable)
        return gradient.indices, gradient.values

    many = np.arange(4 * _world_size() + 1, dtype=np.int64)
    few = many[: _world_size()]
    return [_tried(step, tf.constant(keys)) for keys in (few, many, few, many, few)]


def while_loop():
    """Lookups in `tf.while_loop`, 10 iterations at once, beside another lookup before and after."""
    layer, other = _layer("looped", 2.0), _layer("around", 1.0)

    @tf.function
    def run(keys):
        before = tf.reduce_sum(other(keys[0]))
        _, total = tf.while_loop(
            lambda i, total: i < tf.shape(keys)[0],
            lambda i, total: (
                i + 1,
                total + tf.reduce_sum(layer(keys[i])) * tf.cast(i, tf.float32),
            ),
            (0, 0.0),
            parallel_iterations=10,
        )
        return before, total, tf.reduce_sum(other(keys[1]))

    keys = tf.constant(np.arange(6, dtype=np.int64)[:, None] + 100 * _rank())
    return [_tried(run, keys) for _ in range(3)], int(layer.table.size())


def gradient_outside():
    """Two lookups in a function, the tape around it: TensorFlow makes the gradient's function."""
    layers = [_layer(f"outside{i}", 1.0 + i) for i in range(3)]
    variables = [layer.embedding_variable for layer in layers]

    @tf.function
    def forward(keys):
        return [layer(keys) for layer in layers]

    with tf.GradientTape() as tape:
        found = forward(_keys(1, 2, 2))
        loss = tf.add_n([(i + 1) * tf.reduce_sum(rows) for i, rows in enumerate(found)])
    gradients = tape.gradient(loss, variables)
    return [(g.indices.numpy(), g.values.numpy()) for g in gradients]


def function_meets_eager():
    """Rank 0 looks up eagerly, the others in a function."""
    layer = _layer("met", 4.0)
    call = layer if _rank() == 0 else tf.function(layer)
    return _tried(call, _keys(1, 2))


def other_tables():
    """Ranks make one lookup of tables of another width, order, combiner and initializer."""
    import sok_like as sok

    wide = sok.EmbeddingVariable(2 if _rank() == 0 else 3, name="wide")
    tables = [sok.EmbeddingVariable(2, name=name) for name in ("one", "two")]
    tables = tables if _rank() == 0 else tables[::-1]
    begun = sok.EmbeddingVariable(2, name="begun", initializer="zeros" if _rank() else "ones")
    combiner = "sum" if _rank() == 0 else "mean"
    fields = sok.DistributedEmbedding(combiner, None, 2, slot_num=1, max_nnz=2, name="fields")

    def look_up(group, name):
        keys = [_keys(1, 2)] * len(group)
        return _tried(lambda: sok.group_embedding_lookup(group, keys, name=name))

    # The shapes of ranks may differ: with one key per field a combiner does nothing.
    alike = sok.DistributedEmbedding("sum", None, 2, slot_num=1, max_nnz=2, name="alike")
    alike(tf.constant([[[1, 2]]] if _rank() else [[1]], tf.int64))

    return {
        "width": (look_up([wide], "wide"), int(wide.size())),
        "order": (look_up(tables, "swapped"), sum(int(table.size()) for table in tables)),
        "initializer": (look_up([begun], "begun"), int(begun.size())),
        "combiner": (_tried(fields, _keys(1, 2)[:, tf.newaxis]), int(fields.table.size())),
    }


def other_dense_tables():
    """Ranks look up tables of DMP with other rows, places, combiners and initializers."""
    import sok_like as sok

    def look_up(name, embedding, **options):
        dmp = sok.dist_model_parallel
        layer = dmp.DistributedEmbedding([embedding], name=name, **options)
        own_inputs = options.get("dp_input") is False
        keys = tf.zeros([sok.size(), 1], tf.int64) if own_inputs else _keys(1, 2)[tf.newaxis]
        mine = len(layer.strategy.input_ids_list[_rank()]) if own_inputs else 1
        return _tried(layer, [keys] * mine)

    first, plain = _rank() == 0, tf.keras.layers.Embedding
    combined = sok.Embedding(6, 4, combiner="sum" if first else "mean")
    hashed = sok.HashEmbedding(
        4, embeddings_initializer="ones" if first else "zeros", name="begins"
    )
    return {
        "rows": look_up("rows", plain(6 if first else 5, 4)),
        "thresholds": look_up("thresholds", plain(6, 4), row_slice_threshold=0 if first else None),
        "own_inputs": look_up("own_inputs", plain(6 if first else 5, 4), dp_input=False),
        "combiners": look_up("combiners", combined),
        "initializers": look_up("initializers", hashed),
    }


def notes_out_of_step():
    """Rank 0 looks up while the others agree on something else."""
    from sok_like.runtime.ranks import agreement, comm

    layer = _layer("alone", 1.0)
    if _rank() == 0:
        return _tried(layer, _keys(1))
    return _tried(agreement.raise_on_all, [""], comm.current(), "something_else")


def collectives_out_of_order():
    """Eager collectives of a mesh, a table and callbacks; rank 0 has another order than the others.

    What each call did, then the first of them on all ranks alike.
    """
    import sok_like as sok
    from sok_like.distribution import collectives
    from sok_like.lookup import replicas
    from sok_like.runtime.ranks import agreement, comm

    line, own = comm.current(), 1.0 + _rank()
    variables = [tf.Variable([own, own]) for _ in range(2)]
    layer = _layer("met_by_a_sum", 1.0)
    option = sok.EmbeddingVariableOption(record_statistics=True)
    counted = sok.get_embedding_variable("counted", 2, ev_option=option)
    exports = [f"export of table '{name}'" for name in ("served", "kept")]
    whole = np.zeros([1], np.int64), line, False

    def summed(name):
        return lambda: collectives.summed(tf.constant([own, own]), line, name)

    pairs = [
        (summed("dense_a"), summed("dense_b")),
        (summed("dense_c"), lambda: collectives.gather(tf.constant([own]), 0, line, "kernel")),
        (lambda: replicas.broadcast(variables[:1], 0, "first"), summed("dense_d")),
        (lambda: layer(_keys(1)), summed("dense_e")),
        (lambda: counted.get_frequency([1]), lambda: counted.get_version([1])),
        tuple(functools.partial(agreement.send, *whole, name) for name in exports),
    ]
    seen = [[_tried(call) for call in (pair if _rank() == 0 else pair[::-1])] for pair in pairs]
    return {"seen": seen, "after": _tried(summed("dense_a")), "kept": variables[0].numpy()}
