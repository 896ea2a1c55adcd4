"""`phase` of tools/phase.sh: one line per phase, what the command says in a file."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def run(folder, *lines):
    script = "\n".join(["set -euo pipefail", f"LOG={folder}/log", ". tools/phase.sh", *lines])
    return subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)


def test_a_phase_is_one_line_with_its_seconds(tmp_path):
    done = run(
        tmp_path, "phase 'Fetching wheels' echo chatter", "phase Compiling sh -c 'echo more >&2'"
    )
    assert done.returncode == 0 and done.stderr == ""
    assert re.fullmatch(r"Fetching wheels \.\.\. \d+ s\nCompiling \.\.\. \d+ s\n", done.stdout)
    assert (tmp_path / "log").read_text() == "chatter\nmore\n"


def test_a_phase_that_fails_names_the_log_and_ends_the_script(tmp_path):
    done = run(tmp_path, "phase Compiling sh -c 'echo no such header; exit 3'", "echo went on")
    assert done.returncode == 3
    assert re.fullmatch(r"Compiling \.\.\. failed after \d+ s\n", done.stdout)
    assert done.stderr.splitlines() == [
        "no such header",
        f"Compiling: failed with status 3; the whole log is {tmp_path}/log",
    ]


def test_a_phase_that_waits_is_in_the_shell_itself(tmp_path):
    # tools/make_venv.sh compiles while it downloads.
    done = run(tmp_path, f"(sleep 0.3; touch {tmp_path}/made) &", "phase Waiting wait")
    assert done.returncode == 0 and (tmp_path / "made").exists()
