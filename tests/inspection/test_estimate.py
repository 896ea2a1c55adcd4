"""Estimates against what tables take, as they count it themselves."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import workloads
from sok_like.optimizers import deeprec
from sok_like.runtime.native import libraries


def taken(keys, dim, rule, options=None, batch=65_536):
    """Bytes of a table with its slot rows, after one update of all keys."""
    core = libraries.core()
    table = core.Table("estimated", dim)
    for at in range(0, len(keys), batch):
        part = keys[at : at + batch]
        table.find_or_insert(part)
        if rule:
            grads = np.zeros([len(part), dim], np.float32)
            step = 1 + at // batch
            core.apply_gradients(table, rule, 0.1, step, part, grads, **(options or {}))
    return table.stats()


def close(found, estimated):
    assert estimated == pytest.approx(found, rel=0.1)


RULES = (None, "sgd", "adagrad", "ftrl", "adam", "lazy_adam", "momentum")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim, num_keys", [(16, 300_000), (8, 120_000)])
def test_each_rule(sok, rule, dim, num_keys):
    momentum = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer, options = (momentum, {"momentum": 0.9}) if rule == "momentum" else (rule, {})
    stats = taken(workloads.mixed(np.arange(num_keys)), dim, rule, options)
    estimated = sok.estimate_memory(num_keys, dim, optimizer)
    close(stats["bytes"], estimated.bytes)
    close(stats["index_bytes"], estimated.index_bytes)


@pytest.mark.parametrize("rule", ["adagrad_decay", "rmsprop", "lazy_adam"])
def test_optimizers_of_deeprec(sok, rule):
    optimizer = {
        "adagrad_decay": lambda: deeprec.AdagradDecayOptimizer(0.1, 0),
        "rmsprop": lambda: deeprec.AdamAsyncOptimizer(0.1, apply_sparse_rmsprop=True),
        "lazy_adam": lambda: deeprec.AdamAsyncOptimizer(0.1),
    }[rule]()
    if rule not in RULES:
        stats = taken(workloads.mixed(np.arange(120_000)), 8, rule)
        close(stats["bytes"], sok.estimate_memory(120_000, 8, rule).bytes)
    assert sok.estimate_memory(9, 8, optimizer) == sok.estimate_memory(9, 8, rule)


def test_slot_variables_of_all_rules(sok):
    """Derived ones included: a row that moves outside of the batch says which steps it owes."""
    core = libraries.core()
    assert core.slot_widths("sgd", 8) == {}
    assert core.slot_widths("sgd", 8, weight_decay=0.1) == {"last_step": 1}
    assert core.slot_widths("rowwise_adagrad", 8) == {"accumulator": 1}
    adam = {"momentum": 8, "velocity": 8}
    assert core.slot_widths("lazy_adam", 8) == adam
    widths = {**adam, "velocity_hat": 8, "last_step": 1}
    assert core.slot_widths("adam", 8, amsgrad=True) == widths
    for rule in ("adagrad_decay", "ftrl", "rmsprop"):
        assert sum(core.slot_widths(rule, 8).values()) == 16
    with pytest.raises(ValueError, match="must be one of sgd"):
        core.slot_widths("x", 8)


def test_ranks_records_and_optimizers(sok):
    whole = sok.estimate_memory(10**7, 16, "adam")
    assert whole.index_bytes / 1e7 == pytest.approx(26.8, rel=0.1)  # measured: docs/benchmarks.md
    assert whole.row_bytes / 1e7 == pytest.approx(208, rel=0.01)
    half = sok.estimate_memory(10**7, 16, "adam", world_size=2)
    assert half.bytes == pytest.approx(whole.bytes / 2, rel=0.1)
    assert sok.estimate_memory(100, 4, "sgd", keeps_records=True).record_bytes == 2400
    changes = sok.estimate_memory(1000, 4, "sgd", touched_keys=100)
    assert changes.change_bytes == 4000 + 8 * 128 and sok.estimate_memory(9, 4).change_bytes == 0
    assert changes.bytes - changes.change_bytes == sok.estimate_memory(1000, 4, "sgd").bytes
    adam = tf.keras.optimizers.Adam(0.1)
    lazy = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1), lazy=True)
    of_adam = {adam: "adam", sok.OptimizerWrapper(adam): "adam", lazy: "lazy_adam"}
    for optimizer, rule in of_adam.items():
        of_rule = sok.estimate_memory(10**6, 16, rule)
        assert sok.estimate_memory(10**6, 16, optimizer) == of_rule
    assert sok.estimate_memory(0, 4).bytes == 0
    for *arguments, words in ((-1, 4, "num_keys"), (5, 0, "embedding_dim"), (5, 4, "x", "'x'")):
        with pytest.raises(ValueError, match=words):
            sok.estimate_memory(*arguments)
