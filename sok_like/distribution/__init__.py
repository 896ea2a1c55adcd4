"""Keras' distributions on the TensorFlow backend, with variables that are actually sharded.

    from sok_like.distribution import DeviceMesh, LayoutMap, ModelParallel, set_distribution

Importing this loads no TensorFlow: a name is loaded when first used.
"""

from typing import TYPE_CHECKING

from sok_like.runtime import lazy

if TYPE_CHECKING:
    from sok_like.distribution.distributions import DataParallel as DataParallel
    from sok_like.distribution.distributions import Distribution as Distribution
    from sok_like.distribution.distributions import ModelParallel as ModelParallel
    from sok_like.distribution.distributions import distribute_tensor as distribute_tensor
    from sok_like.distribution.distributions import distribution as distribution
    from sok_like.distribution.distributions import initialize as initialize
    from sok_like.distribution.distributions import set_distribution as set_distribution
    from sok_like.distribution.distributions import summary as summary
    from sok_like.distribution.mesh import DeviceMesh as DeviceMesh
    from sok_like.distribution.mesh import LayoutMap as LayoutMap
    from sok_like.distribution.mesh import TensorLayout as TensorLayout
    from sok_like.distribution.mesh import get_device_count as get_device_count
    from sok_like.distribution.mesh import list_devices as list_devices

__all__, __getattr__, __dir__ = lazy.names(
    __name__,
    {
        ".distributions": "DataParallel Distribution ModelParallel distribute_tensor "
        "distribution initialize set_distribution summary",
        ".mesh": "DeviceMesh LayoutMap TensorLayout get_device_count list_devices",
    },
)
