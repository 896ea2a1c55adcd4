"""`MpiCommunicator`: exchanges by MPI, which ops of the package call (cpp/mpi/).

A thread of the library speaks MPI, and sleeps while there is nothing to do. Exchanges meet by name.
The waits can be ended, so a rank that waits in vain raises and goes on.
"""

import _thread
import atexit
import copy
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm

_FOREVER = 1e9  # seconds
_ENDS_WAIT = 1.0  # seconds that an op may take to end after SIGINT
# Dtypes that MPI adds; others are cast to one that holds their sums.
_SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)


@ctypes.CFUNCTYPE(ctypes.c_int)
def _ctrl_c_ends_the_program():
    """Whether SIGINT raises KeyboardInterrupt: then what the main thread waits for must end."""
    # Python hears of the signal later. While TensorFlow turns an op's error into an exception, a
    # KeyboardInterrupt would become a RuntimeError of pybind11.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return 0
    frame = sys._current_frames().get(threading.main_thread().ident)
    place = (frame, frame.f_lasti if frame else 0)
    threading.Thread(target=_interrupt_behind, args=place, daemon=True).start()
    return 1


def _interrupt_behind(frame, instruction):
    """Interrupts the main thread when it has left `instruction` of `frame`, and waits no more."""
    library = libraries.functions()
    what, number = ctypes.create_string_buffer(512), ctypes.c_int64()
    interval, deadline = sys.getswitchinterval(), time.monotonic() + _ENDS_WAIT
    sys.setswitchinterval(1e-5)  # the exception must not reach the end of the program first
    try:
        while time.monotonic() < deadline:
            library.sok_longest_wait(what, ctypes.c_int64(len(what)), ctypes.byref(number))
            if not what.value and frame.f_lasti != instruction:
                break
            time.sleep(1e-4)
    finally:
        sys.setswitchinterval(interval)
    _thread.interrupt_main()


class MpiCommunicator(comm.Communicator):
    """MPI's collectives, by a library's file. The first one of a process initialises MPI."""

    def __init__(self, library: str):
        # A rank that waits in MPI_Init or MPI_Finalize polls, and takes the core from others.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        self._ops = libraries.mpi_ops()
        self._library = ctypes.CDLL(str(libraries.ops_path("_mpi")))
        self._library.sok_mpi_close.argtypes = [ctypes.c_double]
        self._library.sok_mpi_on_interrupt(_ctrl_c_ends_the_program)
        self._call("start", library.encode())
        place = (ctypes.c_int * 4)()
        self._library.sok_mpi_place(place)
        self.rank, self.world_size, self.local_rank, self.local_size = place
        comm.check_connected(self.world_size, "MPI")
        self._group, self._ranks = 0, tuple(range(self.world_size))
        self._world = self
        self._divisions: dict[tuple, comm.Communicator] = {}
        self._ended = False  # what this process waits for
        # At the end of the program MPI waits for all ranks, unless one cannot come.
        atexit.register(lambda: self.shut_down(0.0 if self._ended else _FOREVER))

    def _call(self, function, *arguments):
        problem = ctypes.create_string_buffer(4096)
        size = ctypes.c_int64(len(problem))
        result = getattr(self._library, f"sok_mpi_{function}")(*arguments, problem, size)
        if problem.value:
            raise RuntimeError(f"MPI: {problem.value.decode(errors='replace')}")
        return result

    def subset(self, groups: Sequence[Sequence[int]]) -> comm.Communicator:
        world, divided = self._world, tuple(tuple(map(int, group)) for group in groups)
        own = comm.group_of(world.rank, divided)
        if divided not in self._divisions:
            group = world if own == world._ranks else comm.SingleProcess()
            if any(len(ranks) > 1 and ranks != world._ranks for ranks in divided):
                numbers = [rank for ranks in divided for rank in ranks], list(map(len, divided))
                as_c = [(ctypes.c_int * len(values))(*values) for values in numbers]
                number = self._call("divide", *as_c, len(divided))
                if len(own) > 1:
                    group = copy.copy(world)
                    vars(group).pop("_sok_rounds", None)  # a function of exchanges of all ranks
                    group._group, group._ranks = number, own
                    group.rank, group.world_size = own.index(world.rank), len(own)
            self._divisions[divided] = group
        return self._divisions[divided]

    def _named(self, name):
        """The arguments of an op that say by which name it meets those of the other ranks."""
        if tf.executing_eagerly() or name == comm.IN_TURN:
            return {"key": name, "group": self._group}
        # In a graph, by the name of the op, which is unique there.
        return {"name": re.sub(r"\W", "_", name), "group": self._group}

    def all_to_all(self, tensor, splits, name):
        return tuple(self._ops.sok_mpi_all_to_all(tensor, splits, **self._named(name)))

    def all_gather(self, tensor, name):
        return self._ops.sok_mpi_all_gather(tensor, **self._named(name))

    def broadcast(self, tensor, root_rank, name):
        return self._ops.sok_mpi_broadcast(tensor, root=root_rank, **self._named(name))

    def sum(self, tensor, name):
        return self._added(self._ops.sok_mpi_sum, tensor, name)

    def reduce_scatter(self, tensor, name):
        return self._added(self._ops.sok_mpi_reduce_scatter, tensor, name)

    def _added(self, add, tensor, name):
        dtype = tensor.dtype
        if dtype not in _SUMMED:
            tensor = tf.cast(tensor, tf.float32 if dtype.is_floating else tf.int64)
        return tf.cast(add(tensor, **self._named(name)), dtype)

    def mean(self, tensors, name):
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        mean = self.sum(flat, name) / tf.cast(self.world_size, flat.dtype)
        counts = [(tensor, tensor.shape.num_elements()) for tensor in tensors]
        sizes = [tf.size(tensor, tf.int64) if n is None else n for tensor, n in counts]
        return [
            tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape)
            for tensor, part in zip(tensors, tf.split(mean, sizes, num=len(sizes)), strict=True)
        ]

    def end_waits(self, reason):
        self._world._ended = True
        self._library.sok_mpi_stop(reason.encode())
        return True

    def shut_down(self, seconds):
        return bool(self._library.sok_mpi_close(seconds))
