"""`sok.Init`: its arguments, seed, second call and v1 form. `sok.shard`, and numbers of ranks."""

import importlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.ranks import comm, initialize, launchers, stalls
from tests import forks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Ranks(comm.SingleProcess):
    def __init__(self, world_size, rank=0):
        self.world_size, self.rank = world_size, rank


@pytest.fixture
def fresh(sok):
    initialize.reset()
    return sok


def test_other_arguments_are_ignored_with_a_warning(fresh):
    with pytest.warns(UserWarning, match="ignores other arguments.*Received: nccl='x', sed=1"):
        fresh.Init(global_batch_size=np.int64(8), seed=np.int32(5), nccl="x", sed=1)
    fresh.Init(global_batch_size=8, seed=5)  # the same arguments


@pytest.mark.parametrize(
    "name, values, error, required",
    [
        ("global_batch_size", [8.0, "8", None, True], TypeError, "an integer"),
        ("seed", [1.5, "1", False], TypeError, "an integer or None"),
        ("seed", [-(2**63) - 1, 2**63, 2**70], ValueError, r"in \[-2\*\*63, 2\*\*63\)"),
    ],
)
def test_arguments_that_are_refused(fresh, name, values, error, required):
    words = f"`{name}` must be {required}.*Received: {name}="
    for value in values:
        with pytest.raises(error, match=words):
            fresh.Init(**{"global_batch_size": 8, name: value})
    with pytest.raises(ValueError, match="`seed` must be"):
        initialize.ensure_initialized(2**63)
    assert not comm.is_initialized()


@pytest.mark.parametrize("world_size, batch", [(1, 0), (1, -4), (4, 3)])
def test_batch_smaller_than_the_number_of_ranks(fresh, world_size, batch):
    comm.set_current(Ranks(world_size))
    required = rf"must be at least.*ranks, {world_size}. Received: global_batch_size={batch}"
    with pytest.raises(ValueError, match=required):
        fresh.Init(global_batch_size=batch)


def test_batch_that_is_no_multiple_of_the_number_of_ranks(fresh, monkeypatch):
    monkeypatch.setattr(comm.SingleProcess, "broadcast", lambda self, tensor, *_: tensor)
    monkeypatch.setattr(stalls, "start", lambda communicator: None)
    comm.set_current(Ranks(3))
    assert fresh.Init(global_batch_size=512).numpy() == b"OK"


def test_second_call(fresh):
    fresh.Init(global_batch_size=8, seed=3)
    assert fresh.Init(global_batch_size=8, seed=3).numpy() == b"OK"
    words = "been called before, with global_batch_size=8, seed=3.*Received: .*=16, seed=3"
    with pytest.raises(RuntimeError, match=words):
        fresh.Init(global_batch_size=16, seed=3)


def initial_row(sok):
    return sok.EmbeddingVariable(6, name="t").find([5])[0].numpy()


def rows_after_init(sok, seeds):
    """An initial row after each of several calls of Init."""
    rows = []
    for seed in seeds:
        initialize.reset()
        sok.Init(global_batch_size=8, seed=seed)
        sok.Init(global_batch_size=8, seed=seed)  # a random seed is kept
        first, again = initial_row(sok), initial_row(sok)
        assert (first == again).all()
        rows.append(first.tobytes())
    return rows


def test_seed_decides_initial_rows(fresh):
    rows = rows_after_init(fresh, (1, -(2**63), -1, 0, 2**63 - 1, None, None, 1))
    assert rows[0] == rows[-1] and len(set(rows)) == 7


def rows_of_rank():
    import sok_like as sok

    return rows_after_init(sok, (100 + sok.rank(), None, None))


@pytest.mark.ranks
def test_rank_0_decides_the_seed(on_processes, fresh):
    """On processes, because each has one seed."""
    first, second = on_processes(2, rows_of_rank)
    assert first == second and len(set(first)) == 3
    assert first[0] == rows_after_init(fresh, [100])[0]


def test_in_a_graph_the_op_comes_first(fresh):
    with tf.Graph().as_default():
        init = fresh.Init(global_batch_size=8, seed=1)
        variable = fresh.EmbeddingVariable(3, name="t")
        rows, _ = variable.find([1])
        with tf.compat.v1.Session() as session:
            assert session.run(init) == b"OK"
            session.run(tf.compat.v1.global_variables_initializer())
            in_graph = session.run(rows)
    eager = fresh.EmbeddingVariable(3, name="t").find([1])[0].numpy()
    assert (in_graph == eager).all()


def test_a_table_before_the_op_has_run_says_so():
    program = (
        "import sok_like as sok, tensorflow as tf\n"
        "with tf.Graph().as_default():\n"
        "    init = sok.Init(global_batch_size=8)\n"
        "    size = sok.EmbeddingVariable(3).size()\n"
        "    with tf.compat.v1.Session() as session:\n"
        "        try: session.run(size)\n"
        "        except tf.errors.FailedPreconditionError as error: print(error.message)\n"
    )
    done = forks.run("-c", program)
    assert "before sok.Init has run" in done.stdout, done.stderr[-2000:]
    assert "in a graph, run the op it returns before any other" in done.stdout


def test_a_strategy_of_several_replicas_is_refused(fresh, monkeypatch):
    # A strategy over one CPU counts one replica, so the count is what is made up here.
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    monkeypatch.setattr(type(strategy.extended), "_num_replicas_in_sync", 2)
    with strategy.scope(), pytest.raises(RuntimeError, match="strategy of 2 replicas"):
        fresh.Init(global_batch_size=8)
    assert not comm.is_initialized()
    fresh.Init(global_batch_size=8)
    with strategy.scope(), pytest.raises(RuntimeError, match="strategy of 2 replicas"):
        fresh.EmbeddingVariable(4)


DOORS = {
    "Init": lambda sok: sok.Init(global_batch_size=8),
    "group_embedding": lambda sok: sok.enable_distributed_strategy("collective"),
    "localized": lambda sok: sok.enable_distributed_strategy("localized"),
    "deeprec": lambda sok: sok.deeprec.CollectiveStrategy(),
    "sok2": lambda sok: importlib.import_module("sok_like.sok2").init(),
    "dmp": lambda sok: sok.dist_model_parallel.DistributedEmbedding([sok.HashEmbedding(4)]),
    "mesh": lambda sok: sok.distribution.DeviceMesh((1, 2), ("batch", "model")),
    "data_parallel": lambda sok: sok.distribution.DataParallel(),
    "distribution": lambda sok: sok.distribution.initialize(),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_door_lets_a_worker_of_tf_config_train_alone(fresh, monkeypatch, door):
    for name in launchers.WORLD_SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}}')
    with pytest.raises(RuntimeError, match="TF_CONFIG names 2 worker.*docs/guides/several_ranks"):
        DOORS[door](fresh)
    assert not comm.is_initialized()
    assert not hasattr(tf, "get_embedding_variable")  # DeepRec's names, after a refusal


@pytest.fixture
def shares(sok):
    """What `sok.shard` gives each rank of a dataset."""

    def shares(dataset, world_size, drop_remainder):
        found = []
        for rank in range(world_size):
            comm.set_current(Ranks(world_size, rank))
            share = initialize.shard(dataset, drop_remainder=drop_remainder)
            found.append([int(number) for number, *_ in share])
        return found

    return shares


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("is_known", [True, False])
def test_shares_are_even(shares, length, world_size, is_known):
    features = {"words": tf.ragged.range(tf.range(length))}
    dataset = tf.data.Dataset.from_tensor_slices((tf.range(length), features))
    if not is_known:
        dataset = dataset.filter(lambda *element: True)
    whole = length // world_size
    assert shares(dataset, world_size, True) == [
        [i * world_size + rank for i in range(whole)] for rank in range(world_size)
    ]
    if is_known and length:
        filled = -(-length // world_size)
        assert shares(dataset, world_size, False) == [
            [(i * world_size + rank) % length for i in range(filled)] for rank in range(world_size)
        ]
    elif not is_known and world_size > 1:
        with pytest.raises(ValueError, match="must know its number of elements"):
            shares(dataset, world_size, False)


def test_endless_dataset(shares):
    numbers = tf.data.Dataset.from_tensor_slices((tf.range(5), tf.range(5))).repeat()
    comm.set_current(Ranks(2, 1))
    taken = initialize.shard(numbers, drop_remainder=False).take(5)
    assert [int(number) for number, _ in taken] == [1, 3, 0, 2, 4]


def test_numbers_of_one_process(sok):
    assert (sok.rank(), sok.size(), sok.local_rank()) == (0, 1, 0)
