"""SOK 2.x's API on one to three ranks, against NumPy on the whole table and the whole batch."""

import numpy as np
import pytest

from tests.checks import sok2 as check

WORLDS = [1, *(pytest.param(n, marks=pytest.mark.ranks) for n in (2, 3))]
pytestmark = pytest.mark.parametrize("world_size", WORLDS)


def whole(parts):
    """A table from what each rank holds."""
    keys = np.concatenate([keys for keys, _ in parts])
    rows = np.concatenate([rows for _, rows in parts])
    assert len(set(keys.tolist())) == len(keys)
    return rows[np.argsort(keys)]


def combined(rows, weights, combiner):
    """A sample's row, and by how much each of its rows counts in it."""
    total = {
        "sum": 1.0,
        "mean": weights.sum(),
        "sqrtn": np.sqrt((weights**2).sum()),
    }[combiner]
    share = weights / total if len(weights) and total else np.zeros(len(weights))
    return share @ rows if len(rows) else np.zeros(check.DIM), share


def expected_training():
    """By step the combined rows of all samples, by kind; and the tables at the end."""
    tables = [check.start(kind).astype(np.float64) for kind in check.KINDS]
    found = []
    for step, (ids, weights) in enumerate(check.samples()):
        outputs, gradients = [], [np.zeros_like(table) for table in tables]
        for t, (table, combiner) in enumerate(zip(tables, check.KINDS.values(), strict=True)):
            rows_of = []
            for sample, weight in zip(ids, weights, strict=True):
                weight = np.ones(len(sample)) if step == 0 else weight
                row, share = combined(table[sample], weight, combiner)
                np.add.at(gradients[t], sample, share[:, np.newaxis] * 2 * row)
                rows_of.append(row)
            outputs.append(np.stack(rows_of))
        found.append(outputs)
        tables = [t - check.RATE * g for t, g in zip(tables, gradients, strict=True)]
    return found, tables


def test_lookup_sparse_trains_all_kinds(rank_results, world_size):
    results = rank_results(world_size, "sok2.train")
    steps, tables = expected_training()
    for step, outputs in enumerate(steps):
        for kind, expected in enumerate(outputs):
            for rank, (found, _) in enumerate(results):
                mine = expected[rank::world_size]
                np.testing.assert_allclose(found[step][kind], mine, rtol=2e-5, atol=1e-6)
    for kind, expected in enumerate(tables):
        found = whole([variables[kind] for _, variables in results])
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_all2all_dense_embedding_and_sgd(rank_results, world_size):
    results = rank_results(world_size, "sok2.dense")
    for kind in check.KINDS:
        start = check.start(kind)
        expected = start.copy()
        for rank, result in enumerate(results):
            ids = np.array([[0, 6], [rank, 6]])
            np.testing.assert_array_equal(result[kind][0], start[ids])
            np.subtract.at(expected, ids, np.float32(check.RATE))
        np.testing.assert_allclose(whole([result[kind][1] for result in results]), expected, 1e-6)


def test_each_rank_holds_its_rows(rank_results, world_size):
    results = rank_results(world_size, "sok2.shards")
    for kind in check.KINDS:
        for rank, result in enumerate(results):
            local = kind.startswith("localized")
            keys = np.arange(rank, check.ROWS, world_size)
            if local:
                keys = np.arange(check.ROWS if rank == world_size - 1 else 0)
            np.testing.assert_array_equal(result[kind][0], keys)
            np.testing.assert_array_equal(result[kind][1], check.start(kind)[keys])
            if f"{kind} size" not in result:
                continue
            assert result[f"{kind} size"] == [len(keys), check.DIM]
            new = rank == (world_size - 1 if local else 2**40 % world_size)
            assert result[f"{kind} size then"] == [len(keys) + new, check.DIM]
            expected = np.stack([check.start(kind)[0], np.full(check.DIM, 0.5)])
            np.testing.assert_array_equal(result[f"{kind} read"], expected)


def test_drawn_rows_do_not_depend_on_the_number_of_ranks(rank_results, world_size):
    drawn = whole([result["drawn"] for result in rank_results(world_size, "sok2.shards")])
    limit = np.sqrt(6 / (check.ROWS + check.DIM))
    assert (np.abs(drawn) <= limit).all() and len(np.unique(drawn)) == drawn.size
    one = whole([result["drawn"] for result in rank_results(1, "sok2.shards")])
    np.testing.assert_array_equal(drawn, one)


def test_scatter_sub_adds_up_equal_keys(rank_results, world_size):
    found = whole([result["scatter"] for result in rank_results(world_size, "sok2.shards")])
    np.testing.assert_allclose(found, check.start("hbm") - 2, rtol=1e-6)


def test_dump_and_load(rank_results, world_size):
    results = rank_results(world_size, "sok2.dump")
    for i, kind in enumerate(check.KINDS):
        rows, momenta = check.rows_of_dump(kind)
        loaded = [variables[i] for _, variables, _ in results]
        np.testing.assert_array_equal(whole(loaded), rows)
        parts = [(keys, result[2][i]) for (keys, _), result in zip(loaded, results, strict=True)]
        np.testing.assert_array_equal(whole(parts), momenta)


def test_a_file_system_of_tensorflow(rank_results, world_size):
    results = rank_results(world_size, "sok2.elsewhere")
    for files, problems, _, here in results:
        assert len(files["local"]) == 2 * len(check.KINDS) and files["remote"] == files["local"]
        assert "no file system is registered for 'nowhere'" in problems["nowhere"]
        assert (world_size == 1) == ("ram" not in problems), problems
        assert not {"ram:", "nowhere:", "file:"} & set(here)
    for i, kind in enumerate(check.KINDS):
        loaded = [variables[i] for _, _, variables, _ in results]
        np.testing.assert_array_equal(whole(loaded), check.start(kind))


def test_files_are_those_of_sok_2(rank_results, world_size):
    files = rank_results(world_size, "sok2.dump")[0][0]
    for kind in check.KINDS:
        name = f"sok2_dump_{kind}_0"
        rows, momenta = check.rows_of_dump(kind)
        head, keys = files[f"{name}-key"][:296], np.frombuffer(files[f"{name}-key"][296:], "<i8")
        assert head == name.encode().rjust(256) + bytes(4) + b" " * 32 + b"\0\0\0\1"
        found = np.frombuffer(files[f"{name}-weight"][296:], "<f4").reshape(-1, check.DIM)
        np.testing.assert_array_equal(found, rows[keys])
        slot = files[f"{name}-SGD-momentum"]
        assert slot[:256].strip() == name.encode() and slot[256:260] == b"\0\0\0\2"
        assert slot[260:292].strip() == b"momentum" and slot[292:296] == b"\0\0\0\5"
        found = np.frombuffer(slot[296:], "<f4").reshape(-1, check.DIM)
        np.testing.assert_array_equal(found, momenta[keys])
        assert int.from_bytes(files[f"{name}-SGD-iterations"][296:], "little") >= 1


def test_a_dump_of_three_ranks_of_sok_2_loads(rank_results, world_size):
    results = rank_results(world_size, "sok2.load")
    for kind in check.KINDS:
        rows = check.rows_of_dump(kind)[0]
        np.testing.assert_array_equal(whole([result[kind] for result in results]), rows)


def test_errors_are_raised_on_every_rank(rank_results, world_size):
    for result in rank_results(world_size, "sok2.errors"):
        for kind in ("distributed", "localized"):
            assert f"sok2_errors_{kind}" in result[kind] and str(check.ROWS) in result[kind]
        assert "FileNotFoundError" in result["missing"]
        assert result["mode"].startswith("ValueError: `mode` must be")
        if world_size == 1:
            assert [result[name] for name in ("group", "saver", "single")] == [None] * 3
            continue
        assert f"all its keys on rank {world_size - 1}" in result["group"]
        assert f"all on rank {world_size - 1}" in result["saver"]
        assert "sok2_errors_spread" in result["scatter"]
        assert "'horovod' in a job of several" in result["single"]
