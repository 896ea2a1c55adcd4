"""sok.get_embedding_variable: one table per name, in scopes and graphs, and what it refuses."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras
v1 = tf.compat.v1
KEYS = np.array([3, -1, 2**60], np.int64)


def rows_of(sok, table, keys=KEYS):
    return sok.group_embedding_lookup([table], [tf.constant(keys)], training=False)[0]


def test_arguments_have_the_reference_positions(sok):
    table = sok.get_embedding_variable(
        *("users", 3, tf.int32, tf.float32, "zeros", None, False, None, None, None, True),
        *(None, None, None, sok.EmbeddingVariableOption()),
        capacity=5,
    )
    assert (table.table_name, table.dim, table.key_dtype) == ("users", 3, tf.int32)
    assert not table.trainable and table.options["capacity"] == 5 and table.dim == 3
    assert (rows_of(sok, table).numpy() == 0).all()


def test_the_same_name_is_the_same_table(sok):
    table = sok.get_embedding_variable("users", 3)
    assert sok.get_embedding_variable("users", 3) is table
    assert sok.get_embedding_variable("items", 3) is not table
    seen = []

    @tf.function
    def read():
        seen.append(sok.get_embedding_variable("users", 3))
        return rows_of(sok, seen[-1])

    assert (read().numpy() == rows_of(sok, table).numpy()).all()
    assert seen[-1] is table


def test_equal_initializers_are_equal_settings(sok):
    """That of the option takes the place of the other."""

    def get(value, other=None):
        option = sok.InitializerOption(tf.keras.initializers.Constant(value))
        option = sok.EmbeddingVariableOption(init_option=option)
        return sok.get_embedding_variable("users", 2, initializer=other, ev_option=option)

    table = get(0.5)
    assert get(0.5, "zeros") is table
    assert (rows_of(sok, table).numpy() == 0.5).all()
    with pytest.raises(ValueError, match=r"Table 'users' exists with initializer="):
        get(0.25)
    with pytest.raises(TypeError, match=r"sok\.EmbeddingVariableOption"):
        sok.get_embedding_variable("users", 3, ev_option=sok.InitializerOption("ones"))


def test_other_settings_are_an_error(sok):
    sok.get_embedding_variable("users", 3)
    others = {"embedding_dim": 4, "key_dtype": tf.int32, "initializer": "zeros", "capacity": 9}
    for argument, value in {**others, "trainable": False}.items():
        given = {"name": "users", "embedding_dim": 3, argument: value}
        with pytest.raises(ValueError, match=f"Table 'users' exists with {argument}="):
            sok.get_embedding_variable(**given)


def test_init_forgets_the_tables_before_it(sok):
    from sok_like.runtime.ranks import initialize

    table = sok.get_embedding_variable("users", 3)
    initialize.reset()
    assert sok.get_embedding_variable("users", 4) is not table  # initializes, as DeepRec does


def test_scopes_and_graphs(sok):
    with tf.Graph().as_default():
        with v1.variable_scope("fields", initializer=v1.constant_initializer(2.0)) as scope:
            first = sok.get_embedding_variable("users", 2, collections=["variables", "mine"])
        assert first.table_name == "fields/users"
        assert v1.get_collection("mine") == v1.global_variables() == [first]
        with v1.variable_scope(scope, reuse=True):
            assert sok.get_embedding_variable("users", 2) is first
            with pytest.raises(ValueError, match="'fields/items' must exist"):
                sok.get_embedding_variable("items", 2)
        read = rows_of(sok, first)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert (session.run(read) == 2.0).all()
    with tf.Graph().as_default(), v1.variable_scope("fields"):
        assert sok.get_embedding_variable("users", 2) is not first


@pytest.mark.parametrize(
    "argument, value",
    [
        ("regularizer", lambda x: x),
        ("constraint", lambda x: x),
        ("custom_getter", lambda x: x),
        ("init_data_source", "file"),
        ("value_dtype", tf.float64),
        ("collections", ["mine"]),
        ("name", ""),
        ("embedding_dim", 0),
        ("capacity", 0),
    ],
)
def test_what_would_be_ignored_is_refused(sok, argument, value):
    arguments = {"name": "users", "embedding_dim": 3, argument: value}
    with pytest.raises(ValueError, match=f"`{argument}` must"):
        sok.get_embedding_variable(**arguments)
    if argument == "regularizer":
        with tf.Graph().as_default(), v1.variable_scope("fields", regularizer=value):
            with pytest.raises(ValueError, match="`regularizer` must be None"):
                sok.get_embedding_variable("users", 3)


def test_steps_to_live_beside_an_option(sok):
    counter = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    table = sok.get_embedding_variable("a", 3, ev_option=counter, steps_to_live=5)
    option = table.options["ev_option"]
    assert option.evictions == (sok.GlobalStepEvict(5),)
    assert option.filter_option == sok.CounterFilter(2)
    assert sok.get_embedding_variable("a", 3, ev_option=counter, steps_to_live=5) is table
    assert sok.get_embedding_variable("b", 3, steps_to_live=0).options["ev_option"] is None
    same = sok.EmbeddingVariableOption(evict_option=sok.GlobalStepEvict(5))
    table = sok.get_embedding_variable("c", 3, ev_option=same, steps_to_live=5)
    assert table.options["ev_option"] is same
    with pytest.raises(ValueError, match="`steps_to_live` must be given once.*6.*table 'd'"):
        sok.get_embedding_variable("d", 3, ev_option=same, steps_to_live=6)


def test_a_partitioned_table_has_one_part(sok):
    without_effect = {"caching_device": "/cpu:0", "validate_shape": False}
    partitioner = tf.compat.v1.fixed_size_partitioner(num_shards=4)
    table = sok.get_embedding_variable("parts", 3, partitioner=partitioner, **without_effect)
    assert list(table) == [table]
    assert tf.nn.embedding_lookup(list(table), [1, 2]).shape == [2, 3]
    with pytest.raises(TypeError, match="has no dense value"):
        list(sok.get_embedding_variable("whole", 3))


def test_rows_of_the_default_matrix(sok):
    def ramp(shape, dtype=None):
        return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    option = sok.EmbeddingVariableOption(init_option=sok.InitializerOption(ramp, 5))
    expected = ramp((5, 2))[(KEYS.view(np.uint64) % np.uint64(5)).astype(int)]
    for make in (sok.get_embedding_variable, sok.EmbeddingVariable):
        table = make(name="ramp", embedding_dim=2, initializer="zeros", ev_option=option)
        assert (rows_of(sok, table).numpy() == expected).all()
