"""Keras' distributions on the TensorFlow backend: `ModelParallel`, `DataParallel`, and their scope.

    mesh = DeviceMesh((2, 4), ("batch", "model"))
    layout_map = LayoutMap(mesh)
    layout_map[".*dense.*kernel"] = (None, "model")
    set_distribution(ModelParallel(mesh, layout_map))

Hooks shard the variables that the map names (`sharded_variable.py`) and bind models (`model.py`)
while a distribution is set. Variables and models that they met stay as they are.
"""

import contextlib
import functools
import math
import random
import re
import secrets
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.distribution.distribution_lib import Distribution as _KerasDistribution
from tensorflow.python.eager import context

from sok_like.distribution.mesh import DeviceMesh, RankMesh, TensorLayout, list_devices, rank_mesh
from sok_like.distribution.model import bind, bind_models
from sok_like.distribution.optimizer import distributed_optimizer
from sok_like.distribution.rules import install, rule_of
from sok_like.distribution.sharded_variable import create, on_shards, path_of, shard_of
from sok_like.planner.tables import aligned
from sok_like.runtime.checks import require, unmet, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.table.variable import is_embedding_variable


class Distribution(_KerasDistribution):
    """Base of `ModelParallel` and `DataParallel`: splits batches, but shards no variable.

    Args:
        device_mesh: `DeviceMesh`, Keras' or ours, with the device of every rank.
        batch_dim_name: The mesh axis along which batches are split; the first by default.
        auto_shard_dataset: As in `ModelParallel`.

    Raises:
        ValueError: the mesh does not match the ranks, or it has no such axis.
    """

    # The state is in Keras' own `_*` attributes.
    _layout_map: Any = None

    def __init__(
        self, device_mesh: Any, batch_dim_name: str | None = None, auto_shard_dataset: bool = True
    ):
        if batch_dim_name is None:
            batch_dim_name = device_mesh.axis_names[0]
        names = tuple(device_mesh.axis_names)
        required = f"an axis of the mesh, one of {names}"
        require(batch_dim_name in names, "batch_dim_name", required, batch_dim_name)
        self._device_mesh = device_mesh
        self._batch_dim_name = batch_dim_name
        self._auto_shard_dataset = auto_shard_dataset
        self._num_processes, self._process_id, self._is_multi_process = 1, 0, False
        self.mesh: RankMesh = rank_mesh(device_mesh)
        self._matched: set[str] = set()
        self._told: set[str] = set()

    @property
    def num_model_replicas(self):
        return self.mesh.shape[self.batch_dim_name]

    @property
    def data_shard_id(self):
        return self.mesh.index[self.batch_dim_name]

    def axes_of(self, path: str) -> tuple | None:
        """One mesh axis or None per dimension of the variable; None if no key matches `path`."""
        layout = None if self._layout_map is None else self._layout_map[path]
        if layout is None:
            return None
        self._matched.update(key for key in self._layout_map if self._layout_map[key] is layout)
        return tuple(layout.axes)

    def check_patterns(self, model: Any) -> None:
        """Warns once per key of the layout map that matches no variable, or some in part only."""
        if self._layout_map is None or "_sok_checked" in vars(model) or not model.variables:
            return
        object.__setattr__(model, "_sok_checked", True)  # bypasses Keras' tracking of attributes
        paths, replicated = [path_of(variable) for variable in model.variables], []
        for variable, path in zip(model.variables, paths, strict=True):
            axes = self.axes_of(path)
            if axes is None:
                replicated.append(path)
            elif is_embedding_variable(variable) and axes[1:] != (None,):
                subject = "A hash table is sharded by key over all ranks, so its layout"
                received = f"layout {axes} for '{path}' of shape {tuple(variable.shape)}"
                raise unmet(subject, "shard rows, (axis, None)", received)
        for key in self._layout_map:
            # A key that is a path means that variable alone.
            in_part = [p for p in replicated if key not in paths and re.search(key, p)]
            if key in self._told or (key in self._matched and not in_part):
                continue
            self._told.add(key)
            what = "matches no variable of this model nor of any other so far. "
            if in_part:
                what = f"matches only a part of {in_part}, so it does not shard them: a key must "
                what += f"match the whole path, as '.*{key}.*' does. "
            warnings.warn(
                f"The key {key!r} of the LayoutMap, with the layout "
                f"{tuple(self._layout_map[key].axes)}, {what}The variables of model "
                f"'{model.name}' are {paths}",
                stacklevel=2,
            )

    def get_variable_layout(self, variable: Any) -> Any:
        layout = getattr(variable, "_layout", None)
        if layout is None and getattr(self, "_layout_map", None) is not None:
            layout = self._layout_map[path_of(variable)]
        return layout or TensorLayout([None] * len(variable.shape), self.device_mesh)

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """The layout of a batch: samples along the batch axis."""
        axes = [self.batch_dim_name, *[None] * (len(data_shape) - 1)]
        return TensorLayout(axes, self.device_mesh)

    def get_tensor_layout(self, path: str) -> Any:
        """The layout of an output in the map, which has no effect; None if it has none."""
        return None if self.axes_of(path) is None else self._layout_map[path]

    def distribute_dataset(self, dataset: Any) -> Any:
        """The dataset unchanged: the model takes this rank's samples out of whole batches."""
        return dataset

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A scope with this distribution; at its end the former one is restored."""
        before = distribution()
        set_distribution(self)
        try:
            yield
        finally:
            set_distribution(before)

    def summary(self, model: Any) -> str:
        """As the function `summary`. It uses no collective, so one rank may call it alone."""
        require(model.built, "model", "built: call it, or give it an Input", model)
        for layer in model._flatten_layers(include_self=False):
            install(layer, self)
        owners = {id(v): layer for layer in model._flatten_layers() for v in _own_variables(layer)}
        of_variable = ("path", "global shape", "layout", "local shape", "bytes here")
        # Collectives of activations are listed with the kernel or table they belong to.
        header = [*of_variable, "collectives of a step"]
        rows = [_row(v, owners.get(id(v)), self) for v in model.variables]
        cells = [header, *(list(map(str, row)) for row in rows)]
        lines = [line.rstrip() for line in aligned(cells, left=range(len(header)))]
        lines.append(f"variables here: {sum(map(_bytes, model.variables)):,} bytes")
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            own = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
            lines.append(f"optimizer here: {sum(map(_bytes, own)):,} bytes")
        return "\n".join(lines)

    def optimizer(self, optimizer: Any) -> Any:
        """Wraps an optimizer for a custom training loop; `compile` does so itself."""
        return distributed_optimizer(optimizer, self)

    def prepare(self, model: Any) -> None:
        """Puts a model under the distribution; `compile` and the first call do this as well."""
        bind(model, self)


class ModelParallel(Distribution, keras.distribution.ModelParallel):
    """Splits the batches, and shards the variables that a layout map names.

    Args:
        device_mesh: `DeviceMesh`, Keras' or ours, with the device of every rank; by default the
            mesh of the layout map.
        layout_map: `LayoutMap` from variable paths to layouts. Variables that it does not name are
            replicated.
        batch_dim_name: The mesh axis along which batches are split; the first by default.
        auto_shard_dataset: False: every rank reads its own samples instead of whole batches.
            Losses, metrics and predictions then cover its own samples only.

    Raises:
        ValueError: `layout_map` is not a LayoutMap, it has another mesh, the mesh does not match
            the ranks, or the mesh does not have the batch axis.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        layout_map: Any = None,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
    ):
        is_map = isinstance(layout_map, keras.distribution.LayoutMap)
        require(is_map, "layout_map", "a LayoutMap", layout_map)
        of_map = layout_map.device_mesh
        device_mesh = of_map if device_mesh is None else device_mesh
        required = "a DeviceMesh, here or in the LayoutMap"
        require(device_mesh is not None, "device_mesh", required, device_mesh)

        def facts(mesh):
            return tuple(mesh.shape), tuple(mesh.axis_names), mesh.devices.reshape(-1).tolist()

        if of_map is not None and facts(of_map) != facts(device_mesh):
            required = f"the mesh of the LayoutMap, {of_map!r}"
            raise wrong_argument("device_mesh", required, device_mesh)
        Distribution.__init__(self, device_mesh, batch_dim_name, auto_shard_dataset)
        self._layout_map = layout_map

    def __repr__(self):
        return f"<ModelParallel device_mesh={self.device_mesh}>"


class DataParallel(Distribution, keras.distribution.DataParallel):
    """Splits the batches over all ranks; every rank holds all variables.

    Args:
        device_mesh: `DeviceMesh`; batches are split along its first axis.
        devices: Instead of a mesh: the devices of a mesh with the single axis "batch".
        auto_shard_dataset: As in `ModelParallel`.

    Raises:
        ValueError: the mesh does not match the ranks.
    """

    def __init__(
        self, device_mesh: Any = None, devices: Any = None, auto_shard_dataset: bool = True
    ):
        if device_mesh is None:
            devices = list_devices() if devices is None else devices
            device_mesh = DeviceMesh((len(devices),), ["batch"], devices)
        Distribution.__init__(self, device_mesh, None, auto_shard_dataset)


_hooks = contextlib.ExitStack()  # of the current distribution
_distribution: Any = None


def summary(model: Any) -> str:
    """A table of a model's variables: their places, and the collectives of a training step.

    Args:
        model: A built model that was compiled or called under a distribution.

    Returns:
        Lines of text: path, global shape, layout, local shape, bytes on this rank, collectives.

    Raises:
        ValueError: the model is not built, or not under a distribution.
    """
    of_model = vars(model).get("_sok_distribution", _distribution)
    required = "under a distribution, compiled or called in it"
    require(of_model is not None, "model", required, model)
    return of_model.summary(model)


def distribution() -> Any:
    """The current distribution, or None."""
    return _distribution


def set_distribution(value: Any) -> None:
    """Makes a distribution the current one; None unsets it.

    Every rank must call it. All ranks get the random state of rank 0, so that initial values and
    the order of samples agree without a seed.

    Args:
        value: `ModelParallel` or `DataParallel`, ours or Keras' own.

    Raises:
        TypeError: `value` is another object.
    """
    global _distribution
    if not (value is None or isinstance(value, Distribution)):
        if isinstance(value, keras.distribution.ModelParallel):
            by_name = {"layout_map": value._layout_map, "batch_dim_name": value.batch_dim_name}
            value = ModelParallel(**by_name, auto_shard_dataset=value.auto_shard_dataset)
        elif isinstance(value, keras.distribution.DataParallel):
            value = DataParallel(value.device_mesh, auto_shard_dataset=value.auto_shard_dataset)
        else:
            raise TypeError(f"A ModelParallel or DataParallel is required. Received: {value!r}")
    if value is not None:
        communicator = comm.current()
        # Keras draws seeds of initializers from Python's generator and shuffles by TensorFlow's;
        # programs make data by NumPy's. If the ranks have set the same seeds, nothing changes.
        if communicator.world_size > 1:
            states = agreed(lambda: None if communicator.rank else random_state(), communicator)
            set_random_state(states[0])
    _hooks.close()
    _distribution = value
    keras.distribution.set_distribution(value)
    if value is not None:
        _hooks.enter_context(tf.variable_creator_scope(functools.partial(create, value)))
        bind_models(value, _hooks)


def _own_variables(layer):
    """Without those of layers within it."""
    kind = "variables" if hasattr(layer, "_trainable_variables") else "weights"
    return [*getattr(layer, f"_trainable_{kind}"), *getattr(layer, f"_non_trainable_{kind}")]


def _row(variable, layer, distribution):
    rule, shard = None if layer is None else rule_of(layer), shard_of(variable)
    path, of_rule = path_of(variable), [rule.collectives] if rule else []
    if is_embedding_variable(variable):
        collectives = of_rule or ["all_to_all"]
        return path, "keys", "key % ranks", "keys", _bytes(variable), *collectives
    batch, over_batch = distribution.batch_dim_name, shard is not None and shard.over_batch
    if shard is None:
        shape = local = tuple(variable.shape)
        layout: tuple = (None,) * len(shape)
        # If a rule has no sharded variable, its collectives are listed at the layer's first one.
        first = rule is not None and rule.variable is None and _own_variables(layer)[0] is variable
        travels = of_rule if first else []
    else:
        shape, layout, local = shard.global_shape, shard.layout, shard.local_shape
        travels = ["all_gather when read"]
        if over_batch and variable.trainable:
            travels.append("reduce_scatter of its gradient")
        if rule is not None and (variable is rule.variable or variable is rule.rides_along):
            travels = of_rule if variable is rule.variable else []
    if distribution.mesh.shape[batch] > 1 and variable.trainable and not over_batch:
        travels.append(f"all_reduce of gradients along '{batch}'")
    return path, shape, layout, local, _bytes(variable), "; ".join(travels) or "none"


def _bytes(variable):
    if is_embedding_variable(variable):
        return int(variable.bytes())
    with on_shards():
        return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def random_state() -> dict[str, Any]:
    """The state of the random generators for JSON: pickled bytes could become code elsewhere."""
    seed, numpy = context.global_seed(), np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    seed = secrets.randbelow(2**31) if seed is None else seed
    return {"python": random.getstate(), "numpy": numpy, "tensorflow": seed}


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the generators, and the seed if it is another: an equal one would restart them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    if context.global_seed() != state["tensorflow"]:
        tf.random.set_seed(state["tensorflow"])
