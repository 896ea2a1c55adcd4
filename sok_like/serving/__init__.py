"""Models for stock TensorFlow: SavedModels that load without this package."""

from sok_like.serving.delta import export_delta as export_delta
from sok_like.serving.export import export_saved_model as export_saved_model
