"""DeepRec's methods of a table: counts, frequencies, versions and exports."""

import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1


def table_of(sok, filter_option=None, dim=2):
    init = sok.InitializerOption("ones", default_value_no_permission=0.5)
    option = sok.EmbeddingVariableOption(
        filter_option=filter_option, init_option=init, record_statistics=True
    )
    return sok.EmbeddingVariable(dim, name="t", ev_option=option)


def look_up(sok, table, *keys):
    (rows,) = sok.group_embedding_lookup([table], [np.array(keys)])
    return rows.numpy()[:, 0].tolist()


def test_shapes_versions_and_exports_as_deeprec_has_them(sok):
    table = table_of(sok, sok.CounterFilter(2), dim=3)
    for keys in ([1, 2, 3], [1, 3, 5], [1, 5, 7]):
        look_up(sok, table, *keys)
    assert table.total_count().numpy().tolist() == [3, 3]
    assert table.get_dynamic_shape().numpy().tolist() == [5, 3]  # with the keys that wait
    every = tf.constant([[1, 2], [3, 4], [5, 7]])
    assert table.get_frequency(every).numpy().tolist() == [[3, 1], [2, 0], [2, 1]]
    assert table.get_version(every).numpy().tolist() == [[2, 0], [1, 0], [2, 2]]
    exported = table.export()
    assert [field.numpy().tolist() for field in exported] == [
        [1, 3, 5],
        [[1] * 3] * 3,
        [2, 1, 2],
        [3, 2, 2],
    ]
    plain = sok.EmbeddingVariable(2, name="plain")
    assert plain.get_dynamic_shape().numpy().tolist() == [0, 2]
    for method in (plain.export, lambda: plain.get_frequency([1]), lambda: plain.get_version([1])):
        with pytest.raises(ValueError, match="record_statistics=True.*Received: table 'plain'"):
            method()


def test_methods_in_a_graph(sok):
    with tf.Graph().as_default(), v1.Session() as session:
        table = table_of(sok)
        keys = v1.placeholder(tf.int64, None)
        rows = tf.nn.embedding_lookup(table, keys)
        asked = table.get_frequency([1, 2]), table.get_dynamic_shape(), table.get_version([1, 2])
        session.run(v1.global_variables_initializer())
        for batch in ([1, 1], [1, 2]):
            session.run(rows, {keys: batch})
        found = [value.tolist() for value in session.run(asked)]
        assert found == [[2, 1], [2, 2], [1, 1]]  # lookups, not occurrences
