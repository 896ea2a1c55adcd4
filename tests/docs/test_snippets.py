"""What the documents show runs, and what they name exists."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.docs.documents import (
    DOCUMENTS,
    ROOT,
    anchors,
    blocks,
    links,
    output_of,
    paths,
    program,
    programs,
    python_blocks,
)
from tests.ranks import run_ranks

LANGUAGES = ("python", "console", "text")  # run; checked for what they name; neither
TOGETHER = [
    together
    for pages in programs()
    if (together := [d for d in pages if any(not block.ranks for block in python_blocks(d))])
]
# Runs the files it is given as one program. They stay files, so that TensorFlow finds their source.
RUN_ALL = """
import sys
for path in sys.argv[1:]:
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), globals())
"""
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"


def _marks(block, num_ranks):
    """Most ranks under Keras 3, fewest under tf_keras; the other two pairs are for `slow`."""
    usual = min(block.ranks) if LEGACY else max(block.ranks)
    return [pytest.mark.ranks] * (num_ranks > 1) + [pytest.mark.slow] * (num_ranks != usual)


ALONE = [
    pytest.param(
        block,
        num_ranks,
        marks=_marks(block, num_ranks),
        id=f"{block.name}-{num_ranks}",
    )
    for document in DOCUMENTS
    for block in python_blocks(document)
    for num_ranks in block.ranks
]


def _run(scripts, folder):
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *map(str, scripts)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.keras
@pytest.mark.parametrize("documents", TOGETHER, ids=lambda documents: documents[0])
def test_blocks_of_a_document_run_in_order(documents, tmp_path):
    scripts = [tmp_path / os.path.basename(document) for document in documents]
    for script, document in zip(scripts, documents, strict=True):
        script.write_text(program([block for block in python_blocks(document) if not block.ranks]))
    _run(scripts, tmp_path)


@pytest.mark.keras
@pytest.mark.parametrize("block, num_ranks", ALONE)
def test_block_runs_alone(block, num_ranks, tmp_path):
    script = tmp_path / os.path.basename(block.document)
    script.write_text(program([block]))
    if num_ranks == 1:
        printed = _run([script], tmp_path)
        assert output_of(block) in printed
    else:
        run_ranks(script, num_ranks, env={"TMPDIR": tmp_path})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in links(document):
        file, _, anchor = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        assert path.exists(), f"{document} links to {target}"
        if anchor:
            known = anchors(str(path.resolve().relative_to(ROOT)))
            assert anchor in known, f"{document} links to {target}; headings are {known}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_exist(document):
    missing = [name for name in paths(document) if not list(ROOT.glob(name.rstrip("/")))]
    # Compiled libraries, which a fresh clone has not made yet.
    assert [name for name in missing if ".so" not in name] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_its_language(document):
    odd = [block.name for block in blocks(document) if block.language not in LANGUAGES]
    assert odd == [], f"a block must be one of {LANGUAGES}"


COMMANDS = [
    pytest.param(block.document, command, id=f"{block.name}-{number}")
    for document in DOCUMENTS
    for block in blocks(document)
    if block.language == "console"
    for number, command in enumerate(block.text.replace("\\\n", " ").splitlines())
    if command.strip() and not command.startswith("#")
]


@pytest.mark.parametrize("document, command", COMMANDS)
def test_commands_name_targets_and_files_that_exist(document, command):
    words = shlex.split(command, comments=True)
    words = [word for word in words if not re.match(r"\w+=", word)]  # FOLDER=... in front
    if words[0] == "make":
        targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.M)
        known = {target for line in targets for target in line.split()}
        assert set(words[1:]) <= known
        return
    assert words[0] in {"python", "mpirun", "horovodrun", "pip"}, command
    programs = [word for word in words if word.endswith(".py")]
    missing = [name for name in programs if name != "train.py" and not (ROOT / name).exists()]
    assert missing == []
