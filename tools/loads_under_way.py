#!/usr/bin/env python3
"""Counts the loads of rows that are under way at once, in the machine code of the kernels that
copy and sum rows: `tools/loads_under_way.py OBJECT...`, where OBJECT is a compiled .cu file.

A load is under way from its instruction to the first one that names a register of its result. The
exit status is 1 if a kernel has fewer than its source asks for, or if a kernel is missing. Needs
cuobjdump and nvdisasm of the CUDA toolkit.
"""

import re
import shutil
import subprocess
import sys

# Jobs whose loads overlap, each with the number in its source (kInFlight, kAhead). The template
# arguments are in the mangled name: pieces of 4 floats or of 1; rows that owe no steps.
LEAST = {
    "FindAndCopyJobILi4ELb0E": 4,
    "FindAndCopyJobILi1ELb0E": 4,
    "CopyRowsJobILi4ELb0E": 4,
    "CopyRowsJobILi1ELb0E": 4,
    "CombineJobILi4E": 4,
    "SumTilesJobILi4E": 4,
}

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S[^;]*);")
REGISTER = re.compile(r"\bR(\d+)\b")


def most_under_way(code, bits):
    """The most loads of `bits` that are under way at once, in the lines of one kernel."""
    most = 0
    waiting = []  # registers of each load's result
    for line in code:
        if not (found := INSTRUCTION.match(line)):
            continue
        address, text = int(found[1], 16), found[2]
        operation, _, operands = text.partition(" ")
        named = {int(number) for number in REGISTER.findall(operands)}
        waiting = [result for result in waiting if not result & named]
        if operation.startswith(("LDG", "LD.")):
            width = next((size for size in (128, 64) if f".{size}" in operation), 32)
            first = int(REGISTER.search(operands)[1])
            if width == bits:
                waiting.append(set(range(first, first + width // 32)))
                most = max(most, len(waiting))
        elif operation == "BRA" and (target := re.search(r"0x([0-9a-f]+)", operands)):
            if int(target[1], 16) <= address:  # the next iteration is another round of loads
                waiting = []
    return most


def kernels_of(disassembly):
    """(target, mangled name, lines) of each kernel."""
    target, name, code = None, None, []
    for line in disassembly.splitlines():
        if found := re.search(r"code for (sm_\w+)", line):
            target = found[1]
        elif found := re.search(r"Function : (\w+)", line):
            if name is not None:
                yield (*name, code)
            name, code = (target, found[1]), []
        else:
            code.append(line)
    if name is not None:
        yield (*name, code)


def report(disassembly):
    """Prints a line per kernel; returns whether all have the loads that LEAST demands."""
    absent, good = set(LEAST), True
    print("loads under way  kernel")
    for target, name, code in kernels_of(disassembly):
        for job, least in LEAST.items():
            if job not in name:
                continue
            absent.discard(job)
            most = most_under_way(code, 128 if "ILi4E" in job else 32)
            together = "JobsKernel" if "JobsKernel" in name else "OneJobKernel"
            few = f", LESS THAN {least}" if most < least else ""
            print(f"{most:>15}  {target} {together} {job}{few}")
            good &= most >= least
    if absent:
        print(f"No kernel is called {', '.join(sorted(absent))}")
    return good and not absent


def main():
    for tool in ("cuobjdump", "nvdisasm"):
        if shutil.which(tool) is None:
            print(f"{tool} is not on PATH: it comes with the CUDA toolkit.", file=sys.stderr)
            return 1
    disassembly = ""
    for path in sys.argv[1:]:
        command = ["cuobjdump", "-sass", path]
        disassembly += subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return 0 if report(disassembly) else 1


if __name__ == "__main__":
    sys.exit(main())
