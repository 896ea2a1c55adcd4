"""What the ranks of a multi-rank test do, many checks in one launch.

A check is a function without arguments that every rank calls; what it returns (anything pickle
takes) is compared by the test that asks for it, `rank_results(world_size, "module.check")`, a list
with one item per rank. A check that raises gives a `Raised` in place of its result. A launch makes
the checks that the selected tests ask for (tests/asked_checks.py).
"""

import dataclasses
import functools
import importlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable

from tests import cores

# The modules of this package, and on how many ranks at most tests ask for their checks.
MODULES = {
    **{"parity": 4, "hashed": 4, "dmp": 4, "distribution": 4},
    **{"shards": 3, "groups": 3, "columns": 3, "policies": 3, "failures": 3},
    **{"steps": 3, "programs": 3, "serving_parts": 3, "serving_dense": 4},
    **{"distribution_use": 2, "fit": 2, "drift": 2, "by_key": 2, "sok1": 2, "saving": 2},
    **{"optimizers": 2, "distribution_steps": 4, "distribution_optimizers": 4},
    **{"distribution_batches": 4, "distribution_ops": 2},
    **{"loss_scale": 2, "serving": 2, "inspection": 2, "files": 4, "dense_files": 2, "parts": 2},
    **{"sok2": 3, "sok2_dense": 3, "norms": 2, "deeprec": 2, "deltas": 2, "tapes": 2, "saver": 3},
    **{"own_layers": 2, "gathered": 2, "background": 2, "table_names": 2},
    **{"fused": 2, "storage": 2, "other_ranks": 4, "fewer_ranks": 3, "not_averaged": 2, "wire": 2},
    **{"masks": 2, "resuming": 2, "live": 2, "global_metrics": 2},
}
# Modules of numbers and errors, whose ranks are threads of the test's process. Each front door has
# checks on processes, too: parity, shards, dense files, `fit`, distributions.
ON_THREADS = {
    *("groups", "hashed", "dmp", "norms", "wire", "by_key", "columns", "failures"),
    *("fused", "loss_scale", "sok2_dense", "storage"),
    *("tapes", "masks", "global_metrics"),
}
# What `make test-all` alone runs on so many ranks, and what it alone runs on two under tf_keras:
# names of checks, or their beginnings. What each holds, others hold on other numbers of ranks, with
# another optimizer, eagerly or under the other Keras.
_IN_GRAPHS = (
    *("not_averaged.dmp_by_rank_nothing_graph", "not_averaged.dmp_start_graph"),
    *("not_averaged.group_nothing_graph", "not_averaged.sok_apart_graph"),
)
SLOW = {
    2: (
        *("parity.sgd", "parity.momentum", "parity.adagrad", "parity.ftrl"),
        *("parity.adam.sum", "parity.lazy_adam", "hashed.train_adam", "hashed.train_momentum"),
        *("distribution.2x1", "distribution_steps.2x1", "distribution_steps.1x2.c"),
        *("distribution_steps.1x2.keras_ops", "distribution_steps.1x2.noise"),
        *("distribution_steps.1x2.norm", "distribution_steps.1x2.global_norm"),
        *("distribution_batches.same_several_steps", "not_averaged.fit_stock"),
        *("not_averaged.fit_sok_in_horovod", "fit.fit_all_to_all", "fit.fit_distributed"),
        *("masks.dmp-average", "masks.all2all", "masks.fused", "masks.dense", "other_ranks.tape"),
        *("drift.broadcast_unbuilt", "dmp.one_id_a_sample"),
        *("distribution_batches.same_own_step", "distribution_batches.own"),
        *("distribution_optimizers.compiled", "distribution_use.deferred"),
        *("distribution_use.from_files", "distribution_use.dataset", "distribution_use.eager"),
        *("distribution_use.own_loop", "distribution_use.exported", "masks.hash-lstm"),
        *("masks.group-attention", "masks.strings", "masks.dmp_hashed", "masks.group-average"),
        *("dmp.basic.adam", "dmp.basic.sgd", "dmp.rows", "dmp.replicated"),
        "serving_dense.parallel",
        *("serving_dense.peak_rows", "serving_dense.peak_parallel"),
        *(*_IN_GRAPHS, "not_averaged.dmp_horovod", "not_averaged.dmp_by_hand_graph"),
        *("not_averaged.dmp_nothing_graph", "not_averaged.sok_by_hand_graph"),
        *("not_averaged.sok_horovod_graph", "not_averaged.sok_nothing_graph"),
    ),
    3: (
        *("parity.sgd", "parity.adam", "columns", "sok2.dense", "sok2_dense.clipped", "programs"),
        *("serving_dense.parallel", "serving_dense.peak", "serving_dense.cannot"),
        *("serving_dense.tables", "serving_parts.peak", "serving_parts.in_parts", "dmp.columns"),
        *("dmp.rows", "hashed.alone", "hashed.model_parallel", "hashed.train", "groups.train"),
    ),
    4: (
        *("parity", "dmp.columns", "dmp.rows", "dmp.mixed", "hashed", "distribution.2x2"),
        *("distribution_steps.2x2.clip_by_norm", "distribution_steps.2x2.norm"),
    ),
}
SLOW_UNDER_TF_KERAS = (
    *("dmp.one_id_a_sample", "dmp.model_parallel_inputs", "dmp.user_guide", "fit.fit_columns"),
    "fit.fit_group_layer",
    *("hashed.train_momentum", "hashed.train_adagrad", "hashed.model_parallel", "hashed.alone"),
    *("distribution.2x1", "distribution_steps.2x1", "distribution_steps.penalties"),
    *("distribution_steps.1x2.tf.gradients", "distribution_steps.1x2.global_norm"),
    *("distribution_use.deferred", "distribution_use.dataset", "distribution_use.published"),
    *("distribution_use.made_before", "distribution_use.backed_up", "distribution_use.from_files"),
    *("distribution_use.exported", "distribution_use.own_loop"),
    *("distribution_optimizers.plain", "distribution_optimizers.mixed"),
    *("distribution_optimizers.compiled", "distribution_optimizers.short"),
    *("distribution_optimizers.unsharded", "drift.other_rates_of_tables", "drift.other_schedules"),
    *("distribution_batches.same", "distribution_batches.several_steps"),
    *("distribution_batches.inputs", "distribution_batches.labels", "distribution_batches.ids"),
    *("distribution_batches.own_2x1", "other_ranks.parallel", "distribution_ops", "parity.sgd"),
    *("dmp.columns", "other_ranks.tape", "by_key", "wire", "parts", "gathered", "fused"),
    *("files.session", "files.refused", "files.resumed", "serving", "masks", *_IN_GRAPHS),
    *("dmp.replicated", "resuming", "live", "distribution.1x2", "own_layers", "other_ranks.dense"),
    *("dense_files", "dmp.rows", "inspection", "fit.tuned", "not_averaged.dmp_horovod_eager"),
    *("not_averaged.fit_sok", "not_averaged.fit_dmp", "not_averaged.fit_own_step"),
)


class Raised:
    """A check's exception, as text."""

    def __init__(self, error):
        self.kind = type(error).__name__
        self.message = str(error)
        self.text = "".join(traceback.format_exception(error))

    def __repr__(self):
        return self.text


@dataclasses.dataclass(frozen=True)
class Alone:
    """In a check's result: what `function(*args)` finds in one process without ranks.

    `computed` puts it there in the process of the test. Every rank would compute the same.
    """

    function: Callable
    args: tuple = ()


@functools.cache
def _computed(alone):
    return alone.function(*alone.args)


def computed(result):
    """A check's result with the value of each `Alone` in its place."""
    if not isinstance(result, dict):
        return result
    return {k: _computed(v) if isinstance(v, Alone) else v for k, v in result.items()}


def is_slow(world_size, name):
    """Whether `make test-all` alone runs the check `name` on so many ranks."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
    slow = SLOW.get(world_size, ())
    if legacy:
        slow = SLOW_UNDER_TF_KERAS
    return world_size > 1 and name.startswith(slow) and not os.environ.get("SLOW")


def on_threads(name):
    """Whether the ranks of the check `name` are threads of the test's process."""
    return name.partition(".")[0] in ON_THREADS


def run_on_threads(world_size, name):
    """What the check `name` finds, or the exception that it raises, on each rank."""
    from tests import thread_ranks  # loads TensorFlow

    module, _, of_module = name.partition(".")

    def check():
        return importlib.import_module(f"tests.checks.{module}").checks(world_size)[of_module]()

    cores.clear_session()
    found = thread_ranks.run(world_size, check)
    return [Raised(result) if isinstance(result, BaseException) else result for result in found]


def run(world_size, only, folder):
    """The checks named in `only`: results by name, without those of other numbers of ranks.

    Their temporary files are in `folder`, which the test run removes in the end.
    """
    os.makedirs(folder, exist_ok=True)
    own, tempfile.tempdir = tempfile.tempdir, folder
    try:
        return _results(world_size, only)
    finally:
        tempfile.tempdir = own


def _results(world_size, only):
    import sok_like as sok
    from tests.checks.parity import SEED

    cores.tune_no_datasets()
    if world_size == 2 and not os.environ.get("SLOW"):
        cores.optimize_no_graphs()  # other numbers of ranks have it
    sok.Init(global_batch_size=12, seed=SEED)
    results = {}
    asked = {name.partition(".")[0] for name in only}
    for name in [name for name, most in MODULES.items() if name in asked and world_size <= most]:
        module = importlib.import_module(f"tests.checks.{name}")
        for of_module, function in module.checks(world_size).items():
            full_name = f"{name}.{of_module}"
            if full_name not in only or is_slow(world_size, full_name):
                continue
            # Ranks number layers without a name. A check in a world of fewer ranks, or one that
            # fails, leaves ranks at other numbers.
            cores.clear_session()
            start, cpu = time.monotonic(), time.process_time()
            try:
                results[full_name] = function()
            except Exception as error:
                results[full_name] = Raised(error)
                print(results[full_name].text)  # seen where the ranks part by it, and end nowhere
            wall, cpu = time.monotonic() - start, time.process_time() - cpu
            print(f"{full_name}: {wall:.1f} s, {cpu:.1f} of them on the processor", flush=True)
    return results
