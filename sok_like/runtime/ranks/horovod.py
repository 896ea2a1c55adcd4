"""`HorovodCommunicator`: exchanges by Horovod, over MPI, Gloo or NCCL as it was built and launched.

Horovod matches collectives by name. Its waits cannot be ended: `stalls` ends the process instead.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.ranks import comm, launchers

# Settings that Horovod and Open MPI read as they start. Values of the user are kept.
# docs/install.md has the figures. An exchange waits for Horovod's thread, which looks for work once
# per cycle (1 ms by default). A rank that waits in MPI polls, and so takes the core from the rank
# it waits for.
_TRANSPORT = {"HOROVOD_CYCLE_TIME": "0.1", "OMPI_MCA_mpi_yield_when_idle": "1"}

# Horovod's own name of all-to-alls outside of graphs.
_IN_TURN = "HorovodAlltoall"

# Arguments of Horovod's wrappers: some have no effect here; the others must mean an average over
# all ranks, or gradients of replicated and local variables would have different scales.
_WITHOUT_EFFECT = ("name", "device_dense", "device_sparse", "num_groups", "groups", "compression")


def _is(required):
    return lambda value: value == required


_MEANS_AVERAGE: dict[str, Callable[[Any], bool]] = {
    "gradient_predivide_factor": _is(1.0),
    "backward_passes_per_step": _is(1),
    "average_aggregated_gradients": _is(False),
    "scale_local_gradients": _is(True),
    "op": lambda op: op in (None, importlib.import_module("horovod.tensorflow").Average),
    "process_set": lambda group: group is None or getattr(group, "process_set_id", None) == 0,
}

# MPI counts elements in int32: those of one tensor, or of everything that ranks gather.
_MOST_COUNTED = 2**31 - 1


def _not_folded(tensor):
    """`tensor`, with its value hidden from TensorFlow's graph optimizers."""
    # They compute constants beforehand, on one rank alone, and Horovod's ops are not marked against
    # it. A rank whose input is constant, say empty, would run its collective without the others.
    rank = tensor.shape.rank
    if tf.executing_eagerly() or not rank:
        return tensor
    with tf.device("/CPU:0"):
        # A value that depends on a random op is not constant. This op draws -1, the only integer in
        # [-1, 0), and a slice of size -1 is the whole tensor, without a copy.
        size = tf.raw_ops.RandomUniformInt(shape=[rank], minval=-1, maxval=0, seed=1, seed2=1)
    return tf.slice(tensor, [0] * rank, size)


def _counted(tensor, parts, what):
    """`tensor`; raises if MPI could not count the elements of `parts` ranks in its int32."""
    limit = _MOST_COUNTED // parts
    text = f"`{what}` must have at most {limit} elements on each rank. Received: "
    num_elements = tensor.shape.num_elements()
    if num_elements is not None:
        if num_elements > limit:
            raise tf.errors.InvalidArgumentError(None, None, f"{text}{num_elements}")
        return tensor
    size = tf.size(tensor, tf.int64)
    return checked(tensor, size <= limit, text, size)


class HorovodCommunicator(comm.Communicator):
    """Horovod's collectives, over MPI, Gloo or NCCL as Horovod was built and launched."""

    # `groups_later` lets `subset` make groups later, on which ranks then agree in each cycle. No
    # effect if the program has initialised Horovod.

    def __init__(self, groups_later: bool = False):
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            remedy = (
                f", and Horovod, which they need, cannot be loaded: {error}. Was it compiled for "
                "another TensorFlow or MPI? Type: python -m sok_like.install_horovod"
            )
            if launchers.horovod_library() is None:
                remedy = (
                    f". {launchers.NO_HOROVOD if launchers.mpi_library() else launchers.NO_MPI}"
                )
            problem = f"This job was launched with {comm.launched_world_size()} processes"
            raise ImportError(problem + remedy) from error
        if not hvd.is_initialized():
            for variable, value in _TRANSPORT.items():
                os.environ.setdefault(variable, value)
            hvd.init(process_sets="dynamic" if groups_later else None)
            comm.check_connected(hvd.size(), "Horovod")
        self._hvd = hvd
        self._groups: dict[tuple[int, ...], HorovodCommunicator] = {}
        self._set_process_set(hvd.global_process_set, tuple(range(hvd.size())))

    def _set_process_set(self, process_set, ranks):
        self._process_set, self._ranks = process_set, ranks
        self.rank = ranks.index(self._hvd.rank())
        self.world_size = len(ranks)
        self.local_rank, self.local_size = self._hvd.local_rank(), self._hvd.local_size()

    def subset(self, groups):
        own = comm.group_of(self._hvd.rank(), groups)
        for group in map(tuple, groups):  # every rank registers all of them
            if 1 < len(group) < self._hvd.size() and group not in self._groups:
                self._register(group, group == own)
        return comm.SingleProcess() if len(own) == 1 else self._groups.get(own, self)

    def _register(self, ranks, is_own):
        try:
            process_set = self._hvd.add_process_set(ranks)
        except ValueError as error:
            raise RuntimeError(
                "Groups of ranks, which a mesh with two axes longer than 1 needs, must be "
                "announced when Horovod is initialised: call sok.distribution.initialize() "
                "before sok.Init, or set HOROVOD_DYNAMIC_PROCESS_SETS=1. "
                f"Received: Horovod without them, and a group of ranks {list(ranks)}"
            ) from error
        self._groups[ranks] = None
        if is_own:
            group = self._groups[ranks] = object.__new__(HorovodCommunicator)
            group._hvd, group._groups = self._hvd, self._groups
            group._set_process_set(process_set, ranks)

    def all_to_all(self, tensor, splits, name):
        # Horovod has no bfloat16: its bits travel as float16, sums and means are of float32.
        is_bfloat16 = tensor.dtype == tf.bfloat16
        received, received_splits = self._hvd.alltoall(
            tf.bitcast(tensor, tf.float16) if is_bfloat16 else tensor,
            splits=splits,
            name=_IN_TURN if name == comm.IN_TURN else name,
            ignore_name_scope=name == comm.IN_TURN,
            process_set=self._process_set,
        )
        return tf.bitcast(received, tf.bfloat16) if is_bfloat16 else received, received_splits

    def _carry(self, collective, tensor, name, parts=1, **options):
        carried = _not_folded(_counted(tensor, parts, name))
        if tensor.dtype == tf.bfloat16:
            change, dtype = (tf.cast, tf.float32) if "op" in options else (tf.bitcast, tf.float16)
            carried = change(carried, dtype)
        result = collective(carried, name=name, process_set=self._process_set, **options)
        return change(result, tensor.dtype) if tensor.dtype == tf.bfloat16 else result

    def mean(self, tensors, name):
        dtype = tf.float32 if tensors[0].dtype == tf.bfloat16 else tensors[0].dtype
        tensors = [tf.cast(_not_folded(_counted(t, 1, name)), dtype) for t in tensors]
        options = {"op": self._hvd.Average, "name": name, "process_set": self._process_set}
        return self._hvd.grouped_allreduce(tensors, **options)

    def broadcast(self, tensor, root_rank, name):
        root = self._ranks[root_rank]
        return self._carry(self._hvd.broadcast, tensor, name, root_rank=root)

    def all_gather(self, tensor, name):
        return self._carry(self._hvd.allgather, tensor, name, self.world_size)

    def sum(self, tensor, name):
        return self._carry(self._hvd.allreduce, tensor, name, op=self._hvd.Sum)

    def reduce_scatter(self, tensor, name):
        return self._carry(self._hvd.reducescatter, tensor, name, op=self._hvd.Sum)

    def end_waits(self, reason):
        return False

    def shut_down(self, seconds):
        self._hvd.shutdown()  # without a time limit
        return True


def import_if_installed() -> Any:
    """Horovod, which is then the engine, for a program that asks it for its rank; else None."""
    installed = importlib.util.find_spec("horovod") is not None
    return importlib.import_module("horovod.tensorflow") if installed else None


def leave_alone(is_local: Callable[[Any], bool]) -> None:
    """Lets the program's own Horovod average and broadcast no variable that is local to a rank."""
    if comm.launched_world_size() == 1 and launchers.imported_horovod() is None:
        return
    try:
        horovod = importlib.import_module("horovod.tensorflow")
    except ImportError:
        return  # `engines.choose` says what to install

    def averaging(own, *args, **kwargs):
        average = own(*args, **kwargs)

        def without_local(gradients, variables=None, *rest):
            if variables is None:
                return average(gradients, variables, *rest)
            pairs = list(zip(gradients, variables, strict=True))
            shared = [(g, v) for g, v in pairs if not is_local(v)]
            averaged = iter(average(*map(list, zip(*shared, strict=True)), *rest) if shared else ())
            return [g if is_local(v) else next(averaged) for g, v in pairs]

        return without_local

    def broadcasting(own, variables, *args, **kwargs):
        return own([v for v in variables if not is_local(v)], *args, **kwargs)

    # Its tape and optimizer would mix rows of different keys or columns.
    why = "Horovod leaves variables alone that belong to one rank"
    hooks.wrap(horovod, "_make_allreduce_grads_fn", averaging, why)
    hooks.wrap("horovod.tensorflow.functions", "broadcast_variables", broadcasting, why)


def check_arguments(wrapper: str, arguments: dict[str, Any]) -> None:
    """Refuses arguments of Horovod's tape and optimizer that would change the result."""
    for name, value in arguments.items():
        received = f"{name}={value!r}"
        if name not in (*_WITHOUT_EFFECT, *_MEANS_AVERAGE):
            raise TypeError(f"{wrapper} got an unexpected argument. Received: {received}")
        if name in _MEANS_AVERAGE and not _MEANS_AVERAGE[name](value):
            subject = f"{wrapper} averages over all ranks, so `{name}`"
            raise unmet(subject, "be left out", received)
