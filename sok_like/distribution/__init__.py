"""Keras' distributions on the TensorFlow backend, with variables that really are sharded.

    from sok_like.distribution import DeviceMesh, LayoutMap, ModelParallel, set_distribution

Importing this loads no TensorFlow: a name is loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

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

# Public name: where it lives.
_PUBLIC = {
    "DataParallel": "sok_like.distribution.distributions",
    "DeviceMesh": "sok_like.distribution.mesh",
    "Distribution": "sok_like.distribution.distributions",
    "LayoutMap": "sok_like.distribution.mesh",
    "ModelParallel": "sok_like.distribution.distributions",
    "TensorLayout": "sok_like.distribution.mesh",
    "distribute_tensor": "sok_like.distribution.distributions",
    "distribution": "sok_like.distribution.distributions",
    "get_device_count": "sok_like.distribution.mesh",
    "initialize": "sok_like.distribution.distributions",
    "list_devices": "sok_like.distribution.mesh",
    "set_distribution": "sok_like.distribution.distributions",
    "summary": "sok_like.distribution.distributions",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sok_like.distribution' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
