"""`sok.deeprec.install`: what it puts where, and DeepRec's scripts with that one line added."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow.compat.v1 as v1  # another module than `tf.compat.v1` was
from tensorflow._api.v2.compat import v1 as first_v1

from sok_like.runtime.ranks import initialize
from tests import forks

OPTIONS = (
    *("CBFFilter", "CounterFilter", "EmbeddingVariableOption", "GlobalStepEvict"),
    *("InitializerOption", "L2WeightEvict", "StorageOption"),
)
COLUMNS = (
    *("categorical_column_with_embedding", "group_embedding_column_scope"),
    *("sequence_categorical_column_with_embedding", "sparse_column_with_embedding"),
)
OPTIMIZERS = (
    *("AdagradDecayOptimizer", "AdagradDecayOptimizerV2"),
    *("AdamAsyncOptimizer", "AdamWOptimizer"),
)
REFUSED = [  # names that say what to use instead
    ("", "get_dynamic_dimension_embedding_variable", "group_embedding_lookup_sparse"),
    ("feature_column", "categorical_column_with_adaptive_embedding", "CounterFilter"),
    ("feature_column", "categorical_column_with_multihash", "get_multihash_variable"),
]
ADDED = [
    (root, module, name)
    for root in (tf, v1, first_v1)
    for module, names in (
        ("", ("get_embedding_variable", "get_multihash_variable", *OPTIONS)),
        ("config.experimental", ("enable_distributed_strategy", "enable_group_embedding")),
        ("feature_column", COLUMNS),
        ("train", OPTIMIZERS),
        *((path, (name,)) for path, name, _ in REFUSED),
        ("nn", ("group_embedding_lookup", "group_embedding_lookup_sparse")),
    )
    for name in names
]
WRAPPED = [
    (tf, "feature_column", "embedding_column"),
    (v1, "feature_column", "embedding_column"),
    (v1, "feature_column", "shared_embedding_columns"),
    (v1, "feature_column", "input_layer"),
    (v1, "feature_column", "linear_model"),
    (v1, "train.Optimizer", "apply_gradients"),
]


def module_of(root, path):
    for part in path.split(".") if path else []:
        root = getattr(root, part)
    return root


def held(places):
    return [getattr(module_of(root, path), name, None) for root, path, name in places]


STOCK = held(WRAPPED)


# ---- which names are added, and where ----


def test_installs_and_takes_back(sok, deeprec):
    from sok_like.optimizers import deeprec as optimizers

    homes = {"feature_column": sok.feature_column, "train": optimizers}
    assert not any(held(ADDED)) and held(WRAPPED) == STOCK  # loading installs nothing
    right = [getattr(homes.get(path, sok), name, None) for _, path, name in ADDED]
    for _ in range(2):
        deeprec.install()
        assert all(b in (a, None) and a for a, b in zip(held(ADDED), right, strict=True))
        assert not any(a is b for a, b in zip(held(WRAPPED), STOCK, strict=True))
        assert [f.__wrapped__ for f in held(WRAPPED)] == STOCK
    for _ in range(2):
        deeprec.uninstall()
        assert not any(held(ADDED))
        assert held(WRAPPED) == STOCK


@pytest.mark.parametrize(
    "root, path, name", [(tf, "", OPTIONS[0]), (v1, "train", OPTIMIZERS[-1]), ADDED[-1]]
)
def test_a_name_that_is_taken(deeprec, monkeypatch, root, path, name):
    module = module_of(root, path)
    monkeypatch.setattr(module, name, len, raising=False)
    with pytest.raises(RuntimeError, match=f"requires that .*{path} does not have '{name}'"):
        deeprec.install()
    assert set(held(ADDED)) == {None, len}
    assert held(WRAPPED) == STOCK
    deeprec.uninstall()
    assert getattr(module, name) is len


def test_what_others_put_over_a_wrapper_stays(deeprec, monkeypatch):
    monkeypatch.setattr(v1.feature_column, "input_layer", STOCK[3])  # what is there afterwards
    deeprec.install()
    v1.feature_column.input_layer = len
    deeprec.uninstall()
    assert v1.feature_column.input_layer is len
    assert held(WRAPPED)[:3] == STOCK[:3]


def test_what_is_not_here_names_what_is(sok, deeprec):
    deeprec.install()
    for path, name, instead in REFUSED:
        with pytest.raises(NotImplementedError, match=f"{name} is not in this.*{instead}"):
            getattr(module_of(v1, path), name)("x", hash_bucket_size=3)
    for kind in ("DRAM", "HBM"):
        assert tf.StorageOption(deeprec.StorageType[kind]).storage_type == kind
    for kind in ("PMEM_LIBPMEM", "SSDHASH", "DRAM_LEVELDB", "HBM_DRAM", "HBM_DRAM_SSDHASH"):
        with pytest.raises(ValueError, match=r"larger than memory.*use DRAM_SSDHASH"):
            tf.StorageOption(deeprec.StorageType[kind], "/tmp", [1024])
    on_disk = tf.StorageOption(
        deeprec.StorageType.DRAM_SSDHASH, "/tmp", [1024], deeprec.CacheStrategy.LRU
    )
    assert (on_disk.storage_size, on_disk.cache_strategy) == ((1024,), "LRU")


def test_horovod_answers_after_the_collective_strategy(deeprec):
    hvd = pytest.importorskip("horovod.tensorflow")
    deeprec.install()
    initialize.reset()
    for switch in ("enable_distributed_strategy", "enable_group_embedding"):
        getattr(tf.config.experimental, switch)("collective")
        assert (hvd.size(), hvd.rank()) == (1, 0)


# ---- TensorFlow's own functions work as before ----


def test_wrapped_names_without_groups_are_stock(deeprec):
    def build():
        fc = v1.feature_column
        columns = [
            fc.embedding_column(fc.categorical_column_with_identity("a", 5), 2),
            *fc.shared_embedding_columns(
                [fc.categorical_column_with_identity(name, 5) for name in "bc"], 3
            ),
        ]
        fc.input_layer({name: [[1]] for name in "abc"}, iter(columns))
        plain = v1.get_variable("plain", [2])
        v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(plain**2))
        return [type(c) for c in columns], [
            op.name for op in v1.get_default_graph().get_operations()
        ]

    with tf.Graph().as_default():
        right = build()
    deeprec.install()
    with tf.Graph().as_default():
        assert build() == right


def test_groups_and_columns_with_keys_are_ours(sok, deeprec):
    columns = sok.feature_column
    ours = type(columns.embedding_column(columns.categorical_column_with_embedding("k"), 1))
    deeprec.install()
    with tf.Graph().as_default():
        for fc in (tf.feature_column, v1.feature_column):
            keys = fc.categorical_column_with_embedding("k")
            identity = fc.categorical_column_with_identity("i", 3)
            assert type(fc.embedding_column(categorical_column=keys, dimension=2)) is ours
            with fc.group_embedding_column_scope("g"):
                assert fc.embedding_column(identity, 2).group == "g"
                shared = v1.feature_column.shared_embedding_columns([identity], 2)
                assert type(shared[0]) is ours and shared[0].group == "g"


# ---- scripts ----

SCRIPT = """
tf.config.experimental.enable_distributed_strategy(strategy="collective")

ad0 = tf.feature_column.categorical_column_with_embedding("ad0", dtype=tf.dtypes.int64)
ad1 = tf.feature_column.categorical_column_with_embedding("ad1", dtype=tf.dtypes.int64)
user0 = tf.feature_column.categorical_column_with_embedding("user0", dtype=tf.dtypes.int64)
with tf.feature_column.group_embedding_column_scope(name="item"):
    ad0_fc = tf.feature_column.embedding_column(
        categorical_column=ad0, dimension=4, initializer=tf.constant_initializer(0.5)
    )
    ad1_fc = tf.feature_column.embedding_column(
        ad1, 4, combiner="sum", initializer=tf.constant_initializer(0.25)
    )
with tf.feature_column.group_embedding_column_scope(name="user"):
    user0_fc = tf.feature_column.embedding_column(
        user0, dimension=3, initializer=tf.ones_initializer()
    )
price = tf.feature_column.numeric_column("price")
ids = {
    "ad0": tf.SparseTensor([[0, 0], [0, 1], [1, 0]], tf.cast([1, 3, 1], tf.int64), [2, 2]),
    "ad1": tf.ragged.constant([[2, 2], [5]], dtype=tf.int64),
    "user0": tf.SparseTensor([[1, 0]], tf.cast([9], tf.int64), [2, 1]),
    "price": tf.constant([[0.5], [2.0]]),
}
out = tf.feature_column.input_layer(ids, [user0_fc, ad1_fc, ad0_fc, price])
loss = tf.reduce_sum(tf.multiply(out, 2.0, name="multiply") ** 2, name="reduce_sum")
opt = tf.train.AdagradOptimizer(0.1)
train_op = opt.minimize(loss, global_step=tf.train.get_or_create_global_step())
with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    outputs = [sess.run([out, train_op])[0] for _ in range(4)]
"""


def stock_columns():
    fc = v1.feature_column

    def embed(name, dimension, value, combiner="mean"):
        initializer = v1.constant_initializer(value)
        column = fc.categorical_column_with_identity(name, 10)
        return fc.embedding_column(column, dimension, combiner, initializer)

    with tf.Graph().as_default(), v1.Session() as session:
        columns = [embed("ad0", 4, 0.5), embed("ad1", 4, 0.25, "sum"), embed("user0", 3, 1.0)]
        ids = {"ad0": [[1, 3], [1, -1]], "ad1": [[2, 2], [5, -1]], "user0": [[-1], [9]]}
        features = {**ids, "price": [[0.5], [2.0]]}
        out = fc.input_layer(features, [*columns, fc.numeric_column("price")])
        train = v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum((out * 2) ** 2))
        session.run(v1.global_variables_initializer())
        return [session.run([out, train])[0] for _ in range(4)]


def test_a_script_of_deeprec(deeprec):
    """Of its GroupEmbedding page, trained by a stock optimizer."""
    right = stock_columns()
    initialize.reset()
    deeprec.install()
    with tf.Graph().as_default() as graph:
        names = {"tf": v1}
        exec(SCRIPT, names)
    np.testing.assert_allclose(names["outputs"], right, rtol=0, atol=1e-6)
    assert np.abs(right[-1] - right[0]).max() > 0.05
    assert sum(op.type == "SokLookup" for op in graph.get_operations()) == 2


def test_a_script_as_a_program():
    program = "import sok_like as sok\nimport tensorflow.compat.v1 as tf\nsok.deeprec.install()\n"
    program += "tf.disable_eager_execution()\n" + SCRIPT
    program += "print(outputs[-1].shape)"
    done = forks.run("-c", program)
    assert done.stdout.strip() == "(2, 12)", done.stderr


def test_an_optimizer_of_the_wrappers_own_is_not_wrapped_again(sok, deeprec):
    deeprec.install()
    initialize.reset()
    with tf.Graph().as_default(), v1.Session() as session:
        sok.Init(global_batch_size=2, seed=1)
        table = sok.get_embedding_variable("t", 2, initializer=v1.ones_initializer())
        plain = v1.get_variable("plain", [2], initializer=v1.ones_initializer())
        (rows,) = sok.group_embedding_lookup([table], [[3, 3]])
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.5))
        train = optimizer.minimize(tf.reduce_sum(rows) + tf.reduce_sum(plain))
        session.run(v1.global_variables_initializer())
        session.run(train)
        assert session.run(rows).tolist() == [[0, 0], [0, 0]]
        assert session.run(plain).tolist() == [0.5, 0.5]
