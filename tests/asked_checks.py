"""Which checks the selected tests compare, so that a launch of ranks makes these alone.

They are read from the calls of the fixture `rank_results` in a test and in its fixtures. The check
of a call must be an expression of constants, names of the module and parameters of the test.
"""

import ast
import functools
import inspect
import pathlib
import textwrap


@functools.cache
def _calls(function):
    """The expressions of both arguments of each call of `rank_results`."""
    return [
        [compile(ast.Expression(argument), "<asked>", "eval") for argument in node.args]
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "rank_results"
    ]


def _value(expression, function, parameters):
    """Its value; None if it has names of another kind, such as variables of the function."""
    try:
        return eval(expression, {**function.__globals__, **parameters})
    except NameError:
        return None


def of(items, world_size):
    """The checks that the tests `items` compare on `world_size` ranks, in one order.

    Raises:
        ValueError: a call does not say which check.
    """
    found = set()
    for item in items:
        fixtures = {n: defs[-1].func for n, defs in item._fixtureinfo.name2fixturedefs.items()}
        # Not another one of the name, which some modules have.
        if "rank_results" not in fixtures or not _is_of_conftest(fixtures["rank_results"]):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for function in [item.function, *fixtures.values()]:
            if "rank_results" not in inspect.signature(function).parameters:
                continue
            for ranks, check in _calls(function):
                name = _value(check, function, parameters)
                if name is None:
                    raise ValueError(f"{item.nodeid}: which check does it compare? See {__file__}")
                if _value(ranks, function, parameters) in (None, world_size):
                    found.add(name)
    return sorted(found)


def _is_of_conftest(function):
    return pathlib.Path(inspect.getfile(function)).name == "conftest.py"
