"""Meshes, layouts and what they come to, and the random state that ranks share, without ranks."""

import json
import random
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_like import distribution as dist
from sok_like.distribution.collectives import shard_bounds
from sok_like.distribution.distributions import random_state, set_random_state
from sok_like.distribution.mesh import Shard

pytestmark = pytest.mark.keras


@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 100])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_shards_are_those_of_numpy(length, num_shards):
    whole = np.arange(length)
    for index, expected in enumerate(np.array_split(whole, num_shards)):
        for given in (length, tf.constant(length, tf.int64)):
            start, stop = map(int, shard_bounds(given, num_shards, index))
            assert whole[start:stop].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "axes", [(None, None), ("model", None), (None, "model"), ("batch", "model"), ("model", "batch")]
)
def test_every_element_lies_on_as_many_ranks_as_its_layout_says(axes):
    sizes = {"batch": 2, "model": 3}
    whole = np.arange(5 * 7).reshape(5, 7)
    held = np.zeros(whole.size, int)
    for batch in range(2):
        for model in range(3):
            indices = {"batch": batch, "model": model}
            mesh = types.SimpleNamespace(shape=sizes, index=indices)
            shard = Shard("p", whole.shape, axes, mesh)
            mine = shard.take(whole)
            assert mine.shape == shard.local_shape
            held[mine.reshape(-1)] += 1
    assert set(held) == {6 // np.prod([sizes[axis] for axis in axes if axis], dtype=int)}


PATHS = ("dense/kernel", "my_dense/kernel_2", "net/dense/kernel", "net/dense_1/bias", "net/bias")


def test_layout_map_matches_as_that_of_keras():
    mesh = dist.DeviceMesh((1, 1), ("batch", "model"), [0])
    ours, theirs = dist.LayoutMap(mesh), keras.distribution.LayoutMap(mesh)
    for layout_map in ours, theirs:
        layout_map["dense/kernel"] = (None, "model")
        layout_map["net/dense_.*"] = dist.TensorLayout(("model",))
    assert ours["dense/kernel"].axes == (None, "model")
    assert ours["net/dense_1/bias"].device_mesh is mesh
    for path in PATHS:
        found, expected = ours[path], theirs[path]
        assert getattr(found, "axes", None) == getattr(expected, "axes", None), path
    with pytest.raises(ValueError, match="already exist"):
        ours["dense/kernel"] = (None,)
    with pytest.raises(ValueError, match="TensorLayout"):
        ours["gamma"] = "model"
    ours["net/dense_1.*"] = ("model",)
    with pytest.raises(
        ValueError, match=r"'net/dense_1/bias' matches multiple layout.*net/dense_1"
    ):
        ours["net/dense_1/bias"]


@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14), reason="a part of a path matches"
)
def test_a_key_that_matches_a_part_of_a_path_warns_and_names_the_variable(sok):
    layers = tf.keras.layers
    layout_map = dist.LayoutMap(dist.DeviceMesh((1, 1), ("batch", "model")))
    layout_map["dense/kernel"] = (None, "model")  # a variable: it is meant alone
    layout_map["dens[e]/bias"] = ("model",)
    layout_map["outer"] = ("model",)
    with dist.ModelParallel(layout_map=layout_map).scope(), pytest.warns() as caught:
        inputs = layers.Input([4])
        hidden = layers.Dense(4, name="my_dense")(layers.Dense(4, name="dense")(inputs))
        model = tf.keras.Model(inputs, hidden)
        model(np.zeros((2, 4), np.float32))
    said = [str(w.message) for w in caught if "LayoutMap" in str(w.message)]
    assert len(said) == 2
    assert "'dens[e]/bias'" in said[0] and "a part of ['my_dense/bias']" in said[0]
    assert "'outer'" in said[1] and "matches no variable" in said[1]
    assert layout_map["my_dense/kernel"] is None


def test_arguments_of_model_parallel(sok):
    mesh = dist.DeviceMesh((1, 1), ("batch", "model"))
    layout_map = dist.LayoutMap(mesh)
    assert dist.ModelParallel(mesh, layout_map, "model").batch_dim_name == "model"
    by_name = dist.ModelParallel(layout_map=layout_map)
    assert by_name.device_mesh is mesh and by_name.batch_dim_name == "batch"
    with pytest.raises(ValueError, match="`layout_map` must be a LayoutMap"):
        dist.ModelParallel(mesh)
    with pytest.raises(ValueError, match="must be the mesh of the LayoutMap"):
        dist.ModelParallel(dist.DeviceMesh((1,), ("batch",)), layout_map)
    with pytest.raises(ValueError, match="'rows'"):
        dist.ModelParallel(mesh, layout_map, "rows")
    with pytest.raises(ValueError, match="does not match the number of devices"):
        dist.DeviceMesh((2, 4), ("batch", "model"))
    with pytest.raises(ValueError, match="`num_processes`.*num_processes=3"):
        dist.initialize(None, 3)


def test_scope_restores_what_was(sok):
    call = tf.keras.Model.__call__
    outer, inner = dist.Distribution(dist.DeviceMesh((1,), ["batch"])), dist.DataParallel()
    assert dist.distribution() is None
    with outer.scope():
        with pytest.raises(RuntimeError, match="stop"), inner.scope():
            assert dist.distribution() is inner
            raise RuntimeError("stop")
        assert dist.distribution() is outer
    assert dist.distribution() is None
    assert tf.keras.Model.__call__ is call
    with pytest.raises(TypeError, match="ModelParallel or DataParallel"):
        dist.set_distribution("data")
    with pytest.raises(TypeError, match="Keras optimizer is required"):
        outer.optimizer("adam")


def test_functions_and_methods_of_keras_on_one_rank(sok):
    assert dist.list_devices("cpu") == ["cpu:0"] and dist.get_device_count() == 1
    with pytest.raises(ValueError, match="'tpu'"):
        dist.list_devices("tpu")
    mesh = dist.DeviceMesh((1, 1), ["batch", "model"])
    whole = np.arange(6.0).reshape(3, 2)
    layout = dist.TensorLayout(("batch", None), mesh)
    np.testing.assert_array_equal(dist.distribute_tensor(whole, layout), whole)
    with pytest.raises(ValueError, match="must have a device mesh"):
        dist.distribute_tensor(whole, dist.TensorLayout((None, None)))
    assert dist.DataParallel().device_mesh.axis_names == ["batch"]
    layout_map = dist.LayoutMap(mesh)
    layout_map["dense/output"] = ("batch", None)
    parallel = dist.ModelParallel(layout_map=layout_map)
    assert parallel.get_tensor_layout("dense/output").axes == ("batch", None)
    assert parallel.get_tensor_layout("other/output") is None
    assert parallel.get_data_layout((4, 2, 2)).axes == ("batch", None, None)


def test_a_first_mesh_of_four_ranks_allows_a_grid_later(monkeypatch):
    """Horovod accepts groups only if it was told at its start: DataParallel, then a 2-D mesh."""
    from sok_like.distribution import mesh as module

    for world_size in (2, 4):
        asked = []

        def start(groups_later, asked=asked):
            asked.append(groups_later)
            raise KeyError  # there is one rank: a mesh of more cannot be made here

        monkeypatch.setattr(module, "ensure_initialized", start)
        monkeypatch.setattr(module.comm, "is_initialized", lambda: False)
        monkeypatch.setattr(module.comm, "launched_world_size", lambda n=world_size: n)
        mesh = dist.DeviceMesh((world_size,), ["batch"], list(range(world_size)))
        with pytest.raises(KeyError):
            module.RankMesh(mesh)
        assert asked == [world_size == 4]


@pytest.mark.parametrize(
    "shape, devices, layouts, words",
    [
        ((1, 1), [0], {".*kernel": ("y",)}, "item for each dimension.*('y',) for.*(64, 8)"),
        ((1, 1), [0], {".*kernel": ("y", "y")}, "name an axis once.*'y'.*dense/kernel"),
        ((1, 1), [0], {".*kernel": (None, "z")}, "name axes of the mesh.*'z'.*kernel"),
        ((1, 1), [0], {".*kernel": (), ".*k.*": ()}, "'.*kernel'.*'.*k.*'.*dense/kernel.*(64, 8)"),
        ((2, 4), [*range(8)], {}, "(2, 4).*('x', 'y').*1 rank(s)"),
        ((1, 2), [1, 0], {}, "in the order of list_devices().*[1, 0]"),
    ],
)
def test_meshes_and_layouts_that_do_not_fit(sok, shape, devices, layouts, words):
    with pytest.raises(ValueError) as raised:
        layout_map = dist.LayoutMap(dist.DeviceMesh(shape, ("x", "y"), devices))
        for path, axes in layouts.items():
            layout_map[path] = axes
        with dist.ModelParallel(layout_map=layout_map).scope():
            layers = tf.keras.layers
            tf.keras.Sequential([layers.Input([64]), layers.Dense(8, name="dense")])
    assert [word for word in words.split(".*") if word not in str(raised.value)] == []


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_the_state_comes_back_to_the_bit():
    random.gauss(0, 1), np.random.randn()  # half of a pair is kept for the next call
    tf.random.set_seed(41)
    data = json.dumps(random_state())  # nothing else travels
    expected = [*draws(), float(tf.random.uniform([]))]
    random.seed(1), np.random.seed(1), tf.random.set_seed(1)
    set_random_state(json.loads(data))
    assert [*draws(), float(tf.random.uniform([]))] == expected


def test_an_equal_seed_does_not_restart_the_generators_of_tensorflow():
    tf.random.set_seed(41)
    first = float(tf.random.uniform([]))
    set_random_state(random_state())
    assert float(tf.random.uniform([])) != first
