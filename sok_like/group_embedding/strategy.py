"""`sok.enable_distributed_strategy`: whether this process looks up alone or with others.

Nothing is stored: a table's keys are on rank `key % world_size`, whatever the number of tables in a
group. With one process a group lookup is one fused op without exchanges ("localized"), with several
it is an exchange between them ("collective"). DeepRec instead puts whole tables on one process each
as soon as a group has more tables than there are processes. There a checkpoint changes its shape
when a feature is added; here it does not.
"""

from __future__ import annotations

from sok_like.runtime.ranks import comm, horovod
from sok_like.runtime.ranks.initialize import ensure_initialized

STRATEGIES = ("collective", "localized", None)


def enable_distributed_strategy(strategy: str | None = "collective") -> None:
    """DeepRec's switch, which initializes the package; use it instead of `sok.Init`, or after it.

    If `sok.Init` has been called, nothing else is initialized. To choose a seed, call `sok.Init`.
    In a `tf.compat.v1` graph it takes effect at once; there is no op to run.

    Args:
        strategy: "collective": keys of every table are spread over all processes of the job, which
            may be only one. If Horovod is installed it is always initialized, because scripts then
            use `hvd.size()`. "localized" or None: this process is the whole job.

    Raises:
        ValueError: another strategy, such as DeepRec's "parameter_server".
        RuntimeError: "localized" in a job of several processes: each would train its own copy of
            the tables, and never see the others' gradients.
        ImportError: several processes, and neither MPI nor Horovod is installed.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {STRATEGIES}. Received: strategy={strategy!r}")
    if strategy != "collective":
        is_initialized = comm.is_initialized()
        world_size = comm.current().world_size if is_initialized else comm.launched_world_size()
        if world_size > 1:
            raise RuntimeError(
                "A localized strategy needs a job of one process: with more, each would train a "
                "private copy of every table. Use strategy='collective'. "
                f"Received: strategy={strategy!r} in a job of {world_size} processes"
            )
    by_program = horovod.import_if_installed() if strategy == "collective" else None
    ensure_initialized()
    if by_program is not None and not by_program.is_initialized():
        by_program.init()
