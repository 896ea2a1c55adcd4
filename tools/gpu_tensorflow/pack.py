#!/usr/bin/env python3
"""Packs TensorFlow with CUDA for one kind of device into parts that are small enough to carry.

    pack.py OUT [--work FOLDER] [--arch 90] [--python 3.12] [--part-mib 54] [--preset 6]

FOLDER keeps the wheels and what was unpacked of them (5 GB). Into OUT go part-00, part-01, ...,
pieces of one compressed tar, which holds the op library of build-cuda, too. More is in
cpp/tests/README.md.
"""

import argparse
import mmap
import pathlib
import shutil
import struct
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The rest of what TensorFlow imports is where JAX and pytest are.
WHEELS = [
    *(
        "tensorflow==2.21.0",
        "keras==3.15.1",
        "tf_keras==2.21.0",
        "nvidia-cuda-runtime-cu12==12.9.79",
    ),
    *("optree", "namex", "gast", "astunparse", "google-pasta", "termcolor"),
]
UNUSED = ["tensorflow/include/", "tensorflow/compiler/mlir/stablehlo/stablehlo_ext"]
# It must load; its kernels, a second copy of the framework's, never run.
NEVER_RUN = "_pywrap_profiler_plugin.so"
FATBIN = struct.pack("<I", 0xBA55ED50)
ELF, PTX = 2, 1


def download(folder, python):
    """Wheels for another Python, each once."""
    platforms = [
        "manylinux_2_28",
        "manylinux_2_27",
        "manylinux_2_17",
        "manylinux2014",
        "manylinux1",
    ]
    options = [f"--platform={name}_x86_64" for name in platforms]
    options += [
        f"--python-version={python}",
        "--implementation=cp",
        "--only-binary=:all:",
        "--no-deps",
    ]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *options]
    subprocess.run([*command, *WHEELS], check=True)


def unpack(wheels, site):
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if not name.startswith(tuple(UNUSED))]
            if path.name.startswith("nvidia_cuda_runtime"):
                names = [name for name in names if "libcudart.so" in name]
            wheel.extractall(site, names)


def prune(path, arch):
    """Zeroes machine code for other devices, and PTX where there is machine code for this one.

    A fatbin has a head of 16 bytes and entries: kind, size of the entry's head, of what follows,
    and further on the architecture.
    """
    zeroed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        begin = data.find(FATBIN)
        while begin >= 0:
            version, head, size = struct.unpack_from("<HHQ", data, begin + 4)
            end = begin + head + size
            if (version, head) != (1, 16) or end > len(data):  # these 4 bytes by chance
                begin = data.find(FATBIN, begin + 4)
                continue
            entries, at = [], begin + head
            while at < end:
                kind, _, entry_head, length, *_, of = struct.unpack_from("<HHIQIIHHI", data, at)
                if kind not in (ELF, PTX) or at + entry_head + length > end:
                    raise ValueError(f"{path} has an unknown entry at {at}")
                entries.append((kind, of, at + entry_head, length))
                at += entry_head + length
            kept = ELF if any(kind == ELF and of == arch for kind, of, *_ in entries) else PTX
            for kind, of, at, length in entries:
                if path.name == NEVER_RUN or (kind, of) != (kept, arch):
                    data[at : at + length] = bytes(length)
                    zeroed += length
            begin = data.find(FATBIN, end)
    return zeroed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build-gpu-tensorflow")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--part-mib", type=int, default=54)
    parser.add_argument("--preset", type=int, default=6)
    options = parser.parse_args()
    wheels, site = options.work / "wheels", options.work / "site"
    if not wheels.exists():
        download(wheels, options.python)
    shutil.rmtree(site, ignore_errors=True)
    unpack(wheels, site)
    large = [path for path in site.rglob("*.so*") if path.stat().st_size > 1 << 20]
    subprocess.run(["strip", "--strip-all", *map(str, large)], check=True)
    print(f"{sum(prune(path, options.arch) for path in large) / 1e6:.0f} MB of fatbins zeroed")
    (site / "project").mkdir()
    shutil.copy(ROOT / "build-cuda" / "_ops.so", site / "project")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    # The filter for machine code saves a tenth.
    compress = f"xz -T0 --x86 --lzma2=preset={options.preset},dict=32MiB"
    split = f"split -d -b {options.part_mib}M - {options.out.resolve()}/part-"
    subprocess.run(f"set -o pipefail; tar -c . | {compress} | {split}", shell=True, check=True,
                   cwd=site, executable="/bin/bash")  # fmt: skip
    sums = subprocess.run("sha256sum part-*", shell=True, check=True, cwd=options.out,
                          capture_output=True, text=True).stdout  # fmt: skip
    (options.out / "SHA256SUMS").write_text(sums)
    print(sums)


if __name__ == "__main__":
    main()
