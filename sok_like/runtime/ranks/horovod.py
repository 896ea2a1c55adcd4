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
_ONLY_WITH = {
    "gradient_predivide_factor": 1.0,
    "backward_passes_per_step": 1,
    "average_aggregated_gradients": False,
    "scale_local_gradients": True,
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


def _as_carried(tensor):
    """The same bits in a dtype that Horovod can send, which bfloat16 is not."""
    return tf.bitcast(tensor, tf.float16) if tensor.dtype == tf.bfloat16 else tensor


def _bits_as(tensor, dtype):
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)


def _as_summed(tensor):
    """The same numbers in a dtype that Horovod can add."""
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


class HorovodCommunicator:
    """Horovod's collectives, over MPI, Gloo or NCCL as Horovod was built and launched."""

    # `groups_later` lets `subset` make groups later, on which ranks then agree in each cycle. No
    # effect if the program has initialised Horovod.

    def __init__(self, groups_later: bool = False):
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            problem = f"This job was launched with {comm.launched_world_size()} processes"
            if launchers.horovod_library() is None:
                remedy = launchers.NO_HOROVOD if launchers.mpi_library() else launchers.NO_MPI
                raise ImportError(f"{problem}. {remedy}") from error
            raise ImportError(
                f"{problem}, and Horovod, which they need, cannot be loaded: {error}. Was it "
                "compiled for another TensorFlow or MPI? Type: python -m sok_like.install_horovod"
            ) from error
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
            if 1 < len(group) < self._hvd.size():
                self._group(group)
        return comm.SingleProcess() if len(own) == 1 else self._groups.get(own, self)

    def _group(self, ranks):
        """The communicator of `ranks`; None on the other ranks, which must register it, too."""
        if ranks not in self._groups:
            try:
                process_set = self._hvd.add_process_set(ranks)
            except ValueError as error:
                raise RuntimeError(
                    "Groups of ranks, which a mesh with two axes longer than 1 needs, must be "
                    "announced when Horovod is initialised: call sok.distribution.initialize() "
                    "before sok.Init, or set HOROVOD_DYNAMIC_PROCESS_SETS=1. "
                    f"Received: Horovod without them, and a group of ranks {list(ranks)}"
                ) from error
            group = None
            if self._hvd.rank() in ranks:
                group = object.__new__(HorovodCommunicator)
                group._hvd, group._groups = self._hvd, self._groups
                group._set_process_set(process_set, ranks)
            self._groups[ranks] = group
        return self._groups[ranks]

    def all_to_all(self, tensor, splits, name):
        received, received_splits = self._hvd.alltoall(
            _as_carried(tensor),
            splits=splits,
            name=_IN_TURN if name == comm.IN_TURN else name,
            ignore_name_scope=name == comm.IN_TURN,
            process_set=self._process_set,
        )
        return _bits_as(received, tensor.dtype), received_splits

    def average(self, tensors, name):
        def mean(tensors, name):
            return self._hvd.grouped_allreduce(
                [_as_summed(_not_folded(_counted(tensor, 1, name))) for tensor in tensors],
                op=self._hvd.Average,
                name=name,
                process_set=self._process_set,
            )

        return comm.averaged(self, mean, tensors, name)

    def broadcast(self, tensor, root_rank, name):
        root, carried = self._ranks[root_rank], _as_carried(_counted(tensor, 1, name))
        result = self._hvd.broadcast(carried, root, name=name, process_set=self._process_set)
        return _bits_as(result, tensor.dtype)

    def all_gather(self, tensor, name):
        carried = _as_carried(_not_folded(_counted(tensor, self.world_size, name)))
        result = self._hvd.allgather(carried, name=name, process_set=self._process_set)
        return _bits_as(result, tensor.dtype)

    def sum(self, tensor, name):
        return self._added(self._hvd.allreduce, tensor, name)

    def reduce_scatter(self, tensor, name):
        return self._added(self._hvd.reducescatter, tensor, name)

    def _added(self, reduce, tensor, name):
        added = _as_summed(_not_folded(_counted(tensor, 1, name)))
        added = reduce(added, op=self._hvd.Sum, name=name, process_set=self._process_set)
        return tf.cast(added, tensor.dtype)

    def barrier(self):
        self.all_gather(tf.zeros([1]), "sok_barrier")

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
        if name in _ONLY_WITH:
            is_average = value == _ONLY_WITH[name]
        elif name == "op":
            average = importlib.import_module("horovod.tensorflow").Average
            is_average = value in (None, average)
        elif name == "process_set":
            is_average = value is None or getattr(value, "process_set_id", None) == 0
        elif name in _WITHOUT_EFFECT:
            continue
        else:
            raise TypeError(f"{wrapper} got an unexpected argument. Received: {name}={value!r}")
        if not is_average:
            required, received = "be left out", f"{name}={value!r}"
            raise unmet(f"{wrapper} averages over all ranks, so `{name}`", required, received)
