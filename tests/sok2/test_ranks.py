"""SOK 2.x's API on one to three ranks, against NumPy on the whole table and the whole batch."""

import os
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import sok2
from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable

pytestmark = pytest.mark.parametrize(
    "world_size",
    [
        1,
        pytest.param(2, marks=pytest.mark.ranks),
        pytest.param(3, marks=[pytest.mark.ranks, pytest.mark.slow]),
    ],
)

ROWS, DIM = 7, 3
STEPS, BATCH, RATE = 4, 6, 0.5
# Table: how it is made, and its combiner.
KINDS = {
    "distributed": "mean",
    "localized": "sum",
    "hbm": "sqrtn",
    "hybrid": "mean",
    "localized_hbm": "sum",
    "localized_hybrid": "mean",
}


def start(kind):
    return np.random.default_rng([3, len(kind)]).normal(size=[ROWS, DIM]).astype(np.float32)


def samples():
    """Ids and weights of the whole batch, `STEPS` times; some samples are empty."""
    rng = np.random.default_rng(5)
    for _ in range(STEPS):
        lengths = rng.integers(0, 4, BATCH)
        ids = [rng.integers(0, ROWS, n) for n in lengths]
        yield ids, [rng.choice([0.5, 1.0, 2.0], n) for n in lengths]


def context():
    return sok2, comm.current().rank, comm.current().world_size


def make(kind, name, initial=None):
    sok2, _, world_size = context()
    initial = start(kind) if initial is None else initial
    last = f"localized:{world_size - 1}"
    if kind == "distributed":
        return sok2.Variable(initial, name=name)
    if kind == "localized":
        return sok2.Variable(initial, name=name, mode=last)
    mode = last if kind.startswith("localized") else None
    var_type = kind.rpartition("_")[2]
    bounds = {"max_capacity": 64} if var_type == "hybrid" else {}
    table = sok2.DynamicVariable(DIM, "0.5", var_type, name=name, mode=mode, **bounds)
    sok2.assign(table, np.arange(len(initial)), initial)
    return table


def content(variable):
    """Keys and rows of this rank."""
    sok2, *_ = context()
    if isinstance(variable, tf.Variable) and hasattr(variable, "global_shape"):
        return variable._rows_here(), variable.numpy()
    return tuple(tensor.numpy() for tensor in sok2.export(variable))


def ragged(values, dtype):
    return tf.ragged.constant([list(v) for v in values], dtype=dtype, ragged_rank=1)


def train():
    """What all kinds of tables in one call find, step by step, and their rows at the end."""
    sok2, rank, world_size = context()
    variables = [make(kind, f"sok2_train_{kind}") for kind in KINDS]
    optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
    found = []
    for step, (ids, weights) in enumerate(samples()):
        ids = ragged(ids[rank::world_size], tf.int64)
        weights = ragged(weights[rank::world_size], tf.float32)
        if step % 2:
            ids, weights = ids.to_sparse(), weights.to_sparse()
        with tf.GradientTape() as tape:
            rows = sok2.lookup_sparse(
                variables,
                [ids] * len(KINDS),
                None if step == 0 else [weights] * len(KINDS),
                list(KINDS.values()),
            )
            loss = sum(tf.reduce_sum(tf.square(row)) for row in rows)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        found.append([row.numpy() for row in rows])
    return found, [content(variable) for variable in variables]


def dense():
    """Rows of a 2-D batch of ids of each kind, and gradient descent by `SGD`, in a function."""
    sok2, rank, _ = context()
    ids = tf.constant([[0, 6], [rank, 6]], tf.int64)
    found = {}
    for kind in KINDS:
        variable, optimizer = make(kind, f"sok2_dense_{kind}"), sok2.SGD(RATE)

        @tf.function
        def step(ids, variable=variable, optimizer=optimizer):
            with tf.GradientTape() as tape:
                rows = sok2.all2all_dense_embedding(variable, ids)
                loss = tf.reduce_sum(rows)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
            return rows

        found[kind] = step(ids).numpy(), content(variable)
    return found


def shards():
    """What each rank holds and reads."""
    sok2, rank, world_size = context()
    found = {}
    for kind in KINDS:
        variable = make(kind, f"sok2_shards_{kind}")
        found[kind] = content(variable)
        if not hasattr(variable, "global_shape"):
            found[f"{kind} size"] = variable.size.numpy().tolist()
            # A key that was not there is on its owner now, and read by all.
            found[f"{kind} read"] = tf.nn.embedding_lookup(variable, [0, 2**40]).numpy()
            found[f"{kind} size then"] = variable.size.numpy().tolist()
    drawn = sok2.Variable(shape=(ROWS, DIM), initializer="glorot_uniform", name="sok2_drawn")
    found["drawn"] = content(drawn)
    table = make("hbm", "sok2_scatter")
    mine = np.arange(rank, ROWS, world_size)
    delta = tf.IndexedSlices(tf.ones([2 * len(mine), DIM]), np.concatenate([mine, mine]))
    table.scatter_sub(delta)
    found["scatter"] = content(table)
    return found


def folder(name):
    # The ranks of a test run on one machine, under one launcher.
    return pathlib.Path(tempfile.gettempdir()) / f"sok2_{name}_{os.getppid()}"


def rows_of_dump(kind):
    """Rows, momenta as the dump of the check below has them."""
    rng = np.random.default_rng([9, len(kind)])
    return rng.normal(size=[2, ROWS, DIM]).astype(np.float32)


def trained(kind, name, optimizer):
    """A table after a step, with rows and momenta of `rows_of_dump`."""
    sok2, _, _ = context()
    variable = make(kind, name)
    rows, momenta = rows_of_dump(kind)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok2.all2all_dense_embedding(variable, np.arange(ROWS)))
    optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    if hasattr(variable, "global_shape"):
        here = variable._rows_here()
        variable.assign(rows[here])
        optimizer.get_slot(variable, "momentum").assign(momenta[here])
    else:
        sok2.assign(variable, np.arange(ROWS), rows)
        sok2.assign(optimizer.get_slot(variable, "momentum"), np.arange(ROWS), momenta)
    return variable


def dump():
    """Where each rank has dumped its part of all kinds of tables."""
    import tf_keras

    sok2, _, world_size = context()
    optimizer = sok2.OptimizerWrapper(tf_keras.optimizers.legacy.SGD(RATE, momentum=0.9))
    variables = [trained(kind, f"sok2_dump_{kind}", optimizer) for kind in KINDS]
    path = folder(f"dump{world_size}")
    sok2.dump(path, variables, optimizer)
    comm.current().barrier()  # another rank may still write
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    # And back, into variables that have other rows.
    for variable in variables:
        if hasattr(variable, "global_shape"):
            variable.assign(tf.zeros_like(variable))
        else:
            sok2.assign(variable, np.arange(ROWS), np.zeros([ROWS, DIM], np.float32))
    sok2.load(path, variables, optimizer)
    slots = [optimizer.get_slot(variable, "momentum") for variable in variables]
    momenta = [
        slot.numpy() if isinstance(slot, tf.Variable) else sok2.export(slot)[1].numpy()
        for slot in slots
    ]
    return files, [content(variable) for variable in variables], momenta


def elsewhere():
    """Dumps to file systems in which ranks cannot write into one file together."""
    sok2, _, world_size = context()
    optimizer = sok2.SGD(RATE)
    variables = [make(kind, f"sok2_elsewhere_{kind}") for kind in KINDS]
    path, own = folder(f"elsewhere{world_size}"), durable.local
    sok2.dump(path / "local", variables, optimizer)
    # Local files, but as TensorFlow's file systems handle them.
    durable.local = lambda at: None if str(at).startswith("file://") else own(at)
    try:
        sok2.dump(f"file://{path}/remote", variables, optimizer)
        comm.current().barrier()
        for variable in variables:
            if hasattr(variable, "global_shape"):
                variable.assign(tf.zeros_like(variable))
            else:
                sok2.assign(variable, np.arange(ROWS), np.zeros([ROWS, DIM], np.float32))
        sok2.load(f"file://{path}/remote", variables, optimizer)
    finally:
        durable.local = own
    files = {
        name: {file.name: file.read_bytes() for file in (path / name).iterdir()}
        for name in ("local", "remote")
    }
    problems = {}
    for scheme in ("ram", "nowhere"):  # in memory of each process; of no file system
        try:
            sok2.dump(f"{scheme}://elsewhere", variables, optimizer)
        except Exception as error:
            problems[scheme] = f"{type(error).__name__}: {error}"
    return files, problems, [content(variable) for variable in variables], os.listdir(".")


def written_by_hand(path, name, keys, rows, dtype_number):
    """Files as SOK 2.x writes them."""
    path.mkdir(exist_ok=True)
    for kind, (end, items, number) in enumerate((("key", keys, 1), ("weight", rows, dtype_number))):
        head = name.encode().rjust(256) + kind.to_bytes(4, "big") + b" " * 32
        data = head + number.to_bytes(4, "big") + np.ascontiguousarray(items).tobytes()
        temporary = path / f"{name}-{end}.{os.getpid()}"
        temporary.write_bytes(data)
        os.replace(temporary, path / f"{name}-{end}")


def load():
    """Tables from files that three ranks of SOK 2.x wrote: keys 0, 3, 6, then 1, 4, then 2, 5."""
    sok2, _, _ = context()
    path = folder("load")
    keys = np.concatenate([np.arange(r, ROWS, 3) for r in range(3)])
    found = {}
    for kind in KINDS:
        name = f"sok2_load_{kind}"
        rows = rows_of_dump(kind)[0]
        written_by_hand(path, f"{name}_0", keys, rows[keys], 5)
        variable = make(kind, name, initial=np.zeros([ROWS, DIM], np.float32))
        sok2.load(path, variable)
        found[kind] = content(variable)
    return found


def message_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def errors():
    """What raises on every rank where one rank is at fault, and what does in any case."""
    sok2, rank, world_size = context()
    found = {}
    wrong = tf.constant([ROWS if rank == world_size - 1 else 0], tf.int64)
    for kind in ("distributed", "localized"):
        table = make(kind, f"sok2_errors_{kind}")
        found[kind] = message_of(lambda table=table: sok2.all2all_dense_embedding(table, wrong))
    table = make("localized_hbm", "sok2_errors_home")
    found["group"] = message_of(
        lambda: sok.group_embedding_lookup(table, [tf.constant([1], tf.int64)])
    )
    found["saver"] = message_of(lambda: sok.Saver().dump_to_file(table, folder("errors")))
    spread = make("hbm", "sok2_errors_spread")
    foreign = tf.IndexedSlices(tf.ones([1, DIM]), [rank + 1])
    found["scatter"] = message_of(lambda: spread.scatter_sub(foreign))
    found["missing"] = message_of(lambda: sok2.load(folder("nothing"), spread))
    found["mode"] = message_of(lambda: sok2.Variable([[1.0]], mode=f"localized:{world_size}"))
    found["single"] = message_of(lambda: sok2.init("single"))
    return found


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
    return share @ rows if len(rows) else np.zeros(DIM), share


def expected_training():
    """By step the combined rows of all samples, by kind; and the tables at the end."""
    tables = [start(kind).astype(np.float64) for kind in KINDS]
    found = []
    for step, (ids, weights) in enumerate(samples()):
        outputs, gradients = [], [np.zeros_like(table) for table in tables]
        for t, (table, combiner) in enumerate(zip(tables, KINDS.values(), strict=True)):
            rows_of = []
            for sample, weight in zip(ids, weights, strict=True):
                weight = np.ones(len(sample)) if step == 0 else weight
                row, share = combined(table[sample], weight, combiner)
                np.add.at(gradients[t], sample, share[:, np.newaxis] * 2 * row)
                rows_of.append(row)
            outputs.append(np.stack(rows_of))
        found.append(outputs)
        tables = [t - RATE * g for t, g in zip(tables, gradients, strict=True)]
    return found, tables


def test_lookup_sparse_trains_all_kinds(on_processes, world_size):
    results = on_processes(world_size, train)
    steps, tables = expected_training()
    for step, outputs in enumerate(steps):
        for kind, expected in enumerate(outputs):
            for rank, (found, _) in enumerate(results):
                mine = expected[rank::world_size]
                np.testing.assert_allclose(found[step][kind], mine, rtol=2e-5, atol=1e-6)
    for kind, expected in enumerate(tables):
        found = whole([variables[kind] for _, variables in results])
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_all2all_dense_embedding_and_sgd(on_processes, world_size):
    results = on_processes(world_size, dense)
    for kind in KINDS:
        initial = start(kind)
        expected = initial.copy()
        for rank, result in enumerate(results):
            ids = np.array([[0, 6], [rank, 6]])
            np.testing.assert_array_equal(result[kind][0], initial[ids])
            np.subtract.at(expected, ids, np.float32(RATE))
        np.testing.assert_allclose(whole([result[kind][1] for result in results]), expected, 1e-6)


def test_each_rank_holds_its_rows(on_processes, world_size):
    results = on_processes(world_size, shards)
    for kind in KINDS:
        for rank, result in enumerate(results):
            local = kind.startswith("localized")
            keys = np.arange(rank, ROWS, world_size)
            if local:
                keys = np.arange(ROWS if rank == world_size - 1 else 0)
            np.testing.assert_array_equal(result[kind][0], keys)
            np.testing.assert_array_equal(result[kind][1], start(kind)[keys])
            if f"{kind} size" not in result:
                continue
            assert result[f"{kind} size"] == [len(keys), DIM]
            new = rank == (world_size - 1 if local else 2**40 % world_size)
            assert result[f"{kind} size then"] == [len(keys) + new, DIM]
            expected = np.stack([start(kind)[0], np.full(DIM, 0.5)])
            np.testing.assert_array_equal(result[f"{kind} read"], expected)


def test_drawn_rows_do_not_depend_on_the_number_of_ranks(on_processes, world_size):
    drawn = whole([result["drawn"] for result in on_processes(world_size, shards)])
    limit = np.sqrt(6 / (ROWS + DIM))
    assert (np.abs(drawn) <= limit).all() and len(np.unique(drawn)) == drawn.size
    one = whole([result["drawn"] for result in on_processes(1, shards)])
    np.testing.assert_array_equal(drawn, one)


def test_scatter_sub_adds_up_equal_keys(on_processes, world_size):
    found = whole([result["scatter"] for result in on_processes(world_size, shards)])
    np.testing.assert_allclose(found, start("hbm") - 2, rtol=1e-6)


def test_dump_and_load(on_processes, world_size):
    results = on_processes(world_size, dump)
    for i, kind in enumerate(KINDS):
        rows, momenta = rows_of_dump(kind)
        loaded = [variables[i] for _, variables, _ in results]
        np.testing.assert_array_equal(whole(loaded), rows)
        parts = [(keys, result[2][i]) for (keys, _), result in zip(loaded, results, strict=True)]
        np.testing.assert_array_equal(whole(parts), momenta)


def test_a_file_system_of_tensorflow(on_processes, world_size):
    results = on_processes(world_size, elsewhere)
    for files, problems, _, here in results:
        assert len(files["local"]) == 2 * len(KINDS) and files["remote"] == files["local"]
        assert "no file system is registered for 'nowhere'" in problems["nowhere"]
        assert (world_size == 1) == ("ram" not in problems), problems
        assert not {"ram:", "nowhere:", "file:"} & set(here)
    for i, kind in enumerate(KINDS):
        loaded = [variables[i] for _, _, variables, _ in results]
        np.testing.assert_array_equal(whole(loaded), start(kind))


def test_files_are_those_of_sok_2(on_processes, world_size):
    files = on_processes(world_size, dump)[0][0]
    for kind in KINDS:
        name = f"sok2_dump_{kind}_0"
        rows, momenta = rows_of_dump(kind)
        head, keys = files[f"{name}-key"][:296], np.frombuffer(files[f"{name}-key"][296:], "<i8")
        assert head == name.encode().rjust(256) + bytes(4) + b" " * 32 + b"\0\0\0\1"
        found = np.frombuffer(files[f"{name}-weight"][296:], "<f4").reshape(-1, DIM)
        np.testing.assert_array_equal(found, rows[keys])
        slot = files[f"{name}-SGD-momentum"]
        assert slot[:256].strip() == name.encode() and slot[256:260] == b"\0\0\0\2"
        assert slot[260:292].strip() == b"momentum" and slot[292:296] == b"\0\0\0\5"
        found = np.frombuffer(slot[296:], "<f4").reshape(-1, DIM)
        np.testing.assert_array_equal(found, momenta[keys])
        assert int.from_bytes(files[f"{name}-SGD-iterations"][296:], "little") >= 1


def test_a_dump_of_three_ranks_of_sok_2_loads(on_processes, world_size):
    results = on_processes(world_size, load)
    for kind in KINDS:
        rows = rows_of_dump(kind)[0]
        np.testing.assert_array_equal(whole([result[kind] for result in results]), rows)


def test_errors_are_raised_on_every_rank(on_processes, world_size):
    for result in on_processes(world_size, errors):
        for kind in ("distributed", "localized"):
            assert f"sok2_errors_{kind}" in result[kind] and str(ROWS) in result[kind]
        assert "FileNotFoundError" in result["missing"]
        assert result["mode"].startswith("ValueError: `mode` must be")
        if world_size == 1:
            assert [result[name] for name in ("group", "saver", "single")] == [None] * 3
            continue
        assert f"all its keys on rank {world_size - 1}" in result["group"]
        assert f"all on rank {world_size - 1}" in result["saver"]
        assert "sok2_errors_spread" in result["scatter"]
        assert "'horovod' in a job of several" in result["single"]
