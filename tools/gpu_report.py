#!/usr/bin/env python3
"""Prints the results of tools/check_gpu.sh as Markdown tables: gpu_report.py FOLDER STEP...

Reads the files of each step in FOLDER: STEP.result, STEP.seconds, STEP.log, and bench.json.
"""

import json
import pathlib
import re
import sys

# Patterns to find in a step's log, and how to print their groups. All matches are printed.
FINDINGS = [
    (r"^={0,70} ?((?:\d+ [a-z]+,? ?)+) in [\d.]+ ?s", "{}"),  # pytest
    (r"^(\d+% tests passed(?:, \d+ tests failed)? out of \d+)", "{}"),  # ctest
    (r"ERROR SUMMARY: (\d+) errors?", "{} errors of the sanitizer"),
    (r"RACECHECK SUMMARY: (\d+) hazards?", "{} hazards"),
    (r"^(Install first: .*)$", "{}"),
    (r"^((?:[\w.]*Error|CMake Error).{0,120})", "{}"),
    (r"^emulator: (.*SOK_EMULATOR_SEED.*)$", "{}"),
    (r"^\|\s+\d+\s+(NVIDIA [\w -]+?)\s{2,}", "{}"),  # nvidia-smi
    (r"release (\d+\.\d+), V", "nvcc {}"),
]


def findings(log: str) -> str:
    """Findings in `log`, in the order of the patterns, each once."""
    told: list[str] = []
    for pattern, words in FINDINGS:
        for match in re.finditer(pattern, log, re.MULTILINE):
            text = words.format(*match.groups()).strip().replace("|", "/")
            if text not in told:
                told.append(text)
    return "; ".join(told[:4])


def read(path: pathlib.Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def steps_table(folder: pathlib.Path, steps: list[str]) -> list[str]:
    lines = ["| step | result | seconds | what it says |", "|---|---|---|---|"]
    for step in steps:
        result = read(folder / f"{step}.result").rpartition(" ")[0] or "not run"
        seconds = read(folder / f"{step}.seconds").strip() if result != "not run" else ""
        said = findings(read(folder / f"{step}.log")) if result != "not run" else ""
        lines.append(f"| {step} | {result} | {seconds} | {said} |")
    return lines


def figures_table(figures: list[dict[str, object]]) -> list[str]:
    """One line per figure; the columns are those of the figures."""
    names = list(dict.fromkeys(name for figure in figures for name in figure))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for figure in figures:
        values = [figure.get(name, "") for name in names]
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    folder, steps = pathlib.Path(sys.argv[1]), sys.argv[2:]
    lines = steps_table(folder, steps)
    figures = read(folder / "bench.json")
    if figures:
        lines += ["", *figures_table(json.loads(figures))]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
