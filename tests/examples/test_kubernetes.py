"""The Kubernetes example: the schemas accept its manifests, its names are there, its etcd admits agents only."""

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recycle import Job, RunError
from recycle.cli.app import command_of
from recycle.exec.etcd import open_client
from recycle.job.shape import place_workers
from tests import ROOT
from tests.exec.etcd_server import ETCD

yaml = pytest.importorskip("yaml", reason="no PyYAML: install recycle-pipeline[test]")

FOLDER = ROOT / "examples" / "cluster"
TEXT = (FOLDER / "kubernetes.yaml").read_text()
MANIFESTS = list(yaml.safe_load_all(TEXT))
OLDEST = "1.31"
"""The first version in which podFailurePolicy is stable."""


def manifest(kind: str, name: str):
    (match,) = (m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return match


def pods() -> dict[str, dict[str, Any]]:
    """The pods' specifications, by the name of what starts them."""
    return {m["metadata"]["name"]: m["spec"]["template"]["spec"] for m in MANIFESTS if "template" in m.get("spec", {})}


def job() -> Job:
    return Job.from_toml(manifest("ConfigMap", "recycle-job")["data"]["job.toml"])


def test_the_schemas_of_kubernetes_accept_the_manifests():
    kubernetes = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate: install the extra `test`")
    for version in (OLDEST, kubernetes.latest_version()):
        for each in MANIFESTS:
            kubernetes.validate(each, version, strict=True)


def without_quantities(node):
    """A manifest without amounts of memory and cores, which the models of the Trainer have no text for."""
    if isinstance(node, list):
        return [without_quantities(each) for each in node]
    if isinstance(node, dict):
        return {key: without_quantities(each) for key, each in node.items() if key not in ("resources", "sizeLimit")}
    return node


def of_kind(file: str, kind: str):
    (match,) = (m for m in yaml.safe_load_all((FOLDER / file).read_text()) if m["kind"] == kind)
    return dict(match)


@pytest.mark.parametrize(
    ("file", "kind", "model"),
    [
        ("jobset.yaml", "JobSet", "JobsetV1alpha2JobSet"),
        ("kubeflow.yaml", "TrainingRuntime", "TrainerV1alpha1TrainingRuntime"),
        ("kubeflow.yaml", "TrainJob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_the_models_of_the_trainer_accept_every_key(file, kind, model):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api: install `test`")
    text = without_quantities(of_kind(file, kind))
    assert getattr(models, model).from_dict(text).to_dict() == text


def test_jobset_and_trainer_start_the_pods_of_the_job():
    job = manifest("Job", "recycle")
    jobset, runtime, train_job = (
        of_kind(*each)
        for each in (("jobset.yaml", "JobSet"), ("kubeflow.yaml", "TrainingRuntime"), ("kubeflow.yaml", "TrainJob"))
    )
    (of_jobset,) = jobset["spec"]["replicatedJobs"]
    assert of_jobset["template"]["spec"] == job["spec"]
    (of_trainer,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert of_trainer["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    named = yaml.safe_dump(of_trainer["template"]["spec"]).replace("containerName: node", "containerName: agent")
    spec = yaml.safe_load(named)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["name"] == of_trainer["name"] == "node"
    container["name"] = "agent"
    assert spec == job["spec"]
    assert (
        runtime["spec"]["mlPolicy"]["numNodes"]
        == train_job["spec"]["trainer"]["numNodes"]
        == job["spec"]["completions"]
    )
    reference = {key: train_job["spec"]["runtimeRef"][key] for key in ("kind", "name")}
    assert reference == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert train_job["spec"]["trainer"]["image"] == container["image"]
    for policy in jobset["spec"]["failurePolicy"], runtime["spec"]["template"]["spec"]["failurePolicy"]:
        (rule,) = policy["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (ignored,) = [m for m in MANIFESTS if m["metadata"].get("labels") == {"agents": "job"}]
    assert ignored is job


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    unit = (FOLDER / "recycle-agent@.service").read_text()
    (options,) = re.findall("^ExecStart=/opt/recycle/bin/recycle (.+)$", unit, re.MULTILINE)
    here = re.sub("^ExecStart=.*", f"ExecStart={shutil.which('true')}", unit, flags=re.MULTILINE)
    (tmp_path / "recycle-agent@.service").write_text(here.replace("User=recycle", "User=root"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "recycle-agent@.service")]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and line[0].isupper())
    assert settings["RestartPreventExitStatus"] == "2"
    assert settings["SuccessExitStatus"] == "143"
    assert (
        float(settings["TimeoutStopSec"])
        > Job.from_toml("[shape]\npipelines = 2\nranks = 1\nmicro_batches = 1\n").membership.grace
    )
    assert options.split()[0] == "agent"


def recycle_commands() -> Iterator[list[str]]:
    """Every `recycle` command of the examples: of containers, of scripts, and those that comments name."""
    for pod in pods().values():
        yield from (each["command"][1:] for each in pod["containers"] if each["command"][0] == "recycle")
    for file in FOLDER.iterdir():
        for line in re.findall(r"\brecycle((?: agent| drain| train) .*?)(?: &)?$", file.read_text(), re.MULTILINE):
            yield shlex.split(line)


def test_the_command_line_accepts_every_command_of_the_examples():
    commands = list(recycle_commands())
    assert {command[0] for command in commands} == {"agent", "drain"}
    for name, *arguments in commands:
        command_of(name).make_context(name, arguments)  # raises UsageError


def test_volumes_secrets_and_mounts_match():
    claims = {"PersistentVolumeClaim": "persistentVolumeClaim", "ConfigMap": "configMap"}
    defined = {(key, m["metadata"]["name"]) for m in MANIFESTS if (key := claims.get(m["kind"]))}
    defined |= {("secret", name) for name in re.findall(r"kubectl create secret generic (\S+)", TEXT)}
    for name, pod in pods().items():
        volumes = {volume["name"] for volume in pod["volumes"]}
        if name == "recycle-etcd":
            volumes |= {
                each["metadata"]["name"] for each in manifest("StatefulSet", name)["spec"]["volumeClaimTemplates"]
            }
        for volume in pod["volumes"]:
            for kind, key in ("persistentVolumeClaim", "claimName"), ("configMap", "name"), ("secret", "secretName"):
                assert kind not in volume or (kind, volume[kind][key]) in defined
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_containers_have_no_privileges_and_bounded_memory():
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            security = container["securityContext"]
            assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
            assert container["resources"]["limits"]["memory"]
            assert "livenessProbe" in container


def test_files_of_the_image_exist():
    recipe = (FOLDER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", recipe, re.MULTILINE):
        for source in line.split():
            assert (FOLDER.parents[1] / source).exists()


def test_job_has_a_pod_per_node_and_mounted_paths():
    of_run, trained = manifest("Job", "recycle")["spec"], job()
    trained.profile()
    nodes = len(place_workers(trained.shape, trained.cluster.workers_per_node))
    assert of_run["completions"] == of_run["parallelism"] == nodes
    assert manifest("PodDisruptionBudget", "recycle")["spec"]["minAvailable"] == nodes - 1
    (agent,) = pods()["recycle"]["containers"]
    mounts = {mount["mountPath"] for mount in agent["volumeMounts"]}
    limits = trained.membership
    paths = [limits.etcd_ca, limits.etcd_certificate, limits.etcd_key, *(a for a in agent["command"] if a[0] == "/")]
    assert {str(Path(str(path)).parent) for path in paths} <= mounts
    assert "/dev/shm" in mounts


@pytest.mark.etcd
@pytest.mark.process
@pytest.mark.skipif(ETCD is None, reason="no etcd: install Debian's etcd-server")
def test_etcd_of_the_manifest_requires_a_certificate(tmp_path):
    for line in re.findall(r"^#   ((?:openssl|printf) .+)$", TEXT, re.MULTILINE):
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as client, socket.create_server(("127.0.0.1", 0)) as peer:
        port, peers = (str(each.getsockname()[1]) for each in (client, peer))
    (container,) = pods()["recycle-etcd"]["containers"]
    replaced = {
        "=/data/": f"={tmp_path}/",
        "=/tls/": f"={tmp_path}/",
        "0.0.0.0": "127.0.0.1",
        "2379": port,
        "2380": peers,
    }
    arguments = [argument for argument in container["command"][1:] if "metrics" not in argument]
    for before, after in replaced.items():
        arguments = [argument.replace(before, after) for argument in arguments]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([ETCD, *arguments], stdout=log, stderr=log)
    try:
        limits = msgspec.structs.replace(
            job().membership,
            store_timeout=30.0,
            **{key: str(tmp_path / Path(path).name) for key, path in certificates(job()).items()},
        )
        url = f"etcds://localhost:{port}"
        assert open_client(url, limits).read("/recycle/") is None
        stranger = msgspec.structs.replace(
            limits, store_timeout=0.2, etcd_certificate=None, etcd_key=None, insecure=True
        )
        with pytest.raises(RunError, match="TLS failed; check"):
            open_client(url, stranger)
        with pytest.raises(RunError, match="its certificate is not accepted: "):
            open_client(url, msgspec.structs.replace(stranger, etcd_ca=None))
    finally:
        server.kill()
        server.wait()


def certificates(job: Job) -> dict[str, str]:
    keys = ("etcd_ca", "etcd_certificate", "etcd_key")
    return {key: str(getattr(job.membership, key)) for key in keys}
