"""Tables with rows on disk: the bits of a table in memory, through every door that makes one."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.table.options import option_config, option_from_config

DIM, NUM_KEYS, BATCH = 32, 6000, 400
MEMORY = 128 * 1024  # of rows that take 2 to 3 MiB with the slot rows of Adam


def option_of(sok, folder, **kwargs):
    storage = sok.StorageOption("DRAM_SSDHASH", str(folder), [MEMORY], **kwargs)
    return sok.EmbeddingVariableOption(storage_option=storage)


def pair(sok, folder, name="t", **kwargs):
    return [
        sok.EmbeddingVariable(DIM, name=name, ev_option=option, **kwargs)
        for option in (None, option_of(sok, folder))
    ]


def train(sok, table, steps=30, first=0):
    """Batches of which most keys come again; returns what the last one read."""
    optimizer, rng = sok.optimizers.Adam(0.01), np.random.default_rng(first)
    for _ in range(steps):
        keys = np.minimum(*rng.integers(0, NUM_KEYS, (2, BATCH)))
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, tf.constant(keys))
            loss = tf.reduce_sum(rows * tf.range(1.0, 1.0 + DIM))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return rows.numpy()


def assert_same(sok, memory, disk):
    for ours, theirs in zip(sok.export(disk), sok.export(memory), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_training_has_the_bits_of_memory_and_bounded_memory(sok, folder):
    memory, disk = pair(sok, folder)
    expected, rows = train(sok, memory), train(sok, disk)
    np.testing.assert_array_equal(rows, expected)
    stats = disk.stats()
    assert stats.file_bytes > 10 * MEMORY and stats.blocks_evicted > 100
    assert stats.bytes_read > MEMORY and stats.bytes_written > MEMORY
    assert stats.resident_bytes <= MEMORY + 4 * BATCH * 4096  # and two batches
    assert stats.arena_bytes == stats.resident_bytes
    assert memory.stats()[-5:] == (0, 0, 0, 0, 0)
    estimate = sok.estimate_memory(
        stats.size, DIM, "adam", storage_option=option_of(sok, folder).storage_option
    )
    assert estimate.row_bytes == MEMORY
    assert estimate.row_bytes <= stats.arena_bytes < sok.estimate_memory(stats.size, DIM).row_bytes
    with pytest.raises(ValueError, match="`storage_option` must be None or a StorageOption"):
        sok.estimate_memory(10, DIM, storage_option=option_of(sok, folder))
    assert_same(sok, memory, disk)
    assert list(folder.iterdir()) == []  # the file has no name


def test_a_dump_is_what_lasts(sok, folder, tmp_path):
    memory, disk = pair(sok, folder / "made")
    train(sok, memory)
    train(sok, disk)
    for table, where in ((memory, "memory"), (disk, "disk")):
        sok.Saver().dump_to_file(table, str(tmp_path / where))
    others = pair(sok, folder / "made")
    for table, where in zip(others, ("disk", "memory"), strict=True):  # each that of the other
        sok.Saver().restore_from_file(table, str(tmp_path / where))
    assert_same(sok, *others)
    assert_same(sok, memory, others[1])
    rows = [train(sok, table, 5, first=9) for table in others]
    np.testing.assert_array_equal(rows[0], rows[1])
    erased = np.arange(0, NUM_KEYS, 3)
    assert others[0].erase(erased).numpy() == others[1].erase(erased).numpy() > 0
    assert_same(sok, *others)


def test_options_of_deeprec_make_such_a_table(sok, folder):
    storage = sok.StorageOption(
        storage_type=sok.deeprec.StorageType.DRAM_SSDHASH,
        storage_path=str(folder / "a" / "b"),
        storage_size=[MEMORY, 2**30],
        cache_strategy=sok.deeprec.CacheStrategy.LRU,
    )
    option = sok.EmbeddingVariableOption(
        storage_option=storage,
        filter_option=sok.CounterFilter(2),
        evict_option=sok.ScoreEvict("lfu", 1500),
    )
    table = sok.get_embedding_variable("on_disk", DIM, ev_option=option)
    train(sok, table)
    assert table.stats().file_bytes > 0 and int(table.statistics().evicted) > 0
    assert (folder / "a" / "b").is_dir()


def test_what_cannot_be_is_refused(sok, folder):
    (folder / "file").write_text("")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`storage_path` .*\(table 't'\)"):
        pair(sok, folder / "file")
    storage = sok.StorageOption("DRAM_SSDHASH", str(folder), [MEMORY, 2**22])
    table = sok.EmbeddingVariable(
        DIM, name="t", ev_option=sok.EmbeddingVariableOption(storage_option=storage)
    )
    kept = np.arange(100)
    sok.assign(table, kept, np.ones((100, DIM), np.float32))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="storage_size allows 4194304"):
        sok.assign(table, np.arange(100_000), np.zeros((100_000, DIM), np.float32))
    np.testing.assert_array_equal(table.find(kept)[0], np.ones((100, DIM)))


def test_the_option_goes_through_json(sok, folder):
    option = option_of(sok, folder, cache_strategy="LRU")
    assert option_from_config(option_config(option)) == option


def test_each_rank_has_a_file_of_its_own(sok, on_threads, folder):
    def check():
        memory, on_disk = pair(sok, folder)
        for table in (memory, on_disk):
            train(sok, table, first=sok.rank())
        assert_same(sok, memory, on_disk)
        assert [*folder.iterdir()] == []  # the files have no names any more
        assert memory.stats().size > 1000 and on_disk.stats().blocks_evicted > 100

    on_threads(2, check)
