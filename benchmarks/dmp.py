"""Sharded tables against replicated ones: the tiny synthetic model on several ranks.

    python -m sok_like.run -np 2 -m benchmarks.dmp [--scale 0.05] [--only adagrad] [--json FILE]

    ours     dmp.DistributedEmbedding: each table on one rank; each rank reads its own samples
    ours mp  the same with `dp_input=False`: each rank reads its tables' inputs, of all samples
    peer     keras.layers.Embedding, a replica on each rank, gradients averaged by Horovod's tape

All train the same dense layers on the same batches. The contenders of an optimizer take turns in
one launch. Rank 0's times are reported; they differ little, because all ranks end a step together.
Then one launch per contender measures its memory (`benchmarks/dmp_memory.py`).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import pathlib
import sys
from typing import Any

ROUNDS, BURST, WARM_UP = 15, 5, 5
OURS, OURS_MP, PEER = "ours", "ours mp", "replicas, stock Horovod"
CONTENDERS = (OURS, OURS_MP, PEER)
TARGET = 1.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dmp", description=__doc__)
    parser.add_argument("--scale", type=float, default=0.05, help="rows of the tables times this")
    parser.add_argument("--batch_size", type=int, default=4096, help="over all ranks together")
    parser.add_argument("--only", default="sgd,adagrad,adam", help="optimizers, by commas")
    parser.add_argument("--quick", action="store_true", help="small data: does it run at all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=0, help="of a rank; 0: the cores by ranks")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures there, too")
    return parser.parse_args(argv)


class Trainer:
    """One contender: a model, its optimizer, and this rank's part of each batch."""

    def __init__(self, kind: str, rule: str, config: Any, scale: float, batches: list):
        import synthetic_data
        import synthetic_models

        make_optimizer, _ = synthetic_models.OPTIMIZERS[rule]
        self.optimizer = make_optimizer(0.01)
        if kind == PEER:
            self.model = _replicated_model(config, scale)
            rank, num_ranks, inputs, make_step = *_place(), None, _stock_step
        else:
            self.model = synthetic_models.SyntheticModel(
                config, scale, strategy="memory_balanced", dp_input=kind == OURS
            )
            layer = self.model.embeddings
            rank, num_ranks = layer.rank, layer.world_size
            inputs = None if kind == OURS else layer.strategy.input_ids_list[rank]
            make_step = synthetic_models.make_step
        parts = [synthetic_data.part_of_rank(b, rank, num_ranks, inputs) for b in batches]
        self._batches = [synthetic_models.as_tensors(part) for part in parts]
        self.model(self._batches[0][:2])  # makes the variables
        self.optimizer.build(self.model.trainable_variables)
        self._step = make_step(self.model, self.optimizer)

    def __call__(self, i: int) -> float:
        """Takes one step and waits for it; returns the loss."""
        return float(self._step(*self._batches[i % len(self._batches)]))

    def variable_bytes(self) -> int:
        """Bytes of the variables of the model and the optimizer on this rank."""
        import tensorflow as tf

        slots = self.optimizer.variables
        variables = [*self.model.variables, *(slots() if callable(slots) else slots)]
        unique = {id(v): v for v in variables}.values()
        return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in unique)


def _place():
    import horovod.tensorflow as hvd

    return hvd.rank(), hvd.size()


def _replicated_model(config, scale):
    """`synthetic_models.SyntheticModel` with Keras' own embeddings instead of ours."""
    import synthetic_models
    import tensorflow as tf

    class Replicated(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.tables = [
                tf.keras.layers.Embedding(table.num_rows, table.width)
                for table in config.tables(scale)
            ]
            self.dense = synthetic_models.dense_layers(config)

        def call(self, inputs):
            ids, numerical = inputs
            rows = [
                tf.reduce_sum(self.tables[each.table](x), axis=1)
                for each, x in zip(config.inputs(), ids, strict=True)
            ]
            x = synthetic_models.interact(rows, numerical, config.pool)
            for layer in self.dense:
                x = layer(x)
            return x

    return Replicated()


def _stock_step(model, optimizer):
    """`synthetic_models.make_step` with Horovod's tape."""
    import horovod.tensorflow as hvd
    import synthetic_models
    import tensorflow as tf

    variables = model.trainable_variables
    # Horovod's tape needs the TensorFlow variables inside Keras 3's.
    sources = [v if isinstance(v, tf.Variable) else v.value for v in variables]

    @tf.function
    def step(ids, numerical, labels):
        with tf.GradientTape() as tape:
            loss = synthetic_models.loss_of(labels, model((ids, numerical)))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, sources)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def make_batches(args: argparse.Namespace, num_ranks: int) -> tuple[Any, float, list]:
    """The model, its scale, and its whole batches."""
    import synthetic_data
    from synthetic_config import MODELS

    config, scale = MODELS["tiny"], 1e-4 if args.quick else args.scale
    batch_size = 64 * num_ranks if args.quick else args.batch_size
    batches = [
        synthetic_data.make_batch(config, scale, batch_size, alpha=1.05, number=i)
        for i in range(4 if args.quick else 10)
    ]
    return config, scale, batches


def run(rule: str, args: argparse.Namespace, num_ranks: int, say) -> list:
    from benchmarks import harness

    config, scale, batches = make_batches(args, num_ranks)
    contenders = {}
    for kind in CONTENDERS:
        say(f"{rule}: {kind}: tables and compilation")
        trainer = Trainer(kind, rule, config, scale, batches)
        contenders[kind] = harness.Contender(trainer, warm_up=WARM_UP)
    times = harness.interleave(
        contenders,
        rounds=3 if args.quick else args.rounds,
        burst=BURST,
        progress=lambda text: say(f"{rule}: {text}"),
    )
    matches = [
        harness.Match(f"step {rule}", ours, PEER, TARGET if ours == OURS else None)
        for ours in (OURS, OURS_MP)
    ]
    return harness.judge(times, matches)


def start(threads: int) -> Any:
    """Starts Horovod, and TensorFlow with `threads` threads; 0: the host's cores by its ranks.

    Returns:
        Horovod's module.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    threads = threads or max(1, (os.cpu_count() or 1) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    import sok_like as sok

    sok.Init(global_batch_size=hvd.size())
    return hvd


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    hvd = start(args.threads)
    import tensorflow as tf

    from benchmarks import harness

    root = hvd.rank() == 0

    def say(text):
        if root:
            harness.progress_line(text)

    threads = tf.config.threading.get_intra_op_parallelism_threads()
    machine = {"ranks": hvd.size(), **harness.machine(threads)}
    if root:
        print("  ".join(f"{k}: {v}" for k, v in machine.items()), flush=True)
    results: list[Any] = []
    for rule in args.only.split(","):
        part = run(rule, args, hvd.size(), say)
        results += part
        say("")
        if root:
            for r in part:
                print(f"{r.name}: {r.ours} {r.ours_ms:.2f} ms, {r.ratio:.3f} of {r.peer}")
            sys.stdout.flush()
        gc.collect()
    if root:
        harness.publish(results, machine, args.json)
    return 0  # a missed target is a figure to read, not a failure of the program


if __name__ == "__main__":
    sys.exit(main())
