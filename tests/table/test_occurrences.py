"""Tables that count occurrences, as DeepRec does: frequencies, filters, methods of its names."""

import numpy as np
import pytest
import tensorflow as tf

from tests.training import train_step

v1 = tf.compat.v1
BLOOM = {"max_element_size": 1000, "false_positive_probability": 1e-6}


def table_of(sok, filter_option=None, dim=2, **options):
    init = sok.InitializerOption("ones", default_value_no_permission=0.5)
    option = sok.EmbeddingVariableOption(
        filter_option=filter_option,
        init_option=init,
        **{"record_statistics": True, "count": "occurrences", **options},
    )
    return sok.EmbeddingVariable(dim, name="t", ev_option=option)


def look_up(sok, table, *keys):
    (rows,) = sok.group_embedding_lookup([table], [np.array(keys)])
    return rows.numpy()[:, 0].tolist()


def test_frequencies_are_occurrences_over_features(sok):
    table = table_of(sok)
    for _ in range(2):
        sok.group_embedding_lookup([table, table], [[1, 1, 1, 2, 2], [3, 2]])
    assert table.get_frequency([1, 2, 3, 4]).numpy().tolist() == [6, 6, 2, 0]
    assert table.statistics()[:5] == (3, 6, 3, 3, 0)  # keys count once per lookup here, too


@pytest.mark.parametrize("kind", ["counter", "bloom", "bloom of 8 signed bits"])
def test_a_filter_reads_the_row_once_the_count_was_there_before(sok, kind):
    """As in DeepRec's tests: the third lookup reads the value of a waiting key, and trains."""
    filters = {
        "counter": sok.CounterFilter(3),
        "bloom": sok.CBFFilter(3, **BLOOM),
        "bloom of 8 signed bits": sok.CBFFilter(3, counter_type=tf.int8, **BLOOM),
    }
    table = table_of(sok, filters[kind])
    optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.25))
    found = []
    for _ in range(4):
        rows = train_step(optimizer, table, lambda: sok.group_embedding_lookup([table], [[7]])[0])
        found.append(rows.numpy()[0, 0])
    assert found == [0.5, 0.5, 0.5, 0.75]
    assert table.statistics().dropped_gradients == 2  # that of the third lookup moved the new row
    # Occurrences within one lookup count: all of them read what the key read before it.
    assert look_up(sok, table, 9, 9, 9, 9) == [0.5] * 4
    assert look_up(sok, table, 9, 9, 8, 8) == [1, 1, 0.5, 0.5]
    assert look_up(sok, table, 9, 9, 8, 8) == [1, 1, 0.5, 0.5]
    assert look_up(sok, table, 8) == [1]
    assert table.get_frequency([7, 8, 9]).numpy().tolist() == [4, 5, 8]


def test_a_table_counts_lookups_unless_it_is_told_otherwise(sok):
    table = table_of(sok, count=None)
    look_up(sok, table, 1, 1, 1)
    assert table.get_frequency([1]).numpy().tolist() == [1]
    sok.deeprec.install()
    try:
        assert sok.EmbeddingVariableOption().count == "occurrences"
        assert sok.EmbeddingVariableOption(count="lookups").count == "lookups"
    finally:
        sok.deeprec.uninstall()
    assert sok.EmbeddingVariableOption().count == "lookups"
    with pytest.raises(ValueError, match="`count` must be one of .*Received: count='keys'"):
        sok.EmbeddingVariableOption(count="keys")


def test_copies_and_dumps_go_on_counting(sok, tmp_path):
    table, again = (table_of(sok, sok.CounterFilter(3)) for _ in range(2))
    look_up(sok, table, 1, 1, 2)
    sok.Saver().dump_to_file(table, str(tmp_path))
    sok.Saver().restore_from_file(again, str(tmp_path))
    assert look_up(sok, again, 1) == [0.5]
    assert look_up(sok, again, 1, 2) == [1, 0.5]
    assert again.get_frequency([1, 2]).numpy().tolist() == [4, 2]


def test_shapes_versions_and_exports_as_deeprec_has_them(sok):
    table = table_of(sok, sok.CounterFilter(2), dim=3)
    for keys in ([1, 2, 3], [1, 3, 5], [1, 5, 7]):
        look_up(sok, table, *keys)
    assert table.total_count().numpy().tolist() == [3, 3]
    assert table.get_dynamic_shape().numpy().tolist() == [5, 3]  # with the keys that wait
    every = tf.constant([[1, 2], [3, 4], [5, 7]])
    assert table.get_frequency(every).numpy().tolist() == [[3, 1], [2, 0], [2, 1]]
    assert table.get_version(every).numpy().tolist() == [[2, 0], [1, -1], [2, 2]]
    exported = table.export()
    assert [field.numpy().tolist() for field in exported] == [
        [1, 3, 5],
        [[1] * 3] * 3,
        [2, 1, 2],
        [3, 2, 2],
    ]


def test_methods_in_a_graph(sok):
    with tf.Graph().as_default(), v1.Session() as session:
        old = sok.GlobalStepEvict(2)
        table = table_of(sok, evict_option=old, evicted_buffer_size=5)
        keys = v1.placeholder(tf.int64, None)
        rows = tf.nn.embedding_lookup(table, keys)
        asked = table.get_frequency([1, 2]), table.get_dynamic_shape(), table.get_version([1, 2])
        known, counts = table.key_statistics([1, 5]), table.statistics()
        evict, popped = table.evict(), table.pop_evicted()
        session.run(v1.global_variables_initializer())
        for batch in ([1, 1], [1, 2]):
            session.run(rows, {keys: batch})
        found = [value.tolist() for value in session.run(asked)]
        assert found == [[3, 1], [2, 2], [1, 1]]
        assert [field.tolist() for field in session.run(known)] == [[True, False], [3, 0], [2, -1]]
        for _ in range(3):
            session.run(rows, {keys: [2]})
        assert session.run(evict) == 1  # key 1, by age
        assert session.run(counts).evicted == 1
        assert session.run(popped).keys.tolist() == [1]
