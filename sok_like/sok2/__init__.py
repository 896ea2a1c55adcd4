"""The API of SOK 2.x: `from sok_like import sok2 as sok`.

    sok.init()
    table = sok.DynamicVariable(dimension=16, initializer="random", var_type="hbm")
    embeddings = sok.lookup_sparse(table, sp_ids, combiners="sum")

Names, arguments and defaults are those of release 2.1; docs/sok2.md says what differs. Importing
this loads no TensorFlow: a name is loaded when first used.
"""

from typing import TYPE_CHECKING

from sok_like.runtime import lazy

if TYPE_CHECKING:
    from sok_like.sok2.distributed_variable import DistributedVariable as DistributedVariable
    from sok_like.sok2.distributed_variable import LocalizedVariable as LocalizedVariable
    from sok_like.sok2.distributed_variable import Variable as Variable
    from sok_like.sok2.dump_load import dump as dump
    from sok_like.sok2.dump_load import load as load
    from sok_like.sok2.dynamic_variable import DynamicVariable as DynamicVariable
    from sok_like.sok2.dynamic_variable import assign as assign
    from sok_like.sok2.dynamic_variable import export as export
    from sok_like.sok2.eviction import incremental_model_dump as incremental_model_dump
    from sok_like.sok2.eviction import sparse_read_and_evict as sparse_read_and_evict
    from sok_like.sok2.initialize import filter_variables as filter_variables
    from sok_like.sok2.initialize import init as init
    from sok_like.sok2.initialize import tf_version as tf_version
    from sok_like.sok2.lookup import all2all_dense_embedding as all2all_dense_embedding
    from sok_like.sok2.lookup import lookup_sparse as lookup_sparse
    from sok_like.sok2.optimizer import SGD as SGD
    from sok_like.sok2.optimizer import OptimizerWrapper as OptimizerWrapper

__all__, __getattr__, __dir__ = lazy.names(
    __name__,
    {
        ".distributed_variable": "DistributedVariable LocalizedVariable Variable",
        ".dump_load": "dump load",
        ".dynamic_variable": "DynamicVariable assign export",
        ".eviction": "incremental_model_dump sparse_read_and_evict",
        ".initialize": "filter_variables init tf_version",
        ".lookup": "all2all_dense_embedding lookup_sparse",
        ".optimizer": "OptimizerWrapper SGD",
    },
)
