"""Checks of arguments, and functions of lists, for several packages. Standard library only."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

COMBINERS = ("sum", "mean", "sqrtn")
OPTIONAL_COMBINERS = (None, *COMBINERS)


def as_list(value: Any) -> list[Any]:
    """A list or tuple as a list; anything else as the only item of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def positions_of(values: Iterable[Any]) -> dict[Any, list[int]]:
    """The positions of each distinct value, in order of first appearance."""
    positions: dict[Any, list[int]] = {}
    for position, value in enumerate(values):
        positions.setdefault(value, []).append(position)
    return positions


def as_integer(value: Any) -> int | None:
    """`value` as an int; None unless it is an integer of Python or NumPy (a bool is not)."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_integer(argument: str, value: Any, minimum: int = 1, of: str = "") -> int:
    """`value` as an int; ValueError unless it is an integer >= `minimum`, which is 0 or 1."""
    integer = as_integer(value)
    if integer is None or integer < minimum:
        required = "a positive integer" if minimum == 1 else f"an integer >= {minimum}"
        raise wrong_argument(argument, required, value, of)
    return integer


def check_combiner(combiner: Any, legal: Sequence[str | None] = COMBINERS) -> Any:
    """`combiner` itself; ValueError unless it is one of `legal`."""
    if any(combiner is choice or combiner == choice for choice in legal):
        return combiner
    raise wrong_argument("combiner", f"one of {tuple(legal)}", combiner)


def unmet(
    subject: str, required: str, received: Any, of: str = "", error: type[Exception] = ValueError
) -> Exception:
    """The error for what a subject must do or be: what was received, `of` which table."""
    where = f" ({of})" if of else ""
    return error(f"{subject} must {required}. Received: {received}{where}")


def wrong_argument(
    argument: str, required: str, received: Any, of: str = "", error: type[Exception] = ValueError
) -> Exception:
    """The error for an argument."""
    return unmet(f"`{argument}`", f"be {required}", f"{argument}={received!r}", of, error)


def require(fits: bool, argument: str, required: str, received: Any, of: str = "") -> None:
    """Raises ValueError unless an argument fits."""
    if not fits:
        raise wrong_argument(argument, required, received, of)
