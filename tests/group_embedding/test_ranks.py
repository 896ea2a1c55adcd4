"""Group lookups on ranks against dense tables in one process; `enable_distributed_strategy`."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import sok2
from sok_like.runtime.ranks import comm, initialize, launchers
from tests.checks import groups, parity
from tests.checks.groups import BATCH, DENSE, FEATURES, NUM_KEYS
from tests.group_embedding.test_lookup_sparse import expected
from tests.lookup.test_learned_weights import right_gradient
from tests.thread_ranks import exchanges_in

v1 = tf.compat.v1


def oracle(optimizer, world_size, start):
    """Per step and feature the vectors of the whole batch; per table the rows; all in float64."""
    tables = {name: tf.Variable(rows) for name, rows in start.items()}
    optimizers = {name: groups.keras_optimizer(optimizer) for name in tables}
    vectors = []
    for features, targets in groups.batches():
        with tf.GradientTape() as tape:
            found = []
            for (name, combiner, weighted, _), arrays in zip(FEATURES, features, strict=True):
                positions, lengths, weights = arrays
                ids = tf.RaggedTensor.from_tensor(positions, lengths)
                weights = tf.RaggedTensor.from_tensor(weights, lengths) if weighted else None
                found.append(expected(tables[name], ids, combiner, weights))
            loss = groups.loss_of(found, tf.constant(targets, tf.float64))
        gradients = dict(zip(tables, tape.gradient(loss, list(tables.values())), strict=True))
        vectors.append([v.numpy() for v in found])
        for name, table in tables.items():
            gradient = tf.convert_to_tensor(gradients[name])
            # Ordinary gradients are averaged over ranks.
            gradient = gradient / world_size if name in DENSE else gradient
            optimizers[name].apply_gradients([(gradient, table)])
    return vectors, {name: table.numpy() for name, table in tables.items()}


@pytest.mark.parametrize("world_size, optimizer", [(1, "adagrad"), (2, "adam")])
def test_training(on_threads, world_size, optimizer):
    """Vectors of every step, and the rows behind the last."""
    ranks = on_threads(world_size, groups.train, optimizer)
    start = {name: rows.astype(np.float64) for name, rows in ranks[0]["initial"].items()}
    vectors, rows = oracle(optimizer, world_size, start)
    for rank, result in enumerate(ranks):
        for step, of_step in enumerate(result["vectors"]):
            mine = parity.ranks_of(step, BATCH, world_size) == rank
            for feature, ours, right in zip(FEATURES, of_step, vectors[step], strict=True):
                # Before the first update they differ by rounding only.
                atol = 1e-6 if step == 0 else 1e-5
                np.testing.assert_allclose(ours, right[mine], 0, atol, err_msg=feature)
        for name, right in rows.items():
            assert np.abs(right - result["initial"][name]).max() > 0.01
            np.testing.assert_allclose(result["final"][name], right, 0, 1e-5, err_msg=name)


def test_gradient_scales(on_threads):
    """Every rank's loss is the sum of its rows."""

    def check():
        table, keys = sok.EmbeddingVariable(1, name="scaled"), groups.keys()
        sparse = [table], [tf.RaggedTensor.from_row_lengths(keys, [NUM_KEYS])], "sum"
        for scale, right in (("sum", 3), ("mean", 1)):
            for lookup in (
                lambda scale: sok.group_embedding_lookup_sparse(*sparse, gradient_scale=scale),
                lambda scale: sok.group_embedding_lookup([table], [keys], gradient_scale=scale),
                lambda scale: sok.group_embedding_lookup_sparse(
                    *sparse, gradient_scale=scale, is_sequence=True
                ),
            ):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(lookup(scale)[0])
                np.testing.assert_allclose(tape.gradient(loss, table).values, right, rtol=1e-6)

    on_threads(3, check)


def test_placement_does_not_depend_on_the_size_of_a_group(on_threads):
    def check():
        tables = [sok.EmbeddingVariable(2, name=f"placed{i}") for i in range(8)]
        sok.group_embedding_lookup([tables[0]], [groups.keys()])
        sok.group_embedding_lookup(tables[1:], [groups.keys()] * 7)
        keys = groups.keys().astype(np.uint64)
        own = sorted(keys[keys % np.uint64(3) == sok.rank()])
        for table in tables:
            assert sok.export(table)[0].numpy().astype(np.uint64).tolist() == own

    on_threads(3, check)


LEARNED = [[2, 4, 2], [], [7, 7], [1, 0, 6]]  # positions of keys, by sample


def test_learned_weights(on_threads):
    """Of spread tables, and of dense and localized ones, which travel by another exchange."""
    rows = np.random.default_rng(9).normal(size=[NUM_KEYS, 3]).astype(np.float32)

    def check():
        rng = np.random.default_rng([9, sok.rank()])
        flat = rng.uniform(0.5, 2.0, sum(map(len, LEARNED))).astype(np.float32)
        factors = rng.normal(size=[len(LEARNED), 3]).astype(np.float32)
        table = sok.EmbeddingVariable(3, name="learned")
        sok.assign(table, groups.keys(), rows)
        static = [sok2.Variable(rows, name="static"), sok2.Variable(rows, mode="localized:0")]
        positions = tf.ragged.constant(LEARNED, dtype=tf.int64)
        ids = positions.with_values(tf.gather(groups.keys(), positions.values))

        def losses(weights, combiner):
            of_ids = ids.with_values(weights)
            outputs = sok.group_embedding_lookup_sparse(
                [table, table],
                [ids, ids.to_sparse()],
                combiner,
                sp_weights=[of_ids, of_ids.to_sparse()],
                gradient_scale="sum",
            )
            return [tf.reduce_sum(output * factors) for output in outputs]

        for combiner in ("sum", "mean", "sqrtn"):
            weights = tf.Variable(flat, name="local")
            with tf.GradientTape(persistent=True) as tape:
                of_static = positions.with_values(weights)
                outputs = sok2.lookup_sparse(static, [positions] * 2, [of_static] * 2, combiner)
                of_tables = [tf.reduce_sum(output * factors) for output in outputs]
                of_tables += losses(weights, combiner)
            right = right_gradient(combiner, rows, LEARNED, flat, factors)
            for loss in of_tables:
                np.testing.assert_allclose(tape.gradient(loss, weights), right, 1e-4, 1e-5)
        weights = tf.constant(flat)
        for call in (losses, tf.function(losses, autograph=False)):
            with tf.GradientTape() as tape:
                if sok.rank() == 0:  # which alone asks for them
                    tape.watch(weights)
                loss = call(weights, "mean")[0]
            of_table, of_weights = tape.gradient(loss, [table, weights])
            assert of_table.values.shape[1] == 3
            assert (of_weights is None) == (sok.rank() > 0)
        if sok.rank() == 0:
            right = right_gradient("mean", rows, LEARNED, flat, factors)
            np.testing.assert_allclose(of_weights, right, 1e-4, 1e-5)

    on_threads(2, check)


def test_reference_variables_in_a_group(on_threads):
    """Rows of a table and of a reference variable after a step."""

    def check():
        with tf.Graph().as_default(), v1.Session() as session:
            ones = v1.ones_initializer()
            dense = v1.get_variable("dense", [4, 2], initializer=ones, use_resource=False)
            table = sok.EmbeddingVariable(2, name="beside_references", initializer="ones")
            ids = tf.RaggedTensor.from_row_lengths(tf.constant([sok.rank(), 3], tf.int64), [2])
            rows = sok.group_embedding_lookup_sparse(
                [table, dense], [ids, ids], "sum", gradient_scale="sum"
            )
            optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.5))
            train = optimizer.minimize(tf.add_n([tf.reduce_sum(r) for r in rows]))
            session.run(v1.global_variables_initializer())
            session.run(train)
            every = tf.nn.embedding_lookup(table, tf.range(4, dtype=tf.int64))
            found, found_dense = session.run([every, dense])
        assert type(dense).__name__ == "RefVariable"
        uses = np.array([[1], [1], [0], [2]])
        np.testing.assert_allclose(found, np.tile(1 - 0.5 * uses, 2))
        # Ordinary gradients are averaged over ranks.
        np.testing.assert_allclose(found_dense, np.tile(1 - 0.5 * uses / 2, 2), rtol=1e-6)

    on_threads(2, check)


def test_switch(on_threads):
    """In a fresh program: world sizes, rows of one seed, and what is refused."""

    def check():
        for choice in ("localized", None):
            initialize.reset()
            with pytest.raises(RuntimeError, match=f"strategy={choice!r} in a job of 3"):
                sok.enable_distributed_strategy(choice)
        initialize.reset()
        sok.enable_distributed_strategy("collective")
        table = sok.EmbeddingVariable(3, name="switched")
        (rows,) = sok.group_embedding_lookup([table], [groups.keys()], training=False)
        assert comm.current().world_size == 3
        initialize.reset()
        with tf.Graph().as_default():
            sok.enable_distributed_strategy()
            assert comm.current().world_size == 3
        initialize.reset()
        sok.Init(global_batch_size=12, seed=parity.SEED)
        return rows.numpy()

    first, *others = on_threads(3, check)
    for rows in others:  # one seed, though none was given
        np.testing.assert_array_equal(rows, first)


def test_any_number_of_tables_takes_two_collectives_forward_and_one_back(on_threads):
    def check(num_tables):
        tables = [sok.EmbeddingVariable(2 + i % 3, name=f"counted{i}") for i in range(num_tables)]
        params = [*tables, tf.Variable(tf.ones([4, 2])), tables[0]]

        def forward(keys):
            ids = tf.RaggedTensor.from_row_lengths(keys, [1, 1])
            return sok.group_embedding_lookup_sparse(params, [ids] * len(params), "mean")

        def step(keys):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(rows) for rows in forward(keys)])
            return tape.gradient(loss, tables)

        # The fourth is in a branch for few steps: it compares the ordinary variable over ranks.
        assert (exchanges_in(forward), exchanges_in(step)) == (2, 4)

    for num_tables in (1, 5):
        on_threads(2, check, num_tables)


@pytest.fixture
def fresh(sok, monkeypatch):
    """The package, not initialised."""
    for name in launchers.WORLD_SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    initialize.reset()
    return sok


def test_on_one_process_they_are_the_same(fresh):
    def rows(strategy):
        initialize.reset()
        fresh.enable_distributed_strategy(strategy)
        fresh.Init(global_batch_size=2, seed=3)
        return fresh.EmbeddingVariable(2, name="same").find([1, 2])[0]

    for strategy in ("localized", None):
        np.testing.assert_array_equal(rows(strategy), rows("collective"))


@pytest.mark.parametrize("strategy", ["parameter_server", "Collective", "", 1])
def test_unknown_strategy(fresh, strategy):
    with pytest.raises(ValueError, match="('collective', 'localized', None).*Received.*strategy="):
        fresh.enable_distributed_strategy(strategy)
    assert not comm.is_initialized()


@pytest.mark.parametrize("strategy", ["localized", None])
def test_localized_among_several_processes(fresh, monkeypatch, strategy):
    monkeypatch.setattr(comm, "launched_world_size", lambda: 3)
    with pytest.raises(RuntimeError, match="private copy.*'collective'.*a job of 3 processes"):
        fresh.enable_distributed_strategy(strategy)
    assert not comm.is_initialized()


def test_instead_of_init_in_a_session(fresh):
    """No op to run: the rows of a seed drawn here are there at the first lookup."""
    with tf.Graph().as_default():
        fresh.enable_distributed_strategy()
        table = fresh.EmbeddingVariable(2, name="graph")
        rows = fresh.group_embedding_lookup([table], [[1, 2]])[0]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert np.unique(session.run(rows)).size == 4


def test_init_before_or_after(fresh):
    fresh.enable_distributed_strategy()
    fresh.Init(global_batch_size=4, seed=1)
    fresh.enable_distributed_strategy("collective")
    with pytest.raises(RuntimeError, match="called before"):
        fresh.Init(global_batch_size=8, seed=1)
