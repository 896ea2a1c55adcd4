"""The table of private names has all whose absence nobody would notice, and each of them exists."""

import ast
import pathlib

import pytest
import tensorflow as tf

from sok_like.runtime.framework import private_names

pytestmark = pytest.mark.keras

ROOT = pathlib.Path(private_names.__file__).resolve().parents[2]
ASKING = ("getattr", "hasattr")
# Some versions of Keras 3 have the first two. Masks are attributes of some tensors.
MAY_BE_MISSING = {"_is_excluded_from_weight_decay", "_model", "_keras_mask"}


def names_of(sources):
    """Private attributes that the package asks for, does not set or define; and all its words."""
    asked, own, words = set(), set(), set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
                own |= set() if isinstance(node.ctx, ast.Load) else {node.attr}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= set(node.value.replace("{0}", "").split())
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ASKING:
                name = getattr(node.args[1], "value", None)  # None: an expression
                has_default = len(node.args) == 3 or node.func.id == "hasattr"
                asked |= {name} if has_default and isinstance(name, str) else set()
    private = {name for name in asked - own if name.startswith("_") and not name.startswith("__")}
    return private, own | words


def test_every_private_name_that_may_be_missing_is_in_the_table():
    tables = private_names._TENSORFLOW, private_names._KERAS_3, private_names._TF_KERAS
    names = {name for table in tables for words in table.values() for name in words.split()}
    paths = [path for path in ROOT.rglob("*.py") if path.name != "private_names.py"]
    asked, known = names_of(path.read_text() for path in paths)
    asked = {name for name in asked if not name.startswith(("_sok_", "_dmp_"))}
    assert asked - names - MAY_BE_MISSING == set()
    stems = tuple(word for word in known if word.endswith("_") and len(word) > 1)  # in f-strings
    assert {name for name in names - known if not name.startswith(stems)} == set()


def test_all_exist():
    assert list(private_names.missing()) == []


def test_a_name_that_is_gone_raises(monkeypatch):
    graph = "tensorflow.python.framework.ops:Graph"
    table = {graph: "_gone", "tensorflow.gone": "_name", f"{graph}Gone": "_name"}
    monkeypatch.setattr(private_names, "_TENSORFLOW", table)
    assert list(private_names.missing())[:3] == [
        f"{graph}._gone",
        "tensorflow.gone",
        f"{graph}Gone",
    ]
    with pytest.raises(ImportError, match=r"needs private names .* Received: no \[.*Graph._gone"):
        private_names._check()


def test_an_attribute_that_only_a_method_sets_is_found(monkeypatch):
    table = {"tensorflow.python.framework.ops:Graph": "_names_in_use"}
    assert not hasattr(tf.Graph, "_names_in_use")
    monkeypatch.setattr(private_names, "_TENSORFLOW", table)
    assert list(private_names.missing()) == []
