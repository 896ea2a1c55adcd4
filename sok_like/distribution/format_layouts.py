"""Prints a model's variables: their places, and the collectives of a training step."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from sok_like.distribution.rules import install, rule_of
from sok_like.distribution.sharded_variable import path_of, shard_of
from sok_like.planner.report import aligned
from sok_like.table.variable import is_embedding_variable

HEADER = ("path", "global shape", "layout", "local shape", "bytes here", "collectives of a step")


def format_layouts(model: Any, distribution: Any) -> str:
    """One line per variable: path, shapes, layout, bytes on this rank, collectives of a step.

    Returns:
        Lines of text. It uses no collective, so one rank may call it alone. Collectives of
        activations are listed with the kernel or table they belong to. The last lines give the
        total bytes of the variables and, if the model has an optimizer, of its variables.
    """
    if not model.built:
        raise ValueError(
            "`model` must be built: call it, or give it an Input. Received: "
            f"model '{model.name}' without variables"
        )
    for layer in model._flatten_layers(include_self=False):
        install(layer, distribution)
    owners = {id(v): layer for layer in model._flatten_layers() for v in _own_variables(layer)}
    rows = [_row(v, owners.get(id(v)), distribution) for v in model.variables]
    cells = [HEADER, *(list(map(str, row)) for row in rows)]
    lines = [line.rstrip() for line in aligned(cells, left=range(len(HEADER)))]
    lines.append(f"variables here: {sum(_bytes(v) for v in model.variables):,} bytes")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        lines.append(f"optimizer here: {sum(_bytes(v) for v in variables):,} bytes")
    return "\n".join(lines)


def _own_variables(layer):
    return (
        [*layer._trainable_variables, *layer._non_trainable_variables]
        if hasattr(layer, "_trainable_variables")
        else [*layer._trainable_weights, *layer._non_trainable_weights]
    )


def _row(variable, layer, distribution):
    rule = None if layer is None else rule_of(layer)
    if is_embedding_variable(variable):
        collectives = rule.collectives if rule else "all_to_all"
        return path_of(variable), "keys", "key % ranks", "keys", _bytes(variable), collectives
    shard = shard_of(variable)
    if shard is None:
        shape = tuple(variable.shape)
        layout: tuple = (None,) * len(shape)
        # If a rule has no sharded variable, its collectives are listed at the layer's first one.
        first = rule is not None and rule.variable is None and _own_variables(layer)[0] is variable
        local, travels = shape, [rule.collectives] if first else []
    else:
        shape, layout = shard.placement.global_shape, shard.placement.axes
        local, travels = shard.placement.local_shape, _of_shard(variable, shard, rule)
    batch = distribution.batch_dim_name
    averaged = distribution.mesh.shape[batch] > 1 and variable.trainable
    if averaged and not (shard is not None and shard.over_batch):
        travels.append(f"all_reduce of gradients along '{batch}'")
    return (path_of(variable), shape, layout, local, _bytes(variable), "; ".join(travels) or "none")


def _of_shard(variable, shard, rule):
    if rule is not None and variable is rule.variable:
        return [rule.collectives]
    if rule is not None and variable is rule.rides_along:
        return []
    travels = ["all_gather when read"]
    if shard.over_batch and variable.trainable:
        travels.append("reduce_scatter of its gradient")
    return travels


def _bytes(variable):
    if is_embedding_variable(variable):
        return int(variable.bytes())
    shard = shard_of(variable)
    shape = tuple(variable.shape) if shard is None else shard.placement.local_shape
    return math.prod(shape) * tf.as_dtype(variable.dtype).size
