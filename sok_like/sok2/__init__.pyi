# The public names; `runtime/framework/lazy_modules.py` reads them from here.
from sok_like.sok2.distributed_variable import DistributedVariable as DistributedVariable
from sok_like.sok2.distributed_variable import LocalizedVariable as LocalizedVariable
from sok_like.sok2.distributed_variable import Variable as Variable
from sok_like.sok2.dump_load import dump as dump
from sok_like.sok2.dump_load import incremental_model_dump as incremental_model_dump
from sok_like.sok2.dump_load import load as load
from sok_like.sok2.dynamic_variable import DynamicVariable as DynamicVariable
from sok_like.sok2.dynamic_variable import assign as assign
from sok_like.sok2.dynamic_variable import export as export
from sok_like.sok2.lookup import all2all_dense_embedding as all2all_dense_embedding
from sok_like.sok2.lookup import lookup_sparse as lookup_sparse
from sok_like.sok2.lookup import sparse_read_and_evict as sparse_read_and_evict
from sok_like.sok2.training import SGD as SGD
from sok_like.sok2.training import OptimizerWrapper as OptimizerWrapper
from sok_like.sok2.training import filter_variables as filter_variables
from sok_like.sok2.training import init as init
from sok_like.sok2.training import tf_version as tf_version

__all__: list[str]
