"""Which engine carries the exchanges of a job: MPI, called by ops of the package, or Horovod."""

import os

from sok_like.runtime.native import devices
from sok_like.runtime.ranks import comm, launchers
from sok_like.runtime.ranks.comm import Communicator, SingleProcess
from sok_like.runtime.ranks.horovod import HorovodCommunicator
from sok_like.runtime.ranks.mpi import MpiCommunicator

ENGINES = ("mpi", "horovod")
# Set for each process by `horovodrun`.
_OF_HOROVODRUN = ("HOROVOD_SIZE", "HOROVOD_CONTROLLER", "HOROVOD_GLOO_RENDEZVOUS_ADDR")


def engine_of_job() -> tuple[str, str]:
    """The engine of a job of several processes, and why it is this one."""
    chosen = os.environ.get("SOK_ENGINE", "")
    if chosen and chosen not in ENGINES:
        raise ValueError(f"SOK_ENGINE must be one of {ENGINES}. Received: SOK_ENGINE={chosen!r}")
    if chosen:
        return chosen, f"SOK_ENGINE={chosen}"
    if launchers.imported_horovod() is not None:
        return "horovod", "the program has imported it"
    variable = next((name for name in _OF_HOROVODRUN if name in os.environ), None)
    if variable:
        return "horovod", f"the launcher set {variable}"
    if launchers.horovod_library() is not None and devices.gpu_in_use():
        return "horovod", "tables in device memory exchange by NCCL"
    if launchers.mpi_library() is None:
        return "horovod", "no library of MPI was found"
    return "mpi", "the launcher connects processes by MPI"


def choose(groups_later: bool = False) -> Communicator:
    """The communicator that fits how this process was launched; `groups_later` as for Horovod's."""
    if comm.launched_world_size() == 1:
        comm.check_connected(1, "Horovod")  # the program may have initialised it
        return SingleProcess()
    engine, _ = engine_of_job()
    if engine == "horovod":
        return HorovodCommunicator(groups_later)
    library = launchers.mpi_library()
    if library is None:
        raise ImportError(f"SOK_ENGINE=mpi needs a library of MPI. {launchers.NO_MPI}")
    return MpiCommunicator(library)
