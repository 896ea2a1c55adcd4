"""What the ranks of a multi-rank test do, many checks in one launch.

A check is a function without arguments that every rank calls; what it returns (anything pickle
takes) is compared by the test that asks for it, `rank_results(world_size)["module.check"]`, a list
with one item per rank. A check that raises gives a `Raised` in place of its result.
"""

import importlib
import os
import time
import traceback

# Module of this package: the checks it offers on so many ranks.
MODULES = (
    *("parity", "shards", "groups", "columns", "policies", "failures", "hashed"),
    *("distribution", "distribution_use", "fit", "drift", "by_key", "steps", "programs", "sok1"),
    "saving",
)


class Raised:
    """A check's exception, as text."""

    def __init__(self, error):
        self.kind = type(error).__name__
        self.message = str(error)
        self.text = "".join(traceback.format_exception(error))

    def __repr__(self):
        return self.text


def run(world_size):
    """Every check for `world_size` ranks; a dictionary of results by name."""
    import sok_like as sok
    from tests.checks.parity import SEED

    sok.Init(global_batch_size=12, seed=SEED)
    results, only = {}, os.environ.get("SOK_CHECKS", "")
    for name in MODULES:
        module = importlib.import_module(f"tests.checks.{name}")
        for check, function in module.checks(world_size).items():
            full_name = f"{name}.{check}"
            if not full_name.startswith(only):
                continue
            start = time.monotonic()
            try:
                results[full_name] = function()
            except Exception as error:
                results[full_name] = Raised(error)
            print(f"{full_name}: {time.monotonic() - start:.1f} s", flush=True)
    return results
