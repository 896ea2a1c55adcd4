"""Policies under TensorFlow, eagerly and in a tf.function; and in files."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tests.core.policy_model import Model
from tests.training import content, rows_by_key, train_step

pytestmark = pytest.mark.keras(slow=True)
RATE, STEPS = 0.5, 25
NO_PERMISSION = -3.0
KEYS = np.array([-1, 2**63 - 1, *range(8)], np.int64)


POLICY = {
    "filter_freq": 2,
    "no_permission": NO_PERMISSION,
    "steps_to_live": 3,
    "l2_threshold": 0.1,
    "score": "lfu",
    "evicted_buffer": 5,
}


def option(sok):
    return sok.EmbeddingVariableOption(
        filter_option=sok.CounterFilter(2),
        evict_option=[sok.GlobalStepEvict(3), sok.L2WeightEvict(0.1), sok.ScoreEvict("lfu", 6)],
        init_option=sok.InitializerOption("ones", default_value_no_permission=NO_PERMISSION),
        evicted_buffer_size=5,
    )


def batches():
    """int64 `[4, 2]` per step: keys of two features of one table."""
    rng = np.random.default_rng(3)
    return [
        rng.choice(KEYS, [4, 2], p=np.array([5, 5, 4, 3, 2, 2, 2, 2, 1, 1]) / 27)
        for _ in range(STEPS)
    ]


def feature_rows(sok, table, keys, training=True):
    return sok.group_embedding_lookup([table, table], [keys[:, 0], keys[:, 1]], training=training)


@pytest.mark.parametrize("as_function", [False, True])
def test_training_against_the_model(sok, as_function):
    """The rows of each step, keys evicted at every fifth one, and the final state."""
    model, dropped, all_evicted = Model(np.ones([1, 2], np.float32), 6, POLICY), 0, 0
    table = sok.get_embedding_variable("users", 2, ev_option=option(sok))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
    optimizer.build([table])

    def step(keys):
        def loss_of():
            rows = tf.stack(feature_rows(sok, table, keys), axis=1)
            return tf.reduce_sum(rows), rows

        return train_step(optimizer, table, loss_of)[1]

    step, evict = map(tf.function, (step, table.evict)) if as_function else (step, table.evict)
    for number, batch in enumerate(batches()):
        right = model.lookup(batch.ravel().tolist()).reshape(4, 2, 2)
        np.testing.assert_array_equal(step(tf.constant(batch)), right)
        for key, count in zip(*np.unique(batch, return_counts=True), strict=True):
            if key in model.rows:  # the loss is the sum of all rows
                model.rows[key] = model.rows[key] - np.float32(RATE * count)
            else:
                dropped += 1
        if number % 5 == 4:
            evicted = model.evict()
            assert int(evict()) == evicted
            all_evicted += evicted
    statistics = table.statistics()
    for name, count in model.counts.items():
        assert getattr(statistics, name) == count, name
    assert statistics.dropped_gradients == dropped > 0 and all_evicted > 0
    assert statistics.step == STEPS and statistics.size == len(model.rows)
    found = zip(*(np.asarray(field).tolist() for field in table.key_statistics(KEYS)), strict=True)
    assert list(found) == [model.seen(key) for key in KEYS.tolist()]
    popped = table.pop_evicted()
    assert np.asarray(popped.keys).tolist() == [key for key, *_ in model.buffer]
    np.testing.assert_array_equal(popped.rows, [row for _, row, *_ in model.buffer])


def test_evaluation_counts_nothing(sok):
    table = sok.get_embedding_variable("users", 2, ev_option=option(sok))
    rows = feature_rows(sok, table, tf.constant([[1, 2]], tf.int64), training=False)
    assert (np.array(rows) == NO_PERMISSION).all()
    assert table.statistics() == (0,) * 15
    assert (table.find([1])[0].numpy() == NO_PERMISSION).all()


def test_custom_scores(sok):
    custom = sok.EmbeddingVariableOption(evict_option=sok.ScoreEvict("custom"))
    table = sok.get_embedding_variable("users", 2, ev_option=custom, capacity=3)
    sok.group_embedding_lookup([table], [[1, 2, 3]])
    assert int(table.assign_scores([1, 2, 3, 9], [5, -1, 2, 7])) == 3
    sok.group_embedding_lookup([table], [[4]])
    assert sok.export(table)[0].numpy().tolist() == [1, 3, 4]  # 4 has score 0
    sok.group_embedding_lookup([table], [[5]])
    assert sok.export(table)[0].numpy().tolist() == [1, 3, 5]
    with pytest.raises(ValueError, match="`scores` must have one item per key"):
        table.assign_scores([1, 2], [3])
    for scores in ([0.5], tf.constant([2**63], tf.uint64)):
        with pytest.raises(TypeError, match="`scores` must be of an integer dtype.*users"):
            table.assign_scores([1], scores)
    assert int(table.assign_scores([], [])) == 0


def test_plain_tables_keep_no_records(sok):
    table = sok.get_embedding_variable("users", 2, ev_option=sok.EmbeddingVariableOption())
    assert not table.keeps_records and table.snapshot().records is None
    for method in ("statistics", "evict", "pop_evicted", "export", "get_frequency", "get_version"):
        keys = [[1]] if method.startswith("get_") else []
        with pytest.raises(ValueError, match=f"`{method}` needs .*record_statistics=True.*users"):
            getattr(table, method)(*keys)
    for shape in (table.total_count(all_ranks=True), table.get_dynamic_shape()):
        assert shape.numpy().tolist() == [0, table.dim]


def test_capacity_of_the_score(sok):
    def get(capacity, own):
        scored = sok.EmbeddingVariableOption(evict_option=sok.ScoreEvict("lru", own))
        return sok.EmbeddingVariable(2, name="users", capacity=capacity, ev_option=scored)

    assert get(None, 5).stats().max_capacity == get(5, None).stats().max_capacity == 5
    assert get(5, 5).stats().max_capacity == 5
    with pytest.raises(ValueError, match="ScoreEvict needs a capacity"):
        get(None, None)
    with pytest.raises(ValueError, match="`capacity` must be that of ScoreEvict, 6"):
        get(5, 6)


def bloom(sok, counter_type="uint8"):
    return sok.EmbeddingVariableOption(
        filter_option=sok.CBFFilter(3, 100, 1e-5, counter_type),
        evict_option=[sok.GlobalStepEvict(100), sok.ScoreEvict("custom", 50)],
    )


def known(table):
    return [field.numpy().tolist() for field in table.key_statistics(np.arange(8))]


def train_a_little(sok, table):
    for keys in ([1, 2, 3], [1, 2], [1, 5], [2]):
        sok.group_embedding_lookup([table], [keys])
    if table.options["ev_option"].evictions:
        table.assign_scores([1], [12])


@pytest.mark.parametrize("kind", ["exact", "bloom"])
@pytest.mark.parametrize("way", ["dump", "checkpoint", "weights file", "pickle", "deepcopy"])
def test_what_is_known_of_keys_survives(sok, tmp_path, kind, way):
    ev_option = bloom(sok)
    if kind == "exact":
        ev_option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(3))
    table = sok.EmbeddingVariable(2, name="users", ev_option=ev_option)
    train_a_little(sok, table)
    at_dump = known(table)
    assert at_dump[0] == [False, True, True, False, False, False, False, False]
    assert at_dump[1] == [0, 3, 3, 1, 0, 1, 0, 0]
    again = sok.EmbeddingVariable(2, name="users", ev_option=ev_option)
    train_a_little(sok, again)
    sok.group_embedding_lookup([again], [[3, 4, 5, 6]])
    if way == "dump":
        sok.Saver().dump_to_file(table, tmp_path)
        sok.Saver().restore_from_file(again, tmp_path)
    elif way == "checkpoint":
        path = tf.train.Checkpoint(table=table).save(str(tmp_path / "ckpt"))
        tf.train.Checkpoint(table=again).restore(path)
    elif way == "weights file":
        for each, call in ((table, "save_weights"), (again, "load_weights")):
            layer = tf.keras.layers.Flatten(name="holder")
            layer.held = each.as_weight()
            model = tf.keras.Sequential([tf.keras.Input([1]), layer])
            getattr(model, call)(tmp_path / "m.weights.h5")
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(table))
    else:
        again = copy.deepcopy(table)
    assert known(again) == at_dump
    np.testing.assert_equal(content(again), content(table))
    assert again.statistics().step == 4 and again.statistics().written == 2
    for each in (table, again):  # and goes on alike
        sok.group_embedding_lookup([each], [[3, 5, 6]])
        sok.group_embedding_lookup([each], [[3]])
    assert known(again) == known(table)
    assert known(again)[0][3]


def test_older_and_plain_dumps(sok, tmp_path):
    plain = sok.EmbeddingVariable(2, name="users")
    sok.group_embedding_lookup([plain], [[1, 2]])
    sok.Saver().dump_to_file(plain, tmp_path / "plain")
    with np.load(next((tmp_path / "plain").glob("*.npz"))) as arrays:
        of_rows = {"keys", "rows", "slot_rows", "slot_names", "slot_widths"}
        assert set(arrays) == of_rows | {"optimizer_step", "initial_row_scale"}
    counting = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    table = sok.EmbeddingVariable(2, name="users", ev_option=counting)
    sok.group_embedding_lookup([table], [[3]])
    sok.Saver().restore_from_file(table, tmp_path / "plain")
    found = table.key_statistics([1, 2, 3])
    assert found.present.numpy().tolist() == [True, True, False]
    assert found.frequencies.numpy().tolist() == [0, 0, 0]
    assert (table.find([1, 2])[0].numpy() == plain.find([1, 2])[0].numpy()).all()
    sok.Saver().dump_to_file(table, tmp_path / "policies")
    sok.Saver().restore_from_file(plain, tmp_path / "policies")
    assert int(plain.size()) == 2


def test_a_dump_evicts_and_a_copy_does_not(sok, tmp_path):
    stale = sok.EmbeddingVariableOption(evict_option=sok.GlobalStepEvict(1))
    table = sok.EmbeddingVariable(2, name="users", ev_option=stale)
    for keys in ([1], [2], [3]):
        sok.group_embedding_lookup([table], [keys])
    copy.deepcopy(table)
    assert table.statistics().evicted == 0
    sok.Saver().dump_to_file(table, tmp_path)
    assert table.statistics().evicted == 1
    assert sok.export(table)[0].numpy().tolist() == [2, 3]


def test_a_filter_of_another_size_is_refused(sok, tmp_path):
    small = sok.EmbeddingVariableOption(filter_option=sok.CBFFilter(3, 10, 0.1))
    table = sok.EmbeddingVariable(2, name="users", ev_option=small)
    sok.group_embedding_lookup([table], [[1]])
    sok.Saver().dump_to_file(table, tmp_path)
    other = sok.EmbeddingVariable(2, name="users", ev_option=bloom(sok))
    train_a_little(sok, other)
    before = known(other)
    with pytest.raises(RuntimeError, match="Bloom filter must be restored"):
        sok.Saver().restore_from_file(other, tmp_path)
    assert known(other) == before


SEEN = {1: 3, 2: 1, 3: 2, 4: 2, -1: 1, -2: 4, 7: 1}  # training lookups of each key
STAY = {1, 3, 4, -2}  # of four, by frequency; of equal ones the larger unsigned key would
MORE = "'users' holds at most 4 keys on rank 0, and was given 3 more"


def trained(sok, evicts, **kwargs):
    """A table whose keys were seen as often as SEEN says; row k is [k, k]."""
    ev_option = sok.EmbeddingVariableOption(evict_option=evicts, record_statistics=evicts is None)
    table = sok.EmbeddingVariable(2, name="users", ev_option=ev_option, **kwargs)
    for step in range(max(SEEN.values())):
        sok.group_embedding_lookup([table], [[k for k, times in SEEN.items() if times > step]])
    sok.assign(table, list(SEEN), [[key, key] for key in SEEN])
    return table


def smaller(sok, score="lfu", capacity=4, **kwargs):
    scored = sok.EmbeddingVariableOption(evict_option=sok.ScoreEvict(score, capacity), **kwargs)
    return sok.EmbeddingVariable(2, name="users", ev_option=scored)


@pytest.mark.parametrize("way", ["dump", "delta", "checkpoint", "copy", "no policy before"])
def test_what_a_smaller_table_keeps(sok, tmp_path, way):
    """`ResourceExhaustedError: table 'users' holds at most 4 keys on this rank` it said."""
    before = None if way == "no policy before" else sok.ScoreEvict("lfu", 100)
    table = trained(sok, before)
    small, saver = smaller(sok, evicted_buffer_size=2), sok.Saver()
    sok.group_embedding_lookup([small], [[11, 12, 13]])
    with pytest.warns(UserWarning, match=MORE):
        if way == "checkpoint":
            path = tf.train.Checkpoint(table=table).save(str(tmp_path / "ckpt"))
            tf.train.Checkpoint(table=small).restore(path)
        elif way == "copy":
            small.load_snapshot(table.snapshot())
        elif way == "delta":
            saver.dump(table, tmp_path)
            table.erase([-2, 3])
            sok.group_embedding_lookup([table], [[3, -2]])
            sok.group_embedding_lookup([table], [[-2, 2, 2]])
            saver.dump(table, tmp_path, since="last")
            saver.restore(small, tmp_path)
        else:
            saver.dump_to_file(table, tmp_path)
            saver.restore(small, tmp_path)
    stay = STAY
    if way == "delta":  # 1: 3, 4 and 2 and -2: 2, all others 1
        stay = {1, 4, 2, -2}
    assert rows_by_key(small) == {
        key: row for key, row in rows_by_key(table).items() if key in stay
    }
    counts = small.statistics()
    assert (counts.written, counts.evicted, counts.dropped, counts.buffered) == (7, 3, 1, 2)
    if way != "delta":
        last = sorted(SEEN.keys() - stay, key=lambda k: (SEEN[k], k % 2**64))[-2:]
        assert small.pop_evicted().keys.numpy().tolist() == last
    # It goes on as a table of four keys, and its next delta is one that can be read.
    sok.group_embedding_lookup([small], [[21]])
    assert int(small.size()) == 4 and 21 in rows_by_key(small)
    if way == "delta":
        saver.dump(small, tmp_path, since="last")
        saver.restore(table, tmp_path)
        assert rows_by_key(table) == rows_by_key(small)


def test_a_table_without_a_score_still_refuses(sok, tmp_path):
    sok.Saver().dump_to_file(trained(sok, None), tmp_path)
    small = sok.EmbeddingVariable(2, name="users", capacity=4)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="at most 4 keys.*Received: 7"):
        sok.Saver().restore(small, tmp_path)


@pytest.mark.parametrize("graph", [False, True])
def test_writes_of_more_keys_than_fit(sok, graph):
    small = smaller(sok)

    @tf.function
    def in_graph(keys, rows):
        sok.assign(small, keys, rows)

    for _ in range(2):
        sok.group_embedding_lookup([small], [[5, 11]])
    with pytest.warns(UserWarning, match="holds at most 4 keys on rank 0, and was given 2 more"):
        given = tf.range(1, 7, dtype=tf.int64), tf.ones([6, 2])
        in_graph(*given) if graph else sok.assign(small, *given)
    # 11 is not written, 5 was seen, and of 1 to 4 and 6 the larger stay.
    assert rows_by_key(small).keys() == {5, 3, 4, 6}
    assert small.statistics().evicted == 3


def test_a_large_dump_is_read_in_parts(sok, tmp_path, monkeypatch):
    """Keys of a later part may have lower scores than those of an earlier one."""
    from sok_like.saving.format import deltas

    rng = np.random.default_rng(0)
    table = smaller(sok, "custom", 4000)
    keys = rng.choice(10**6, 4000, replace=False)
    scores = rng.integers(-50, 50, 4000)
    sok.group_embedding_lookup([table], [keys])
    table.assign_scores(keys, scores)
    sok.Saver().dump_to_file(table, tmp_path)
    monkeypatch.setattr(deltas, "CHUNK_BYTES", 4096)
    small = smaller(sok, "custom", 1000)
    with pytest.warns(UserWarning, match="at most 1000 keys on rank 0, and was given 3000 more"):
        sok.Saver().restore(small, tmp_path)
    order = np.lexsort([keys, scores])[-1000:]
    assert rows_by_key(small).keys() == set(keys[order].tolist())
    assert small.stats().size == 1000
