"""Clipping by hand on several ranks is that of one process on a dense variable."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks.norms import (
    CLIPPING,
    DENSE,
    KERNEL,
    KEYS,
    LIMIT,
    MODES,
    OTHER,
    ROWS,
    SEVERAL,
    STRENGTH,
)

each_world = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
each_mode = pytest.mark.parametrize("mode", MODES)
each_process = pytest.mark.parametrize("check_name", ["norms.clipped", "norms.with_distribution"])


def whole_gradients():
    """Of a mean over all samples: of the rows by key, and of the kernel."""
    keys = np.array(KEYS).ravel()
    of_rows = {key: KERNEL * (keys == key).mean() for key in np.unique(keys).tolist()}
    return of_rows, ROWS[keys].mean(0)


def norm_of(*gradients):
    return np.sqrt(sum((gradient**2).sum() for gradient in gradients))


def check(results, row_factor, kernel_factor, norm):
    """Each key's row is on one rank; the kernel's gradients of all ranks have this mean."""
    of_rows, of_kernel = whole_gradients()
    seen = [(key, row) for rows, _, _ in results for key, row in rows.items()]
    assert sorted(key for key, _ in seen) == sorted(of_rows)
    for key, row in seen:
        np.testing.assert_allclose(row, of_rows[key] * row_factor, rtol=1e-5)
    kernel = np.mean([kernel for _, kernel, _ in results], 0)
    np.testing.assert_allclose(kernel, of_kernel * kernel_factor, rtol=1e-5)
    np.testing.assert_allclose([found for _, _, found in results], norm, rtol=1e-5)


def global_norm():
    of_rows, of_kernel = whole_gradients()
    norm = norm_of(*of_rows.values(), of_kernel)
    assert norm > LIMIT
    return norm


@each_process
@each_world
@each_mode
@pytest.mark.parametrize("name", ["by_global_norm", "tape_of_dmp"])
def test_clip_by_global_norm(rank_results, check_name, world_size, name, mode):
    results = [r[f"{name} {mode}"] for r in rank_results(world_size, check_name)]
    factor = LIMIT / global_norm()
    check(results, factor, factor, global_norm())


@each_process
@each_world
@each_mode
def test_global_norm(rank_results, check_name, world_size, mode):
    results = [r[f"global_norm {mode}"] for r in rank_results(world_size, check_name)]
    check(results, 1.0, 1.0, global_norm())


@each_process
@each_world
@each_mode
def test_clip_by_norm_of_a_table(rank_results, check_name, world_size, mode):
    results = [r[f"by_norm {mode}"] for r in rank_results(world_size, check_name)]
    check(results, LIMIT / norm_of(*whole_gradients()[0].values()), 1.0, 0.0)


@each_world
def test_global_norm_of_dense_tables(rank_results, world_size):
    keys = np.array(KEYS).ravel()
    of_rows = [2 * ROWS[key] * (keys == key).mean() for key in np.unique(keys)]
    right = norm_of(*of_rows) * np.sqrt(2)  # both tables begin with the same rows
    for found in rank_results(world_size, "norms.tables"):
        np.testing.assert_allclose(found, right, rtol=1e-5)


def of_two_lookups():
    """As `whole_gradients`, of a table that two lookups read: their parts are summed by key."""
    keys = np.array(KEYS).ravel()
    counts = np.zeros(6)
    np.add.at(counts, keys, 1)
    np.add.at(counts, OTHER(keys), 2)
    of_rows = counts[:, None] * KERNEL / len(keys)
    used = np.flatnonzero(counts)
    of_kernel = (ROWS[keys] + 2 * ROWS[OTHER(keys)]).mean(0)
    return {key: of_rows[key] for key in used.tolist()}, of_kernel


def clipped_to(rows, axis):
    """Stock TensorFlow's `clip_by_norm` of the dense gradient."""
    return tf.clip_by_norm(tf.constant(rows, tf.float32), LIMIT, axis).numpy()


@pytest.mark.parametrize("check_name", ["norms.several", "norms.several_with_distribution"])
@each_world
@each_mode
@pytest.mark.parametrize(("door", "change"), SEVERAL)
def test_a_table_that_two_lookups_read(rank_results, check_name, world_size, door, change, mode):
    results = [r[f"{door} {change} {mode}"] for r in rank_results(world_size, check_name)]
    of_rows, of_kernel = of_two_lookups()
    whole = norm_of(*of_rows.values(), of_kernel)
    dense = np.array(list(of_rows.values()))
    right = {
        "by_norm": lambda: clipped_to(dense, None),
        "by_norm_of_rows": lambda: clipped_to(dense, 1),
        "by_norm_of_columns": lambda: clipped_to(dense, 0),
        "by_value": lambda: np.clip(dense, -LIMIT, LIMIT),
        "by_global_norm": lambda: dense * LIMIT / whole,
        "global_norm": lambda: dense,
    }[change]()
    assert change == "global_norm" or not np.allclose(right, dense)
    factor = LIMIT / whole if change == "by_global_norm" else 1.0
    seen = {}
    for rows, _, norm in results:
        for key, row in rows.items():
            seen[key] = seen.get(key, 0.0) + row
        np.testing.assert_allclose(norm, whole if "global" in change else 0.0, rtol=1e-5)
    assert sorted(seen) == sorted(of_rows)
    for key, row in zip(of_rows, right, strict=True):
        np.testing.assert_allclose(seen[key], row, rtol=1e-5)
    kernel = np.mean([kernel for _, kernel, _ in results], 0)
    np.testing.assert_allclose(kernel, of_kernel * factor, rtol=1e-5)


@pytest.mark.keras
@each_world
@pytest.mark.parametrize(("door", "setting"), CLIPPING)
def test_stock_optimizers_clip_the_gradient_of_the_whole_table(
    rank_results, world_size, door, setting
):
    if door == "legacy" and is_keras_3():
        pytest.skip("an optimizer of tf_keras")
    moved = [r[f"{door} {setting}"] for r in rank_results(world_size, "norms.by_optimizers")]
    of_rows, _ = of_two_lookups()
    if door in DENSE:
        of_rows = {key: of_rows.get(key, 0.0) + STRENGTH * ROWS[key] for key in range(6)}
    factor = LIMIT / norm_of(*of_rows.values())  # the only variable
    right = {key: row * factor for key, row in of_rows.items()}
    if setting == "clipvalue":
        right = {key: np.clip(row, -LIMIT, LIMIT) for key, row in of_rows.items()}
    seen = {key: row for of_rank in moved for key, row in of_rank.items()}
    assert sorted(seen) == list(range(6))
    for key, row in seen.items():
        np.testing.assert_allclose(row, right.get(key, 0.0), rtol=1e-4, atol=1e-6)


@pytest.mark.keras
@pytest.mark.ranks
def test_a_part_that_is_not_rows_of_one_table_has_no_norm_of_its_own(rank_results):
    results = rank_results(2, "norms.without_norms")
    for kind, count in (("whole", 2), ("columns", 1)):
        found = [result[kind] for result in results]
        for each in found:
            for clip in ("rows", "dense", "clipnorm"):
                error, message = each[clip]
                assert error == "ValueError" and "row_slice_threshold" in message, (kind, clip)
            np.testing.assert_allclose(each["norm"], np.sqrt(count) * norm_of(2 * ROWS), rtol=1e-5)
        moved = np.sqrt(sum(each["moved"] for each in found))
        np.testing.assert_allclose(moved, LIMIT, rtol=1e-4)
