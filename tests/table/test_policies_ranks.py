"""Policies on ranks: one state, whatever their number."""

import collections

import numpy as np
import pytest

from tests.checks import policies


def rows_of(results):
    keys = np.concatenate([r["keys"] for r in results])
    rows = np.concatenate([r["rows"] for r in results])
    order = np.argsort(keys)
    return keys[order], rows[order]


def known_of(results):
    """Each key is known on its owner only."""
    known = np.stack([r["known"] for r in results])  # [ranks, keys, 3]
    owner = (policies.KEYS.view(np.uint64) % np.uint64(len(results))).astype(int)
    for rank, found in enumerate(known):
        assert (found[owner != rank] == [0, 0, -1]).all()
    return known[owner, np.arange(len(owner))]


def test_the_same_state_on_any_number_of_ranks(on_threads):
    check_same_state(*on_threads(1, policies.train), on_threads(3, policies.train))


def check_same_state(alone, ranks):
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


def test_a_dump_of_ranks_is_known_on_one(sok, on_threads, tmp_path):
    results = on_threads(3, policies.train)
    for name, content in results[0]["dump"].items():
        (tmp_path / name).write_bytes(content)
    table = sok.EmbeddingVariable(3, name="policies", ev_option=policies.option())
    sok.Saver().restore_from_file(table, tmp_path)
    np.testing.assert_array_equal(policies._known(table), known_of(results))
    assert table.statistics().step == policies.STEPS


def test_a_dump_of_one_rank_is_known_on_all(on_threads):
    keys = np.array([0, 9, 20, 21, 30])
    expected = {0: (True, 5, 0), 9: (True, 14, 9), 20: (True, 3, 10), 21: (False, 2, 10)}
    expected[30] = (False, 1, 10)
    for rank, (known, step) in enumerate(on_threads(3, policies.restore)):
        assert step == 10
        for i, key in enumerate(keys.tolist()):
            found = tuple(field[i] for field in known)
            assert found == (expected[key] if key % 3 == rank else (False, 0, -1))


def test_occurrences_count_over_ranks_and_features(on_threads):
    ranks = on_threads(3, policies.occurrences)
    counts, versions = collections.Counter(), dict.fromkeys(policies.KEYS.tolist(), 0)
    for step, batch in enumerate(policies.batches()):
        for found, *_ in ranks:
            mine, rows = found[step]
            for keys, read in zip(batch, rows, strict=True):
                before = np.vectorize(counts.__getitem__, otypes=[int])(keys[mine])
                np.testing.assert_array_equal(read, np.where(before >= 5, 1.0, 0.5))
        counts.update(batch.ravel().tolist())
        for key in batch.ravel().tolist():
            versions[key] = step
    assert 5 < sum(count >= 5 for count in counts.values()) < len(counts)
    for rank, (_, frequencies, last) in enumerate(ranks):
        asked = policies.KEYS[rank:].tolist()
        assert frequencies.tolist() == [counts[key] for key in asked]
        assert last.tolist() == [versions[key] for key in asked]


def test_a_full_shard_is_an_error_on_all_ranks(on_threads):
    results = on_threads(3, policies.full)
    assert all("max_capacity=2" in message for message, _ in results)


def test_full_shards_go_on_on_one_rank(sok, on_threads, tmp_path):
    """`holds at most 2 keys on this rank. Received: 4` ended a job on fewer ranks."""
    (_, dump), *_ = on_threads(3, policies.full)
    for name, content in dump.items():
        (tmp_path / name).write_bytes(content)
    scored = sok.EmbeddingVariableOption(evict_option=sok.ScoreEvict("lru", 2))
    table = sok.EmbeddingVariable(2, name="full_by_score", ev_option=scored)
    given = "'full_by_score' holds at most 2 keys on rank 0, and was given 4"
    with pytest.warns(UserWarning, match=given):
        sok.Saver().restore(table, tmp_path)
    assert sok.export(table)[0].numpy().tolist() == [4, 5]
    assert table.statistics().evicted == 4
