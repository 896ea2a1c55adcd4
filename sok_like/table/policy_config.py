"""Options of an EmbeddingVariable as JSON values and back, for the configuration of layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from sok_like.table import policies


def to_config(option: Any) -> Any:
    """An option as JSON values, nested options likewise; Keras serializes initializers."""
    if isinstance(option, (list, tuple)):
        return [to_config(item) for item in option]
    if not dataclasses.is_dataclass(option):
        return option
    fields = {f.name: to_config(getattr(option, f.name)) for f in dataclasses.fields(option)}
    if isinstance(option, policies.InitializerOption) and option.initializer is not None:
        initializer = tf.keras.initializers.get(option.initializer)
        fields["initializer"] = tf.keras.initializers.serialize(initializer)
    return {"option": type(option).__name__, **fields}


def from_config(config: Any) -> Any:
    """The inverse of `to_config`; returns an option unchanged."""
    if isinstance(config, list):
        return [from_config(item) for item in config]
    if not isinstance(config, dict) or "option" not in config:
        return config
    fields = {name: from_config(value) for name, value in config.items() if name != "option"}
    if isinstance(fields.get("initializer"), dict):
        fields["initializer"] = tf.keras.initializers.deserialize(fields["initializer"])
    return getattr(policies, config["option"])(**fields)
