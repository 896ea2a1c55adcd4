"""Public names and signatures: a change here is a change for every program that uses them."""

import importlib
import inspect
import subprocess
import sys

import pytest
import tensorflow as tf

import sok_like as sok

FIELDS = "max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, "
EV_COLUMN = "key, dtype=tf.string, partition_num=None, ev_option=None"
PLANNER = "dist_model_parallel.DistEmbeddingStrategy"
CALLABLES = {
    "Init": "*, global_batch_size, seed=None, **kwargs",
    "DistributedEmbedding": "combiner, "
    + FIELDS
    + "max_nnz, max_feature_num=1, use_hashtable=True, key_dtype=None, "
    + "embedding_initializer=None, **kwargs",
    "All2AllDenseEmbedding": FIELDS
    + "nnz_per_slot, dynamic_input=False, use_hashtable=True, key_dtype=None, "
    + "embedding_initializer=None, **kwargs",
    "Embedding": "input_dim, output_dim, embeddings_initializer='uniform', "
    "embeddings_regularizer=None, activity_regularizer=None, embeddings_constraint=None, "
    "combiner=None, use_custom_kernel=True, mask_zero=False, **kwargs",
    "GroupEmbedding": "embedding_dims, *, tables=None, combiners='mean', table_options=None, "
    "pad_key=None, gradient_scale='auto', wire_dtype=None, **kwargs",
    "HashEmbedding": "output_dim, combiner=None, embeddings_initializer='uniform', capacity=None, "
    "initial_capacity=0, key_dtype=tf.int64, pad_key=None, **kwargs",
    "EmbeddingVariable": "embedding_dim, *, name=None, key_dtype=tf.int64, "
    "initializer='random_uniform', capacity=None, use_hashtable=True, initial_capacity=0, "
    "dtype=None, trainable=True, ev_option=None",
    "CBFFilter": "filter_freq=0, max_element_size=0, false_positive_probability=-1.0, "
    "counter_type='uint64'",
    "CounterFilter": "filter_freq=0, *, max_waiting=None",
    "EmbeddingVariableOption": "ht_type='', ht_partition_num=1000, evict_option=None, ckpt=None, "
    "filter_option=None, storage_option=None, init_option=None, *, evicted_buffer_size=0, "
    "record_statistics=False, count=None",
    "GlobalStepEvict": "steps_to_live=None",
    "InitializerOption": "initializer=None, default_value_dim=4096, "
    "default_value_no_permission=0.0",
    "L2WeightEvict": "l2_weight_threshold=-1.0",
    "ScoreEvict": "score='lru', capacity=None",
    "StorageOption": "storage_type=None, storage_path=None, storage_size=None, "
    "cache_strategy=None, layout=None",
    "local_rank": "",
    "rank": "",
    "shard": "dataset, *, drop_remainder",
    "size": "",
    "OptimizerScope": "trainable_variables",
    "OptimizerWrapper": "optimizer, *, default=None, lazy=False, average_dense_gradients=True, "
    "skip_nonfinite_gradients=False",
    "assign": "variable, keys, rows",
    "callbacks.TableMetrics": "*, every=100, log_dir='logs'",
    "estimate_memory": "num_keys, embedding_dim, optimizer='adam', *, world_size=1, "
    "keeps_records=False, touched_keys=None, storage_option=None",
    "find_key": "key, *places, table=None",
    "report": "model, *, print_table=True",
    "export_saved_model": "model, path, missing='initial', row_dtype='float32', signatures=None, "
    "refreshable=False, headroom=0.25",
    "export_delta": "model, path",
    "dist_model_parallel.BroadcastGlobalVariablesCallback": "root_rank=0, device=''",
    "dist_model_parallel.ConcatInitializer": "initializer, sizes",
    PLANNER: "embeddings, world_size, strategy='basic', "
    "input_table_map=None, column_slice_threshold=None, row_slice_threshold=None, "
    "data_parallel_threshold=None",
    f"{PLANNER}.init_table_groups": "table_configs, row_slice_threshold, data_parallel_threshold",
    f"{PLANNER}.init_input_and_map_groups": "table_groups, input_table_map",
    f"{PLANNER}.maybe_slice_table_column": "orig_config, column_slice_threshold, world_size",
    f"{PLANNER}.create_col_sliced_configs": "global_col_configs, world_size, "
    "column_slice_threshold, input_table_map",
    f"{PLANNER}.create_row_sliced_configs": "global_row_configs, world_size",
    f"{PLANNER}.apply_stragety": "strategy, world_size, sliced_configs",
    "deeprec.CollectiveStrategy": "",
    "deeprec.CollectiveStrategy.scope": "*args, **kwargs",
    "deeprec.install": "",
    "deeprec.uninstall": "",
    "callbacks.BroadcastVariables": "root_rank=0",
    "callbacks.GlobalMetrics": "*, sums=()",
    "callbacks.MetricAverage": "",
    "dist_model_parallel.DistributedEmbedding": "embeddings, strategy='basic', "
    "column_slice_threshold=None, row_slice_threshold=None, dp_input=True, input_table_map=None, "
    "data_parallel_threshold=None, wire_dtype=None, **kwargs",
    "dist_model_parallel.DistributedGradientTape": "gradtape, *, sparse_as_dense=False, "
    "**horovod_arguments",
    "dist_model_parallel.DistributedOptimizer": "optimizer, *, sparse_as_dense=False, "
    "**horovod_arguments",
    "dist_model_parallel.broadcast_variables": "model_vars, root_rank=0",
    "dist_model_parallel.is_local": "variable",
    "distribution.DataParallel": "device_mesh=None, devices=None, auto_shard_dataset=True",
    "distribution.DeviceMesh": "shape, axis_names, devices=None",
    "distribution.Distribution": "device_mesh, batch_dim_name=None, auto_shard_dataset=True",
    "distribution.LayoutMap": "device_mesh",
    "distribution.ModelParallel": "device_mesh=None, layout_map=None, batch_dim_name=None, "
    "auto_shard_dataset=True",
    "distribution.TensorLayout": "axes, device_mesh=None",
    "distribution.distribute_tensor": "tensor, layout",
    "distribution.distribution": "",
    "distribution.get_device_count": "device_type=None",
    "distribution.initialize": "job_addresses=None, num_processes=None, process_id=None",
    "distribution.list_devices": "device_type=None",
    "distribution.set_distribution": "value",
    "distribution.summary": "model",
    "embedding_lookup": "param, ids, combiner=None, *, weights=None",
    "enable_distributed_strategy": "strategy='collective'",
    "export": "variable",
    "gather_batch": "tensor, name='gather_batch'",
    "keys_of": "strings",
    "renamed_tables": "names",
    "resized_tables": "choices",
    "optimizers.RowWiseAdagrad": "learning_rate=0.01, initial_accumulator_value=0.0, "
    "epsilon=1e-08, name='rowwise_adagrad', **kwargs",
    "feature_column.DenseFeatures": "feature_columns, *, gradient_scale='auto', **kwargs",
    "feature_column.SequenceFeatures": "feature_columns, *, gradient_scale='auto', **kwargs",
    "feature_column.categorical_column_with_embedding": EV_COLUMN,
    "feature_column.embedding_column": "categorical_column, dimension, combiner='mean', "
    "initializer=None, ckpt_to_load_from=None, tensor_name_in_ckpt=None, max_norm=None, "
    "trainable=True, use_safe_embedding_lookup=True",
    "feature_column.group_embedding_column_scope": "name=None",
    "feature_column.input_layer": "features, feature_columns, weight_collections=None, "
    "trainable=True, cols_to_vars=None, cols_to_output_tensors=None, *, training=True, "
    "gradient_scale='auto'",
    "feature_column.sequence_categorical_column_with_embedding": EV_COLUMN,
    "feature_column.sequence_input_layer": "features, feature_columns, weight_collections=None, "
    "trainable=True, *, training=True, gradient_scale='auto'",
    "feature_column.shared_embedding_columns": "categorical_columns, dimension, combiner='mean', "
    "initializer=None, shared_embedding_collection_name=None, ckpt_to_load_from=None, "
    "tensor_name_in_ckpt=None, max_norm=None, trainable=True, use_safe_embedding_lookup=True",
    "feature_column.sparse_column_with_embedding": "column_name, dtype=tf.string, "
    "partition_num=None, steps_to_live=None, init_data_source=None, ht_partition_num=1000, "
    "evconfig=None, ev_option=None",
    "feature_column.weighted_categorical_column": "categorical_column, weight_feature_key, "
    "dtype=tf.float32",
    "filter_variables": "variables",
    "fuse_lookups": "model",
    "get_embedding": "name, constructor=None, **kwargs",
    "get_embedding_variable": "name, embedding_dim, key_dtype=tf.int64, value_dtype=None, "
    "initializer=None, regularizer=None, trainable=True, collections=None, caching_device=None, "
    "partitioner=None, validate_shape=True, custom_getter=None, constraint=None, "
    "init_data_source=None, ev_option=None, *, steps_to_live=None, capacity=None",
    "group_embedding_lookup": "params, ids, partition_strategy='mod', name=None, *, "
    "training=None, gradient_scale='auto', wire_dtype=None",
    "group_embedding_lookup_sparse": "params, sp_ids, combiners, partition_strategy='mod', "
    "sp_weights=None, name=None, *, is_sequence=False, params_num_per_group=sys.maxsize, "
    "training=None, gradient_scale='auto', wire_dtype=None".replace(
        "sys.maxsize", str(sys.maxsize)
    ),
    "sok2.DistributedVariable": "*args, **kwargs",
    "sok2.DynamicVariable": "dimension, initializer=None, var_type=None, name=None, "
    "constraint=None, trainable=True, key_type=None, dtype=None, mode=None, *, init_capacity=None, "
    "max_capacity=None, evict_strategy=None, filter_ratio=1.0, **kwargs",
    "sok2.OptimizerWrapper": "optimizer",
    "sok2.OptimizerWrapper.apply_gradients": "grads_and_vars, global_step=None, name=None",
    "sok2.SGD": "lr",
    "sok2.Variable": "*args, mode=None, **kwargs",
    "sok2.all2all_dense_embedding": "param, indices",
    "sok2.assign": "var, indices, values",
    "sok2.dump": "path, dump_vars, optimizer=None",
    "sok2.export": "var",
    "sok2.filter_variables": "vars",
    "sok2.incremental_model_dump": "sok_vars, time_threshold, sess=None",
    "sok2.init": "comm_tool='horovod', use_legacy_optimizer=True",
    "sok2.load": "path, load_vars, optimizer=None",
    "sok2.lookup_sparse": "params, sp_ids, sp_weights=None, combiners=None, "
    "use_low_frequency_filter=False",
    "sok2.sparse_read_and_evict": "var, indices, name=None",
    "split_embedding_variable_from_others": "variables",
    "optimizers.Adam": "learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-07, "
    "name='Plugin_Adam', **kwargs",
    "tf.keras.optimizers.LazyAdamOptimizer": "learning_rate=0.001, beta1=0.9, beta2=0.999, "
    "epsilon=1e-08, use_locking=False, name='LazyAdam'",
}
# Where SOK 1.x has them, below sok_like.
REFERENCE = {
    "core.context_scope.OptimizerScope": "OptimizerScope",
    "core.initialize.Init": "Init",
    "embeddings.get_embedding_op.get_embedding": "get_embedding",
    "optimizers.adam.Adam": "optimizers.Adam",
    "saver.Saver.Saver": "Saver",
    "tf_distributed_embedding.TFDistributedEmbedding": (
        "embeddings.tf_distributed_embedding.TFDistributedEmbedding"
    ),
    "embeddings.distributed_embedding.DistributedEmbedding": "DistributedEmbedding",
    "embeddings.all2all_dense_embedding.All2AllDenseEmbedding": "All2AllDenseEmbedding",
    "tf.keras.optimizers.adam.Adam": "tf.keras.optimizers.Adam",
    "tf.keras.optimizers.lazy_adam.LazyAdamOptimizer": "tf.keras.optimizers.LazyAdamOptimizer",
    "optimizers.utils.split_embedding_variable_from_others": (
        "split_embedding_variable_from_others"
    ),
}
MODULES = {
    *("core", "deeprec", "dist_model_parallel", "distribution", "embeddings", "feature_column"),
    *("kit_lib", "optimizers", "saver", "sok2", "tf", "tf_distributed_embedding"),
}
CLASSES_ONLY = {"Saver"}


def resolve(path):
    found = sok
    for name in path.split("."):
        found = getattr(found, name)
    return found


def written(function):
    """A signature without annotations."""
    if isinstance(function, type):  # the metaclass of tf.Variable hides it
        function = function.__init__
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]
    return str(inspect.Signature(parameters))[1:-1]


@pytest.mark.parametrize("path", CALLABLES)
def test_signature(path):
    assert written(resolve(path)) == CALLABLES[path]


def test_no_name_is_missing_here():
    known = {path.split(".")[0] for path in CALLABLES} | MODULES | CLASSES_ONLY
    assert set(sok.__all__) == known


@pytest.mark.keras
@pytest.mark.parametrize("path", REFERENCE)
def test_module_paths_of_the_reference(path):
    module, name = path.rsplit(".", 1)
    assert getattr(importlib.import_module(f"sok_like.{module}"), name) is resolve(REFERENCE[path])


@pytest.mark.keras
def test_adam_takes_what_keras_adam_takes():
    ours = inspect.signature(sok.tf.keras.optimizers.Adam).parameters
    assert list(ours) == list(inspect.signature(tf.keras.optimizers.Adam).parameters)
    assert {name: p.default for name, p in ours.items()} == {
        name: p.default
        for name, p in inspect.signature(tf.keras.optimizers.Adam).parameters.items()
    }


@pytest.mark.parametrize("path", [*CALLABLES, "Saver"])
def test_every_public_name_is_documented(path):
    documentation = inspect.getdoc(resolve(path))
    assert documentation
    assert documentation.splitlines()[0].endswith(".")


@pytest.mark.parametrize(
    "path", ["", "callbacks", *sorted(MODULES - {"core", "embeddings", "saver", "tf"})]
)
def test_tab_shows_public_names_only(path):
    module = resolve(path) if path else sok
    assert {name for name in dir(module) if not name.startswith("_")} == set(module.__all__)


def test_tab_shows_names_of_tables_for_users():
    for table in (sok.EmbeddingVariable, sok.sok2.DynamicVariable):
        shown = {name for name in dir(table) if not name.startswith("_")}
        assert {"name", "erase", "evict"} <= shown
        assert {"scatter_nd_add", "mark", "snapshot"} & shown == set()
        assert all(hasattr(table, name) for name in shown)
    assert "dimension" in shown


def test_unknown_name():
    with pytest.raises(AttributeError, match="'sok_like' has no attribute 'HashTable'"):
        sok.HashTable  # noqa: B018
    assert "Init" in dir(sok)


def test_import_loads_no_tensorflow():
    program = "import sys, sok_like; print(sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_earlier_name_of_the_readme_warns():
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    with pytest.warns(FutureWarning, match=r"sok.rank\(\)"):
        assert sok.comm is comm
