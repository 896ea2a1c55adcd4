"""The checks of `dmp.DistributedEmbedding`, which lie beside its tests."""

from tests.dist_model_parallel import rank_checks


def checks(world_size):
    return dict(rank_checks.checks())
