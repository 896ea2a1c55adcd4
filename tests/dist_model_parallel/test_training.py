"""Which gradients are averaged, with a communicator that halves what it is given."""

import copy

import numpy as np
import pytest
import tensorflow as tf

import sok_like
import sok_like.dist_model_parallel as dmp
from sok_like.lookup.local_variables import mark_local
from sok_like.runtime.ranks import comm

pytestmark = pytest.mark.keras


class Halving(comm.SingleProcess):
    """Two ranks of which the other one has zeros only; it remembers what was averaged."""

    world_size = 2

    def __init__(self):
        self.averaged = []

    def average(self, tensors, name):
        self.averaged.append(len(tensors))
        half = []
        for t in tensors:
            if isinstance(t, tf.IndexedSlices):
                half.append(tf.IndexedSlices(t.values / 2, t.indices, t.dense_shape))
            else:
                half.append(None if t is None else t / 2)
        return half


@pytest.fixture
def halving():
    communicator = Halving()
    comm.set_current(communicator)
    yield communicator
    comm.set_current(None)


def weight(values):
    layer = tf.keras.layers.Layer()
    variable = layer.add_weight(
        name="w", shape=np.shape(values), initializer=tf.keras.initializers.Constant(values)
    )
    variable.layer_of_test = layer  # kept alive
    return variable


def test_only_gradients_of_shared_variables_are_averaged(halving):
    shared, local, unused = weight([2.0]), mark_local(weight([3.0])), tf.Variable(1.0)
    tape = tf.GradientTape()
    wrapped = dmp.DistributedGradientTape(tape)
    with wrapped:  # the variables are first watched after the tape was wrapped
        loss = tf.reduce_sum(4.0 * tf.convert_to_tensor(shared) + 6.0 * tf.convert_to_tensor(local))
    gradients = wrapped.gradient(loss, {"a": shared, "b": [local, unused]})
    assert gradients["a"].numpy() == [2.0]
    assert gradients["b"][0].numpy() == [6.0] and gradients["b"][1] is None
    assert halving.averaged == [2]  # the last as None


@pytest.mark.parametrize("method", ["jacobian", "batch_jacobian"])
def test_jacobians_are_those_of_one_rank(halving, method):
    x = tf.constant([[1.0, 2.0]])
    with dmp.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        tape.watch(x)
        y = x * x
    with pytest.raises(NotImplementedError, match=f"not what `{method}` returns.* on 2 ranks"):
        getattr(tape, method)(y, x)
    halving.world_size = 1
    right = np.array([[2.0, 0.0], [0.0, 4.0]])
    np.testing.assert_array_equal(np.squeeze(getattr(tape, method)(y, x)), right)


def test_a_source_given_by_the_wrapper_or_by_what_it_holds(halving):
    variable = mark_local(weight([1.0]))
    faces = [variable, copy.copy(variable)]
    faces += [v for v in [getattr(variable, "_value", None)] if isinstance(v, tf.Variable)]
    assert all(dmp.is_local(face) for face in faces)
    assert not dmp.is_local(weight([1.0]))
    assert not dmp.is_local(tf.Variable(1.0))


def test_sparse_gradients_stay_sparse_with_each_index_once(halving):
    table = tf.Variable(np.ones([5, 2], np.float32))
    for dense in (False, True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [3, 1, 3]))
        tape = dmp.DistributedGradientTape(tape, sparse_as_dense=dense)
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices) is not dense
        if not dense:
            assert gradient.indices.numpy().tolist() == [3, 1]
        expected = np.array([[0, 0], [0.5, 0.5], [0, 0], [1, 1], [0, 0]])
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected)


def test_a_program_may_average_by_itself(halving):
    shared = weight([2.0])
    optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.SGD(0.5))
    pairs = [(tf.constant([4.0]), shared)]
    optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)
    assert shared.numpy() == 2.0 - 0.5 * 4.0 and halving.averaged == []


def test_arguments_of_horovods_wrappers(halving):
    tape = tf.GradientTape()
    dmp.DistributedGradientTape(tape, device_dense="/cpu:0", compression=None, op=None)
    dmp.DistributedOptimizer(tf.keras.optimizers.SGD(), backward_passes_per_step=1)
    for argument in ({"scale_local_gradients": False}, {"gradient_predivide_factor": 2.0}):
        with pytest.raises(ValueError, match="averages over all ranks, so `.*` must be left out"):
            dmp.DistributedGradientTape(tape, **argument)
    with pytest.raises(ValueError, match="backward_passes_per_step=4"):
        dmp.DistributedOptimizer(tf.keras.optimizers.SGD(), backward_passes_per_step=4)
    with pytest.raises(TypeError, match="got an unexpected argument. Received: sum=True"):
        dmp.DistributedGradientTape(tape, sum=True)
    with pytest.raises(TypeError, match="An optimizer of Keras 3 or tf_keras"):
        dmp.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))


def test_an_optimizer_averages_once(halving):
    averaging = dmp.DistributedOptimizer(tf.keras.optimizers.SGD())
    with pytest.raises(TypeError, match="must not be wrapped again.*Received: .*DistributedSGD"):
        dmp.DistributedOptimizer(averaging)
    with pytest.raises(TypeError, match="DistributedOptimizer goes around the wrapper"):
        sok_like.OptimizerWrapper(averaging)
