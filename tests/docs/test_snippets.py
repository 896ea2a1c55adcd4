"""What the documents show runs, and what they name exists."""

import functools
import json
import os
import re
import shlex

import pytest

from tests import disk, forks
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
FIRST_PAGES = ("README.md", "docs/distribution.md")
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"


def _numbers(block):
    """Numbers of ranks: one, and for the pages that one reads first two; under tf_keras one."""
    if os.environ.get("SLOW"):
        return block.ranks
    few = LEGACY or block.document not in FIRST_PAGES
    return [min(block.ranks) if few else max(block.ranks)] if block.ranks else []


BY_THEMSELVES = [
    pytest.param(
        *(block, num_ranks),
        marks=[pytest.mark.ranks] * (num_ranks > 1),
        id=f"{block.name}-{num_ranks}",
    )
    for document in DOCUMENTS
    for block in python_blocks(document)
    for num_ranks in _numbers(block)
]


def _scripts(folder, documents, wanted):
    """Files of the documents' wanted blocks, each line at the place where the document has it."""
    scripts = []
    for document in documents:
        folder.mkdir(exist_ok=True)
        script = folder / os.path.basename(document)
        script.write_text(program([block for block in python_blocks(document) if wanted(block)]))
        scripts.append(str(script))
    return scripts


def _of_documents(folder, documents):
    return _scripts(folder / documents[0].replace("/", "-"), documents, lambda b: not b.ranks)


def _of_block(folder, block):
    name = block.name.replace("/", "-").replace(":", "-")
    return _scripts(folder / name, [block.document], lambda b: b == block)


def _run(programs, num_ranks, folder):
    """Errors of programs that share processes, in a temporary folder, and what rank 0 printed."""
    if num_ranks > 1:
        ranks = run_ranks(
            "tests.docs.together:run",
            num_ranks,
            args={"programs": programs},
            env={"TMPDIR": folder},
        )
        return {
            path: (
                "".join(
                    f"rank {r}: {each[path][0]}" for r, each in enumerate(ranks) if each[path][0]
                ),
                ranks[0][path][1],
            )
            for path in ranks[0]
        }
    module, results = ["-m", "tests.docs.together"], folder / "results"
    with disk.folder() as here:
        environment = {**os.environ, "TMPDIR": str(folder)}
        done = forks.run(*module, json.dumps(programs), results, cwd=here, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """`usual(num_ranks)`: the folder, and what all programs gave that run on so many ranks."""

    @functools.cache
    def usual(num_ranks):
        folder = tmp_path_factory.mktemp("docs")
        programs = [_of_documents(folder, documents) for documents in TOGETHER if num_ranks == 1]
        for document in DOCUMENTS:
            for block in python_blocks(document):
                if num_ranks in _numbers(block):
                    programs.append(_of_block(folder, block))
        return folder, _run(programs, num_ranks, folder)

    return usual


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("documents", TOGETHER, ids=lambda documents: documents[0])
def test_blocks_of_a_document_run_in_order(usual, documents):
    folder, found = usual(1)
    error, _ = found[_of_documents(folder, documents)[0]]
    assert not error, error


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("block, num_ranks", BY_THEMSELVES)
def test_block_runs_by_itself(usual, block, num_ranks):
    folder, found = usual(num_ranks)
    error, printed = found[_of_block(folder, block)[0]]
    assert not error, error
    if num_ranks == 1:
        assert output_of(block) in printed


@pytest.mark.keras
def test_servers_follow_the_model_of_the_readme(tmp_path):
    """Its block of `fit` goes on from the block above it."""
    above, block = (each for each in blocks("README.md") if "model.fit(" in each.text)
    script = tmp_path / "README.md"
    shown = 'import os\nassert "1" in os.listdir("out/models"), os.listdir("out/models")\n'
    script.write_text(program([above, block]) + shown)
    error, _ = _run([[str(script)]], 1, tmp_path)[str(script)]
    assert not error, error


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1200


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_files_exist_and_blocks_say_their_language(document):
    for target in links(document):
        file, _, anchor = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        assert path.exists(), f"{document} links to {target}"
        if anchor:
            known = anchors(str(path.resolve().relative_to(ROOT)))
            assert anchor in known, f"{document} links to {target}; headings are {known}"
    missing = [name for name in paths(document) if not list(ROOT.glob(name.rstrip("/")))]
    # Compiled libraries, which a fresh clone has not made yet.
    assert [name for name in missing if ".so" not in name] == []
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
