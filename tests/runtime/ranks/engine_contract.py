"""What ranks do with a communicator of any engine, beside NumPy.

A rank can compute what all ranks send, because a generator's seed is the round and the rank.
"""

import concurrent.futures
import ctypes
import os
import time

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.ranks import comm, engines, horovod, launchers

SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64, tf.float16, tf.bfloat16)
ANY = (*SUMMED, tf.bool, tf.uint8, tf.int8)
MPI_ALONE = (tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.complex64)
MODES = ("eager", "function", "session")


def run(engine, rounds):
    """Every promise that needs no rank to fail."""
    in_process = engine in ("memory", "single")
    communicator = comm.current() if in_process else engines.choose(groups_later=True)
    assert type(communicator).__name__.lower().startswith(engine)
    checks = [exchanges, gathers, sums, averages, order, concurrency, groups]
    checks += {"mpi": [late, large, disagreement, forked], "horovod": [counted]}.get(engine, [])
    for check in checks:
        check(communicator, rounds)
        communicator.barrier()


def _numbers(round_, rank, shape):
    return np.random.default_rng([round_, rank]).integers(-9, 10, shape)


def _call(mode, function, arrays, dtypes, name):
    """`function(*tensors, name)` eagerly, in a function or in a session, as NumPy arrays."""
    call = tf.function(function) if mode == "function" else function

    def results():
        tensors = [tf.cast(tf.constant(a), d) for a, d in zip(arrays, dtypes, strict=True)]
        return call(*tensors, f"{name}_{mode}")

    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            return session.run(results())
    return tf.nest.map_structure(lambda t: t.numpy(), results())


def _compare(got, want, dtype, what):
    want = tf.cast(tf.constant(want), dtype).numpy()
    assert got.shape == want.shape and np.array_equal(got, want), f"{what}: {got!r}, not {want!r}"


def _rounds(rounds):
    for number in range(rounds):
        yield number, MODES[number % 3], number // 3


def _splits(number, rank, world_size):
    generator = np.random.default_rng([number, rank, 1])
    most = (1, 5, 300, 4000)[generator.integers(4)]
    empty = generator.random() < 0.2
    return np.zeros(world_size, int) if empty else generator.integers(0, most, world_size)


def exchanges(communicator, rounds):
    """Random sizes, some of them 0; all dtypes."""
    me, world_size = communicator.rank, communicator.world_size
    dtypes = ANY + (MPI_ALONE if hasattr(communicator, "_library") else ())
    for number, mode, step in _rounds(rounds):
        dtype = dtypes[step % len(dtypes)]
        splits = [_splits(number, rank, world_size) for rank in range(world_size)]
        data = [_numbers(number, rank, splits[rank].sum()) for rank in range(world_size)]
        received, lengths = _call(
            mode,
            communicator.all_to_all,
            [data[me], splits[me]],
            [dtype, tf.int32],
            f"exchange_{dtype.name}",
        )
        begin = [split[:me].sum() for split in splits]
        parts = zip(data, begin, splits, strict=True)
        want = np.concatenate([d[b : b + s[me]] for d, b, s in parts])
        _compare(received, want, dtype, f"round {number}, {mode}")
        _compare(lengths, [s[me] for s in splits], tf.int32, f"lengths {number}")


def gathers(communicator, rounds):
    """Rows of one and two axes, of unlike numbers; broadcasts from each rank."""
    world_size = communicator.world_size
    for number, mode, step in _rounds(rounds):
        dtype, tail = ANY[step % len(ANY)], ((), (3,), (2, 5))[step % 3]
        lengths = [_splits(number, rank, 1)[0] for rank in range(world_size)]
        data = [_numbers(number, rank, (n, *tail)) for rank, n in enumerate(lengths)]
        got = _call(
            mode, communicator.all_gather, [data[communicator.rank]], [dtype], f"g{len(tail)}"
        )
        _compare(got, np.concatenate(data), dtype, f"gather {number}, {mode}")
        root = number % world_size
        shape = ((), (7,), (50, 60))[step % 3]
        data = [_numbers(number, rank, shape) for rank in range(world_size)]

        def broadcast(tensor, name, root=root):
            return communicator.broadcast(tensor, root, f"{name}_{root}")

        got = _call(mode, broadcast, [data[communicator.rank]], [dtype], f"b{len(shape)}")
        _compare(got, data[root], dtype, f"broadcast {number}, {mode}")


def sums(communicator, rounds):
    """Sums and their parts, of whole numbers, so that no order of addition matters."""
    me, world_size = communicator.rank, communicator.world_size
    for number, mode, step in _rounds(rounds):
        dtype, shape = SUMMED[step % len(SUMMED)], ((), (7, 2), (3000,), (0,))[step % 4]
        data = [_numbers(number, rank, shape) for rank in range(world_size)]
        got = _call(mode, communicator.sum, [data[me]], [dtype], f"s{dtype.name}")
        _compare(got, sum(data), dtype, f"sum {number}, {mode}")
        data = [_numbers(number, rank, (7, 2)) for rank in range(world_size)]
        got = _call(mode, communicator.reduce_scatter, [data[me]], [dtype], f"rs{dtype.name}")
        part = np.array_split(sum(data), world_size)[me]
        _compare(got, part, dtype, f"part {number}, {mode}")


def averages(communicator, rounds):
    """Tensors of two dtypes, one of them sparse, and one that is missing."""
    me, world_size = communicator.rank, communicator.world_size
    for number, mode, _ in _rounds(rounds):
        data = [
            [_numbers(number, rank, shape) for shape in ((3, 2), (4,), (2, 2))]
            for rank in range(world_size)
        ]

        def average(a, b, c, name):
            rows = tf.IndexedSlices(c, tf.constant([1, me + 2]), [world_size + 2, 2])
            a, b, rows, none = communicator.average([a, b, rows, None], name)
            assert none is None
            return a, b, tf.math.unsorted_segment_sum(rows.values, rows.indices, world_size + 2)

        a, b, c = _call(mode, average, data[me], [tf.float32, tf.float64, tf.float32], "avg")
        dense = np.zeros([world_size + 2, 2])
        for rank in range(world_size):
            np.add.at(dense, [1, rank + 2], data[rank][2] / world_size)
        want = [sum(d[i] for d in data) / world_size for i in range(2)]
        for got, right in zip((a, b, c), (*want, dense), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def order(communicator, rounds):
    """Exchanges of one name meet one after the other."""
    world_size = communicator.world_size
    splits = tf.ones([world_size], tf.int32)

    @tf.function
    def twice(value):
        first, _ = communicator.all_to_all(tf.fill([world_size], value), splits, comm.IN_TURN)
        with tf.control_dependencies([first]):
            second = tf.fill([world_size], value + 1)
            return first, communicator.all_to_all(second, splits, comm.IN_TURN)[0]

    for number in range(rounds):
        if number % 3 == communicator.rank:
            time.sleep(0.001)
        first, second = twice(tf.constant(2 * number))
        assert set(first.numpy()) == {2 * number} and set(second.numpy()) == {2 * number + 1}


def concurrency(communicator, rounds):
    """Two threads each; rank 1 begins with what the others end with."""
    me, world_size = communicator.rank, communicator.world_size

    def work(name, size):
        @tf.function(autograph=False)
        def total(tensor):
            return communicator.sum(tensor, f"{name}_sum")

        @tf.function(autograph=False)
        def gather(tensor):
            return communicator.all_gather(tensor, f"{name}_gather")

        for number in range(rounds):
            value = tf.fill([size], float(me + number))
            assert total(value)[0] == sum(range(world_size)) + number * world_size
            assert gather(value).shape[0] == size * world_size

    tasks, done = [("a", 3), ("b", 5000)], []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for task in reversed(tasks) if me == 1 else tasks:
            done.append(pool.submit(work, *task))
            time.sleep(0.05)
    for each in done:
        each.result()


def late(communicator, rounds):
    """One rank comes seconds later; ranks that wait take next to no time of the processor."""
    seconds = 20 if rounds > 100 else 2
    is_late = communicator.rank == communicator.world_size - 1
    communicator.barrier()
    before = time.process_time()
    if is_late:
        time.sleep(seconds)
    total = float(communicator.sum(tf.constant(1.0), "late"))
    used = (time.process_time() - before) / seconds
    assert total == communicator.world_size
    assert used < 0.05  # many times what a quiet machine shows; one that polled would use a core


def groups(communicator, rounds):
    """Ranks of a group count within it; both kinds of groups may be in use."""
    me, world_size = communicator.rank, communicator.world_size
    whole = communicator.subset([list(range(world_size))])
    assert (whole.rank, whole.world_size) == (me, world_size)
    assert communicator.subset([[rank] for rank in range(world_size)]).world_size == 1
    rest = list(range(1, world_size))
    group = communicator.subset([[0], rest])
    if me == 0:
        assert group.world_size == 1
        return
    for number in range(rounds):
        total = group.sum(tf.constant(float(me + number)), "of_group")
        assert total == sum(rest) + number * len(rest)
        assert group.all_gather(tf.constant([me]), "of_group").numpy().tolist() == rest
        assert group.broadcast(tf.constant(me), len(rest) - 1, "of_group") == rest[-1]


def large(communicator, rounds):
    """MPI counts in int32; 2 GiB and more travel in pieces. The short form is below a piece."""
    me, world_size = communicator.rank, communicator.world_size
    size = (2**28 if rounds > 100 and world_size == 2 else 2**20) + 5
    mine = tf.fill([size], tf.constant(me + 1, tf.int64))
    splits = [size if rank == (me + 1) % world_size else 0 for rank in range(world_size)]
    received, lengths = communicator.all_to_all(mine, splits, "large")
    sender = (me - 1) % world_size
    assert tf.reduce_all(received == sender + 1) and lengths[sender] == size
    # Pieces of a sum are of 1 MiB. Only the long form has parts beyond 2 GiB.
    rows = size // 4 + 5
    part = communicator.reduce_scatter(tf.range(me, me + rows, dtype=tf.int64), "large_parts")
    want = np.array_split(world_size * np.arange(rows) + sum(range(world_size)), world_size)[me]
    np.testing.assert_array_equal(part, want)


def counted(communicator, rounds):
    """More elements than Horovod's MPI counts raise: 16 in all, here."""
    each = 16 // communicator.world_size
    gather = tf.function(
        lambda part: communicator.all_gather(part, "gathered"),
        input_signature=[tf.TensorSpec([None])],
    )
    calls = [
        (each, lambda n: communicator.all_gather(tf.ones([n]), "gathered")),
        (each, lambda n: gather(tf.ones([n]))),
        (16, lambda n: communicator.sum(tf.ones([n]), "summed")),
        (16, lambda n: communicator.average([tf.ones([n])], "averaged")[0]),
        (16, lambda n: communicator.broadcast(tf.ones([n]), 0, "broadcast")),
    ]
    own, horovod._MOST_COUNTED = horovod._MOST_COUNTED, 16
    try:
        for most, call in calls:
            call(most)
            words = f"at most {most} elements on each rank. Received: "
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                call(most + 1)
    finally:
        horovod._MOST_COUNTED = own


def disagreement(communicator, rounds):
    """Ranks that disagree all raise, and go on."""
    is_first = communicator.rank == 0
    dtype = tf.int32 if is_first else tf.float32
    for call in (
        lambda: communicator.all_gather(tf.zeros([2, 3 + is_first]), "unlike"),
        lambda: communicator.all_gather(tf.zeros([9000], dtype), "unlike"),
        lambda: communicator.sum(tf.zeros([3 + is_first]), "unlike"),
        lambda: communicator.broadcast(tf.zeros([3]), int(is_first), "unlike"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)must give.*rank 0 has"):
            call()
    assert communicator.sum(tf.constant(1.0), "unlike") == communicator.world_size


def forked(communicator, rounds):
    """A forked process may not speak for the rank, and ends without MPI."""
    child = os.fork()
    if child == 0:
        closed = communicator.shut_down(1.0)
        communicator._library.sok_mpi_stop(b"a child's reason")
        os._exit(0 if closed else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert communicator.sum(tf.constant(1.0), "after_fork") == communicator.world_size


def initialised_before(level):
    """The program has initialised MPI, for threads of a level, and ends it by itself."""
    mpi = ctypes.CDLL(launchers.mpi_library(), mode=ctypes.RTLD_GLOBAL)
    mpi.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    try:
        communicator = engines.choose()
        result = float(communicator.sum(tf.constant(1.0), "total"))
        communicator.shut_down(10.0)
    except RuntimeError as error:
        result = str(error)
    ended = ctypes.c_int()
    mpi.MPI_Finalized(ctypes.byref(ended))
    mpi.MPI_Finalize()
    return result, ended.value


def beside_horovod(horovod_first):
    """Exchanges by MPI in a program that uses Horovod, too, whichever came first."""
    import horovod.tensorflow as hvd

    if horovod_first:
        hvd.init()
    communicator = engines.choose()
    if not horovod_first:
        communicator.barrier()
        hvd.init()
    by_horovod = float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="total"))
    return float(communicator.sum(tf.constant(1.0), "total")), by_horovod
