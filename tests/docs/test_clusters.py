"""The job of Kubernetes in the guide, as far as that goes without a cluster."""

import os
import subprocess

import pytest

from sok_like.runtime.ranks.launchers import find_program
from tests.docs.documents import blocks
from tests.ranks import HANG_LIMIT

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
