#!/usr/bin/env python3
"""Reads the output of `ptxas -v` from standard input and prints one line per kernel.

The exit status is 1 if a kernel of this project spills registers or has a stack frame.
"""

import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def main():
    kernels = []
    for line in sys.stdin:
        if found := ENTRY.search(line):
            kernels.append([*found.groups(), "?", "?", "?", "?"])
        elif (found := SPILLS.search(line)) and kernels:
            kernels[-1][3:6] = found.groups()
        elif (found := REGISTERS.search(line)) and kernels:
            kernels[-1][2] = found[1]
    names = subprocess.run(
        ["c++filt"],
        input="\n".join(name for name, *_ in kernels),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    print("registers  stack  spill stores  spill loads  kernel")
    failed = False
    for name, (mangled, target, registers, stack, stores, loads) in zip(
        names, kernels, strict=True
    ):
        short = re.sub(r"\(anonymous namespace\)::|sok::(cuda::)?|void ", "", name)
        short = re.sub(r"\(.*\)$", "", short)
        print(f"{registers:>9}  {stack:>5}  {stores:>12}  {loads:>11}  {target} {short}")
        ours = "3sok" in mangled
        failed |= ours and not stack == stores == loads == "0"
    print(f"{len(kernels)} kernels; " + ("SOME SPILL" if failed else "none of ours spills"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
