"""Ranks that stand ready: the processes of one launch run functions, one after the other.

    a worker of pytest ---- function, arguments ----> rank 0, rank 1: a socket each
                       <--- a result, or `Raised` ----

Starting TensorFlow takes longer than most tests. Each function starts after `sok.Init`, without
what others have left: distributions, embeddings known by name, numbers of Keras layers.
"""

import atexit
import contextlib
import io
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Listener, wait

from tests import ranks, speed

SEED = 7  # of `sok.Init`, in processes and in the fixture `sok`


class Raised:
    """An exception of a function, as text."""

    def __init__(self, error):
        self.kind, self.message = type(error).__name__, str(error)
        self.text = "".join(traceback.format_exception(error))

    def __repr__(self):
        return self.text


PATIENCE = 30  # seconds that ranks have once another one has raised
_ready = {}  # of this process, by number of ranks


def run(world_size, function, args):
    """What `function(*args)` returns on each rank, or `Raised`, after which others are started."""
    if world_size not in _ready:
        _ready[world_size] = ReadyRanks(world_size)
    try:
        results = _ready[world_size].run(function, args)
    except ranks.RanksFailed:
        del _ready[world_size]
        raise
    if any(isinstance(result, Raised) for result in results):  # they may have parted
        _ready.pop(world_size).close()
    return results


def close():
    while _ready:
        _ready.popitem()[1].close()


class ReadyRanks:
    """Processes of one launch, which end with this object's `close` or this process."""

    def __init__(self, num_ranks):
        self._num_ranks, self._stack = num_ranks, contextlib.ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="sok_ranks_")
        self._folder = pathlib.Path(self._stack.enter_context(folder))
        # Groups of ranks, which meshes with two axes have, must be asked for where Horovod starts.
        env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
        target, args = "tests.ready_ranks:serve", {"folder": str(self._folder)}
        self._process = ranks.start(target, num_ranks, self._folder, args=args, env=env)
        self._stack.callback(ranks.stop, self._process, self._folder)
        self._lines = [self._connected(rank) for rank in range(num_ranks)]

    def run(self, function, args):
        """What `function(*args)` returns on each rank, or `Raised`. Functions go by name."""
        for line in self._lines:
            line.send((function, args))
        deadline, results = time.monotonic() + ranks.HANG_LIMIT, {}
        while len(results) < self._num_ranks:
            waiting = [line for line in self._lines if line not in results]
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                raised = [result for result in results.values() if isinstance(result, Raised)]
                why = f"it ran longer than {ranks.HANG_LIMIT} s: {ranks.slow_machine()}"
                raise self._failed(f"{function}{args}: {raised[0].text if raised else why}")
            for line in ready:
                try:
                    results[line] = pickle.loads(line.recv_bytes())
                except EOFError:
                    raise self._failed(f"{function}{args} ended a rank") from None
                if isinstance(results[line], Raised):  # the others may wait for it
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        return [results[line] for line in self._lines]

    def close(self):
        for line in self._lines:
            line.close()
        with contextlib.suppress(Exception):
            self._process.wait(20)
        self._stack.close()

    def _connected(self, rank):
        address, start = self._folder / f"rank{rank}.socket", time.monotonic()
        while not address.exists():
            late = time.monotonic() - start > ranks.HANG_LIMIT
            if late or self._process.poll() is not None:
                raise self._failed("did not start")
            time.sleep(0.05)
        return Client(str(address))

    def _failed(self, what):
        launcher = ranks.stop(self._process, self._folder)
        output = f"{ranks.outputs(self._folder, self._num_ranks)}--- launcher\n{launcher}"
        self._stack.close()
        return ranks.RanksFailed(f"{self._num_ranks} ranks: {what}.\n{output}")


def serve(folder):
    """Runs what comes, on a rank, until nobody asks any more."""
    speed.tune_no_datasets()
    if not os.environ.get("SLOW"):
        speed.optimize_no_graphs()
    tempfile.tempdir = folder  # removed in the end
    aside = pathlib.Path(folder, f"rank{ranks.rank_of_process()}.aside")
    with Listener(str(aside)) as listener:
        os.rename(aside, aside.with_suffix(".socket"))  # it listens
        with listener.accept() as line:
            import sok_like as sok
            from sok_like.runtime.ranks import comm

            sok.Init(global_batch_size=12, seed=SEED)
            engine = comm.current()  # also after a function has imported Horovod
            with contextlib.suppress(EOFError):
                while True:
                    call = line.recv_bytes()
                    forget()
                    comm.set_current(engine)
                    sok.Init(global_batch_size=12, seed=SEED)
                    line.send_bytes(_outcome(call))
    # Python would take the graphs of all functions apart, one by one.
    atexit._run_exitfuncs()
    os._exit(0)


def _outcome(call):
    """The pickled result of a pickled function."""
    start, cpu = time.monotonic(), time.process_time()
    function, args = pickle.loads(call)
    try:
        result = pickle.dumps(function(*args))
    except Exception as error:
        raised = Raised(error)
        print(raised.text)
        result = pickle.dumps(raised)
    wall, cpu = time.monotonic() - start, time.process_time() - cpu
    print(f"{function} {args}: {wall:.1f} s, {cpu:.1f} of them on the processor", flush=True)
    return result


def run_program(paths, words, folder):
    """The trace of an error of a program of several files with these arguments, and its output."""
    forget()
    sources = {path: pathlib.Path(path).read_text() for path in paths}
    # No program needs them unless it imports them itself.
    absent = {"horovod", "mpi4py"} - set(sys.modules)
    absent = [name for name in absent if not any(name in text for text in sources.values())]
    sys.modules.update(dict.fromkeys(absent))
    namespace, printed = {"__name__": "__main__", "__file__": paths[0]}, io.StringIO()
    sys.argv = [paths[0], *words]
    sys.path.insert(0, str(pathlib.Path(paths[0]).parent))
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            for path, text in sources.items():  # files, so that TensorFlow finds the source
                exec(compile(text, path, "exec"), namespace)
    except BaseException:  # a program may leave by `sys.exit`, too
        return traceback.format_exc(), printed.getvalue()
    finally:
        os.chdir(before)
        sys.path.pop(0)
        for name in absent:
            del sys.modules[name]
    return "", printed.getvalue()


def forget():
    """Has this process begin anew, as far as programs can tell."""
    from sok_like import distribution
    from sok_like.embeddings import get_embedding_op
    from sok_like.runtime.ranks import initialize

    initialize.reset()
    distribution.set_distribution(None)
    get_embedding_op._eager.clear()
    speed.clear_session()
