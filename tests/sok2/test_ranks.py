"""SOK 2.x's API on two ranks, against stock TensorFlow on whole tables and whole batches."""

import os

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import sok2
from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable
from tests.thread_ranks import raised
from tests.training import train_step

WORLD_SIZE, ROWS, DIM = 2, 7, 3
STEPS, BATCH, RATE = 3, 6, 0.5
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


def make(kind, initial=None):
    initial = start(kind) if initial is None else initial
    name, last = f"sok2_{kind}", f"localized:{sok.size() - 1}"
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


def is_static(variable):
    return isinstance(variable, tf.Variable) and hasattr(variable, "global_shape")


def content(variable):
    """Keys and rows of this rank."""
    if is_static(variable):
        return variable._rows_here(), variable.numpy()
    return tuple(tensor.numpy() for tensor in sok2.export(variable))


def whole(parts):
    """A table from what each rank holds."""
    keys, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
    assert len(set(keys.tolist())) == len(keys)
    return rows[np.argsort(keys)]


def check_whole(results, expected, rtol=2e-5):
    """By kind, what the ranks hold together."""
    for parts, right in zip(zip(*results, strict=True), expected, strict=True):
        np.testing.assert_allclose(whole(parts), right, rtol=rtol, atol=1e-6)


def ragged(values, dtype):
    return tf.ragged.constant([list(v) for v in values], dtype=dtype, ragged_rank=1)


def trained_by_stock():
    """By step the combined rows of all samples, by kind; and the tables at the end."""
    tables, found = [tf.Variable(start(kind)) for kind in KINDS], []
    optimizer = tf.keras.optimizers.SGD(RATE)
    for step, (ids, weights) in enumerate(samples()):
        ids = ragged(ids, tf.int64).to_sparse()
        weights = None if step == 0 else ragged(weights, tf.float32).to_sparse()
        with tf.GradientTape() as tape:
            rows = [
                tf.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner)
                for table, combiner in zip(tables, KINDS.values(), strict=True)
            ]
            loss = sum(tf.reduce_sum(tf.square(row)) for row in rows)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, tables))
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        found.append([row.numpy() for row in rows])
    return found, tables


def test_lookup_sparse_trains_all_kinds(on_threads):
    steps, tables = trained_by_stock()

    def check():
        mine = slice(sok.rank(), None, WORLD_SIZE)
        variables = list(map(make, KINDS))
        optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
        for step, (ids, weights) in enumerate(samples()):
            ids, weights = ragged(ids[mine], tf.int64), ragged(weights[mine], tf.float32)
            if step % 2:
                ids, weights = ids.to_sparse(), weights.to_sparse()
            given = [ids] * len(KINDS), None if step == 0 else [weights] * len(KINDS)

            def loss_of(given=given):
                rows = sok2.lookup_sparse(variables, *given, list(KINDS.values()))
                return sum(tf.reduce_sum(tf.square(row)) for row in rows), rows

            _, rows = train_step(optimizer, variables, loss_of)
            for found, expected in zip(rows, steps[step], strict=True):
                np.testing.assert_allclose(found, expected[mine], rtol=2e-5, atol=1e-6)
        return list(map(content, variables))

    check_whole(on_threads(WORLD_SIZE, check), tables)


def test_all2all_dense_embedding_and_sgd(on_threads):
    """Rows of a 2-D batch of ids, and gradient descent by `SGD`, of some tables in a function."""

    def check():
        ids = tf.constant([[0, 6], [sok.rank(), 6]], tf.int64)
        variables, optimizer = list(map(make, KINDS)), sok2.SGD(RATE)
        for kind, variable in zip(KINDS, variables, strict=True):

            def step(ids, variable=variable):
                def loss_of():
                    rows = sok2.all2all_dense_embedding(variable, ids)
                    return tf.reduce_sum(rows), rows

                return train_step(optimizer, variable, loss_of)[1]

            step = tf.function(step) if kind in ("localized", "hybrid") else step
            np.testing.assert_array_equal(step(ids), start(kind)[ids])
        return list(map(content, variables))

    uses = np.array([[3], [1], [0], [0], [0], [0], [4]], np.float32)
    check_whole(on_threads(WORLD_SIZE, check), [start(kind) - RATE * uses for kind in KINDS])


def test_each_rank_holds_its_rows(on_threads):
    def check():
        rank, last = sok.rank(), sok.rank() == WORLD_SIZE - 1
        for kind in KINDS:
            variable, local = make(kind), kind.startswith("localized")
            keys = np.arange(rank, ROWS, WORLD_SIZE)
            keys = np.arange(ROWS if last else 0) if local else keys
            for found, right in zip(content(variable), (keys, start(kind)[keys]), strict=True):
                np.testing.assert_array_equal(found, right)
            if is_static(variable):
                continue
            assert variable.size.numpy().tolist() == [len(keys), DIM]
            # A key that was not there is on its owner now, and read by all.
            found = tf.nn.embedding_lookup(variable, [0, 2**40])
            np.testing.assert_array_equal(found, [start(kind)[0], [0.5] * DIM])
            new = last if local else rank == 0
            assert variable.size.numpy().tolist() == [len(keys) + new, DIM]
        table, mine = make("hbm"), np.arange(rank, ROWS, WORLD_SIZE)
        table.scatter_sub(tf.IndexedSlices(tf.ones([2 * len(mine), DIM]), np.tile(mine, 2)))
        np.testing.assert_allclose(content(table)[1], start("hbm")[mine] - 2, rtol=1e-6)

    on_threads(WORLD_SIZE, check)


def test_drawn_rows_do_not_depend_on_the_number_of_ranks(on_threads):
    def check():
        drawn = sok2.Variable(shape=(ROWS, DIM), initializer="glorot_uniform", name="sok2_drawn")
        return content(drawn)

    drawn, one = whole(on_threads(WORLD_SIZE, check)), whole(on_threads(1, check))
    assert (np.abs(drawn) <= np.sqrt(6 / (ROWS + DIM))).all()
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(drawn, one)


# ---- files ----


def rows_of_dump(kind):
    """Rows and momenta."""
    rng = np.random.default_rng([9, len(kind)])
    return rng.normal(size=[2, ROWS, DIM]).astype(np.float32)


def assign(variable, rows, part=None):
    """Sets all rows of a variable, or of one of its slots."""
    part = variable if part is None else part
    if is_static(variable):
        part.assign(rows[variable._rows_here()])
    else:
        sok2.assign(part, np.arange(ROWS), rows)


def trained(kind, optimizer):
    """A table after a step, with rows and momenta of `rows_of_dump`."""
    variable = make(kind)
    rows, momenta = rows_of_dump(kind)
    every = np.arange(ROWS)
    train_step(
        optimizer, variable, lambda: tf.reduce_sum(sok2.all2all_dense_embedding(variable, every))
    )
    assign(variable, rows)
    assign(variable, momenta, optimizer.get_slot(variable, "momentum"))
    return variable


def files_in(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def dump(path):
    """A dump of all kinds of tables, and what comes back into variables that have other rows."""
    import tf_keras

    optimizer = sok2.OptimizerWrapper(tf_keras.optimizers.legacy.SGD(RATE, momentum=0.9))
    variables = [trained(kind, optimizer) for kind in KINDS]
    sok2.dump(path, variables, optimizer)
    comm.current().barrier()  # another rank may still write
    files = files_in(path)
    for variable in variables:
        assign(variable, np.zeros([ROWS, DIM], np.float32))
    sok2.load(path, variables, optimizer)
    loaded = list(map(content, variables))
    slots = [optimizer.get_slot(variable, "momentum") for variable in variables]
    momenta = [
        (keys, slot.numpy() if isinstance(slot, tf.Variable) else sok2.export(slot)[1].numpy())
        for slot, (keys, _) in zip(slots, loaded, strict=True)
    ]
    # In memory of each process; of no file system.
    for scheme, words in (("ram", ""), ("nowhere", "no file system is registered for 'nowhere")):
        with pytest.raises(Exception, match=words):
            sok2.dump(f"{scheme}://elsewhere", variables, optimizer)
    assert not {"ram:", "nowhere:"} & set(os.listdir("."))
    return files, loaded, momenta


@pytest.mark.ranks
def test_dump_and_load(on_processes, tmp_path):
    results = on_processes(WORLD_SIZE, dump, tmp_path)
    check_whole([loaded for _, loaded, _ in results], [rows_of_dump(kind)[0] for kind in KINDS], 0)
    check_whole([slots for *_, slots in results], [rows_of_dump(kind)[1] for kind in KINDS], 0)
    files = results[0][0]  # those of SOK 2.x
    for kind in KINDS:
        name = f"sok2_{kind}_0"
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


def test_a_file_system_of_tensorflow(on_threads, tmp_path, monkeypatch):
    """In which ranks cannot write into one file together."""
    own = durable.local  # Local files, but as TensorFlow's file systems handle them.
    monkeypatch.setattr(durable, "local", lambda at: None if "://" in str(at) else own(at))

    def check():
        optimizer, variables = sok2.SGD(RATE), list(map(make, KINDS))
        sok2.dump(tmp_path / "local", variables, optimizer)
        sok2.dump(f"file://{tmp_path}/remote", variables, optimizer)
        for variable in variables:
            assign(variable, np.zeros([ROWS, DIM], np.float32))
        sok2.load(f"file://{tmp_path}/remote", variables, optimizer)
        return list(map(content, variables))

    check_whole(on_threads(WORLD_SIZE, check), map(start, KINDS), 0)
    files = files_in(tmp_path / "remote")
    assert len(files) == 2 * len(KINDS) and files == files_in(tmp_path / "local")


def written_by_hand(path, name, keys, rows):
    """Files as SOK 2.x writes them."""
    for kind, (end, items, dtype) in enumerate((("key", keys, 1), ("weight", rows, 5))):
        head = name.encode().rjust(256) + kind.to_bytes(4, "big") + b" " * 32
        data = head + dtype.to_bytes(4, "big") + np.ascontiguousarray(items).tobytes()
        (path / f"{name}-{end}").write_bytes(data)


def test_a_dump_of_three_ranks_of_sok_2_loads(on_threads, tmp_path):
    """Keys 0, 3, 6, then 1, 4, then 2, 5."""
    keys = np.concatenate([np.arange(r, ROWS, 3) for r in range(3)])
    for kind in KINDS:
        written_by_hand(tmp_path, f"sok2_{kind}_0", keys, rows_of_dump(kind)[0][keys])

    def check():
        variables = [make(kind, np.zeros([ROWS, DIM], np.float32)) for kind in KINDS]
        for variable in variables:
            sok2.load(tmp_path, variable)
        return list(map(content, variables))

    check_whole(on_threads(WORLD_SIZE, check), [rows_of_dump(kind)[0] for kind in KINDS], 0)


def test_errors_are_raised_on_every_rank(on_threads, tmp_path):
    def check():
        wrong = tf.constant([ROWS if sok.rank() else 0], tf.int64)
        for kind in ("distributed", "localized"):
            with pytest.raises(Exception, match=rf"(?s)(?=.*sok2_{kind}).*{ROWS}"):
                sok2.all2all_dense_embedding(make(kind), wrong)
        table, spread = make("localized_hbm"), make("hbm")
        foreign = tf.IndexedSlices(tf.ones([1, DIM]), [sok.rank() + 1])
        for call, words in (
            (lambda: sok.group_embedding_lookup(table, [wrong]), "all its keys on rank 1"),
            (lambda: sok.Saver().dump_to_file(table, tmp_path / "errors"), "all on rank 1"),
            (lambda: spread.scatter_sub(foreign), "sok2_hbm"),
            (lambda: sok2.load(tmp_path / "nothing", spread), "FileNotFoundError"),
            (lambda: sok2.Variable([[1.0]], mode="localized:2"), "`mode` must be"),
            (lambda: sok2.init("single"), "'horovod' in a job of several"),
        ):
            error = raised(call)
            assert error is not None and words in f"{error}", words

    on_threads(WORLD_SIZE, check)
