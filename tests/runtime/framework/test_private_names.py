"""The table of private names has all whose absence nobody would notice, and each of them exists."""

import pathlib
import re

import pytest
import tensorflow as tf

from sok_like.runtime.framework import private_names

pytestmark = pytest.mark.keras

SOURCES = pathlib.Path(private_names.__file__).resolve().parents[2].rglob("*.py")
ASKED = r'\b(?:getattr|hasattr)\([^"()]*(?:\([^"()]*\)[^"()]*)*"(_[a-z]\w*)"'
OWN = r"\b(?:def|class) (_\w+)", r"\.(_\w+)(?:, [\w.]+)* = ", r"(?m)^\s+(_\w+)(?:: .*)? = "
# Some versions of Keras 3 have the first two. Masks are attributes of some tensors.
MAY_BE_MISSING = {"_is_excluded_from_weight_decay", "_model", "_keras_mask"}


def test_every_private_name_that_may_be_missing_is_in_the_table():
    tables = private_names._TENSORFLOW, private_names._KERAS_3, private_names._TF_KERAS
    names = {name for table in tables for words in table.values() for name in words.split()}
    text = "\n".join(path.read_text() for path in SOURCES if path.name != "private_names.py")
    own = {name for pattern in OWN for name in re.findall(pattern, text)}
    asked = {name for name in re.findall(ASKED, text) if not name.startswith(("_sok_", "_dmp_"))}
    assert len(asked) > 30 and asked - own - names - MAY_BE_MISSING == set()
    assert names - set(re.findall(r"\w+", text)) == set()


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
