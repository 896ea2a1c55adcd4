"""An optimizer's variables in files, without those of holders of dense tables.

TensorFlow and Keras know an optimizer's variables by their positions in lists, which would differ
between ranks. So the lists that they see do not contain the holders' variables: a holder stores
them with its tables (`dense_tables.py`).
"""

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework.scoped_attributes import attributes

_state = threading.local()
_holders: weakref.WeakSet = weakref.WeakSet()


def register(holder: Any) -> None:
    """From now on, optimizers keep the holder's variables out of checkpoints."""
    _holders.add(holder)


def unreached(objects: Sequence[Any], variables: Sequence[Any]) -> list[str]:
    """Names of holders that own one of the variables but are not among the objects."""
    reached, ids = set(map(id, objects)), set(map(id, variables))
    lost = [holder for holder in list(_holders) if id(holder) not in reached]
    return [holder.name for holder in lost if ids & set(map(id, holder.own_variables()))]


def children(own: Callable, self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """`_trackable_children` of Keras' optimizers."""
    children = own(self, save_type, **kwargs)
    hidden = save_type == "checkpoint" and _hidden(self)
    if not hidden:
        return children
    lists = vars(self).setdefault("_sok_lists", {})
    tracked: dict[str, Any] = {n: c for n, c in children.items() if isinstance(c, list)}
    for name, wrapper in tracked.items():  # TensorFlow's, of a list
        items = wrapper._trackable_children()
        if items:
            children[name] = lists.setdefault(name, _Others())
            children[name].fill(items, hidden)
    return children


def save_or_load(own: Callable, self: Any, store: Any) -> None:
    """`save_own_variables` and `load_own_variables` of Keras' optimizers."""
    # They ask an optimizer for nothing but its name and its variables, which they number.
    seen = types.SimpleNamespace(name=self.name, variables=ordinary(self))
    own(seen if _hidden(self) else self, store)


def ordinary(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that no holder stores."""
    hidden, variables = _hidden(optimizer), getattr(optimizer, "variables", ())
    # A method: of an optimizer that Keras' files do not hold. tf_keras' list is callable, too.
    variables = variables if isinstance(variables, (list, tuple)) else ()
    return [variable for variable in variables if id(variable) not in hidden]


def _hidden(optimizer):
    return {id(v) for holder in list(_holders) for v in holder.variables_in(optimizer)}


class _Others(tf.__internal__.tracking.Trackable):
    """A list of an optimizer's variables without those of holders."""

    def fill(self, items, hidden):
        ordered = [items[name] for name in sorted(items, key=int) if id(items[name]) not in hidden]
        self._items = {str(i): item for i, item in enumerate(ordered)}

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        return dict(self._items)

    def _lookup_dependency(self, name, cached_dependencies=None):
        return self._items.get(name)


def of_root(objects: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """A scope in which holders take their optimizers from these objects, to write or read."""
    return attributes(_state, {"optimizers": list(filter(is_optimizer, objects))})


def in_scope() -> Sequence[Any]:
    """The optimizers of `of_root`; none outside of it."""
    return getattr(_state, "optimizers", ())


def is_optimizer(thing: Any) -> bool:
    """Whether it is an optimizer of either Keras or of TensorFlow."""
    return hasattr(thing, "apply_gradients") and not hasattr(thing, "compile")


def is_built(optimizer: Any) -> bool:
    """Whether an optimizer has created its slot variables."""
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    if hasattr(inner, "get_slot_names"):
        return bool(inner.get_slot_names()) or not hasattr(inner, "_create_all_weights")
    return bool(
        getattr(inner, "_index_dict", None) or getattr(inner, "_trainable_variables_indices", None)
    )


def build(objects: Sequence[Any]) -> None:
    """Makes the slot variables of the optimizers among the objects: list positions then agree."""
    for model in objects:
        optimizer = getattr(model, "optimizer", None)
        if getattr(model, "built", False) and optimizer is not None and not is_built(optimizer):
            if hasattr(optimizer, "_create_all_weights"):
                optimizer._create_all_weights(model.trainable_variables)
            elif hasattr(optimizer, "build"):
                optimizer.build(model.trainable_variables)
    for optimizer in filter(is_optimizer, objects):
        if not is_built(optimizer):
            raise ValueError(
                "An optimizer of dense tables must be built before a checkpoint is restored: call "
                "its build(model.trainable_variables). Received: an optimizer "
                f"{type(optimizer).__name__} without slot variables"
            )
