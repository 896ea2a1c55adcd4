"""Models on meshes of ranks against the same models by Keras alone in one process."""

import numpy as np
import pytest

from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks import distribution as mixed

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
TOLERANCE = 1e-5
USES = ("published", "deferred", "eager", "dataset", "own_loop", "backed_up") + (
    ("keras_classes", "made_before", "loaded") if is_keras_3() else ()
)


def assert_close(found, expected, what):
    """Equal within the tolerance: arrays, and dictionaries and lists of them."""
    if isinstance(expected, dict):
        assert set(found) >= set(expected), what
        for key in expected:
            assert_close(found[key], expected[key], f"{what} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), what
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{what} {i}")
    else:
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


CASES = [
    pytest.param(world_size, shape, optimizer, id=f"{world_size}-{shape}-{optimizer}")
    for world_size, meshes in mixed.CHECKED.items()
    for shape, optimizers in meshes.items()
    for optimizer in optimizers
]


_expected = {}


def expected(optimizer, start, eager):
    """The oracle's training, once: ranks and meshes start with equal weights."""
    if (optimizer, eager) not in _expected:
        _expected[optimizer, eager] = start, mixed.oracle(optimizer, start, eager)
    first, training = _expected[optimizer, eager]
    assert_close(start, first, "initial weights")
    return training


@pytest.mark.parametrize("world_size, shape, optimizer", CASES)
def test_mixed_model_is_the_unsharded_one(rank_results, world_size, shape, optimizer):
    ranks = rank_results(world_size, f"distribution.{shape[0]}x{shape[1]}.{optimizer}")
    for rank, result in enumerate(ranks):
        assert len(result["sharded"]["losses"]) == 4 * mixed.EPOCHS
        assert result["sharded"]["losses"][-1] < result["sharded"]["losses"][0]
        right = expected(optimizer, result["start"], mixed.is_eager(shape))
        assert_close(result["sharded"], right, f"rank {rank}:")


@pytest.mark.parametrize("world_size, shape, optimizer", CASES)
def test_shards_and_slots_are_parts(rank_results, world_size, shape, optimizer):
    sizes = dict(zip(("batch", "model"), shape, strict=True))
    ranks = rank_results(world_size, f"distribution.{shape[0]}x{shape[1]}.{optimizer}")
    of_layouts = [a for axes in mixed.LAYOUTS.values() for a in axes if a and sizes[a] > 1]
    slots_each = {"sgd": 1, "adam": 2, "adagrad": 1}[optimizer]
    for kind, number in (("shards", len(of_layouts)), ("slots", slots_each * len(of_layouts))):
        assert len(ranks[0][kind]) == number
        for path, (layout, whole, _) in ranks[0][kind].items():
            parts = max(sizes[axis] for axis in layout if axis is not None)
            (dim,) = [i for i, axis in enumerate(layout) if axis is not None]
            here = [rank[kind][path][2] for rank in ranks]
            rest = np.prod(whole) // whole[dim]
            assert set(here) <= {whole[dim] // parts * rest, -(-whole[dim] // parts) * rest}, path
            # Each part is on as many ranks as the other axis is long.
            assert sum(here) == np.prod(whole) * world_size // parts, path
    assert ranks[0]["warned"] == []


def test_summary_says_what_lies_where(rank_results):
    table = {
        line.split()[0]: line
        for line in rank_results(2, "distribution.1x2.adagrad")[0]["table"].splitlines()
    }
    kernel = table["dense_column/kernel"]
    assert "(6, 5)" in kernel and "(None, 'model')" in kernel and "(6, 3)" in kernel
    assert " 72 " in kernel  # bytes of 6 * 3 floats
    assert "all_gather of outputs, all_reduce of input gradients" in kernel
    assert "all_reduce of outputs, all_gather of input gradients" in table["dense_row/kernel"]
    assert "all_gather of the batch's rows" in table["rows/embeddings"]
    assert "all_gather when read" in table["layer_norm/gamma"]
    assert table["dense_column/bias"].endswith("none")


@pytest.mark.parametrize(
    "check", [*(f"distribution_use.{use}" for use in USES), "distribution_ops.operations"]
)
def test_use_is_the_unsharded_one(rank_results, check):
    for rank, result in enumerate(rank_results(2, check)):
        expected = result["oracle"]
        runs = {key: run for key, run in result.items() if key != "oracle" and "local" not in key}
        assert runs
        for key, run in runs.items():
            assert_close(run, expected, f"rank {rank}, {key}:")


def local_shapes(found):
    """By the end of the path: `kernel` of a layer has one shard shape."""
    return {"/".join(path.split("/")[-2:]): shape for path, shape in found.items()}


def test_a_folder_per_rank_for_backups_raises(rank_results):
    for rank in rank_results(2, "distribution_use.backed_up"):
        assert "All ranks must save to the same path" in rank["local folders"]


def test_mesh_shape_alone_changes_the_sharding(rank_results):
    published = rank_results(2, "distribution_use.published")
    sharded = [local_shapes(rank[(1, 2)]["local"]) for rank in published]
    assert [shapes["dense/kernel"] for shapes in sharded] == [(64, 4)] * 2
    assert [shapes["dense_1/kernel"] for shapes in sharded] == [(8, 3), (8, 2)]
    assert [shapes["conv2d/kernel"] for shapes in sharded] == [(3, 3, 2, 2)] * 2
    assert [rank["local on (2, 1)"] for rank in published] == [{}, {}]


def test_model_that_was_not_built_is_sharded(rank_results):
    for rank in rank_results(2, "distribution_use.deferred"):
        assert local_shapes(rank["local"])["dense/kernel"] == (64, 4)


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras cannot exchange a layer's variables")
def test_model_made_before_is_cut(rank_results):
    for rank in rank_results(2, "distribution_use.made_before"):
        assert local_shapes(rank["local"])["dense/kernel"] == (64, 4)
        assert local_shapes(rank["local of compiled"])["dense/kernel"] == (64, 4)


@pytest.mark.parametrize("check", ["files", "from_files"])
def test_files_hold_whole_values(rank_results, check):
    for rank in rank_results(2, f"distribution_use.{check}"):
        assert len(rank["read"]) >= 2
        for name, values in rank["read"].items():
            for found, written in zip(values, rank["written"], strict=True):
                np.testing.assert_array_equal(found, written, err_msg=name)


def test_rank_0_writes_a_model_of_which_nothing_is_sharded(rank_results):
    for kept in rank_results(2, "files.unsharded"):
        assert len(kept) == 3 and all(kept.values()), kept


def test_a_file_that_one_rank_cannot_read_changes_no_shard(rank_results):
    for rank in rank_results(2, "distribution_use.not_loaded"):
        assert "rank 1: " in rank["message"] and "the disk is ill" in rank["message"]
        assert rank["same"] and rank["local"]


@pytest.mark.parametrize(
    "case, words",
    [
        ("rank", ["must have an item for each dimension", "('model',)", "dense/kernel", "(64, 8)"]),
        ("twice", ["must name an axis once", "'model'", "dense/kernel", "(64, 8)"]),
        ("axis", ["must name axes of the mesh", "'modle'", "dense/kernel"]),
        ("two patterns", ["'.*dense/k.*'", "'.*se/kernel'", "dense/kernel", "(64, 8)"]),
        ("constraint", ["other than NonNeg", "MaxNorm", "dense/kernel"]),
        ("mesh", ["(2, 4)", "('batch', 'model')", "2 rank(s)"]),
        ("order", ["in the order of list_devices()", "[1, 0]"]),
        ("process", ["`num_processes`", "num_processes=3"]),
    ],
)
def test_errors_say_what_is_wrong(rank_results, case, words):
    for rank in rank_results(2, "distribution_use.errors"):
        assert rank[case].startswith("ValueError: ")  # of tf_keras, with a trace behind it
        assert [word for word in words if word not in rank[case]] == [], rank[case]


def test_pattern_that_matches_nothing_warns(rank_results):
    for rank in rank_results(2, "distribution_use.errors"):
        (warning,) = rank["unmatched"]
        assert "'no_such.*kernel'" in warning and "dense/kernel" in warning


@pytest.mark.parametrize("how", ["export", "saved_model", "module"])
def test_saved_model_of_shards_is_refused(rank_results, how):
    for rank in rank_results(2, "distribution_use.exported"):
        assert "sok.export_saved_model" in rank[how], rank[how]


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras' variables have no layout of their own")
def test_explicit_layouts(rank_results):
    ranks = rank_results(2, "distribution_use.explicit")
    whole = np.arange(10.0).reshape(5, 2)
    for rank, rows in zip(ranks, (whole[:3], whole[3:]), strict=True):
        np.testing.assert_array_equal(rank["local"], rows)
        np.testing.assert_array_equal(rank["whole"], whole)
        assert rank["layout"] == ("batch", "model")
        assert rank["outputs"] == (22, 5)
