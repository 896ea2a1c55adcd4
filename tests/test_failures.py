"""A fault on one rank: every rank raises its message soon, and no key is lost."""

import re
import time

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.checks import failures
from tests.ranks import HANG_LIMIT, RanksFailed, run_ranks

LIMIT = HANG_LIMIT / 2  # seconds, also on a slow machine; what hangs is ended after them all
FAULTS = {
    "key_out_of_range": (
        "InvalidArgumentError",
        r"must lie in \[0, {rows}\).*key {rows}.*'rows_only'",
    ),
    "too_many_keys": ("InvalidArgumentError", r"at most 2 keys.*3 keys in row 1.*'short'"),
    "rows_not_multiple_of_slots": ("InvalidArgumentError", r"multiple of 2.*3.*'pairs'"),
    "samples_of_other_slots": ("InvalidArgumentError", r"slot_num=2 fields. Received: 1"),
    "table_full": ("ResourceExhaustedError", r"max_capacity=4.*2 new keys at size 3.*'full'"),
}
NAMED = {
    "key_out_of_range": 2,
    "table_full": 2,
    "too_many_keys": 0,
    "samples_of_other_slots": 0,
}  # the rank of the fault


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_gets_the_message_and_can_go_on(on_threads, fault, world_size):
    kind, message = FAULTS[fault]
    for result in on_threads(world_size, getattr(failures, fault)):
        for mode in ("eager", "graph"):
            seen = result[mode]
            assert seen["kind"] == kind
            assert re.search(message.format(rows=10 * world_size), seen["message"], re.S)
            assert seen["seconds"] < LIMIT
            if world_size > 1 and fault in NAMED:
                assert f"rank {NAMED[fault]}" in seen["message"]
        assert (result["afterwards"] > 0).all()


@pytest.mark.parametrize("world_size", [1, 3])
def test_full_table_loses_nothing(on_threads, world_size):
    for result in on_threads(world_size, failures.table_full):
        for before, after in zip(result["before"], result["after"], strict=True):
            np.testing.assert_array_equal(before, after)
        assert result["eager"]["grown"] == result["graph"]["grown"] == 0


def test_assign_overfills_one_rank_only(sok, on_threads):
    def check():
        variable = sok.EmbeddingVariable(2, name="assigned_full", capacity=4)
        keys = np.arange(6) * 2 + 1
        if sok.rank() == 0:
            sok.assign(variable, keys, np.ones([6, 2]))
        else:
            words = r"max_capacity=4. Received: 6 new keys at size 0 \(table 'assigned_full'\)"
            with pytest.raises(tf.errors.ResourceExhaustedError, match=words):
                sok.assign(variable, keys, np.ones([6, 2]))
        assert int(variable.size()) == 0

    on_threads(2, check)


# ---- a rank that raises elsewhere ----


def exception_outside_sok():
    sok.Init(global_batch_size=2)
    layer = sok.DistributedEmbedding("sum", None, 2, 1, 1)
    for step in range(1000):
        if sok.rank() == 1 and step == 3:
            raise ValueError("no such file on rank 1")
        layer(tf.constant([[step]], tf.int64))


@pytest.mark.ranks
def test_a_job_ends_with_the_message():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="ValueError: no such file on rank 1"):
        run_ranks("tests.test_failures:exception_outside_sok", 2)
    assert time.monotonic() - start < LIMIT
