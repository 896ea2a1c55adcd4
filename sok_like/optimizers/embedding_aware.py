"""Stock optimizers that also train embedding variables.

`embedding_aware(cls)` is a subclass of a stock optimizer class: `EmbeddingAware` over the adapter
of the class's family.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from sok_like.optimizers import families, owner
from sok_like.optimizers.rules import OptimizerRule, rule_of
from sok_like.runtime.framework.graphs import counter
from sok_like.runtime.framework.running_keras import keras_optimizers, optimizer_family
from sok_like.table.variable import as_embedding_variable, is_embedding_variable, unwrap

_STOCK = ("keras", "tf_keras", "tensorflow")  # packages of stock optimizers
_OPTIONS = ("lazy", "average", "skip_nonfinite")


class EmbeddingAware:
    """What all families share: rule, options, configuration. State is in `_sok_*` attributes."""

    _sok_lazy = False
    _sok_average = True
    _sok_only_embeddings = False
    _sok_skip_nonfinite = False
    _sok_tables: Mapping[str, Any] = {}  # optimizers of single tables, see `owner`

    @property
    def embedding_rule(self) -> OptimizerRule:
        """The core's rule for the optimizer's present settings."""
        rule = rule_of(self)
        if not self._sok_lazy:
            return rule
        if rule.rule == "adam":
            return rule.replace("lazy_adam")
        return rule.replace(lazy=True) if rule.rule == "momentum" else rule

    @property
    def initializer(self) -> tf.Operation | None:
        """In a v1 graph, the op that initializes its variables; state of rows is in the tables."""
        variables: Any = getattr(self, "variables")  # noqa: B009 (of the stock class)
        variables = list(variables() if callable(variables) else variables)
        # tf_keras does not list these.
        variables += [getattr(self, "_learning_rate", None), *getattr(self, "_hyper", {}).values()]
        variables += [getattr(v, "value", None) for v in variables]  # inside those of Keras 3
        ops = [v.initializer for v in variables if isinstance(v, tf.Variable)]
        return tf.group(*[op for op in ops if op is not None])

    def get_config(self):
        config = super().get_config()
        for option in _OPTIONS:
            if getattr(self, f"_sok_{option}") != getattr(type(self), f"_sok_{option}"):
                config[f"sok_{option}"] = getattr(self, f"_sok_{option}")
        if self._sok_tables:
            serialize = tf.keras.optimizers.serialize
            config["sok_tables"] = {key: serialize(own) for key, own in self._sok_tables.items()}
        return config

    @classmethod
    def from_config(cls, config, **kwargs):
        config, deserialize = dict(config), tf.keras.optimizers.deserialize
        tables = {key: deserialize(own) for key, own in config.pop("sok_tables", {}).items()}
        names = [f"sok_{option}" for option in _OPTIONS]
        options = {f"_{name}": config.pop(name) for name in names if name in config}
        optimizer = super().from_config(config, **kwargs)
        optimizer.__dict__.update(options, _sok_tables=tables)
        return optimizer

    def optimizer_of(self, table: str) -> Any:
        """The optimizer of a table, as in the dictionary of `sok.OptimizerWrapper`.

        Its `learning_rate` can be read and set.
        """
        key = owner.key_of(self._sok_tables, table)
        return self if key is None else self._sok_tables[key]

    def skipped_gradients(self, variable: Any) -> tf.Variable:
        """Number of this rank's keys whose gradient for `variable` was skipped, int64 scalar."""
        table = as_embedding_variable(variable)
        if not self._sok_skip_nonfinite:
            raise ValueError(
                "`skipped_gradients` needs an optimizer of "
                "`sok.OptimizerWrapper(..., skip_nonfinite_gradients=True)`. "
                f"Received: {type(self).__name__} without"
            )
        counts = self.optimizer_of(table.table_name)
        return counts._sok_counter(f"skipped_{table.table_name}")

    def _sok_counter(self, name):
        return counter(self, f"{self._sok_name()}/{name}")

    def _sok_name(self):
        named = isinstance(self, tf.compat.v1.train.Optimizer)
        return self.get_name() if named else getattr(self, "name", "optimizer")

    def _sok_ordinary(self, variables):
        variables = list(variables)
        owner.check_keys(self, variables)
        ordinary = [variable for variable in variables if not is_embedding_variable(variable)]
        if ordinary and self._sok_only_embeddings:
            raise ValueError(
                f"{type(self).__name__} trains embedding variables only; "
                "sok.tf.keras.optimizers.Adam trains both kinds. "
                f"Received: {ordinary[0]!r}"
            )
        return ordinary


class _Built(EmbeddingAware):
    """Over Keras 3 and tf_keras, whose optimizers are built, and decay weights, except some."""

    def build(self, variables):
        # Bypasses Keras' __setattr__, which would make them part of the optimizer's saved state.
        self.__dict__["_sok_trainable"] = list(variables)
        ordinary = self._sok_ordinary(variables)
        if ordinary:  # Keras builds once; ordinary variables may come in a later call
            super().build(ordinary)

    def finalize_variable_values(self, var_list):
        # Keras sets variables to their moving averages, which it finds by position.
        super().finalize_variable_values(self._sok_ordinary(var_list))

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        if self._sok_tables:  # whose own optimizers would decay them all the same
            raise ValueError(
                f"Tables {sorted(self._sok_tables)} have optimizers of their own. Call "
                "`exclude_from_weight_decay` on each of them and on `default`, with tables in "
                "`var_names`, before `sok.OptimizerWrapper` joins them. Received: a call on the "
                "joint optimizer"
            )
        var_list = list(var_list or [])
        with contextlib.ExitStack() as scopes:
            for variable in var_list:
                if is_embedding_variable(variable):
                    scopes.enter_context(unwrap(variable).asked_by_known_optimizer())
            super().exclude_from_weight_decay(var_list, var_names)

    def _sok_check_scaling(self, factor):
        if not self.__dict__.get("_sok_scaling_allowed"):
            raise ValueError(
                "Keras' LossScaleOptimizer, which `compile` puts around an optimizer under "
                "`mixed_float16`, cannot handle embedding variables. Give compile "
                "`sok.OptimizerWrapper(tf.keras.optimizers.LossScaleOptimizer(optimizer))` (with "
                "optimizers of tables `default=` is the one to scale), or choose "
                "`mixed_bfloat16`, which needs no loss scaling."
            )


def knows_tables(optimizer: Any) -> bool:
    """Whether an optimizer can train embedding variables."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer if inner is None else inner, EmbeddingAware)


@functools.cache
def embedding_aware(cls: type) -> type:
    """A subclass of the stock optimizer class `cls` that also trains embedding variables."""
    if issubclass(cls, EmbeddingAware):
        return cls
    family = optimizer_family(cls)
    if family is None:
        raise TypeError(
            "An optimizer of Keras 3, tf_keras or tf.compat.v1.train is required. "
            f"Received: {cls.__module__}.{cls.__qualname__}"
        )

    @functools.wraps(cls.__init__)
    def init(self, *args, **kwargs):
        cls.__init__(self, *args, **kwargs)
        try:
            rule = rule_of(self)
        except ValueError:
            return  # a setting without a rule only matters once there is a table
        rule.check()

    bases = (_Built if "keras" in family else EmbeddingAware, families.ADAPTERS[family], cls)
    members = {"__module__": __name__, "__init__": init}
    # The legacy Adam and Adam have the same name; files must distinguish their subclasses.
    kind = "Legacy" if ".legacy." in cls.__module__ else ""
    if cls.__module__.partition(".")[0] not in _STOCK and hasattr(keras_optimizers(), cls.__name__):
        # Files of the stock class must not find another package's subclass of the same name.
        kind = cls.__module__.replace(".", "_") + "_"
    aware = type(f"EmbeddingAware{kind}{cls.__name__}", bases, members)
    if family != "tf.compat.v1":  # clones and saved models find the class by its name
        tf.keras.utils.register_keras_serializable("sok_like")(aware)
    return aware


def __getattr__(name: str) -> type:
    """The subclass of a Keras optimizer by its name in files, such as `EmbeddingAwareAdam`."""
    if name.startswith("EmbeddingAware") and hasattr(keras_optimizers(), name[14:]):
        return embedding_aware(getattr(keras_optimizers(), name[14:]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
