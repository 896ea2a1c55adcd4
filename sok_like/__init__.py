"""Hash-table embeddings inside TensorFlow, spread over ranks by `key % world_size`.

    import sok_like as sok

    sok.Init(global_batch_size=8192)
    layer = sok.DistributedEmbedding("sum", 1_000_000, 16, slot_num=26, max_nnz=1)

Importing the package loads nothing else. A name, and TensorFlow with it, is loaded at its first
use, or when Keras loads a model file that has the name.
"""

import functools
import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from sok_like.runtime import lazy
from sok_like.runtime.keras_names import announce

if TYPE_CHECKING:
    from sok_like import callbacks as callbacks
    from sok_like import deeprec as deeprec
    from sok_like import dist_model_parallel as dist_model_parallel
    from sok_like import distribution as distribution
    from sok_like import feature_column as feature_column
    from sok_like import kit_lib as kit_lib
    from sok_like import optimizers as optimizers
    from sok_like import saver as saver
    from sok_like import sok2 as sok2
    from sok_like import tf as tf
    from sok_like import tf_distributed_embedding as tf_distributed_embedding
    from sok_like.core.initialize import Init as Init
    from sok_like.dist_model_parallel.embedding import Embedding as Embedding
    from sok_like.dist_model_parallel.hash_embedding import HashEmbedding as HashEmbedding
    from sok_like.embeddings.all2all_dense_embedding import (
        All2AllDenseEmbedding as All2AllDenseEmbedding,
    )
    from sok_like.embeddings.distributed_embedding import (
        DistributedEmbedding as DistributedEmbedding,
    )
    from sok_like.embeddings.fused_lookups import fuse_lookups as fuse_lookups
    from sok_like.embeddings.get_embedding import get_embedding as get_embedding
    from sok_like.group_embedding.get_embedding_variable import (
        get_embedding_variable as get_embedding_variable,
    )
    from sok_like.group_embedding.layer import GroupEmbedding as GroupEmbedding
    from sok_like.group_embedding.lookup_sparse import (
        group_embedding_lookup as group_embedding_lookup,
    )
    from sok_like.group_embedding.lookup_sparse import (
        group_embedding_lookup_sparse as group_embedding_lookup_sparse,
    )
    from sok_like.group_embedding.strategy import (
        enable_distributed_strategy as enable_distributed_strategy,
    )
    from sok_like.inside.estimate import estimate_memory as estimate_memory
    from sok_like.inside.report import report as report
    from sok_like.lookup.by_key import EmbeddingVariable as EmbeddingVariable
    from sok_like.lookup.dense_lookup import embedding_lookup as embedding_lookup
    from sok_like.optimizers.scope import OptimizerScope as OptimizerScope
    from sok_like.optimizers.utils import (
        filter_variables as filter_variables,
    )
    from sok_like.optimizers.utils import (
        split_embedding_variable_from_others as split_embedding_variable_from_others,
    )
    from sok_like.optimizers.wrapper import OptimizerWrapper as OptimizerWrapper
    from sok_like.runtime.process import local_rank as local_rank
    from sok_like.runtime.process import rank as rank
    from sok_like.runtime.process import shard as shard
    from sok_like.runtime.process import size as size
    from sok_like.saving.saver import Saver as Saver
    from sok_like.serving.export import export_saved_model as export_saved_model
    from sok_like.table.export_assign import assign as assign
    from sok_like.table.export_assign import export as export
    from sok_like.table.policies import CBFFilter as CBFFilter
    from sok_like.table.policies import CounterFilter as CounterFilter
    from sok_like.table.policies import EmbeddingVariableOption as EmbeddingVariableOption
    from sok_like.table.policies import GlobalStepEvict as GlobalStepEvict
    from sok_like.table.policies import InitializerOption as InitializerOption
    from sok_like.table.policies import L2WeightEvict as L2WeightEvict
    from sok_like.table.policies import ScoreEvict as ScoreEvict
    from sok_like.table.storage import StorageOption as StorageOption

# Modules of the public names.
_PUBLIC = lazy.by_name(
    {
        "sok_like.core.initialize": "Init",
        "sok_like.dist_model_parallel.embedding": "Embedding",
        "sok_like.dist_model_parallel.hash_embedding": "HashEmbedding",
        "sok_like.embeddings.all2all_dense_embedding": "All2AllDenseEmbedding",
        "sok_like.embeddings.distributed_embedding": "DistributedEmbedding",
        "sok_like.embeddings.fused_lookups": "fuse_lookups",
        "sok_like.embeddings.get_embedding": "get_embedding",
        "sok_like.group_embedding.get_embedding_variable": "get_embedding_variable",
        "sok_like.group_embedding.layer": "GroupEmbedding",
        "sok_like.group_embedding.lookup_sparse": "group_embedding_lookup "
        "group_embedding_lookup_sparse",
        "sok_like.group_embedding.strategy": "enable_distributed_strategy",
        "sok_like.inside.estimate": "estimate_memory",
        "sok_like.inside.report": "report",
        "sok_like.lookup.by_key": "EmbeddingVariable",
        "sok_like.lookup.dense_lookup": "embedding_lookup",
        "sok_like.optimizers.scope": "OptimizerScope",
        "sok_like.optimizers.utils": "filter_variables split_embedding_variable_from_others",
        "sok_like.optimizers.wrapper": "OptimizerWrapper",
        "sok_like.runtime.process": "local_rank rank shard size",
        "sok_like.serving.export": "export_saved_model",
        "sok_like.table.export_assign": "assign export",
        "sok_like.table.policies": "CBFFilter CounterFilter EmbeddingVariableOption "
        "GlobalStepEvict InitializerOption L2WeightEvict ScoreEvict",
        "sok_like.saving.saver": "Saver",
        "sok_like.table.storage": "StorageOption",
    }
)
_MODULES = (
    "callbacks",
    "core",
    "deeprec",
    "dist_model_parallel",
    "distribution",
    "embeddings",
    "feature_column",
    "kit_lib",
    "optimizers",
    "saver",
    "sok2",
    "tf",
    "tf_distributed_embedding",
)

# Modules of the classes, by their names in Keras' files.
_IN_FILES = {
    "sok_like>Adam": "sok_like.optimizers.keras_adam",
    "sok_like>All2AllDenseEmbedding": "sok_like.embeddings.all2all_dense_embedding",
    "sok_like>ConcatInitializer": "sok_like.dist_model_parallel.concat_initializer",
    "sok_like>ConcatOneHotEmbedding": "sok_like.dist_model_parallel.concat_one_hot",
    "sok_like>DenseFeatures": "sok_like.feature_column.layers",
    "sok_like>DistributedEmbedding": "sok_like.embeddings.distributed_embedding",
    "sok_like>Embedding": "sok_like.dist_model_parallel.embedding",
    "sok_like>EmbeddingAdam": "sok_like.optimizers.adam",
    "sok_like>EmbeddingAwareLossScaleOptimizer": "sok_like.optimizers.wrapper",
    "sok_like>FusedLookups": "sok_like.embeddings.fused_lookups",
    "sok_like>GroupEmbedding": "sok_like.group_embedding.layer",
    "sok_like>HashEmbedding": "sok_like.dist_model_parallel.hash_embedding",
    "sok_like>LazyAdam": "sok_like.optimizers.lazy_adam",
    "sok_like>SequenceFeatures": "sok_like.feature_column.layers",
    "sok_like>TFDistributedEmbedding": "sok_like.embeddings.tf_distributed_embedding",
    "sok_like.dist_model_parallel>DistributedEmbedding": "sok_like.dist_model_parallel.layer",
    "sok_like.dist_model_parallel>DistributedOptimizer": "sok_like.dist_model_parallel.serialized",
    **{
        f"sok_like>EmbeddingAware{name}": "sok_like.optimizers.embedding_aware"
        for name in ("SGD", "Adagrad", "Adam", "AdamW", "Ftrl")
    },
}


def _class_in_file(name: str) -> Any:
    """The class with a registered name."""
    attribute = name.split(">")[1]
    other_names = {"EmbeddingAdam": "Adam", "DistributedOptimizer": "Serialized"}
    attribute = other_names.get(attribute, attribute)
    return getattr(importlib.import_module(_IN_FILES[name]), attribute)


announce({name: functools.partial(_class_in_file, name) for name in _IN_FILES})

__all__ = [*_PUBLIC, *_MODULES]
__version__ = "0.1.0"

# Not a declared dependency: TensorFlow has one build for the CPU and another for GPUs.
_NEEDS_TENSORFLOW = (
    "sok_like needs TensorFlow 2.16.2 or newer, and none is installed. "
    "Type: pip install tensorflow-cpu==2.21.0"
)
if importlib.util.find_spec("tensorflow") is None:
    warnings.warn(_NEEDS_TENSORFLOW, stacklevel=2)


def __getattr__(name: str) -> Any:
    try:
        if name in _PUBLIC:
            value = getattr(importlib.import_module(_PUBLIC[name]), name)
        elif name in _MODULES:
            value = importlib.import_module(f"sok_like.{name}")
        else:
            raise AttributeError(f"module 'sok_like' has no attribute {name!r}")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(_NEEDS_TENSORFLOW) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
