# The public names; `runtime/framework/lazy_modules.py` reads them from here.
from sok_like import callbacks as callbacks
from sok_like import core as core
from sok_like import deeprec as deeprec
from sok_like import dist_model_parallel as dist_model_parallel
from sok_like import distribution as distribution
from sok_like import embeddings as embeddings
from sok_like import feature_column as feature_column
from sok_like import kit_lib as kit_lib
from sok_like import optimizers as optimizers
from sok_like import saver as saver
from sok_like import sok2 as sok2
from sok_like import tf as tf
from sok_like import tf_distributed_embedding as tf_distributed_embedding
from sok_like.core.initialize import Init as Init
from sok_like.dist_model_parallel.embedding import Embedding as Embedding
from sok_like.dist_model_parallel.embedding import HashEmbedding as HashEmbedding
from sok_like.embeddings.all2all_dense_embedding import (
    All2AllDenseEmbedding as All2AllDenseEmbedding,
)
from sok_like.embeddings.distributed_embedding import DistributedEmbedding as DistributedEmbedding
from sok_like.embeddings.fused_lookups import fuse_lookups as fuse_lookups
from sok_like.embeddings.get_embedding_op import get_embedding as get_embedding
from sok_like.group_embedding.layer import GroupEmbedding as GroupEmbedding
from sok_like.group_embedding.lookup_sparse import group_embedding_lookup as group_embedding_lookup
from sok_like.group_embedding.lookup_sparse import (
    group_embedding_lookup_sparse as group_embedding_lookup_sparse,
)
from sok_like.group_embedding.variables import (
    enable_distributed_strategy as enable_distributed_strategy,
)
from sok_like.group_embedding.variables import (
    get_embedding_variable as get_embedding_variable,
)
from sok_like.inspection.find_key import find_key as find_key
from sok_like.inspection.sizes import estimate_memory as estimate_memory
from sok_like.inspection.sizes import report as report
from sok_like.lookup.by_key import EmbeddingVariable as EmbeddingVariable
from sok_like.lookup.dense_lookup import embedding_lookup as embedding_lookup
from sok_like.lookup.local_variables import gather_batch as gather_batch
from sok_like.optimizers.utils import filter_variables as filter_variables
from sok_like.optimizers.utils import (
    split_embedding_variable_from_others as split_embedding_variable_from_others,
)
from sok_like.optimizers.wrapper import OptimizerScope as OptimizerScope
from sok_like.optimizers.wrapper import OptimizerWrapper as OptimizerWrapper
from sok_like.runtime.ranks.initialize import local_rank as local_rank
from sok_like.runtime.ranks.initialize import rank as rank
from sok_like.runtime.ranks.initialize import shard as shard
from sok_like.runtime.ranks.initialize import size as size
from sok_like.saving.parts.table_names import renamed_tables as renamed_tables
from sok_like.saving.parts.table_names import resized_tables as resized_tables
from sok_like.saving.saver import Saver as Saver
from sok_like.serving.delta import export_delta as export_delta
from sok_like.serving.export import export_saved_model as export_saved_model
from sok_like.table.keys import keys_of as keys_of
from sok_like.table.policies import CBFFilter as CBFFilter
from sok_like.table.policies import CounterFilter as CounterFilter
from sok_like.table.policies import EmbeddingVariableOption as EmbeddingVariableOption
from sok_like.table.policies import GlobalStepEvict as GlobalStepEvict
from sok_like.table.policies import InitializerOption as InitializerOption
from sok_like.table.policies import L2WeightEvict as L2WeightEvict
from sok_like.table.policies import ScoreEvict as ScoreEvict
from sok_like.table.policies import StorageOption as StorageOption
from sok_like.table.snapshots import assign as assign
from sok_like.table.snapshots import export as export

__version__: str
__all__: list[str]
