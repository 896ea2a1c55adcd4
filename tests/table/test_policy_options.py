"""The options of an EmbeddingVariable: what they take, and what their errors say."""

import pathlib

import pytest
import tensorflow as tf

import sok_like as sok


def test_equal_options_are_equal():
    for make in (
        lambda: sok.CounterFilter(filter_freq=3),
        lambda: sok.CBFFilter(3, 1000, 0.01, tf.uint16),
        lambda: sok.GlobalStepEvict(steps_to_live=10),
        lambda: sok.L2WeightEvict(0.5),
        lambda: sok.ScoreEvict("lfu", capacity=10),
        lambda: sok.StorageOption("HBM"),
        lambda: sok.StorageOption("DRAM_SSDHASH", "/tmp", [2**20, 2**30, 0, 0], "LRU"),
        lambda: sok.InitializerOption("zeros", 1, -1.0),
        lambda: sok.EmbeddingVariableOption(
            evict_option=[sok.GlobalStepEvict(2), sok.ScoreEvict()], evicted_buffer_size=3
        ),
    ):
        assert make() == make() and hash(make()) == hash(make())
    for make in (sok.CounterFilter, sok.CBFFilter, sok.GlobalStepEvict, sok.L2WeightEvict):
        assert make() == make()  # DeepRec's defaults, which do nothing


def on_disk(*arguments, **options):
    return sok.StorageOption("DRAM_SSDHASH", *arguments, **options)


TWICE = [sok.ScoreEvict(), sok.ScoreEvict()]


@pytest.mark.parametrize(
    "option, argument, received",
    [
        (lambda: sok.CounterFilter(-1), "filter_freq", "-1"),
        (lambda: sok.CounterFilter(1.5), "filter_freq", "1.5"),
        (lambda: sok.CounterFilter(True), "filter_freq", "True"),
        (lambda: sok.CBFFilter(-1, 5, 0.1), "filter_freq", "-1"),
        (lambda: sok.CBFFilter(3), "max_element_size", "0"),
        (lambda: sok.CBFFilter(3, 100), "false_positive_probability", "-1.0"),
        (lambda: sok.CBFFilter(3, 100, 1.0), "false_positive_probability", "1.0"),
        (lambda: sok.CBFFilter(256, 100, 0.1, "uint8"), "filter_freq", "256"),
        (lambda: sok.CBFFilter(3, 100, 0.1, tf.float32), "counter_type", "float32"),
        (lambda: sok.GlobalStepEvict(0), "steps_to_live", "0"),
        (lambda: sok.L2WeightEvict(0), "l2_weight_threshold", "0"),
        (lambda: sok.L2WeightEvict(float("nan")), "l2_weight_threshold", "nan"),
        (lambda: sok.ScoreEvict("fifo"), "score", "fifo"),
        (lambda: sok.ScoreEvict("lru", 0), "capacity", "0"),
        (lambda: sok.InitializerOption(default_value_dim=0), "default_value_dim", "0"),
        (lambda: sok.InitializerOption("ones", 1, float("inf")), "no_permission", "inf"),
        (lambda: sok.StorageOption("SSDHASH"), "storage_type", "SSDHASH"),
        (lambda: sok.StorageOption(storage_path="x"), "storage_path", "x"),
        (lambda: sok.StorageOption("DRAM", storage_size=[9]), "storage_size", "9"),
        (lambda: on_disk(), "storage_path", "None"),
        (lambda: on_disk(""), "storage_path", "''"),
        (lambda: on_disk("s3://a/b"), "storage_path", "s3://a/b"),
        (lambda: on_disk("file:///a"), "storage_path", "file:///a"),
        (lambda: on_disk(pathlib.Path("gs://a")), "storage_path", "gs:/a"),
        (lambda: on_disk("x", [0, 9]), "storage_size", "0, 9"),
        (lambda: on_disk("x", [9, 9, 9]), "storage_size", "9, 9, 9"),
        (lambda: on_disk("x", 1.5), "storage_size", "1.5"),
        (lambda: on_disk("x", None, "FIFO"), "cache_strategy", "FIFO"),
        (lambda: on_disk("x", layout="light"), "layout", "light"),
        (lambda: sok.EmbeddingVariableOption(ckpt="x"), "ckpt", "x"),
        (lambda: sok.EmbeddingVariableOption(evicted_buffer_size=3), "evicted_buffer_size", "3"),
        (lambda: sok.EmbeddingVariableOption(evict_option=TWICE), "evict_option", "ScoreEvict"),
    ],
)
def test_errors_name_argument_and_value(option, argument, received):
    with pytest.raises(ValueError, match=f"`.*{argument}`.*Received.*{received}"):
        option()


def test_options_of_the_wrong_class():
    with pytest.raises(TypeError, match=r"`filter_option` must be None or a sok.CounterFilter or"):
        sok.EmbeddingVariableOption(filter_option=sok.ScoreEvict())
    with pytest.raises(TypeError, match=r"`evict_option` must be"):
        sok.EmbeddingVariableOption(evict_option=[sok.CounterFilter(2)])


def test_what_makes_a_table_keep_records():
    assert not sok.EmbeddingVariableOption().keeps_records
    assert not sok.EmbeddingVariableOption(init_option=sok.InitializerOption()).keeps_records
    assert sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2)).keeps_records
    assert sok.EmbeddingVariableOption(evict_option=sok.ScoreEvict()).keeps_records
    assert sok.EmbeddingVariableOption(record_statistics=True).keeps_records


@pytest.mark.keras
@pytest.mark.parametrize("most, bound", [(None, 50), (20, 20)])
def test_keys_that_wait_are_bounded_without_being_told(sok, most, bound):
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2, max_waiting=most))
    table = sok.EmbeddingVariable(2, name="waits", capacity=50, ev_option=option)
    for begin in range(0, 1000, 10):  # each key once
        keys = tf.range(begin, begin + 10, dtype=tf.int64)
        sok.group_embedding_lookup([table], [keys], training=True)
        assert int(table.statistics().waiting) <= bound
    counts = table.statistics()
    assert counts.waiting > bound // 2 and counts.waiting + counts.forgotten == 1000
    assert table.key_statistics([999, 0]).frequencies.numpy().tolist() == [1, 0]  # oldest first
