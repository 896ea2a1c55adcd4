"""Ranks stay in step: whole lookups in one order, and no exchange with another call's data."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import agreement, comm, exchange_order
from tests.checks import programs
from tests.ranks import run_ranks
from tests.training import layer_of

DIM = 2


def ids(*numbers):
    return tf.constant(numbers, tf.int64)


def check_refused(call, *words, error=tf.errors.FailedPreconditionError):
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in raised.value.message


def test_calls_in_different_order_raise_on_all_ranks(on_threads):
    def check():
        layers = [layer_of("order_a", 1.0), layer_of("order_b", 2.0)]
        for layer in layers if sok.rank() == 0 else layers[::-1]:
            words = "of 'order_a: 2 none", "of 'order_b: 2 none", "rank 1:"
            check_refused(lambda layer=layer: layer(ids(1, 2, 3)), *words)
            assert int(layer.table.size()) == 0
        assert [float(tf.reduce_mean(layer(ids(4, 5)))) for layer in layers] == [1.0, 2.0]

    on_threads(2, check)


def test_a_gradient_waits_for_its_lookup(on_threads):
    """The gradient of a sum does not read the rows; a full table must stop it all the same."""

    def check():
        layer = layer_of("no_value", 1.0, capacity=4)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def step(keys):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(keys, training=True))
            return tape.gradient(loss, layer.embedding_variable)

        many, full = tf.range(9, dtype=tf.int64), tf.errors.ResourceExhaustedError
        for _ in range(2):
            assert (step(many[:2]).values == 2).numpy().all()
            check_refused(lambda: step(many), "'no_value'", error=full)

    on_threads(2, check)


def test_what_a_graph_knows_beforehand_travels_too(on_threads):
    """On rank 0 a step's keys are constants of its graph, then none."""

    def check():
        layer = layer_of("constant", 3.0)
        for own, expected in (([5], [[], [5, 7]]), ([], [[], [7]])):

            @tf.function
            def step(fed, keys=own):
                keys = fed if sok.rank() else tf.constant(keys, tf.int64)
                with tf.GradientTape() as tape:
                    rows = layer(keys, training=True)
                    loss = tf.reduce_sum(rows)
                return rows, tape.gradient(loss, layer.embedding_variable)

            rows, gradient = step(ids(7))
            assert rows.shape == [1 if sok.rank() else len(own), DIM]
            assert (rows == 3.0).numpy().all()
            assert sorted(gradient.indices.numpy()) == expected[sok.rank()]  # odd: rank 1's
            assert (gradient.values == 1.0).numpy().all()

    on_threads(2, check)


def test_a_gradient_outside_of_its_function(on_threads):
    """The tape is around a function of several lookups: TensorFlow makes the gradient's."""

    def check():
        layers = [layer_of(f"outside{i}", 1.0 + i) for i in range(3)]
        forward = tf.function(lambda keys: [layer(keys) for layer in layers])
        with tf.GradientTape() as tape:
            found = forward(ids(1, 2, 2))
            loss = tf.add_n([(i + 1) * tf.reduce_sum(rows) for i, rows in enumerate(found)])
        gradients = tape.gradient(loss, [layer.embedding_variable for layer in layers])
        for i, gradient in enumerate(gradients):
            assert gradient.indices.numpy().tolist() == [1 if sok.rank() else 2]
            times = 1 if sok.rank() else 2
            assert gradient.values.numpy().tolist() == [[times * (i + 1.0) * 2] * DIM]

    on_threads(2, check)


def test_a_function_meets_an_eager_lookup(on_threads):
    def check():
        layer = layer_of("met", 4.0)
        call = layer if sok.rank() == 0 else tf.function(layer)
        assert (call(ids(1, 2)) == 4.0).numpy().all()

    on_threads(2, check)


def test_tables_that_differ_over_ranks_raise_on_all(on_threads):
    def check():
        first = sok.rank() == 0
        wide = sok.EmbeddingVariable(2 if first else 3, name="wide")
        pair = [sok.EmbeddingVariable(2, name=name) for name in ("one", "two")]
        begun = sok.EmbeddingVariable(2, name="begun", initializer="ones" if first else "zeros")
        combiner = "sum" if first else "mean"
        fields = sok.DistributedEmbedding(combiner, None, 2, slot_num=1, max_nnz=2, name="fields")
        # The shapes of ranks may differ: with one key per field a combiner does nothing.
        alike = sok.DistributedEmbedding("sum", None, 2, slot_num=1, max_nnz=2, name="alike")
        alike(tf.constant([[1]] if first else [[[1, 2]]], tf.int64))

        def group(tables, name):
            return lambda: sok.group_embedding_lookup(tables, [ids(1, 2)] * len(tables), name=name)

        calls = [
            (group([wide], "wide"), "wide: 2 none", "wide: 3 none"),
            (group(pair if first else pair[::-1], "swapped"), "swapped: one 2", "swapped: two 2"),
            (
                group([begun], "begun"),
                *("begun: 2 none of constant 1 0'", "begun: 2 none of constant 0 0'"),
            ),
            (lambda: fields(ids(1, 2)[:, tf.newaxis]), "fields: 2 sum of ", "fields: 2 mean of "),
        ]
        for call, mine, other in calls:
            said = f"rank 0: keys of call 1 of '{mine}", f"rank 1: keys of call 1 of '{other}"
            check_refused(call, *said)
        assert not any(int(table.size()) for table in (wide, *pair, begun, fields.table))

    on_threads(2, check)


def test_dense_tables_that_differ_over_ranks_raise_on_all(on_threads):
    dmp, plain = sok.dist_model_parallel, tf.keras.layers.Embedding

    def check():
        first = sok.rank() == 0

        def look_up(name, embedding, **options):
            layer = dmp.DistributedEmbedding([embedding], name=name, **options)
            if options.get("dp_input", True):
                return lambda: layer([ids(1, 2)[tf.newaxis]])
            inputs = layer.strategy.input_ids_list[sok.rank()]
            return lambda: layer([tf.zeros([sok.size(), 1], tf.int64)] * len(inputs))

        rows = plain(6 if first else 5, 4)
        combined = sok.Embedding(6, 4, combiner="sum" if first else "mean")
        start = "ones" if first else "zeros"
        hashed = sok.HashEmbedding(4, embeddings_initializer=start, name="begins")
        threshold = {"row_slice_threshold": 0 if first else None}
        said = "rank 0: keys of call 1 of "
        other = "; rank 1: keys of call 1 of 'rows: 5x"
        check_refused(look_up("rows", rows), f"{said}'rows: 6x", other)
        check_refused(look_up("thresholds", plain(6, 4), **threshold), f"{said}'thresholds: 6x")
        notes = "rank 0: notes of call 1 of 'own_inputs: "
        check_refused(look_up("own_inputs", plain(6 if first else 5, 4), dp_input=False), notes)
        check_refused(look_up("combiners", combined), f"{said}'combiners: 6x")
        check_refused(look_up("initializers", hashed), f"{said}'initializers: ")

    on_threads(2, check)


def test_a_lookup_that_meets_something_else_names_both(on_threads):
    def check():
        layer = layer_of("alone", 1.0)
        words = "keys of call 1 of 'alone: 2 none", "notes of call", "'something_else'"
        call = functools.partial(layer, ids(1))
        if sok.rank():
            note = tf.zeros([0], tf.int64), comm.current(), "something_else"
            call = functools.partial(exchange_order.exchange_notes, *note)
        check_refused(call, *words)

    on_threads(2, check)


def test_eager_collectives_in_different_order_raise_on_all_ranks(on_threads):
    """Those of a mesh, a table and callbacks; rank 0 has another order than the others."""
    from sok_like.distribution import collectives
    from sok_like.lookup import replicas

    def check():
        line, own = comm.current(), 1.0 + sok.rank()
        variables = [tf.Variable([own, own]) for _ in range(2)]
        layer = layer_of("met_by_a_sum", 1.0)
        option = sok.EmbeddingVariableOption(record_statistics=True)
        counted = sok.get_embedding_variable("counted", 2, ev_option=option)

        def summed(name):
            return name, lambda: collectives.summed(tf.constant([own, own]), line, name)

        def exported(name):
            name, whole = f"export of table '{name}'", (np.zeros([1], np.int64), line, False)
            return name, lambda: agreement.send(*whole, name)

        gather = functools.partial(collectives.gather, tf.constant([own]), 0, line, "kernel")
        broadcast = functools.partial(replicas.broadcast, variables[:1], 0, "first")
        statistics = [
            (f"sok_get_{what}_counted", functools.partial(getattr(counted, f"get_{what}"), [1]))
            for what in ("frequency", "version")
        ]
        pairs = [
            (summed("dense_a"), summed("dense_b")),
            (summed("dense_c"), ("kernel", gather)),
            (("first_0", broadcast), summed("dense_d")),
            (("met_by_a_sum", lambda: layer(ids(1))), summed("dense_e")),
            statistics,
            (exported("served"), exported("kept")),
        ]
        for pair in pairs:
            words = "rank 1:", *(f"of '{name}" for name, _ in pair)
            for _, call in pair if sok.rank() == 0 else pair[::-1]:
                check_refused(call, *words)
        assert summed("dense_a")[1]().numpy().tolist() == [3.0, 3.0]
        assert variables[0].numpy().tolist() == [own, own]

    on_threads(2, check)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_programs_give_what_a_dictionary_gives(on_processes, world_size):
    steps = programs.num_steps(world_size)
    results = on_processes(world_size, programs.run, 46, steps)
    assert all(result == results[0] for result in results)
    assert sum(results[0].values()) == steps
    assert {"eager fine", "function fine", "loop fine"} <= set(results[0])
    if world_size == 2:
        assert all(any(wrong in how for how in results[0]) for wrong in ("rows", "full", "dmp"))


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_runs_of_a_session_give_what_a_dictionary_gives(on_processes, world_size):
    results = on_processes(world_size, programs.run_in_session, 3, programs.SESSION_STEPS)
    assert all(result == results[0] for result in results)
    assert sum(results[0].values()) == programs.SESSION_STEPS
    assert "session fine" in results[0] and len(results[0]) > 1


@pytest.mark.ranks
def test_exchanges_beyond_the_transport_take_several_rounds():
    """Ranks exchange at most 150 words of a block at once, and have two devices."""
    env = {"SOK_EXCHANGE_LIMIT": "300", "SOK_BLOCK_LIMIT": "4000"}
    first, second = run_ranks("tests.checks.rounds:main", 2, env=env)
    assert first == second and sum(first.values()) == 12
