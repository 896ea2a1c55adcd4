"""Random programs on 2 and 3 ranks, many steps: `make soak-ranks ARGS="--steps 20000"`."""

import argparse
import random

from tests.ranks import run_ranks

CHUNK = 2000  # steps of one launch


def main():
    """Runs the steps and prints how they ended; fails where a rank differs from the oracle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="in total")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    arguments = parser.parse_args()
    done = 0
    while done < arguments.steps:
        ranks = arguments.ranks[done // CHUNK % len(arguments.ranks)]
        args = {"seed": arguments.seed + done, "steps": min(CHUNK, arguments.steps - done)}
        timeout = 120 + args["steps"]  # a step takes milliseconds; a hang is ended by its message
        results = run_ranks("tests.checks.programs:main", ranks, args=args, timeout=timeout)
        done += args["steps"]
        print(f"{done} steps, {ranks} ranks, seed {args['seed']}: {results[0]}", flush=True)


if __name__ == "__main__":
    main()
