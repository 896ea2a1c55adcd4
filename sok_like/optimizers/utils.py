"""Separates the variables that this package trains from other variables."""

from collections.abc import Sequence
from typing import Any

from sok_like.runtime.checks import require
from sok_like.table.variable import is_embedding_variable


def split_embedding_variable_from_others(
    variables: Sequence[Any],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits a model's variables into embedding variables and others.

    Gradients of embedding variables are complete on the rank that owns the rows. Those of other
    variables must still be averaged over ranks, so programs often handle the two separately.

    Args:
        variables: List or tuple of trainable variables.

    Returns:
        `(embedding_variables, other_variables)`, two tuples in the order given.

    Raises:
        ValueError: `variables` is neither a list nor a tuple.
    """
    is_list = isinstance(variables, (list, tuple))
    require(is_list, "variables", "a list or a tuple of trainable variables", variables)
    embedding = tuple(v for v in variables if is_embedding_variable(v))
    return embedding, tuple(v for v in variables if not is_embedding_variable(v))


def filter_variables(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The same split under SOK 2.x's name: lists `(sok_variables, other_variables)`.

    Args:
        variables: Any iterable of variables.
    """
    embedding, other = split_embedding_variable_from_others(list(variables))
    return list(embedding), list(other)
