"""The table of private names has all that the package reads, and each of them exists."""

import ast
import pathlib

import pytest
import tensorflow as tf

from sok_like.runtime.framework import private_names

pytestmark = pytest.mark.keras

ROOT = pathlib.Path(private_names.__file__).resolve().parents[2]
NOT_READ = {
    *("_asdict", "_fields", "_replace"),  # of Python's classes
    "_TapeGradientFunctions",  # one of its methods is wrapped
    "_descriptions",  # of this package, set by another way
    *("_exit", "_current_frames"),  # of `os` and `sys`
}
PUT_TOGETHER = {  # in f-strings
    *("_outputs_struct", "_nested_outputs", "_trainable_weights", "_non_trainable_weights"),
    "_non_trainable_variables",
}


def names_of(sources):
    """Private attributes that the package reads and does not set or define; and all its words."""
    read, own, words = set(), set(), set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                (read if isinstance(node.ctx, ast.Load) else own).add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    private = {name for name in read - own if name.startswith("_") and not name.startswith("__")}
    return private, read | own | words


def test_every_private_name_is_in_the_table():
    texts = private_names._TENSORFLOW, private_names._KERAS_3, private_names._TF_KERAS
    table = private_names.table(*texts)
    names = {name for listed in table.values() for name in listed}
    listed = names | {owner.partition(":")[2] for owner in table}
    paths = [path for path in ROOT.rglob("*.py") if path.name != "private_names.py"]
    read, known = names_of(path.read_text() for path in paths)
    read = {name for name in read - NOT_READ if not name.startswith(("_sok_", "_dmp_"))}
    assert read - listed == set()
    assert names - known <= PUT_TOGETHER


def test_all_exist():
    assert list(private_names.missing()) == []


def test_a_name_that_is_gone_raises(monkeypatch):
    graph = "tensorflow.python.framework.ops:Graph"
    table = f"{graph}\n    _gone\ntensorflow.gone\n    _name\n{graph}Gone\n    _name\n"
    monkeypatch.setattr(private_names, "_TENSORFLOW", table)
    assert list(private_names.missing())[:3] == [
        f"{graph}._gone",
        "tensorflow.gone",
        f"{graph}Gone",
    ]
    with pytest.raises(ImportError, match=r"needs private names .* Received: no \[.*Graph._gone"):
        private_names._check()


def test_an_attribute_that_only_a_method_sets_is_found(monkeypatch):
    table = "tensorflow.python.framework.ops:Graph\n    _names_in_use\n"
    assert not hasattr(tf.Graph, "_names_in_use")
    monkeypatch.setattr(private_names, "_TENSORFLOW", table)
    assert list(private_names.missing()) == []
