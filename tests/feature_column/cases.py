"""Columns in groups and the same columns of stock TensorFlow, with one set of rows.

Ids are below `BUCKETS`, so that a stock identity column on a dense variable can hold the rows that
a hash table has under the same keys. Everything is written twice on purpose: the stock side says
what is right.
"""

import functools

import numpy as np
import tensorflow as tf

import sok_like as sok

v1 = tf.compat.v1
BUCKETS = 12
STOCK = tf.feature_column


def rows_of(name, dim):
    rng = np.random.default_rng([len(name), *name.encode()])
    return rng.normal(size=[BUCKETS, dim]).astype(np.float32)


# Column's name: dimension of its table. What a table is called in a graph begins with it.
DIMS = {
    "age_embedding": 3,
    "city_embedding": 3,
    "site_weighted_by_w_embedding": 3,
    "hashed_embedding": 2,
    "lone_embedding": 2,
    "seen_clicked": 4,
}
NAMES = [
    *("age_embedding", "city_embedding", "clicked_shared_embedding", "hashed_embedding"),
    *("kind_indicator", "lone_embedding", "price", "price_bucketized", "seen_shared_embedding"),
    *("site_weighted_by_w_embedding",),
]
GROUPS = ("user", "ads")  # two lookups, and one of the column outside of them


def stock_columns():
    def identity(key):
        return STOCK.categorical_column_with_identity(key, BUCKETS)

    weighted = STOCK.weighted_categorical_column(identity("site"), "w")
    hashed = STOCK.categorical_column_with_hash_bucket("hashed", BUCKETS)
    return [
        *_plain(),
        STOCK.embedding_column(identity("age"), 3, "mean"),
        STOCK.embedding_column(identity("city"), 3, "sum"),
        STOCK.embedding_column(hashed, 2, "sqrtn"),
        STOCK.embedding_column(weighted, 3, "mean"),
        STOCK.embedding_column(identity("lone"), 2, "sum"),
        *v1.feature_column.shared_embedding_columns(
            [identity("seen"), identity("clicked")],
            4,
            shared_embedding_collection_name="seen_clicked",
        ),
    ]


def group_columns(fc):
    def keys(key):
        return fc.categorical_column_with_embedding(key, tf.int64)

    with fc.group_embedding_column_scope("user"):
        user = [
            fc.embedding_column(keys("age"), 3, "mean"),
            fc.embedding_column(keys("city"), 3, "sum"),
        ]
    with fc.group_embedding_column_scope("ads"):
        shared = fc.shared_embedding_columns(
            [keys("seen"), keys("clicked")], 4, shared_embedding_collection_name="seen_clicked"
        )
        weighted = fc.weighted_categorical_column(keys("site"), "w")
        ads = [*shared, fc.embedding_column(weighted, 3, "mean")]
    with fc.group_embedding_column_scope("user"):  # once more: these join the two above
        hashed = STOCK.categorical_column_with_hash_bucket("hashed", BUCKETS)
        user.append(fc.embedding_column(hashed, 2, "sqrtn"))
    return [*_plain(), *user, *ads, fc.embedding_column(keys("lone"), 2, "sum")]


def _plain():
    price = STOCK.numeric_column("price")
    kind = STOCK.categorical_column_with_vocabulary_list("kind", ["a", "b", "c"])
    return [
        STOCK.indicator_column(kind),
        STOCK.bucketized_column(price, [0.0, 1.0]),
        price,
    ]


def features():
    """NumPy: dense ones padded with -1 and '', and lists of lists for the others."""
    return {
        "age": np.array([[3, 3, 5], [-1, -1, -1], [7, -1, 1], [0, 11, -1]]),
        "city": np.array([2, -1, 4, 4]),
        "hashed": np.array([["x", "y"], ["", ""], ["z", ""], ["x", "x"]]),
        "site": [[1, 2, 3], [], [4, 4], [5]],
        "w": [[1.0, 0.5, 2.0], [], [0.0, 3.0], [-1.0]],
        "lone": [[9], [8, 8], [], [1, 2, 3]],
        "seen": [[1], [2, 3], [4], []],
        "clicked": [[1, 1], [], [], [7]],
        "kind": np.array([["a", "c"], ["", "d"], ["b", "b"], ["a", ""]]),
        "price": np.array([-1.0, 0.5, 2.0, 1.0], np.float32),
    }


def tensors(kind):
    """The features with lists as RaggedTensors or SparseTensors."""
    found = {}
    for name, value in features().items():
        if isinstance(value, list):
            dtype = tf.float32 if name == "w" else tf.int64
            value = tf.ragged.constant(value, dtype=dtype, ragged_rank=1)
            found[name] = value if kind == "ragged" else value.to_sparse()
        else:
            found[name] = tf.constant(value)
    return found


def assignments(variables, assign):
    """Ops that give every table of `{column: variables}` its rows; `assign(table, rows)`."""
    tables = {table_name(column): held[0] for column, held in variables.items() if held}
    return [assign(table, rows_of(name, DIMS[name])) for name, table in tables.items()]


def table_name(column):
    """Key of `DIMS`."""
    return column._var_scope_name


def dense_gradients(output, factors, variables):
    """By table, the gradient of the sum of outputs times factors, one row per id; in a graph."""
    tables = {table_name(column): held[0] for column, held in variables.items() if held}
    loss = tf.reduce_sum(output * factors.astype(np.float32))
    gradients = zip(tables, tf.gradients(loss, [*tables.values()]), strict=True)
    return {
        name: tf.math.unsorted_segment_sum(g.values, g.indices, BUCKETS) for name, g in gradients
    }


@functools.cache
def expected():
    """By stock `input_layer`: output, factors of it, and gradients by table."""
    with tf.Graph().as_default(), v1.Session() as session:
        held = {}
        output = v1.feature_column.input_layer(
            tensors("sparse"), stock_columns(), cols_to_vars=held
        )
        factors = np.random.default_rng(0).normal(size=output.shape)
        gradients = dense_gradients(output, factors, held)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        session.run(assignments(held, lambda table, rows: table.assign(rows)))
        return session.run(output), factors, session.run(gradients)


def dense_weight(layer):
    """The rows of the column with hash buckets, a tf.Variable."""
    (weight,) = (w for w in layer.weights if "hashed" in w.name)
    return weight


def filled(layer):
    """A layer of `group_columns`, whose tables get their rows."""
    for name, table in layer.tables.items():
        sok.assign(table, np.arange(BUCKETS), rows_of(name, DIMS[name]))
    dense_weight(layer).assign(rows_of("hashed_embedding", 2))
    return layer
