"""The benchmark of sharded against replicated tables: both sides do the same work."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import synthetic_data
import synthetic_models

from benchmarks import dmp, dmp_memory
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.examples.test_synthetic_models import SHAPES, SMALL, initial_values


@pytest.mark.keras
def test_replicas_compute_what_spread_tables_compute(sok):
    ours = synthetic_models.SyntheticModel(SMALL, dp_input=True)
    peer = dmp._replicated_model(SMALL, 1.0)
    inputs = synthetic_models.as_tensors(synthetic_data.make_batch(SMALL, 1.0, 12, 1.05, 0))[:2]
    ours(inputs), peer(inputs)
    tables = initial_values(SHAPES)
    ours.embeddings.set_weights(tables)
    for layer, value in zip(peer.tables, tables, strict=True):
        layer.set_weights([value])
    for mine, theirs in zip(ours.dense, peer.dense, strict=True):
        theirs.set_weights(mine.get_weights())
    np.testing.assert_allclose(ours(inputs), peer(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.keras
@pytest.mark.parametrize("rule, copies", [("sgd", 1), ("adagrad", 2), ("adam", 3)])
def test_bytes_of_variables_count_slots(sok, rule, copies):
    if rule == "sgd" and not is_keras_3():
        copies = 2  # tf_keras makes a momentum whether or not it is used
    batches = [synthetic_data.make_batch(SMALL, 1.0, 12, 1.05, 0)]
    trainer = dmp.Trainer(dmp.OURS, rule, SMALL, 1.0, batches)
    # Tables 2 x 40 x 4, 300 x 6, 3 x 10 x 4; layers 12 pools and 5 features to 8 to 1.
    floats = 320 + 1800 + 120 + (17 * 8 + 8) + (8 + 1)
    counters = trainer.variable_bytes() - 4 * copies * floats
    assert 0 <= counters <= 24  # steps done and learning rate


def test_memory_table_shows_shares_of_the_peer():
    def of(mib):
        return dict.fromkeys(dmp_memory.COLUMNS, mib * 2**20)

    table = dmp_memory.table({"sgd": {dmp.OURS: of(150), dmp.PEER: of(300)}})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[2] == ["sgd", "ours", *["150 (0.50)"] * 3]
    assert rows[3] == ["sgd", dmp.PEER, *["300 (1.00)"] * 3]


def test_command_lines():
    assert dmp.parse(["--only", "sgd", "--quick"]).only == "sgd"
    assert dmp_memory.parse([]).ranks == 2
