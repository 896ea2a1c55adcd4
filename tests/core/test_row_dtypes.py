"""Rows of 16 bits: their rounding against NumPy and ml_dtypes, updates against the oracles."""

import ml_dtypes
import numpy as np
import pytest

from sok_like import _core
from tests.core.oracles import ORACLES
from tests.core.test_optimizers import CASES

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
LARGEST = {"bfloat16": 3.3895314e38, "float16": 65504.0}
# Those that change the rows of a batch only.
LAZY = [
    *("sgd", "lazy_momentum", "tf1_nesterov_lazy", "adagrad", "rowwise_adagrad", "lazy_adam"),
    *("lazy_amsgrad", "adam_of_rows_with_decay", "adagrad_decay", "rmsprop", "ftrl", "ftrl_all"),
]
KEYS = np.array([5, -1, 2**62, 0, -(2**63), 77], np.int64)

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def make_table(dtype, dim, **kwargs):
    kwargs = {"initializer": "uniform", "a": -0.5, "b": 0.5, "seed": 3, **kwargs}
    return _core.Table("table", dim, row_dtype=dtype, **kwargs)


def nearest(rows, dtype):
    with np.errstate(over="ignore"):
        return np.asarray(rows, np.float32).astype(DTYPES[dtype]).astype(np.float32)


def spacing(rows, dtype):
    """From a number to the next one that the dtype holds."""
    fraction, smallest = {"bfloat16": (7, -126), "float16": (10, -14)}[dtype]
    exponents = np.maximum(np.frexp(np.abs(rows))[1] - 1, smallest)
    return np.ldexp(1.0, exponents - fraction)


def bits(rows):
    return np.asarray(rows, np.float32).view(np.uint32)


def apply(table, rule, step, keys, grads, rate=0.05, **options):
    _core.apply_gradients(table, rule, rate, step, keys, grads, **options)


@each_dtype
def test_every_number_of_the_dtype_is_kept(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    table = make_table(dtype, 64)
    keys, rows = np.arange(1024), values.reshape(1024, 64)
    table.assign(keys, rows)
    found = table.find(keys)[0]
    is_nan = np.isnan(rows)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(bits(found)[~is_nan], bits(rows)[~is_nan])


@each_dtype
def test_given_rows_are_rounded_to_nearest(dtype):
    rng = np.random.default_rng(0)
    small, large = np.log2([1e-9, LARGEST[dtype] / 1.01])
    values = np.exp2(rng.uniform(small, large, 60_000)) * rng.choice([-1, 1], 60_000)
    ties = values[:20_000].astype(DTYPES[dtype]).astype(np.float64)
    ties += np.copysign(spacing(ties, dtype) / 2, ties)
    special = [0.0, -0.0, np.inf, -np.inf, 1e-45, 1e-30, 2.0**-25, -(2.0**-25) * 1.01, 2.0**-24]
    special += [LARGEST[dtype], -LARGEST[dtype]]
    rows = np.concatenate([values, ties, special]).astype(np.float32)
    rows = np.append(rows, np.zeros(-len(rows) % 5, np.float32)).reshape(-1, 5)
    table, keys = make_table(dtype, 5), np.arange(len(rows)) - 100
    table.assign(keys, rows)
    np.testing.assert_array_equal(bits(table.find(keys)[0]), bits(nearest(rows, dtype)))
    imported = make_table(dtype, 5)
    imported.import_(keys, rows)
    np.testing.assert_array_equal(bits(imported.find(keys)[0]), bits(nearest(rows, dtype)))


@each_dtype
@pytest.mark.parametrize("call", ["assign", "import_"])
def test_rows_that_do_not_fit_are_refused_and_nothing_is_written(dtype, call):
    table, good = make_table(dtype, 3), np.ones([2, 3], np.float32)
    table.assign([1, 2], good)
    rows = np.full([2, 3], 2.0, np.float32)
    rows[1, 2] = np.nextafter(np.float32(np.inf), 0) if dtype == "bfloat16" else 65520.0
    with pytest.raises(ValueError, match=f"range of {dtype}.*key 9,.*'table'"):
        getattr(table, call)(np.array([1, 9]), rows)
    np.testing.assert_array_equal(table.find([1, 2])[0], good)
    assert table.size == 2
    with np.errstate(over="ignore"):
        assert np.isinf(rows[1, 2].astype(DTYPES[dtype]))  # NumPy agrees


@each_dtype
@pytest.mark.parametrize("dim", [1, 3, 8, 63, 64, 65, 4096])
@pytest.mark.parametrize("initializer", ["uniform", "truncated_normal"])
def test_initial_rows_are_those_of_float32_rounded(dtype, dim, initializer):
    full = _core.Table("table", dim, initializer=initializer, a=0.0, b=0.5, seed=3)
    table = make_table(dtype, dim, initializer=initializer, a=0.0, b=0.5)
    expected = nearest(full.initial_rows(KEYS), dtype)
    np.testing.assert_array_equal(table.find(KEYS)[0], expected)  # not inserted
    np.testing.assert_array_equal(table.initial_rows(KEYS), expected)
    np.testing.assert_array_equal(table.find_or_insert(KEYS)[0], expected)
    np.testing.assert_array_equal(table.find(KEYS)[0], expected)
    zeros = np.zeros([len(KEYS), dim], np.float32)
    other = make_table(dtype, dim, initializer=initializer, a=0.0, b=0.5)
    for step in range(1, 20):
        apply(other, "adagrad", step, KEYS, zeros)  # inserts by itself, and moves nothing
    np.testing.assert_array_equal(other.find(KEYS)[0], expected)


def test_rows_take_half_the_memory():
    sizes = {}
    for dtype in ("float32", *DTYPES):
        table = make_table(dtype, 64)
        table.find_or_insert(np.arange(100_000))
        sizes[dtype] = table.stats()["arena_bytes"]
    assert sizes["bfloat16"] == sizes["float16"]
    assert sizes["bfloat16"] < 0.55 * sizes["float32"]


@each_dtype
@pytest.mark.parametrize("dim", [1, 7, 64, 100])
@pytest.mark.parametrize("case", LAZY)
def test_updates_are_rounded_to_a_neighbour(case, dim, dtype):
    rule, options = CASES[case]
    table, all_keys = make_table(dtype, dim), np.arange(120)
    oracle = ORACLES[rule](table.find(all_keys)[0], clip_value=0.8, **options)
    rng = np.random.default_rng(1)
    for step in range(1, 16):
        keys = rng.integers(0, 100, 60)
        grads = rng.normal(size=[60, dim]).astype(np.float32)
        oracle.w = table.find(all_keys)[0].astype(np.float64)  # as the rule sees them
        before = oracle.w.copy()
        apply(table, rule, step, keys, grads, clip_value=0.8, **options)
        oracle.step(step, float(np.float32(0.05)), keys, grads)
        rows = table.find(all_keys)[0]
        limit = spacing(np.maximum(np.abs(rows), np.abs(oracle.w)), dtype)
        assert (np.abs(rows - oracle.w) <= limit + 1e-6).all()
        untouched = np.setdiff1d(all_keys, keys)
        np.testing.assert_array_equal(rows[untouched], before[untouched])
    np.testing.assert_array_equal(nearest(rows, dtype), rows)


@each_dtype
def test_rounding_has_the_mean_of_the_number(dtype):
    """A step of a tenth of the spacing moves a tenth of the elements."""
    dim, num_keys = 100, 1000
    table = make_table(dtype, dim, initializer="constant", a=1.0)
    keys = np.arange(num_keys) * 7 - 300
    gap = spacing(np.ones(1), dtype)[0]
    grads = np.full([num_keys, dim], -0.1 * gap, np.float32)
    apply(table, "sgd", 1, keys, grads, rate=1.0)
    moved = (table.find(keys)[0] - 1.0) / gap
    assert set(np.unique(moved)) == {0.0, 1.0}
    deviation = np.sqrt(0.1 * 0.9 / moved.size)
    assert abs(moved.mean() - 0.1) < 4 * deviation
    # Neither keys nor columns go together.
    assert np.abs(moved.mean(axis=0) - 0.1).max() < 5 * np.sqrt(0.09 / num_keys)
    assert np.abs(moved.mean(axis=1) - 0.1).max() < 6 * np.sqrt(0.09 / dim)
    # Other steps round otherwise: nothing moves twice for sure.
    for step in range(2, 202):
        apply(table, "sgd", step, keys, grads, rate=1.0)
    expected = 1.0 + 201 * 0.1 * gap
    assert abs(table.find(keys)[0].mean() / expected - 1.0) < 1e-3 * gap / 2.0**-7


@each_dtype
def test_subnormal_numbers_have_their_mean_too(dtype):
    table = make_table(dtype, 1000, initializer="constant", a=0.0)
    value = np.float32({"float16": 2.0**-24 * 3.3, "bfloat16": 2.0**-20 * 1.0041}[dtype])
    keys = np.arange(100)
    apply(table, "sgd", 1, keys, np.full([100, 1000], -value, np.float32), rate=1.0)
    rows = table.find(keys)[0].astype(np.float64)
    gap = spacing(value, dtype)
    assert len(np.unique(rows)) == 2
    assert abs(rows.mean() - value) < 4 * gap * 0.5 / np.sqrt(rows.size)


def test_chance_makes_no_infinity():
    table = make_table("float16", 64, initializer="constant", a=65504.0)
    keys = np.arange(200)
    apply(table, "sgd", 1, keys, np.full([200, 64], -31.0, np.float32), rate=1.0)
    assert (table.find(keys)[0] == 65504.0).all()
    apply(table, "sgd", 2, keys, np.full([200, 64], -65504.0, np.float32), rate=1.0)
    assert np.isposinf(table.find(keys)[0]).all()  # as of any float16


@each_dtype
@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad"])
def test_neither_threads_nor_batches_nor_ranks_show(dtype, rule):
    dim, num_keys = 12, 6000
    rng = np.random.default_rng(3)
    keys = rng.permutation(num_keys)
    grads = rng.normal(size=[3, num_keys, dim]).astype(np.float32)
    results = []
    for threads in (1, 2, 5):
        _core.set_num_threads(threads)
        table = make_table(dtype, dim)
        for step in range(3):
            apply(table, rule, step + 1, keys, grads[step])
        results.append(table.find(np.arange(num_keys))[0])
    shards = [make_table(dtype, dim, rank=rank, world_size=3) for rank in range(3)]
    for step in range(3):
        for rank, shard in enumerate(shards):
            mine = keys[::-1] % 3 == rank
            apply(shard, rule, step + 1, keys[::-1][mine], grads[step, ::-1][mine])
    rows = np.empty_like(results[0])
    for rank, shard in enumerate(shards):
        mine = np.arange(rank, num_keys, 3)
        rows[mine] = shard.find(mine)[0]
    for other in (*results[1:], rows):
        np.testing.assert_array_equal(results[0], other)


@each_dtype
@pytest.mark.parametrize(
    "rule, options",
    [
        ("adam", {}),
        ("momentum", {"momentum": 0.9}),
        ("sgd", {"weight_decay": 0.1}),
        ("lazy_adam", {"weight_decay": 0.1}),
    ],
)
def test_optimizers_that_change_every_row_are_refused(dtype, rule, options):
    table = make_table(dtype, 2)
    before = table.find_or_insert(KEYS)[0]
    with pytest.raises(ValueError, match=f"dtype {dtype} needs.*rows of the batch.*'table'"):
        apply(table, rule, 1, KEYS, np.ones([len(KEYS), 2], np.float32), **options)
    np.testing.assert_array_equal(table.find(KEYS)[0], before)
    apply(table, "sgd", 1, KEYS, np.ones([len(KEYS), 2], np.float32))  # it still takes one


@each_dtype
@pytest.mark.parametrize("dim", [1, 6, 64])
def test_export_and_import_keep_every_bit(dtype, dim):
    table = make_table(dtype, dim)
    rng = np.random.default_rng(4)
    for step in range(1, 4):
        apply(table, "lazy_adam", step, KEYS, rng.normal(size=[len(KEYS), dim]).astype(np.float32))
    keys, rows, slots = table.export()
    copy = make_table(dtype, dim)
    copy.import_(keys, rows, slots)
    for a, b in zip(table.export()[:2], copy.export()[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    grads = rng.normal(size=[len(KEYS), dim]).astype(np.float32)
    for each in (table, copy):  # goes on alike
        apply(each, "lazy_adam", 4, KEYS, grads)
    np.testing.assert_array_equal(table.find(KEYS)[0], copy.find(KEYS)[0])


@each_dtype
def test_a_new_optimizer_state_moves_rows_as_they_are(dtype):
    table = make_table(dtype, 7)
    keys = np.arange(50_000)
    before = table.find_or_insert(keys)[0]
    table.configure_slots([_core.SlotVariableSpec("a", 7, initial=0.5)])
    np.testing.assert_array_equal(table.find(keys)[0], before)
    table.configure_slots(
        [_core.SlotVariableSpec("b", 3, initial=2.0), _core.SlotVariableSpec("a", 7)]
    )
    exported_keys, rows, slots = table.export()
    np.testing.assert_array_equal(rows, before[exported_keys])
    assert (slots["a"] == 0.5).all() and (slots["b"] == 2.0).all()


@each_dtype
def test_tables_without_hashtable(dtype):
    table = make_table(dtype, 5, use_hashtable=False, max_capacity=100)
    full = make_table("float32", 5, use_hashtable=False, max_capacity=100)
    keys = np.arange(100)
    np.testing.assert_array_equal(table.find(keys)[0], nearest(full.find(keys)[0], dtype))
    rows = np.random.default_rng(5).normal(size=[10, 5]).astype(np.float32)
    table.assign(keys[:10], rows)
    np.testing.assert_array_equal(table.find(keys[:10])[0], nearest(rows, dtype))


@each_dtype
def test_tables_with_policies(dtype):
    policy = {"filter_freq": 2, "score": "lru", "evicted_buffer": 50, "l2_threshold": 0.05}
    tables = [make_table(d, 4, policy=policy, max_capacity=30) for d in (dtype, "float32")]
    rng = np.random.default_rng(6)
    for _ in range(200):
        keys = np.unique(rng.integers(0, 60, 8))
        for table in tables:
            table.find_or_insert(keys)
    popped = [table.pop_evicted() for table in tables]
    assert len(popped[0]["keys"]) == 50
    np.testing.assert_array_equal(popped[0]["keys"], popped[1]["keys"])
    np.testing.assert_array_equal(popped[0]["rows"], nearest(popped[1]["rows"], dtype))
    keys, rows, _ = tables[0].export()
    half = 0.5 * np.square(rows.astype(np.float64)).sum(axis=1)
    clear = np.abs(half - 0.05) > 1e-3
    tables[0].evict()
    left = np.isin(keys, tables[0].export()[0])
    np.testing.assert_array_equal(left[clear], half[clear] >= 0.05)


@each_dtype
def test_rows_on_disk(dtype, tmp_path):
    storage = {"path": str(tmp_path), "memory": 1 << 20}
    on_disk, in_memory = make_table(dtype, 33, storage=storage), make_table(dtype, 33)
    full = make_table("float32", 33)
    rng = np.random.default_rng(7)
    for step in range(1, 5):
        keys = np.unique(rng.integers(0, 40_000, 20_000))
        grads = rng.normal(size=[len(keys), 33]).astype(np.float32)
        for table in (on_disk, in_memory, full):
            apply(table, "adagrad", step, keys, grads)
    for a, b in zip(on_disk.export()[:2], in_memory.export()[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    for table in (on_disk, in_memory):  # slot rows are float32
        accumulators = table.export()[2]["accumulator"]
        np.testing.assert_array_equal(accumulators, full.export()[2]["accumulator"])


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="'float32', 'bfloat16', 'float16'. Received: 'int8'"):
        make_table("int8", 4)
    with pytest.raises(ValueError, match="at most 4096.*4097"):
        make_table("bfloat16", 4097)
    for arguments in (
        {"initializer": "constant", "a": 7e4},
        {"initializer": "uniform", "a": 0.0, "b": 7e4},
        {"initializer": "default_rows", "default_rows": np.full([2, 4], -7e4, np.float32)},
    ):
        with pytest.raises(ValueError, match="float16 must be within.*70000"):
            make_table("float16", 4, **arguments)
        make_table("bfloat16", 4, **arguments)
