"""The short form of what `make asan` and `make tsan` do with the op library."""

from tests.lookup import stress_ops


def test_functions_share_a_table_from_several_threads(sok):
    for calls in stress_ops.run(1).values():
        assert min(calls[kind] for kind in ("steps", "reads", "exports")) > 0
