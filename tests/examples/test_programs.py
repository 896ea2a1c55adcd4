"""The example programs on 2 ranks: they learn, and what they print is right."""

import re

import pytest

from tests import forks
from tests.examples.conftest import FLIGHTS

pytestmark = pytest.mark.ranks


def alone(name, *words):
    """What the program prints on one rank."""
    done = forks.run(forks.ROOT / "examples" / f"{name}.py", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def number(what, output):
    return float(re.search(rf"{what} +([\d.]+)", output)[1])


@pytest.mark.slow
def test_columns_train_by_ftrl_and_adagrad():
    # 0.5 is chance. On so few flights most dates and crosses are seen a few times only.
    assert number("test AUC", alone("group_columns", *FLIGHTS)) > 0.65


def test_columns_train_the_same_model_on_two_ranks(on_two_ranks):
    one = number("test AUC", alone("group_columns", *FLIGHTS, "--optimizer", "adagrad"))
    two = number("test AUC", on_two_ranks("group_columns")[0])
    # Initial rows and batches are the same; only the rounding of sums differs.
    assert one > 0.65 and abs(one - two) < 0.005


def test_two_towers_recommend(on_two_ranks):
    first, second = on_two_ranks("two_tower")
    assert number("recall at 50", first) > 3 * number("by chance", first)
    assert "recall" not in second


@pytest.mark.slow
def test_films_are_rated_and_named(on_two_ranks):
    first, second = on_two_ranks("movielens")
    assert number("test RMSE", first) < 0.95  # always the mean of all ratings: 1.126
    assert re.search(r"films like +Star Wars: \w+", first)
    assert "RMSE" not in second


@pytest.mark.slow
def test_films_are_rated_as_by_stock_embeddings(on_two_ranks):
    spread = number("test RMSE", on_two_ranks("movielens", "--epochs", "8")[0])
    assert abs(spread - number("test RMSE", alone("movielens", "--dense"))) < 0.005


@pytest.mark.slow
def test_what_comes_next_is_learned_and_served(on_two_ranks, tmp_path):
    first, second = on_two_ranks("sasrec", "--folder", str(tmp_path))
    assert re.search(r"served as predicted +True", first)
    assert number("hit rate at 10", first) > 0.4  # at random: 0.1
    assert "hit rate" not in second


@pytest.mark.keras(slow=True)
def test_losses_agree_over_meshes_and_ranks(on_two_ranks):
    line = re.compile(r"^(\w+) on (\(\d, \d\)): losses ([\d. ]+)$", re.M)
    for output in on_two_ranks("keras_model_parallel"):
        found = {
            (name, shape): [float(loss) for loss in losses.split()]
            for name, shape, losses in line.findall(output)
        }
        names, shapes = ("classifier", "recommender"), ("(1, 2)", "(2, 1)")
        assert set(found) == {(name, shape) for name in names for shape in shapes}
        for name in names:
            by_columns, by_batch = (found[name, shape] for shape in shapes)
            assert by_columns == pytest.approx(by_batch, abs=2e-5)
            assert by_columns[-1] < by_columns[0]
        # 16 units over 2 ranks, and the users' rows.
        assert re.search(r"dense/kernel +\(288, 16\) +\(None, 'model'\) +\(288, 8\)", output)
        assert re.search(r"users/embeddings +\(1000, 8\) +\('model', None\) +\(500, 8\)", output)
