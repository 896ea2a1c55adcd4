"""Draws the ratios of docs/benchmarks.md: `python -m benchmarks.draw`."""

from __future__ import annotations

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[1] / "docs"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def rows() -> list[tuple[str, list[float], float | None]]:
    """The name, the ratios and the target of each row of the page's table of results."""
    section = (DOCS / "benchmarks.md").read_text().split("## Results")[1].split("![")[0]
    results = []
    for line in re.findall(r"^\| (?!ours).* / .*\|$", section, re.M):
        name, *cells = (cell.strip() for cell in line[1:-1].split("|"))
        ratios = [float(number) for cell in cells[:-1] for number in NUMBER.findall(cell)]
        target = NUMBER.search(cells[-1])
        results.append((name.replace("`", ""), ratios, float(target[0]) if target else None))
    return results


def main() -> None:
    """Writes docs/images/benchmarks.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6.5), layout="constrained")
    names, all_ratios, targets = zip(*rows(), strict=True)
    places = range(len(names))
    for place, ratios, target in zip(places, all_ratios, targets, strict=True):
        color = "tab:red" if target is not None and min(ratios) > target else "tab:blue"
        axes.plot([min(ratios), max(ratios)], [place, place], "o-", color=color)
        if target is not None:
            axes.plot(target, place, "|", color="black", markersize=14)
    axes.set(xscale="log", xlim=(0.015, 5), xlabel="time, ours / theirs")
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4]
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.set_yticks(places, labels=names)
    axes.axvline(1, color="gray", linewidth=1)
    figure.suptitle("One layer and groups; | marks a target, red misses it", fontsize=10)
    axes.invert_yaxis()
    figure.savefig(DOCS / "images" / "benchmarks.png", dpi=90)


if __name__ == "__main__":
    main()
