"""What lets tests take less time, of Python, TensorFlow and Keras."""

import gc
import itertools

_cleared = itertools.count(1)


def collect_seldom():
    """Python looks for garbage less often: traces of TensorFlow's stay and are large."""
    gc.set_threshold(500_000, 20, 10)


def clear_session():
    """Keras' function. Of many traces, its search for garbage takes a second: seldom, too."""
    import tensorflow as tf

    from sok_like.runtime.framework.running_keras import is_keras_3

    collects = {"free_memory": next(_cleared) % 16 == 0} if is_keras_3() else {}
    tf.keras.backend.clear_session(**collects)


def tune_no_datasets():
    """tf.data without the threads that tune it.

    An iterator that is deleted waits for its thread. TensorFlow tells the thread to stop before it
    says so where the thread looks, so now and then the thread sleeps on, up to a minute. In tests
    this is an idle minute of all ranks, whenever Python collects garbage.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import dataset_ops

    options = tf.data.Options()
    options.autotune.enabled = False

    def untuned(dataset):
        return dataset_ops._OptionsDataset(dataset, options)

    dataset_ops.DatasetV2._apply_debug_options = untuned


def optimize_no_graphs():
    """TensorFlow without its graph optimiser: a tenth of the time in which ranks train little."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
