"""Which checks a launch makes, by the tests that were selected."""

import types

import pytest

from tests import asked_checks, conftest

WORLD = 2


def literal(rank_results):
    rank_results(2, "fit.tuned")


def of_parameters(rank_results, world_size, door):
    rank_results(world_size, f"fit.fit_{door}")


def of_names(rank_results):
    [result for n in (1, 3) for result in rank_results(n, "sok2." + "dump")]
    rank_results(WORLD, "sok2.load")


def hidden(rank_results):
    name = "fit.tuned"
    rank_results(2, name)


def fixture(rank_results, world_size):
    return rank_results(world_size, "dmp.fit")


def by_fixture(fixture):
    pass


def item(function, parameters=None, fixtures=(), of=conftest.may_have_device):
    """As pytest collects it; `of` is any function of the file that has `rank_results`."""
    functions = {"rank_results": of, **{f.__name__: f for f in fixtures}}
    definitions = {name: [types.SimpleNamespace(func=f)] for name, f in functions.items()}
    made = types.SimpleNamespace(function=function, nodeid=function.__name__)
    made._fixtureinfo = types.SimpleNamespace(name2fixturedefs=definitions)
    if parameters:
        made.callspec = types.SimpleNamespace(params=parameters)
    return made


@pytest.mark.parametrize(
    "collected, expected",
    [
        ([item(literal)], {2: ["fit.tuned"], 3: []}),
        ([item(of_parameters, {"world_size": 3, "door": "group"})], {2: [], 3: ["fit.fit_group"]}),
        ([item(of_names), item(literal)], {2: ["fit.tuned", "sok2.dump", "sok2.load"]}),
        ([item(of_names)], {1: ["sok2.dump"]}),
        ([item(by_fixture, {"world_size": 2}, [fixture])], {2: ["dmp.fit"]}),
        ([item(literal, of=literal)], {2: []}),  # a module's own `rank_results`
    ],
)
def test_checks_are_read_from_calls(collected, expected):
    assert {ranks: asked_checks.of(collected, ranks) for ranks in expected} == expected


def test_a_check_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="hidden: which check does it compare?"):
        asked_checks.of([item(hidden)], 2)
