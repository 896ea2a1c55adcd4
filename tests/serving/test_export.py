"""Models exported on 1 and 2 ranks, loaded by a process that cannot import the package."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests import forks
from tests.checks import serving
from tests.checks.serving import ITEMS
from tests.ranks import HANG_LIMIT

pytestmark = pytest.mark.keras
DOORS = ("group", "columns", "sok1", "sharded", "parallel", "module")


def flat(inputs):
    """Arrays by the signature's names."""
    found = {}
    for name, value in inputs.items():
        if isinstance(value, tf.RaggedTensor):
            found[f"{name}_values"] = value.values.numpy()
            found[f"{name}_row_splits"] = value.row_splits.numpy()
        else:
            found[name] = np.asarray(value)
    return {k: v.astype("S") if v.dtype == object else v for k, v in found.items()}


def exported(folder):
    """SavedModels by the doors' names, each with rank 0's inputs and outputs."""
    models = {}
    for door in DOORS:
        tf.keras.utils.set_random_seed(3)
        model, inputs, signatures, compute = getattr(serving, door)()
        # Others follow in test_serve_while_training.py and test_dense.py.
        follows, place = door == "sharded", folder / door
        sok.export_saved_model(model, place, signatures=signatures, refreshable=follows)
        expected = np.asarray(compute(inputs))
        if follows:
            follow(model, place, inputs)
            before, expected = expected, np.asarray(compute(inputs))
            assert np.abs(expected - before).max() > 0.01
        if sok.rank() == 0:
            np.savez(place / "inputs.npz", **flat(inputs))
            np.savez(place / "expected.npz", output=expected)
        models[door] = model
    refuses(models, folder)


def follow(model, place, inputs):
    """Two deltas of an export."""
    if sok.size() > 1:
        with pytest.raises(Exception, match="with the same path"):
            sok.export_delta(model, f"{place}{sok.rank()}")
    for name in ("1", "2"):
        go_on(model, inputs)
        delta = sok.export_delta(model, f"{place}.deltas/{name}")
        assert (delta.num_new > 0) == (name == "1")


def go_on(model, inputs):
    """Gives keys that are new to its tables a row, moves all rows, and erases a few."""
    model(inputs, training=True)
    for variable in model.trainable_variables:
        table = getattr(variable, "_embedding_variable", variable)
        if isinstance(table, sok.EmbeddingVariable):
            keys, rows = sok.export(table)
            sok.assign(table, keys, rows + 0.5)
            table.erase(ITEMS[:2])
        else:
            variable.assign(variable + 0.25)


class WithPython(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def __call__(self, keys):
        return tf.numpy_function(lambda x: x, [keys], tf.int64)


def refuses(models, folder):
    """TensorFlow's and Keras' exports, wrong calls, and what has no form."""
    model, sliced, under_mesh = (models[name] for name in ("group", "sharded", "parallel"))
    tables = [sok.EmbeddingVariable(2, name="served_unheld")]

    class Unheld(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def __call__(self, keys):
            return tf.gather(tables[0], keys)

    held = tf.Module()  # a model of Keras 3 would first be traced with a signature of floats
    held.tables = sliced.tables
    held.call = tf.function(
        lambda ids: {"rows": held.tables([ids] * 4, training=False)[0]},
        input_signature=[tf.TensorSpec([None, 3], tf.int64)],
    )

    def raises(error, *words):
        return pytest.raises(error, match="(?s)" + ".*".join(words))

    new, save = str(folder / "new"), tf.saved_model.save
    for call in (lambda: save(model, new), lambda: model.export(new)):
        with raises(NotImplementedError, "served_group", "sok.export_saved_model"):
            call()
    if sok.size() > 1:
        with raises(NotImplementedError, "served_", "sok.export_saved_model"):
            save(held, new, held.call)
        with raises(ValueError, "sok.export_saved_model"):
            save(under_mesh, new)
        with raises(Exception, "(?=.*missing=initial)(?=.*missing=zeros)"):
            missing = "zeros" if sok.rank() else "initial"
            sok.export_saved_model(model, new, missing=missing)
    for error, words, given, options in (
        (ValueError, ["`missing`", "'none'"], model, {"missing": "none"}),
        (ValueError, ["`row_dtype`", "'float16'"], model, {"row_dtype": "float16"}),
        (TypeError, ["`model` must be a Keras model"], [model], {}),
        (ValueError, ["must be built"], tf.keras.layers.Dense(2), {}),
        (ValueError, ["`signatures` must say what", "Module"], tf.Module(), {}),
        (ValueError, ["serving_default", "PyFunc"], WithPython(), {}),
        (ValueError, ["served_unheld", "not among its variables"], Unheld(), {}),
    ):
        with raises(error, *words):
            sok.export_saved_model(given, new, **options)
    with raises(ValueError, "`path` must be a new folder"):
        sok.export_saved_model(model, folder)
    with raises(ValueError, "no file system is registered for 'nowhere'"):
        sok.export_saved_model(model, "nowhere://bucket/model")


def compute(folders):
    """Has one process of stock TensorFlow compute."""
    script = pathlib.Path(__file__).with_name("stock_process.py")
    done = forks.run(script, *folders, timeout=HANG_LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.ranks)],
)
def test_stock_tensorflow_computes_what_the_model_does(on_processes, tmp_path, world_size):
    on_processes(world_size, exported, tmp_path)
    compute([tmp_path / name for name in DOORS])
    for door in DOORS:
        expected = np.load(tmp_path / door / "expected.npz")["output"]
        outputs = np.load(tmp_path / door / "outputs.npz")
        assert np.abs(expected).max() > 0 and len(np.unique(expected)) > 6
        for loader in ("v1", "v2"):
            if door == "parallel" and world_size > 1:  # a product in parts rounds in another way
                np.testing.assert_allclose(outputs[loader], expected, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(outputs[loader], expected, f"{door} {loader}")
