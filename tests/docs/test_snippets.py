"""What the documents show runs, and what they name exists."""

import os
import re
import shlex
import subprocess

import pytest

from sok_like.runtime.ranks.launchers import find_program
from tests import ready_ranks
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
from tests.ranks import HANG_LIMIT

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


@pytest.fixture
def run(tmp_path, folder):
    """`run(2, {name: text})`: what rank 0 prints in a program of files with these texts."""

    def run(num_ranks, files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        paths = [str(tmp_path / name) for name in files]
        ranks = ready_ranks.run(num_ranks, ready_ranks.run_program, (paths, [], folder))
        for error, _ in ranks:
            assert not error, error
        return ranks[0][1]

    return run


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("documents", TOGETHER, ids=lambda documents: documents[0])
def test_blocks_of_a_document_run_in_order(run, documents):
    parts = {d: [block for block in python_blocks(d) if not block.ranks] for d in documents}
    run(1, {os.path.basename(d): program(blocks) for d, blocks in parts.items()})


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("block, num_ranks", BY_THEMSELVES)
def test_block_runs_by_itself(run, block, num_ranks):
    printed = run(num_ranks, {os.path.basename(block.document): program([block])})
    if num_ranks == 1:
        assert output_of(block) in printed


@pytest.mark.keras
def test_servers_follow_the_model_of_the_readme(run):
    """Its block of `fit` goes on from the block above it."""
    parts = [each for each in blocks("README.md") if "model.fit(" in each.text]
    shown = 'import os\nassert "1" in os.listdir("out/models"), os.listdir("out/models")\n'
    run(1, {"README.md": program(parts) + shown})


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


# ---- the job of Kubernetes, as far as that goes without a cluster ----

# Of kubeflow.org/v2beta1, as its definition names them.
SPEC = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
POLICY = {"cleanPodPolicy", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"}


@pytest.fixture(scope="module")
def spec():
    yaml = pytest.importorskip("yaml")
    found = [b.text for b in blocks("docs/guides/several_ranks.md") if "kind: MPIJob" in b.text]
    job = yaml.safe_load(found[0])
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    return job["spec"]


def test_the_job_has_the_fields_of_its_kind(spec):
    assert spec.keys() <= SPEC and spec["runPolicy"].keys() <= POLICY
    assert spec["mpiReplicaSpecs"].keys() == {"Launcher", "Worker"}
    for replicas in spec["mpiReplicaSpecs"].values():
        assert replicas.keys() <= {"replicas", "restartPolicy", "template"}
        pod = replicas["template"]["spec"]
        names = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert all(isinstance(word, str) for word in container["command"])
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == names


@pytest.mark.ranks
def test_the_launcher_of_the_job_starts_all_ranks(spec, tmp_path):
    specs = spec["mpiReplicaSpecs"]
    (container,) = specs["Launcher"]["template"]["spec"]["containers"]
    _, *options, python, program = container["command"]
    assert (python, program) == ("python", "/app/train.py")
    slots = spec["slotsPerWorker"] * specs["Worker"]["replicas"]
    hosts = tmp_path / "hostfile"  # the operator writes one
    hosts.write_text(f"localhost slots={slots}\n")
    options[options.index("/etc/mpi/hostfile")] = str(hosts)
    line = [find_program("mpirun"), *options, "echo", "a rank"]
    environment = {"LD_LIBRARY_PATH": "", **os.environ}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT)
    assert done.stdout.split("\n") == ["a rank"] * slots + [""], done.stderr
