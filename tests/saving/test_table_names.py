"""A file's tables go to the tables of their names, whatever the order; ranks: checks/table_names.py."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import table_names as made

pytestmark = pytest.mark.keras
LAYERS = sorted(made.LAYERS)
# Features of the layer that reads what one of ["user", "item"] wrote.
SWAPPED, MORE, FEWER, RENAMED = ["item", "user"], ["new", "item", "user"], ["item"], ["item", "who"]


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_swapped_tables_get_their_own_content(sok, tmp_path, layer, kind):
    before = made.written(layer, ["user", "item"], tmp_path)
    model = made.model(layer, SWAPPED)
    made.load(kind, model, tmp_path)
    assert made.contents(model) == before


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize(
    "features, missing, extra",
    [(MORE, ["new"], []), (FEWER, [], ["user"]), (RENAMED, ["who"], ["user"])],
)
@pytest.mark.parametrize("layer", ["group", "own"])
def test_other_tables_are_named_and_start_empty(
    sok, tmp_path, layer, features, missing, extra, kind
):
    before = made.written(layer, ["user", "item"], tmp_path)
    model = made.model(layer, features)
    with made.refused(kind, features, ["user", "item"]):
        made.load(kind, model, tmp_path)
    model = made.model(layer, features)
    with pytest.warns(UserWarning) as told:
        made.load(kind, model, tmp_path, partial=True)
    text = next(str(w.message) for w in told if "Received: " in str(w.message))
    expected, received = text.split("Received: ")
    assert all(repr(name) in expected for name in features)
    assert all(repr(name) in received for name in ["user", "item"])
    known = {name: before[name] for name in features if name in before}
    assert made.contents(model) == known | dict.fromkeys(missing)


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("layer", ["group", "own"])
def test_a_renamed_table(sok, tmp_path, layer, kind):
    before = made.written(layer, ["user", "item"], tmp_path)
    model = made.model(layer, RENAMED)
    with sok.renamed_tables({"user": "who"}):
        made.load(kind, model, tmp_path)
    assert made.contents(model) == {"item": before["item"], "who": before["user"]}
    # Whole names, and two names that change places.
    model = made.model(layer, ["user", "item"])
    with sok.renamed_tables({"user": "item", "item": "user"}):
        made.load(kind, model, tmp_path)
    assert made.contents(model) == {"item": before["user"], "user": before["item"]}
    with pytest.raises(ValueError, match="'nobody'"), sok.renamed_tables({"nobody": "user"}):
        made.load(kind, made.model(layer, ["user", "item"]), tmp_path)
