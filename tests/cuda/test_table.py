"""`CudaTable` against a Python dict, and against `_core.Table` bit by bit."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from sok_like import _core

DIM = 4
EXTREMES = [0, 1, -1, -2, 2**63 - 1, -(2**63), 2**32, 2**31, -(2**31), 255, 256]


def up(cuda, values, dtype=np.int64):
    return cuda.CudaArray(np.asarray(values, dtype))


def keys_of(*keys):
    return np.array(keys, np.int64)


@pytest.mark.parametrize(
    "initializer", ["constant", "uniform", "normal", "truncated_normal", "default_rows"]
)
@pytest.mark.parametrize("dim", [1, 7, 8, 32])
def test_initial_rows_have_the_bits_of_the_cpu(cuda, initializer, dim):
    options = {"initializer": initializer, "a": -0.5, "b": 0.5, "seed": 11}
    if initializer == "default_rows":
        options["default_rows"] = np.arange(3 * dim, dtype=np.float32).reshape(3, dim)
    keys = np.array([*EXTREMES, *range(1000, 1100)], np.int64)
    expected = _core.Table("t", dim, **options).initial_rows(keys)
    table = cuda.CudaTable("t", dim, **options)
    rows, found = table.find(up(cuda, keys))
    np.testing.assert_array_equal(rows.get(), expected)
    assert not found.get().any()
    rows, inserted = table.find_or_insert(up(cuda, keys))
    np.testing.assert_array_equal(rows.get(), expected)
    assert inserted.get().all()
    assert len(table) == keys.size


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_without_hashtable(cuda, rank):
    """As of `_core.Table`, in tests/core/test_table.py."""
    options = {"use_hashtable": False, "max_capacity": 10, "rank": rank, "world_size": 3, "seed": 5}
    table, host = cuda.CudaTable("t", DIM, **options), _core.Table("t", DIM, **options)
    keys = np.arange(10) * 3 + rank
    assert len(table) == 10
    rows, found = table.find(up(cuda, keys))
    np.testing.assert_array_equal(rows.get(), host.initial_rows(keys))
    assert found.get().all()
    assert not table.find_or_insert(up(cuda, keys[[5, 5, 1]]))[1].get().any()
    assert table.row_numbers(up(cuda, keys[[5, 9]])).get().tolist() == [5, 9]
    table.assign(up(cuda, keys[[2, 2]]), up(cuda, [[1] * DIM, [2] * DIM], np.float32))
    host.assign(keys[[2]], [[2] * DIM])
    # A row that was never touched has Adam's weight decay too, and its slots when it is exported.
    grads = np.ones((1, DIM), np.float32)
    for step in (1, 2, 3):
        args = ("adam", 0.5, step)
        _core.apply_gradients(host, *args, keys[[4]], grads, weight_decay=0.1)
        on_device = up(cuda, keys[[4]]), up(cuda, grads, np.float32)
        cuda.cuda_apply_gradients(table, *args, *on_device, weight_decay=0.1)
    ours, theirs = table.export(), host.export()
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)
    assert ours[2].keys() == theirs[2].keys()
    for name, slot in ours[2].items():
        np.testing.assert_allclose(slot, theirs[2][name], rtol=1e-6)
    for bad in (-3 + rank, 30 + rank, (rank + 1) % 3, 2**62):
        with pytest.raises(IndexError, match=rf"\[0, 30\).*Received: key {bad} \(table 't'\)"):
            table.find_or_insert(up(cuda, [rank, bad]))
    with pytest.raises(ValueError, match="use_hashtable=false"):
        table.erase(up(cuda, keys))
    table.clear()
    host.clear()
    np.testing.assert_allclose(table.find(up(cuda, keys))[0].get(), host.find(keys)[0], rtol=1e-6)
    table.import_(*theirs)
    np.testing.assert_array_equal(table.find(up(cuda, keys))[0].get(), theirs[1])


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["find", "find_or_insert", "assign", "erase"]),
        st.lists(st.sampled_from(EXTREMES + list(range(50))), max_size=80),
    ),
    max_size=12,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(actions=ACTIONS)
def test_agrees_with_a_dict(cuda, actions):
    table = cuda.CudaTable("t", DIM, initializer="constant", a=0.25)
    expected = {}
    for number, (action, keys) in enumerate(actions):
        array = up(cuda, keys)
        if action == "erase":
            assert table.erase(array) == len(expected.keys() & set(keys))
            for key in keys:
                expected.pop(key, None)
        elif action == "assign":
            rows = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM) + 1000 * number
            table.assign(array, up(cuda, rows, np.float32))
            expected.update(zip(keys, rows, strict=True))  # the last of equal keys
        else:
            rows, flags = getattr(table, action)(array)
            wanted = [expected.get(key, np.full(DIM, 0.25, np.float32)) for key in keys]
            np.testing.assert_array_equal(rows.get(), np.array(wanted, np.float32).reshape(-1, DIM))
            if action == "find":
                assert flags.get().tolist() == [key in expected for key in keys]
            else:
                new = [key for key, flag in zip(keys, flags.get(), strict=True) if flag]
                assert sorted(new) == sorted(set(keys) - expected.keys())
                for key in keys:
                    expected.setdefault(key, np.full(DIM, 0.25, np.float32))
    assert table.size == len(expected)
    keys, rows, _ = table.export()
    assert (np.diff(keys.astype(np.uint64)) > 0).all() or len(keys) < 2
    assert keys.tolist() == sorted(expected, key=lambda key: key % 2**64)
    for key, row in zip(keys.tolist(), rows, strict=True):
        np.testing.assert_array_equal(row, expected[key])


def test_keys_that_share_home_bucket_and_digest(cuda):
    wanted = _core._hash_pieces(0)[1:]
    keys = [
        key
        for key in range(400_000)
        if (_core._hash_pieces(key)[1] % 4, _core._hash_pieces(key)[2])
        == (wanted[0] % 4, wanted[1])
    ]
    assert len(keys) > 100
    rows = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM)
    table = cuda.CudaTable("t", DIM)
    table.assign(up(cuda, keys), up(cuda, rows, np.float32))
    np.testing.assert_array_equal(table.find(up(cuda, keys))[0].get(), rows)
    assert table.erase(up(cuda, keys[::2])) == len(keys[::2])
    now, found = table.find(up(cuda, keys))
    np.testing.assert_array_equal(found.get(), np.arange(len(keys)) % 2 == 1)
    np.testing.assert_array_equal(now.get()[1::2], rows[1::2])


@pytest.mark.parametrize("max_load_factor", [0.5, 0.875, 0.95])
def test_growth_keeps_every_row(cuda, max_load_factor):
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 4000))
    rng.shuffle(keys)
    rows = rng.standard_normal((keys.size, DIM), np.float32)
    table = cuda.CudaTable("t", DIM, max_load_factor=max_load_factor)
    for begin in range(0, keys.size, 700):
        part = slice(begin, begin + 700)
        table.assign(up(cuda, keys[part]), up(cuda, rows[part], np.float32))
    np.testing.assert_array_equal(table.find(up(cuda, keys))[0].get(), rows)
    stats = table.stats()
    assert stats["size"] == keys.size
    assert 0.4 * max_load_factor < stats["load_factor"] <= max_load_factor


def test_max_capacity_is_all_or_nothing(cuda):
    table = cuda.CudaTable("user_id", DIM, max_capacity=100)
    table.find_or_insert(up(cuda, np.arange(90)))
    keys = np.array([*range(80, 101), 100, 99])
    with pytest.raises(ValueError, match=r"max_capacity=100.*11 new keys.*90.*user_id"):
        table.find_or_insert(up(cuda, keys))
    assert len(table) == 90
    table.find_or_insert(up(cuda, keys[keys != 100]))
    assert len(table) == 100


def test_import_gives_what_was_exported(cuda):
    table = cuda.CudaTable("t", 3)
    table.configure_slots([_core.SlotVariableSpec("m", 2, initial=1.5)])
    table.find_or_insert(up(cuda, EXTREMES))
    keys, rows, slots = table.export()
    assert slots["m"].shape == (len(EXTREMES), 2) and (slots["m"] == 1.5).all()
    other = cuda.CudaTable("another", 3)
    other.import_(keys[::-1], rows[::-1], {"m": slots["m"] + 1})
    keys_again, rows_again, slots_again = other.export()
    np.testing.assert_array_equal(keys_again, keys)
    np.testing.assert_array_equal(rows_again, rows)
    assert (slots_again["m"] == 2.5).all()
    # And to the CPU's table.
    cpu = _core.Table("t", 3)
    cpu.import_(keys, rows, slots)
    np.testing.assert_array_equal(cpu.find(keys)[0], rows)


def test_an_export_beside_assignments_is_of_one_instant(cuda):
    """Python's threads run at once: calls release its lock, and tables lock themselves."""
    table, keys = cuda.CudaTable("t", 2), up(cuda, np.arange(1000))
    rows = [up(cuda, np.full((1000, 2), value), np.float32) for value in range(10)]
    table.assign(keys, rows[0])
    snapshots = []

    def export():
        while assigning.is_alive():
            snapshots.append(table.export())

    def assign():
        number = 0
        while number < 40 or len(snapshots) < 3:
            table.assign(keys, rows[number % 10])
            number += 1

    assigning = threading.Thread(target=assign)
    exporting = threading.Thread(target=export)
    for thread in (assigning, exporting):
        thread.start()
    for thread in (assigning, exporting):
        thread.join()
    for exported, found, _ in snapshots:
        np.testing.assert_array_equal(exported, np.arange(1000))
        assert (found == found[0, 0]).all()


def test_rows_by_number(cuda):
    table = cuda.CudaTable("t", DIM)
    keys = up(cuda, EXTREMES)
    assert (table.row_numbers(keys).get() == 2**32 - 1).all()
    numbers = table.row_numbers(keys, insert=True)
    assert sorted(numbers.get().tolist()) == list(range(len(EXTREMES)))
    np.testing.assert_array_equal(table.gather(numbers).get(), table.find(keys)[0].get())


@pytest.mark.parametrize(
    "keys, message",
    [
        (np.arange(3), "device memory"),
        ("int32", "type <i8"),
        ("matrix", r"shape \[\?\]"),
    ],
)
def test_arguments_are_checked(cuda, keys, message):
    if isinstance(keys, str):
        keys = up(cuda, [1, 2], np.int32) if keys == "int32" else up(cuda, [[1, 2]])
    with pytest.raises(ValueError, match=f"`keys` must .*{message}"):
        cuda.CudaTable("t", DIM).find(keys)


def test_32_bit_keys_are_refused(cuda):
    with pytest.raises(ValueError, match="`key_dtype` must be int64 or uint64.*int32"):
        cuda.CudaTable("t", DIM, key_dtype="int32")


def test_a_build_without_cuda_has_the_names_and_says_so(cuda):
    """The two modules of bindings must not drift apart."""
    if isinstance(_core.CudaTable, type):
        pytest.skip("this library was built with CUDA")
    names = [name for name in dir(cuda) if name.startswith(("Cuda", "cuda_"))]
    assert len(names) == 17
    for name in set(names) - {"CudaError", "cuda_device_count"}:
        with pytest.raises(RuntimeError, match="make cuda"):
            getattr(_core, name)("t", DIM)
    assert _core.cuda_device_count() == 0


@pytest.mark.parametrize(
    "num_keys, batch",
    [(3000, 1024), pytest.param(100_000_000, 1 << 22, marks=[pytest.mark.gpu, pytest.mark.slow])],
)
def test_so_many_keys(cuda, num_keys, batch):
    if cuda is not _core and num_keys > 1_000_000:
        pytest.skip("needs a device")
    table = cuda.CudaTable("t", DIM, initial_capacity=num_keys)
    for begin in range(0, num_keys, batch):
        keys = np.arange(begin, min(begin + batch, num_keys), dtype=np.int64) * 7919
        table.row_numbers(up(cuda, keys), insert=True)
    assert len(table) == num_keys
    keys = np.random.default_rng(0).integers(0, num_keys, batch) * 7919
    rows, found = table.find(up(cuda, keys))
    assert found.get().all()
    expected = _core.Table("t", DIM).initial_rows(keys[:1000])
    np.testing.assert_array_equal(rows.get()[:1000], expected)
