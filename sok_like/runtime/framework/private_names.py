"""Private names of TensorFlow and Keras whose absence nothing would notice.

This package asks for them where they may be missing (`getattr` with a default, `hasattr`), sets
them, or overrides them in subclasses. So a name that has moved would be taken for a missing one,
and `sok.Init` checks that they exist. Other private names raise AttributeError where they are read.
`hooks.py` has the names that are wrapped.
"""

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3

# A class (after a colon) or module, then names that are its attributes, or that its functions use.
# The comments say what this package needs them for.
_TENSORFLOW = {
    # The gradient of a loop's body captures what the body uses.
    "tensorflow.python.ops.while_v2:_WhileBodyGradFuncGraph": "_forward_graph",
    # Tables are variables of TensorFlow.
    "tensorflow.python.ops.resource_variable_ops:ResourceVariable": (
        "_read_variable_op _export_to_saved_model_graph _serialize_to_tensors _restore_from_tensors"
    ),
    # Settings of tf.compat.v1.train.
    "tensorflow.python.training.optimizer:Optimizer": "_name",
    "tensorflow.python.training.adam:AdamOptimizer": "_lr",
    # The tensors of a checkpoint.
    "tensorflow.python.checkpoint.functional_saver:MultiDeviceSaver": (
        "_registered_savers _num_unique_tasks"
    ),
    # Columns with keys.
    "tensorflow.python.feature_column.feature_column:_LazyBuilder": "_get_raw_feature_as_tensor",
    "tensorflow.python.feature_column.feature_column_v2:EmbeddingColumn": (
        "_var_scope_name _old_get_dense_tensor_internal"
    ),
    # Whether data comes in the same order again.
    "tensorflow.python.data.ops.shuffle_op:_ShuffleDataset": "_seed2 _reshuffle_each_iteration",
    "tensorflow.python.data.ops.random_op:_RandomDataset": "_rerandomize",
    "tensorflow.python.data.ops.map_op:_ParallelMapDataset": "_deterministic",
}
_KERAS_3 = {
    # Which layer looks a table up, and whether it lists it.
    "keras.src.layers.layer:Layer": (
        "current_call_ctx _flatten_layers _trainable_variables _non_trainable_variables"
    ),
    # The path of a new variable.
    "keras.src.backend.common.name_scope": "name_scope_stack",
    # What a variable holds, and how it is laid out.
    "keras.src.backend.common.variables:Variable": "_value _layout _initialize_with_initializer",
    # Optimizers that train tables.
    "keras.src.optimizers.base_optimizer:BaseOptimizer": (
        "_learning_rate _trainable_variables_indices _overwrite_variable_with_gradient "
        "_clip_gradients _var_key"
    ),
    # All ranks skip a step or none does.
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer": "_stateful_handle_finite_grads",
    # The graph of a model.
    "keras.src.models.functional:Functional": "_inputs_struct _nodes_by_depth",
    "keras.src.models.sequential:Sequential": "_functional",
    # Fit continues.
    "keras.src.models.model:Model": "_initial_epoch",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator": "_steps_seen",
}
_TF_KERAS = {
    # The layers and variables of a model.
    "tf_keras.src.engine.base_layer:Layer": (
        "_flatten_layers _non_trainable_weights _initial_weights _update_trackables"
    ),
    # Optimizers that train tables.
    "tf_keras.src.optimizers.optimizer:Optimizer": (
        "_learning_rate _current_learning_rate _index_dict _clip_gradients _var_key _built"
    ),
    "tf_keras.src.optimizers.legacy.optimizer_v2:OptimizerV2": (
        "_name _hyper _initial_decay _create_all_weights _aggregate_gradients"
    ),
    # The graph of a functional model.
    "tf_keras.src.engine.functional:Functional": "_nested_inputs _nodes_by_depth",
    # Fit continues.
    "tf_keras.src.engine.training:Model": "_training_state",
    "tf_keras.src.engine.data_adapter:DataHandler": "_initial_step",
    "tf_keras.src.engine.data_adapter:KerasSequenceAdapter": "_shuffle_sequence",
}


def table() -> dict[str, list[str]]:
    """Names by class or module, for TensorFlow and the running Keras."""
    names = _TENSORFLOW | (_KERAS_3 if is_keras_3() else _TF_KERAS)
    return {owner: words.split() for owner, words in names.items()}


def missing() -> Iterator[str]:
    """The names of the table that do not exist."""
    for owner, names in table().items():
        module, _, cls = owner.partition(":")
        try:
            holder: Any = importlib.import_module(module)
            holder = getattr(holder, cls) if cls else holder
        except (ImportError, AttributeError):
            yield owner
            continue
        used = set(_used_by(holder))
        yield from (f"{owner}.{n}" for n in names if n not in used and not hasattr(holder, n))


def _used_by(owner):
    """The attributes and strings that occur in the functions of a class or module."""
    for holder in getattr(owner, "__mro__", [owner]):
        for value in vars(holder).values():
            value = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            codes = [value.__code__] if hasattr(value, "__code__") else []
            for code in codes:  # grows by the functions within
                codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
                yield from code.co_names
                yield from (const for const in code.co_consts if isinstance(const, str))


@hooks.at_init
def _check():
    names = list(missing())
    if names:
        raise hooks.unknown_version("private names of TensorFlow and Keras", f"no {names}")
