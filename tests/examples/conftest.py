"""The example programs on 2 ranks that stand ready."""

import pytest

from tests import cores, ready_ranks
from tests.examples import on_ranks

SERVED = "served"  # folder of the model that `serve_flights.py` trains
FLIGHTS = ["--rows", "40000", "--batch-size", "512", "--embedding-dim", "4"]
PROGRAMS = {
    "keras_model_parallel": ["--samples", "200", "--epochs", "2"],
    "two_tower": ["--epochs", "3"],
    "group_columns": [*FLIGHTS, "--optimizer", "adagrad"],
    "serve_flights": [
        *("--train", "--rows", "20000", "--every", "2"),
        *("--folder", str(cores.folder() / SERVED)),
    ],
    "movielens": ["--epochs", "1"],
    "sasrec": ["--epochs", "3", "--folder", str(cores.folder() / "sasrec")],
}


@pytest.fixture(scope="session")
def on_two_ranks():
    """`on_two_ranks(name)`: for each rank what the program of that name printed."""

    def outputs(name):
        with cores.alone():
            found = ready_ranks.run(2, on_ranks.run, (name, PROGRAMS[name]))
        errors = [text for text in found if "Traceback" in text]
        assert not errors, errors[0]
        return found

    return outputs
