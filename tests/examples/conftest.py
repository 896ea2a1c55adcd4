"""The example programs on 2 ranks that stand ready."""

import pytest

from tests import forks, ready_ranks

FLIGHTS = ["--rows", "20000", "--batch-size", "512", "--embedding-dim", "4"]
PROGRAMS = {
    "keras_model_parallel": ["--samples", "200", "--epochs", "2"],
    "two_tower": ["--epochs", "1"],
    "group_columns": [*FLIGHTS, "--optimizer", "adagrad"],
    "serve_flights": ["--train", "--rows", "20000", "--every", "2"],
    "movielens": ["--epochs", "1"],
    "sasrec": ["--epochs", "3"],
}


@pytest.fixture(scope="session")
def on_two_ranks():
    """`on_two_ranks(name, *words)`: for each rank what the program of that name printed."""

    def outputs(name, *words):
        path, words = str(forks.ROOT / "examples" / f"{name}.py"), [*PROGRAMS[name], *words]
        found = ready_ranks.run(2, ready_ranks.run_program, ([path], words, "."))
        for error, _ in found:
            assert not error, error
        return [printed for _, printed in found]

    return outputs
