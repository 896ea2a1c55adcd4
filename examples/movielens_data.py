"""MovieLens-100K as the tables of ratings, films and users that the PyPI package `recbole` ships.

100,000 ratings, 1 to 5 stars, of 1,682 films by 943 users (Harper and Konstan, The MovieLens
Datasets, 2015). Only the data files of the package are read; no code of it is imported. Ids and
genres stay strings, as in the files.
"""

import csv
import dataclasses
import importlib.util
import pathlib

import numpy as np

HOLD_OUT_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Ratings; entry `i` of every field belongs to the same rating.

    Attributes:
        users: string `[ratings]`, ids.
        films: string `[ratings]`, ids.
        genres: list of lists of strings, the film's genres.
        stars: float32 `[ratings]`, 1 to 5.
    """

    users: np.ndarray
    films: np.ndarray
    genres: list[list[str]]
    stars: np.ndarray

    def __len__(self):
        return len(self.stars)

    def take(self, rows):
        """The ratings with the numbers in `rows`, `[num_rows]`."""
        genres = [self.genres[row] for row in rows]
        return Ratings(self.users[rows], self.films[rows], genres, self.stars[rows])


def load(seed=0):
    """Reads the files and splits the ratings at random.

    Returns:
        Ratings to train on, ratings to test on, and the titles of the films by id.

    Raises:
        FileNotFoundError: the package `recbole` is not installed.
    """
    films = {row["item_id:token"]: row for row in _read("item")}
    ratings = list(_read("inter"))
    all_ratings = Ratings(
        np.array([row["user_id:token"] for row in ratings]),
        np.array([row["item_id:token"] for row in ratings]),
        [films[row["item_id:token"]]["class:token_seq"].split() for row in ratings],
        np.array([row["rating:float"] for row in ratings], np.float32),
    )
    order = np.random.default_rng(seed).permutation(len(all_ratings))
    held_out = int(len(order) * HOLD_OUT_SHARE)
    titles = {film: row["movie_title:token_seq"] for film, row in films.items()}
    return all_ratings.take(order[held_out:]), all_ratings.take(order[:held_out]), titles


def histories():
    """For each user the ids of the films, from the first rated to the last: lists of strings.

    Raises:
        FileNotFoundError: the package `recbole` is not installed.
    """
    found = {}
    for row in sorted(_read("inter"), key=lambda row: float(row["timestamp:float"])):
        found.setdefault(row["user_id:token"], []).append(row["item_id:token"])
    return [found[user] for user in sorted(found)]


def _read(kind):
    """Yields one dictionary per line of the package's file of that kind."""
    package = importlib.util.find_spec("recbole")
    if package is None:
        raise FileNotFoundError(
            "MovieLens-100K is read from the files of the package `recbole`, which is not "
            "installed: pip install --no-deps recbole==1.2.1"
        )
    folder = pathlib.Path(package.submodule_search_locations[0], "dataset_example", "ml-100k")
    with open(folder / f"ml-100k.{kind}", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
