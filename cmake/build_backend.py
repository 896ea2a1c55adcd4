"""setuptools' build backend, which asks for a TensorFlow only where the environment has none.

So `pip install .` compiles against the TensorFlow that is installed, and downloads no second one.
"""

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from tensorflow_config import config_line

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_TENSORFLOW = "tensorflow-cpu==2.21.0"


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """What pip installs for the build, beside pyproject.toml's list."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_missing_tensorflow()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """The same, for an editable install."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_missing_tensorflow()]


def _missing_tensorflow():
    try:
        config_line()
    except SystemExit:
        return [_TENSORFLOW]
    return []
