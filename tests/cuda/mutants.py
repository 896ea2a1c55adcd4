"""Plants bugs in the CUDA backend, one at a time, and asks the emulator's tests to find each.

    make mutants                      # ARGS="--only 'missing release'" for one
    python -m tests.cuda.mutants --build build-mutants

Works on a copy of the sources, which is compiled for the emulator and keeps what was compiled. A
mutant is found if a test fails with one of the seeds; the sources as they are must pass with all.
Exit status 1 if a mutant lives, or if its text is no longer in the sources.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
CORE = "cpp/core/cuda"
SEEDS = range(1, 6)


class Mutant(NamedTuple):
    name: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...] = ("cuda_streams_test",)


MUTANTS = [
    Mutant(
        "missing release",
        f"{CORE}/index/bucket_memory.cuh",
        ".store(row, ::cuda::memory_order_release)",
        ".store(row, ::cuda::memory_order_relaxed)",
        ("cuda_table_test", "cuda_streams_test"),
    ),
    Mutant(
        "missing acquire",
        f"{CORE}/index/bucket_memory.cuh",
        ".load(::cuda::memory_order_acquire)",
        ".load(::cuda::memory_order_relaxed)",
        ("cuda_table_test", "cuda_streams_test"),
    ),
    Mutant(
        "missing event wait",
        f"{CORE}/device/device.cu",
        "if (error == cudaSuccess) error = cudaStreamWaitEvent(later, event, 0);",
        "",
    ),
    Mutant(
        "event recorded on the wrong stream",
        f"{CORE}/device/device.cu",
        "cudaEventRecord(event, earlier)",
        "cudaEventRecord(event, later)",
    ),
    Mutant(
        "freed scratch",
        f"{CORE}/device/device.cu",
        "    blocks_.emplace_back(std::max(",
        "    blocks_.clear();\n    blocks_.emplace_back(std::max(",
    ),
    Mutant(
        "buffer freed on the wrong stream",
        f"{CORE}/device/device.cu",
        "cudaFreeAsync(data_, stream_)",
        "cudaFreeAsync(data_, nullptr)",
    ),
    Mutant(
        "table's memory stays with the old stream",
        f"{CORE}/table/table_state.cu",
        "for (Buffer& slab : arena.slabs) slab.MoveTo(next);",
        "",
    ),
    Mutant(
        "kernel on the wrong stream",
        f"{CORE}/lookup/unique.cu",
        "  LaunchJobs(stream, writes);",
        "  LaunchJobs(nullptr, writes);",
    ),
    Mutant(
        "copy to the host that is not waited for",
        f"{CORE}/device/device.cu",
        "  Synchronize(stream);\n  if (target != to)",
        "  if (target != to)",
    ),
    Mutant(
        "counters taken before they have arrived",
        f"{CORE}/table/table_room.cu",
        "  copy_point->Wait();\n  TakeCounters();",
        "  TakeCounters();",
    ),
    Mutant(
        "host pointer in a kernel",
        f"{CORE}/table/table_room.cu",
        "LearnMisses(stream, &self);",
        "self[0].num_keys.actual = reinterpret_cast<const uint32_t*>(&self);\n"
        "    LearnMisses(stream, &self);",
        ("cuda_streams_test",),
    ),
    Mutant(
        "device pointer on the host",
        f"{CORE}/table/table_keys.cu",
        "  const int64_t num_erased = impl.host_counters->erased;",
        "  const int64_t num_erased = impl.counters.as<Counters>()->erased;",
    ),
    Mutant(
        "staging memory that the device has not read",
        f"{CORE}/lookup/segments.cu",
        "piece->memory.bytes() >= bytes && piece->read.HasPassed(round)",
        "piece->memory.bytes() >= bytes && round > 0",
        ("cuda_segments_test",),
    ),
    Mutant(
        "a table's lookup is made before the other tables are ready",
        f"{CORE}/table/table_many.cu",
        "batch.keys, OnHost(stream, {batch.num_keys, batch.num_actual}), batch.distinct));\n",
        "batch.keys, OnHost(stream, {batch.num_keys, batch.num_actual}), batch.distinct));\n"
        "    lookups.back()->table->MakeTrainingLookup(lookups.back().get());\n",
        ("cuda_half_step_test",),
    ),
    Mutant(
        "device 0 restored where nothing was current",
        f"{CORE}/device/device.cu",
        "Contexts().set(before_);",
        "if (before_ == nullptr) cudaSetDevice(0);",
        ("cuda_table_test",),
    ),
    Mutant(
        "sums of groups that are not made",
        f"{CORE}/lookup/combine_gradient.cu",
        "    LaunchJobs(stream, groups);\n",
        "",
        ("cuda_combine_test",),
    ),
    Mutant(
        "merged keys counted before the device has",
        f"{CORE}/lookup/merge_keys.cu",
        "  Synchronize(stream);\n",
        "",
        ("cuda_merge_keys_test",),
    ),
    Mutant(
        "missing barrier before ranks in a tile",
        f"{CORE}/lookup/unique.cu",
        "    __syncthreads();\n",
        "",
        ("cuda_combine_test",),
    ),
    Mutant(
        "missing barrier before counting",
        f"{CORE}/policies/select_lowest.cu",
        "  of_block[threadIdx.x] = 0;\n  __syncthreads();",
        "  of_block[threadIdx.x] = 0;",
        ("cuda_lowest_test",),
    ),
    Mutant(
        "missing barrier after counting",
        f"{CORE}/policies/select_lowest.cu",
        "  __syncthreads();\n  const uint32_t found",
        "  const uint32_t found",
        ("cuda_lowest_test",),
    ),
]


def run(command: list[str], **environment: str) -> tuple[bool, str]:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900
    )
    return done.returncode == 0, done.stdout + done.stderr


class Copy:
    """A copy of the sources and its build."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.sources, self.build_folder = folder, folder / "build"
        for name in ("cpp", "cmake"):
            # Only what has changed gets a new time, for ninja.
            for path in (ROOT / name).rglob("*"):
                target = self.sources / path.relative_to(ROOT)
                if path.is_file() and (
                    not target.exists() or target.read_bytes() != path.read_bytes()
                ):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
        shutil.copyfile(ROOT / "CMakeLists.txt", self.sources / "CMakeLists.txt")
        options = ["-DSOK_WITH_TESTS=ON", "-DSOK_WITH_TF=OFF", "-DSOK_WITH_PYTHON=OFF"]
        where = ["-S", str(self.sources), "-B", str(self.build_folder)]
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        good, output = run(["cmake", *where, *generator, *options])
        assert good, output

    def build(self, tests: set[str]) -> None:
        targets = [word for test in sorted(tests) for word in ("--target", test)]
        jobs = ["--parallel", str(os.cpu_count())]
        good, output = run(["cmake", "--build", str(self.build_folder), *targets, *jobs])
        assert good, output[-3000:]

    def failure(self, tests: tuple[str, ...] | set[str]) -> str:
        """What the first failure says and its seed; empty if all tests pass with all seeds."""
        for test in tests:
            for seed in SEEDS:
                command = [str(self.build_folder / test)]
                try:
                    good, output = run(["timeout", "120", *command], SOK_EMULATOR_SEED=str(seed))
                except subprocess.TimeoutExpired:
                    good, output = False, "ran too long"
                if not good:
                    lines = [line for line in output.splitlines() if "=" not in line[:30]]
                    return f"{test}, seed {seed}: {' '.join(lines[-1:])[:90]}"
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, help="a folder to keep, for the next time")
    parser.add_argument("--only", help="mutants whose names have this word")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only is None or arguments.only in m.name]
    folder = arguments.build or pathlib.Path(tempfile.mkdtemp(prefix="sok_mutants_"))
    copy = Copy(folder)
    tests = {test for mutant in chosen for test in mutant.tests}
    copy.build(tests)
    failure = copy.failure(tests)
    if failure:
        print(f"The sources as they are fail: {failure}")
        return 1
    alive = 0
    for mutant in chosen:
        file = copy.sources / mutant.file
        original = file.read_text()
        assert original.count(mutant.text) == 1, f"{mutant.name}: not once in {mutant.file}"
        file.write_text(original.replace(mutant.text, mutant.planted))
        try:
            copy.build(set(mutant.tests))
            failure = copy.failure(mutant.tests)
        finally:
            file.write_text(original)
        alive += not failure
        print(f"{mutant.name:42} {failure or 'NOT FOUND'}", flush=True)
    if arguments.build is None:
        shutil.rmtree(folder)
    print(f"{len(chosen) - alive} of {len(chosen)} found")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
