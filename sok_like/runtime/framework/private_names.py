"""Private names of TensorFlow and Keras that this package reads, or overrides in subclasses.

`sok.Init` checks that they exist: many are read where another version of Keras may lack them, and
a name that has moved would be taken for a missing one. `hooks.py` has the names that are wrapped.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.keras_version import is_keras_3

# A class (after a colon) or module, then names that are its attributes, or that its functions use.
# The comments say what this package needs them for.
_TENSORFLOW = """
# Whether a v1 graph is inside a loop or branch.
tensorflow.python.framework.ops:Graph
    _get_control_flow_context
# A lookup keeps rows once the gradient of its weights is built; lookups of an export become one.
tensorflow.python.framework.ops:Operation
    _set_attr
    _update_input
# The gradient of a loop's body captures what the body uses.
tensorflow.python.ops.while_v2:_WhileBodyGradFuncGraph
    _forward_graph
# Tables are variables of TensorFlow.
tensorflow.python.ops.resource_variable_ops:ResourceVariable
    _in_graph_mode _unique_id _shared_name _read_variable_op _export_to_saved_model_graph
    _serialize_to_tensors _restore_from_tensors
# A wrapped function takes the same types as the stock one.
tensorflow.python.util.dispatch
    _TYPE_BASED_DISPATCH_SIGNATURES
# Rules and slots of tf.compat.v1.train.
tensorflow.python.training.optimizer:Optimizer
    _name _slots _call_if_callable _get_or_make_slot_with_initializer _zeros_slot
# Settings of tf.compat.v1.train.
tensorflow.python.training.adam:AdamOptimizer
    _lr _beta1 _beta2 _epsilon _lr_t _beta1_t _beta2_t _epsilon_t _get_beta_accumulators
tensorflow.python.training.momentum:MomentumOptimizer
    _learning_rate _momentum _use_nesterov
# Ranks save at the same step.
tensorflow.python.training.basic_session_run_hooks:CheckpointSaverHook
    _timer _steps_per_run _global_step_tensor
# Which variables it saves, and where.
tensorflow.python.training.saver:Saver
    _var_list _pad_step_number
# The objects of a checkpoint.
tensorflow.python.checkpoint.checkpoint:TrackableSaver
    _graph_view
# The tables of a checkpoint.
tensorflow.python.checkpoint.checkpoint:Checkpoint
    _saver
# Where a manager writes the next one.
tensorflow.python.checkpoint.checkpoint_management:CheckpointManager
    _prefix
# The tensors of a checkpoint.
tensorflow.python.checkpoint.functional_saver:MultiDeviceSaver
    _shardable_tensors_by_task _registered_savers _keys_to_restore_fn _restore_fn_to_keys
    _num_unique_tasks _tensor_save_spec
# Columns with keys.
tensorflow.python.feature_column.feature_column
    _LazyBuilder _CategoricalColumn _DenseColumn _normalize_feature_columns
# Columns with keys take ragged tensors.
tensorflow.python.feature_column.feature_column:_LazyBuilder
    _get_raw_feature_as_tensor
# Columns with keys.
tensorflow.python.feature_column.feature_column_v2
    _to_sparse_input_and_drop_ignore_values _normalize_feature_columns
    _verify_static_batch_size_equality
tensorflow.python.feature_column.feature_column_v2:EmbeddingColumn
    _get_dense_tensor _get_dense_tensor_internal_helper _var_scope_name _variable_shape
# The tensors of a checkpoint.
tensorflow.python.training.saving.saveable_object_util:TrackableSaveable
    _trackable
# Whether data comes in the same order again.
tensorflow.python.data.ops.dataset_ops:DatasetV2
    _inputs _functions _as_serialized_graph
tensorflow.python.data.ops.shuffle_op:_ShuffleDataset
    _seed _seed2 _reshuffle_each_iteration
"""
_KERAS_3 = """
# Which layer looks a table up, and whether it lists it.
keras.src.layers.layer:Layer
    current_call_ctx entry_layer _flatten_layers _trainable_variables _non_trainable_variables
# The path of a new variable.
keras.src.backend.common.name_scope
    name_scope_stack
# What a variable holds, and how it is laid out.
keras.src.backend.common.variables:Variable
    _value _layout _shape _maybe_autocast _initialize_with_initializer
# Optimizers that train tables.
keras.src.optimizers.base_optimizer:BaseOptimizer
    _learning_rate _iterations _trainable_variables _trainable_variables_indices
    _check_variables_are_known _use_weight_decay _overwrite_variable_with_gradient _clip_gradients
    _var_key
# All ranks skip a step or none does.
keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer
    _stateful_handle_finite_grads
# The graph of a functional model.
keras.src.models.functional:Functional
    _inputs _inputs_struct _outputs_struct _nodes_by_depth
# The inputs of a Sequential model.
keras.src.models.sequential:Sequential
    _functional
# Fit continues.
keras.src.models.model:Model
    _initial_epoch
keras.src.backend.tensorflow.trainer:TFEpochIterator
    _distributed_dataset _num_batches _steps_seen
# Keras' own layouts.
keras.src.distribution.distribution_lib:ModelParallel
    _layout_map
"""
_TF_KERAS = """
# Which layer looks a table up.
tf_keras.src.engine.base_layer_utils:CallContext
    _state in_call layer
tf_keras.src.engine.base_layer_utils
    call_context
# The layers around it.
tf_keras.src.engine.base_layer_utils:CallContextManager
    _state
# The layers and variables of a model.
tf_keras.src.engine.base_layer:Layer
    _flatten_layers _trainable_weights _non_trainable_weights _initial_weights
    _update_trackables _supports_masking _expects_mask_arg
# Optimizers that train tables.
tf_keras.src.optimizers.optimizer:Optimizer
    _learning_rate _current_learning_rate _compute_current_learning_rate _iterations _index_dict
    _use_weight_decay _clip_gradients _var_key _built _build_learning_rate
    _serialize_hyperparameter
tf_keras.src.optimizers.legacy.optimizer_v2:OptimizerV2
    _name _hyper _initial_decay _create_all_weights _decayed_lr _aggregate_gradients
# The graph of a functional model.
tf_keras.src.engine.functional:Functional
    _nested_inputs _nested_outputs _nodes_by_depth
# Fit continues.
tf_keras.src.engine.training:Model
    _training_state
tf_keras.src.engine.data_adapter:DataHandler
    _adapter _dataset _inferred_steps _initial_step
"""


def table(*texts: str) -> dict[str, list[str]]:
    """Names by class or module, in these texts; by default for TensorFlow and the running Keras."""
    names: dict[str, list[str]] = {}
    owner = ""
    texts = texts or (_TENSORFLOW, _KERAS_3 if is_keras_3() else _TF_KERAS)
    for line in "".join(texts).split("\n"):
        if line.startswith("    "):
            names[owner] += line.split()
        elif line and not line.startswith("#"):
            owner = line
            names[owner] = []
    return names


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
            code = getattr(value, "__code__", None)
            yield from () if code is None else _names_in(code)


def _names_in(code):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):  # of a function within
            yield from _names_in(constant)


@hooks.at_init
def _check():
    names = list(missing())
    if names:
        raise hooks.unknown_version("private names of TensorFlow and Keras", f"no {names}")
