"""The one place where functions of TensorFlow and Keras are replaced by functions of this package.

    def _fit(own, self, x=None, *args, **kwargs):    # `own` is Keras' function
        ...
        return own(self, x, *args, **kwargs)

    @hooks.at_init
    def _install():
        hooks.wrap(tf.keras.Model, "fit", _fit, "tells the ranks that an epoch begins")

What only some programs need stands behind a door, which the first use of a feature opens:

    @hooks.behind(hooks.SESSIONS)
    def _install_savers(): ...

    hooks.open_door(hooks.SESSIONS)                  # where a table is made in a v1 graph

A wrapper names the arguments that it uses; they must be the first ones of the function that it
wraps. A function that is missing or takes other arguments raises ImportError when it is wrapped:
another TensorFlow or Keras may have moved it, and nothing must go on without it.

`python -m sok_like` prints `listing()`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

KNOWN = (
    "TensorFlow 2.16.2 to 2.21 with Keras 3.12 to 3.15, or with tf_keras of TensorFlow's version"
)
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras")
_ABSENT = object()
# The doors. Hooks that no installer puts in belong to a scope that the program has entered.
EVERY, SCOPES = "every program", "scopes"
SESSIONS, CHECKPOINTS, DENSE_TABLES = "tf.compat.v1 graphs", "checkpoints", "dense tables"
MODELS, RANKS = "Keras models", "several ranks"

_lock = threading.RLock()
_modules: list[str] = []
_installers: list[tuple[tuple[str, ...], Callable[[], None]]] = []  # with their doors
_installed: list[tuple[tuple[str, ...], Callable[[], None]]] = []
_open = {EVERY}
_hooks: list[Hook] = []
_door = SCOPES  # whose hooks are being put in
_uncopied: list[Hook] | None = None  # in `_install`: hooks whose copies are not replaced yet
_initialized = False


def at_init(install: Callable[[], None]) -> Callable[[], None]:
    """Decorator of a function that wraps others; the first `sok.Init` calls it."""
    # Those of modules that are loaded later are called here, while their module is being loaded.
    # Not every program loads it, so the module is their door.
    door = install.__module__ if _initialized else EVERY
    _open.add(door)
    return behind(door)(install)


def behind(*doors: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """`at_init` of a function that is called once one of these doors is open, too."""

    def decorate(install):
        with _lock:
            _installers.append((doors, install))
            if _initialized:
                _install()
        return install

    return decorate


def open_door(door: str) -> None:
    """Puts in what stands behind a door, now or at the first `sok.Init`; if it raises, nothing.

    Called while hooks are put in, it puts in those behind it after them.
    """
    with _lock:
        if door in _open:
            return
        _open.add(door)
        try:
            if _initialized:
                _install()
        except BaseException:
            _open.discard(door)
            raise


def load_at_init(*modules: str) -> None:
    """Lets `install_all` import modules first, so that lower packages need not know them."""
    _modules.extend(modules)


def install_all() -> None:
    """Calls the functions behind open doors that have not been called; `sok.Init` calls it."""
    global _initialized
    with _lock:
        for module in _modules:
            importlib.import_module(module)
        _install()
        _initialized = True


def _install():
    """Puts in what is missing behind open doors: all of it, or nothing."""
    global _uncopied, _door
    if _uncopied is not None:  # what is being put in opens a door: the loop below goes on with it
        return
    num_hooks, num_installed, doors_before, _uncopied = len(_hooks), len(_installed), {*_open}, []
    try:
        while missing := [i for i in _installers if i not in _installed and _open & {*i[0]}]:
            doors, install = missing[0]
            _installed.append(missing[0])
            _door = next(door for door in doors if door in _open)
            install()
        _replace_copies(_uncopied)
    except BaseException:
        while len(_hooks) > num_hooks:
            _hooks[-1].undo()
        del _installed[num_installed:]
        _open.intersection_update(doors_before)
        raise
    finally:
        _uncopied, _door = None, SCOPES


@dataclasses.dataclass(eq=False)
class Hook:
    """A name of TensorFlow or Keras that has another value."""

    name: str  # dotted, with the module
    why: str  # in one line
    value: Any  # what it is now
    door: str
    # (Holder, attribute, its own value): the owner, then modules that have copied it.
    _places: list[tuple[Any, str, Any]]

    def state(self) -> str:
        """Whether the hook is in effect."""
        owner, attribute, _ = self._places[0]
        now = inspect.getattr_static(owner, attribute, None)
        if now is self.value:
            return "in place"
        function, ours = (getattr(value, "__func__", value) for value in (now, self.value))
        if callable(function) and inspect.unwrap(function, stop=lambda f: f is ours) is ours:
            return "in place, within another wrapper"
        return "not in effect: replaced by another package"

    def undo(self) -> None:
        """Puts the name's own value back, unless somebody else has changed it since."""
        with _lock:
            for holder, attribute, own in reversed(self._places):
                if inspect.getattr_static(holder, attribute, None) is not self.value:
                    continue
                if own is _ABSENT:  # a class had inherited it
                    delattr(holder, attribute)
                else:
                    setattr(holder, attribute, own)
            _hooks.remove(self)


def wrap(owner: Any, name: str, wrapper: Callable, why: str, *, copies: bool = True) -> Hook:
    """Replaces a function of TensorFlow or Keras by `wrapper`; returns the hook, to undo it."""
    # `owner` is a class, a module or its dotted name. `wrapper` gets the function itself first.
    # With `copies` it is also replaced in modules that did `from owner import name`, except ours.
    owner = _owner(owner)
    where = f"{_name_of(owner)}.{name}"
    static = _current(owner, name, None)
    own = getattr(static, "__func__", static)  # of a static or class method
    if not callable(own):
        raise unknown_version(f"the function {where}", "none")
    _check_arguments(where, own, wrapper)
    if isinstance(owner, type) and name not in vars(owner) and own is static:
        inherited = own

        @functools.wraps(inherited)
        def own(self, *args, **kwargs):  # found at each call: a base may be wrapped later
            return getattr(super(owner, self), name)(*args, **kwargs)

        own.autograph_info__ = None

    @functools.wraps(own)
    def hooked(*args, **kwargs):
        return wrapper(own, *args, **kwargs)

    # AutoGraph must not convert it; it still converts a user's functions that are called in it.
    hooked.autograph_info__ = None  # type: ignore[attr-defined]
    is_method_of_class = isinstance(static, (staticmethod, classmethod))
    value = type(static)(hooked) if is_method_of_class else hooked
    with _lock:
        hook = put(owner, name, value, why)
        if copies and isinstance(owner, types.ModuleType):
            if _uncopied is None:
                _replace_copies([hook])
            else:
                _uncopied.append(hook)
    return hook


def put(owner: Any, name: str, value: Any, why: str, *, added: bool = False) -> Hook:
    """Replaces an attribute by any value, or with `added` adds it; otherwise like `wrap`."""
    owner = _owner(owner)
    if not added and _current(owner, name, _ABSENT) is _ABSENT:
        raise unknown_version(f"{_name_of(owner)}.{name}", "none")
    own = vars(owner).get(name, _ABSENT)
    hook = Hook(f"{_name_of(owner)}.{name}", why, value, _door, [(owner, name, own)])
    setattr(owner, name, value)
    with _lock:
        _hooks.append(hook)
    return hook


class Within(threading.local):
    """Notes, per thread, that functions which it wraps run, or a `with`; it is true meanwhile."""

    _depth = 0

    def __call__(self, own: Callable, *args: Any, **kwargs: Any) -> Any:
        with self:
            return own(*args, **kwargs)

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0


def doors() -> list[str]:
    """All doors behind which something stands."""
    return sorted({door for of_installer, _ in _installers for door in of_installer})


def listing(door: str | None = None) -> list[tuple[str, str, str]]:
    """(Name, reason, state) of each name that is replaced now, in alphabetical order."""
    with _lock:
        hooks = [hook for hook in _hooks if door in (None, hook.door)]
        return sorted((hook.name, hook.why, hook.state()) for hook in hooks)


def unknown_version(required: str, received: str) -> ImportError:
    """The error of a TensorFlow or Keras that lacks something, with the versions known to work."""
    modules = {name: sys.modules.get(name) for name in _FRAMEWORKS}
    running = [f"{name} {getattr(m, '__version__', '?')}" for name, m in modules.items() if m]
    return ImportError(
        f"sok_like needs {required}, and works with {KNOWN}. "
        f"Received: {received} in {', '.join(running)}"
    )


def _owner(owner):
    """A class or module, also by the module's name."""
    try:
        return importlib.import_module(owner) if isinstance(owner, str) else owner
    except ModuleNotFoundError as error:
        raise unknown_version(f"the module {owner}", f"no module {error.name}") from error


def _name_of(owner):
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def _check_arguments(where, own, wrapper):
    """Raises ImportError unless the wrapper's arguments are the first ones of the function."""
    theirs = inspect.signature(own).parameters
    ours = list(inspect.signature(wrapper).parameters.values())[1:]
    kinds = {parameter.kind for parameter in ours}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {*first, *(p.name for p in ours if p.kind is p.KEYWORD_ONLY)}
    their_first = [p.name for p in theirs.values() if p.kind in positional]
    enough = their_first[: len(first)] == first and named <= theirs.keys()
    for parameter in theirs.values():
        if parameter.name not in named:
            by_place = parameter.kind in (*positional, parameter.VAR_POSITIONAL)
            enough &= (parameter.VAR_POSITIONAL if by_place else parameter.VAR_KEYWORD) in kinds
    if not enough:
        required = f"the function {where}({', '.join(map(str, ours))})"
        raise unknown_version(required, f"{where}{inspect.signature(own)}")


def _current(owner, name, default):
    """What a name is now, or will be once copies are replaced."""
    value = inspect.getattr_static(owner, name, default)
    if _uncopied and any(value is hook._places[0][2] for hook in _uncopied):
        _replace_copies(_uncopied)
        value = inspect.getattr_static(owner, name, default)
    return value


def _replace_copies(hooks: list[Hook]) -> None:
    """Replaces functions of modules where other modules have them, and empties the list."""
    # One walk for all hooks, because TensorFlow has thousands of modules.
    of = {id(hook._places[0][2]): hook for hook in hooks}
    for module in list(sys.modules.values()) if hooks else ():
        # `vars` does not load what a lazy module would load on request.
        if not isinstance(module, types.ModuleType):
            continue
        if of.keys().isdisjoint(map(id, vars(module).values())):
            continue
        if str(vars(module).get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
            continue  # this package calls what it has imported
        for alias, value in list(vars(module).items()):
            # A hook may wrap what another one has put in this function's place.
            while (hook := of.get(id(value))) and module is not hook._places[0][0]:
                hook._places.append((module, alias, value))
                value = hook.value
                setattr(module, alias, value)
    hooks.clear()
