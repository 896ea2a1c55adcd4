"""Policies on ranks: one state, whatever their number."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.checks.parity import ranks_of

BATCH, STEPS, HOTNESS = 9, 24, 2
KEYS = np.array([*range(40), -1, -2, 2**63 - 1, -(2**63)], np.int64)


def batches():
    """int64 keys `[BATCH, HOTNESS]` per step, for each of two features of one table."""
    rng = np.random.default_rng(8)
    odds = 1 / np.arange(1, len(KEYS) + 1)
    for _ in range(STEPS):
        yield rng.choice(KEYS, [2, BATCH, HOTNESS], p=odds / odds.sum())


def option():
    return sok.EmbeddingVariableOption(
        filter_option=sok.CounterFilter(3),
        evict_option=[sok.GlobalStepEvict(4), sok.L2WeightEvict(1e-4)],
        init_option=sok.InitializerOption(default_value_no_permission=0.5),
        evicted_buffer_size=100,
    )


def train(folder):
    """Trains on this rank's samples and dumps; counts over ranks per step, and own keys."""
    rank, world_size = sok.rank(), sok.size()
    table = sok.get_embedding_variable("policies", 3, ev_option=option())
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    optimizer.build([table])
    statistics = []
    for number, batch in enumerate(batches()):
        mine = ranks_of(number, BATCH, world_size) == rank
        with tf.GradientTape() as tape:
            keys = [tf.RaggedTensor.from_tensor(tf.constant(keys[mine])) for keys in batch]
            rows = sok.group_embedding_lookup_sparse([table, table], keys, ["sum", "mean"])
            loss = tf.add_n([tf.reduce_sum((r - 0.3) ** 2) for r in rows]) / BATCH
        optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))
        if number % 6 == 5:
            table.evict()
        statistics.append(tuple(table.statistics(all_ranks=True)))
    keys, rows = (tensor.numpy() for tensor in sok.export(table))
    sok.Saver().dump_to_file(table, folder)
    return {
        "statistics": statistics,
        "total": table.total_count(all_ranks=True).numpy().tolist(),
        "keys": keys,
        "rows": rows,
        "known": known_to(table),
        "evicted": table.pop_evicted().keys.numpy(),
    }


def known_to(table):
    return np.stack([field.numpy().astype(np.int64) for field in table.key_statistics(KEYS)], 1)


def rows_of(results):
    keys = np.concatenate([r["keys"] for r in results])
    rows = np.concatenate([r["rows"] for r in results])
    order = np.argsort(keys)
    return keys[order], rows[order]


def known_of(results):
    """Each key is known on its owner only."""
    known = np.stack([r["known"] for r in results])  # [ranks, keys, 3]
    owner = (KEYS.view(np.uint64) % np.uint64(len(results))).astype(int)
    for rank, found in enumerate(known):
        assert (found[owner != rank] == [0, 0, -1]).all()
    return known[owner, np.arange(len(owner))]


def test_the_same_state_on_any_number_of_ranks(on_threads, tmp_path):
    """And a dump of the ranks is known on one, and one of one rank on all."""
    (alone,), ranks = (on_threads(n, train, tmp_path / str(n)) for n in (1, 3))
    # size, seen, found, admitted, refused: the comparison is of something
    assert min(alone["statistics"][-1][:5]) > 0 and len(alone["evicted"]) > 0
    for rank in ranks:
        assert rank["statistics"] == alone["statistics"]
        assert rank["total"] == alone["total"] == [len(alone["keys"]), 3]
    np.testing.assert_array_equal(known_of(ranks), known_of([alone]))
    keys, rows = rows_of(ranks)
    np.testing.assert_array_equal(keys, rows_of([alone])[0])
    np.testing.assert_allclose(rows, rows_of([alone])[1], atol=1e-5)
    evicted = sorted(np.concatenate([r["evicted"] for r in ranks]))
    assert evicted == sorted(alone["evicted"])

    def restored(written_by):
        table = sok.EmbeddingVariable(3, name="policies", ev_option=option())
        sok.Saver().restore_from_file(table, tmp_path / written_by)
        assert table.statistics().step == STEPS
        return {"known": known_to(table)}

    for world_size, written_by in ((1, "3"), (3, "1")):
        known = known_of(on_threads(world_size, restored, written_by))
        np.testing.assert_array_equal(known, known_of([alone]))


def test_occurrences_count_over_ranks_and_features(on_threads):
    counts, versions = collections.Counter(), dict.fromkeys(KEYS.tolist(), 0)
    right = []  # by step: the rows of both features
    for step, batch in enumerate(batches()):
        seen = np.vectorize(counts.__getitem__, otypes=[int])(batch)
        right.append(np.where(seen >= 5, 1.0, 0.5))
        counts.update(batch.ravel().tolist())
        versions |= dict.fromkeys(batch.ravel().tolist(), step)
    assert 5 < sum(count >= 5 for count in counts.values()) < len(counts)

    def check():
        option = sok.EmbeddingVariableOption(
            filter_option=sok.CounterFilter(5),
            init_option=sok.InitializerOption("ones", default_value_no_permission=0.5),
            count="occurrences",
        )
        table = sok.EmbeddingVariable(2, name="occurrences", ev_option=option)
        for step, batch in enumerate(batches()):
            mine = ranks_of(step, BATCH, 3) == sok.rank()
            rows = sok.group_embedding_lookup([table, table], [keys[mine] for keys in batch])
            found = np.stack(rows)[..., 0]
            np.testing.assert_array_equal(found, right[step][:, mine])
        # Each rank asks for keys of its own choice, wherever they are.
        asked = KEYS[sok.rank() :].tolist()
        assert table.get_frequency(asked).numpy().tolist() == [counts[key] for key in asked]
        assert table.get_version(asked).numpy().tolist() == [versions[key] for key in asked]

    on_threads(3, check)


def test_full_shards(on_threads, tmp_path):
    """An error on all ranks; and a dump of full shards goes on on one rank."""
    scored = sok.EmbeddingVariableOption(evict_option=sok.ScoreEvict("lru", 2))

    def check():
        table = sok.EmbeddingVariable(2, name="full_by_score", ev_option=scored)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="max_capacity=2"):
            sok.group_embedding_lookup([table], [np.arange(6) * 6])  # rank 0 owns them all
        for key in range(6):
            sok.group_embedding_lookup([table], [[key]])
        sok.Saver().dump_to_file(table, tmp_path)

    on_threads(3, check)
    table = sok.EmbeddingVariable(2, name="full_by_score", ev_option=scored)
    given = "'full_by_score' holds at most 2 keys on rank 0, and was given 4"
    with pytest.warns(UserWarning, match=given):
        sok.Saver().restore(table, tmp_path)
    assert sok.export(table)[0].numpy().tolist() == [4, 5]
    assert table.statistics().evicted == 4
