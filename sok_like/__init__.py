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
from typing import Any

from sok_like.runtime.framework import hooks, lazy_modules

# Modules of the classes, by their names in Keras' files.
_IN_FILES = {
    "sok_like>Adam": "sok_like.optimizers.own",
    "sok_like>All2AllDenseEmbedding": "sok_like.embeddings.all2all_dense_embedding",
    "sok_like>ConcatInitializer": "sok_like.dist_model_parallel.local_layers",
    "sok_like>ConcatOneHotEmbedding": "sok_like.dist_model_parallel.embedding",
    "sok_like>DenseFeatures": "sok_like.feature_column.layers",
    "sok_like>DistributedEmbedding": "sok_like.embeddings.distributed_embedding",
    "sok_like>Embedding": "sok_like.dist_model_parallel.embedding",
    "sok_like>EmbeddingAdam": "sok_like.optimizers.adam",
    "sok_like>EmbeddingAwareLossScaleOptimizer": "sok_like.optimizers.wrapper",
    "sok_like>FusedLookups": "sok_like.embeddings.fused_lookups",
    "sok_like>GroupEmbedding": "sok_like.group_embedding.layer",
    "sok_like>HashEmbedding": "sok_like.dist_model_parallel.embedding",
    "sok_like>LazyAdam": "sok_like.optimizers.own",
    "sok_like>PaddingMask": "sok_like.lookup.ids",
    "sok_like>RowWiseAdagrad": "sok_like.optimizers.own",
    "sok_like>SequenceFeatures": "sok_like.feature_column.layers",
    "sok_like>TFDistributedEmbedding": "sok_like.embeddings.tf_distributed_embedding",
    "sok_like.dist_model_parallel>DistributedEmbedding": "sok_like.dist_model_parallel.layer",
    "sok_like.dist_model_parallel>DistributedOptimizer": "sok_like.dist_model_parallel.training",
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


# Modules that change TensorFlow or Keras, and that no lower package imports.
hooks.load_at_init(
    "sok_like.runtime.framework.private_names",
    "sok_like.runtime.ranks.training_statistics",
    "sok_like.saving.containers.install",
)
lazy_modules.announce({name: functools.partial(_class_in_file, name) for name in _IN_FILES})

__all__, _load, __dir__ = lazy_modules.names(__name__)
__version__ = "0.1.0"

# Not a declared dependency: TensorFlow has one build for the CPU and another for GPUs.
_NEEDS_TENSORFLOW = (
    "sok_like needs TensorFlow 2.16.2 or newer, and none is installed. "
    "Type: pip install tensorflow-cpu==2.21.0"
)
if importlib.util.find_spec("tensorflow") is None:
    warnings.warn(_NEEDS_TENSORFLOW, stacklevel=2)


def __getattr__(name: str) -> Any:
    if name == "comm":  # an earlier README imported it
        warnings.warn(
            "sok_like.comm is an earlier name. Use sok.rank(), sok.size() and sok.local_rank(). "
            "Received: an import of `comm` from sok_like",
            FutureWarning,
            stacklevel=2,
        )
        return importlib.import_module("sok_like.runtime.ranks.comm")
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(_NEEDS_TENSORFLOW) from error
