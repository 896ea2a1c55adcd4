"""Every public name has one entry in the site's reference, whose docstring says enough.

The site is built without importing anything; so these checks are here, where TensorFlow is.
"""

import enum
import importlib
import inspect
import re
import textwrap

import pytest
import tensorflow as tf

from tests.docs.documents import DOCUMENTS, entries, members

# Modules with public names. Those of SOK 1.x that only lead to names of others are left out.
DOORS = [
    "sok_like",
    *(
        f"sok_like.{name}"
        for name in (
            *("callbacks", "deeprec", "dist_model_parallel", "distribution", "feature_column"),
            *("kit_lib", "optimizers", "sok2", "tf.keras.mixed_precision", "tf.keras.optimizers"),
            "tf_distributed_embedding",
        )
    ),
]
# They take anything.
NEVER_RAISE = {
    *("sok_like.filter_variables", "sok_like.sok2.filter_variables"),
    "sok_like.dist_model_parallel.is_local",
}
# Arguments that are tensors or arrays: where one is taken, the docstring states shapes.
ARRAYS = {"ids", "indices", "keys", "rows", "sp_ids", "tensor", "values"}


def public(door):
    module = importlib.import_module(door)
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    found = {f"{door}.{name}": getattr(module, name) for name in names}
    return {path: value for path, value in found.items() if not inspect.ismodule(value)}


def is_ours(value):
    """Whether it is a class or a function of this package, with a docstring of its own."""
    ours = callable(value) and value.__module__.startswith("sok_like")
    return ours and not (isinstance(value, type) and issubclass(value, enum.Enum))


def resolve(path):
    """What an entry names. A module is preferred to a function of the same name, as MkDocs does."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AssertionError(path)


PUBLIC = {path: value for door in DOORS for path, value in public(door).items()}
ENTRIES = [path for document in DOCUMENTS for path in entries(document)]
CALLABLES = [path for path in ENTRIES if is_ours(resolve(path))]
MEMBERS = {path: names for document in DOCUMENTS for path, names in members(document).items()}


def test_every_public_name_has_exactly_one_entry():
    described = [id(resolve(path)) for path in ENTRIES]
    counts = {path: described.count(id(value)) for path, value in PUBLIC.items()}
    assert {path: count for path, count in counts.items() if count != 1} == {}
    known = {id(value) for value in PUBLIC.values()}
    assert [path for path in ENTRIES if id(resolve(path)) not in known] == []


def documented(value):
    """Docstring of a function, or those of a class and its constructor."""
    texts = [inspect.getdoc(value) or ""]
    if isinstance(value, type) and value.__init__.__doc__:
        texts.append(inspect.getdoc(value.__init__))
    return "\n".join(texts)


def own_arguments(value):
    """Arguments, without `self`; none where a class has the constructor of TensorFlow or Keras."""
    function = value.__init__ if isinstance(value, type) else value
    if not getattr(function, "__module__", "").startswith("sok_like"):
        return []
    return [p for p in inspect.signature(function).parameters if p != "self"]


def section(text, title):
    """The indented lines below `title`."""
    found = re.search(rf"^{title}:\n((?:(?: +.*)?\n)*)", text + "\n", flags=re.M)
    return textwrap.dedent(found[1]) if found else ""


@pytest.mark.parametrize("path", CALLABLES)
def test_docstring_names_arguments_errors_and_shapes(path):
    value, arguments = resolve(path), own_arguments(resolve(path))
    text = documented(value)
    lines = re.findall(r"^([*\w][*\w, ]*):", section(text, "Args"), flags=re.M)
    named = {name.strip("* ") for line in lines for name in line.split(",")}
    assert set(arguments) - {"args", "kwargs"} <= named
    if not {"args", "kwargs"} & set(arguments) and arguments:
        assert named <= set(arguments)
    if arguments and path not in NEVER_RAISE:
        methods = [getattr(value, name) for name in MEMBERS.get(path, ())]
        assert any(section(documented(each), "Raises") for each in [value, *methods])
    if isinstance(value, type) and issubclass(value, tf.keras.layers.Layer):
        assert re.search("Input shape:|inputs:", text)
        assert re.search("Output shape:|Returns:", text)
    elif ARRAYS & set(arguments):
        assert re.search(r"`\[.*\]`|shape", text)


@pytest.mark.parametrize("path", MEMBERS)
def test_listed_members_are_documented(path):
    # MkDocs is silent about a member that does not exist.
    for name in MEMBERS[path]:
        assert inspect.getdoc(getattr(resolve(path), name)), name


def test_tables_entry_lists_what_tab_shows():
    path = "sok_like.EmbeddingVariable"
    shown = {name for name in dir(resolve(path)) if not name.startswith("_")}
    assert set(MEMBERS[path]) == shown - {"name", "dtype", "device", "trainable"}  # tf.Variable's
