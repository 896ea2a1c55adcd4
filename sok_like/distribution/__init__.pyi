# The public names; `runtime/framework/lazy_modules.py` reads them from here.
from sok_like.distribution.distributions import DataParallel as DataParallel
from sok_like.distribution.distributions import Distribution as Distribution
from sok_like.distribution.distributions import ModelParallel as ModelParallel
from sok_like.distribution.distributions import distribution as distribution
from sok_like.distribution.distributions import set_distribution as set_distribution
from sok_like.distribution.distributions import summary as summary
from sok_like.distribution.mesh import DeviceMesh as DeviceMesh
from sok_like.distribution.mesh import LayoutMap as LayoutMap
from sok_like.distribution.mesh import TensorLayout as TensorLayout
from sok_like.distribution.mesh import distribute_tensor as distribute_tensor
from sok_like.distribution.mesh import get_device_count as get_device_count
from sok_like.distribution.mesh import initialize as initialize
from sok_like.distribution.mesh import list_devices as list_devices

__all__: list[str]
