"""The manifests for Kubernetes give a pod what the guide says that it needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nostall.base import _options
from nostall.base._sizes import parse_size

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
# Where each kind has its pods.
PODS = {
    "PyTorchJob": "spec pytorchReplicaSpecs Worker template",
    "JobSet": "spec replicatedJobs 0 template spec template",
    "TrainingRuntime": "spec template spec replicatedJobs 0 template spec template",
}
API = {
    "PyTorchJob": "kubeflow.org/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}


def documents(name: str) -> dict[str, Any]:
    found = {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}
    assert {kind: one["apiVersion"] for kind, one in found.items()} == {k: API[k] for k in found}
    return found


def within(value: Any, path: str) -> Any:
    for key in path.split():
        value = value[int(key) if key.isdigit() else key]
    return value


def size(text: str) -> int:
    return parse_size(text + "B")


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml", "trainjob.yaml"])
def test_pods_have_what_ranks_need(name: str) -> None:
    found = documents(name)
    (kind,) = set(found) & set(PODS)
    pod = within(found[kind], PODS[kind])
    (container,) = pod["spec"]["containers"]
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes) and len(mounts) == len(volumes)
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    # Trainer 2 has the resources in the job.
    job = found.get("TrainJob")
    resources = job["spec"]["trainer"]["resourcesPerNode"] if job else container["resources"]
    limit = size(resources["limits"]["memory"])
    assert limit == size(resources["requests"]["memory"]) > size(shared["sizeLimit"])
    assert "medium" not in volumes[mounts["/cache"]]["emptyDir"]
    # The guide's tiers stay below the volumes they lie in.
    page = (FOLDER.parents[1] / "docs" / "guide" / "kubernetes.md").read_text()
    ram, cache = re.findall(r"(?:ram|/cache):(\w+)", page)
    assert parse_size(ram) < size(shared["sizeLimit"])
    assert parse_size(cache) < size(volumes[mounts["/cache"]]["emptyDir"]["sizeLimit"])


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml", "trainjob.yaml"])
def test_metrics_are_served_where_probes_and_scrapers_look(name: str) -> None:
    found = documents(name)
    (kind,) = set(found) & set(PODS)
    pod = within(found[kind], PODS[kind])
    (container,) = pod["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    port = variables[_options.row("observe.metrics_port").variable]
    assert variables[_options.row("observe.metrics_address").variable] == "0.0.0.0"
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == port
    (named,) = container["ports"]
    assert named["containerPort"] == int(port)
    probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
    for probe in probes.values():
        assert probe["httpGet"] == {"path": "/metrics", "port": named["name"]}
    # Metrics are served when all pods have met, so where these can be found by then only if they
    # need not be ready.
    network = found[kind]["spec"].get("network", {})
    published = kind == "TrainingRuntime" or network.get("publishNotReadyAddresses", False)
    assert set(probes) == {"livenessProbe", *(["startupProbe"] if published else [])}


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml", "trainjob.yaml"])
def test_torchrun_is_told_of_the_eight_ranks_of_its_pod(name: str) -> None:
    """Else it starts one. A TrainJob passes its field on; a PyTorchJob does not in all releases."""
    found = documents(name)
    if "TrainJob" in found:
        trainer = found["TrainJob"]["spec"]["trainer"]
        command, ranks = trainer["command"], [f"--nproc-per-node={trainer['numProcPerNode']}"]
    else:
        (kind,) = set(found) & set(PODS)
        (container,) = within(found[kind], PODS[kind])["spec"]["containers"]
        command = container["command"]
        ranks = [word for word in command if word.startswith("--nproc-per-node")]
    assert command[0] == "torchrun" and ranks == ["--nproc-per-node=8"]


def read(document: Any) -> Any:
    """What a document is to the models that Kubeflow makes of its schemas, as a document again.

    The models refuse values of other types and documents without a required field.
    """
    import kubeflow_trainer_api.models as models  # for a second, and for this test alone

    if document["kind"] == "PyTorchJob":
        from kubeflow.training.api_client import ApiClient

        client = ApiClient()
        answer = SimpleNamespace(data=json.dumps(document))
        job = client.sanitize_for_serialization(
            client.deserialize(answer, "KubeflowOrgV1PyTorchJob")
        )
        # Its own model of a pod takes values of any type.
        template = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        pod = models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template)
        assert missing(template, pod.to_dict()) == []
        return job
    model = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }[document["kind"]]
    return model.from_dict(document).to_dict()


def missing(document: Any, found: Any, path: str = "") -> list[str]:
    """Where `found` has not what `document` has: models leave out names that they do not know."""
    if isinstance(document, dict) and isinstance(found, dict):
        return [
            one
            for key, value in document.items()
            for one in missing(value, found.get(key), f"{path}.{key}")
        ]
    if isinstance(document, list) and isinstance(found, list) and len(document) == len(found):
        pairs = enumerate(zip(document, found, strict=True))
        return [one for i, (a, b) in pairs for one in missing(a, b, f"{path}[{i}]")]
    return [] if document == found else [path]


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml", "trainjob.yaml"])
def test_manifests_hold_to_the_schemas(name: str) -> None:
    for kind, document in documents(name).items():
        assert missing(document, read(document)) == []
        if kind == "TrainJob":
            continue
        # The check finds a name that no schema has, and a value of another type.
        pod = within(document, PODS[kind])
        (container,) = pod["spec"]["containers"]
        pod["spec"]["restartPolicies"] = "Never"
        place = "." + re.sub(r" (\d+)", r"[\1]", PODS[kind]).replace(" ", ".")
        if kind != "PyTorchJob":
            assert missing(document, read(document)) == [f"{place}.spec.restartPolicies"]
        else:
            with pytest.raises(AssertionError, match="restartPolicies"):
                read(document)
        del pod["spec"]["restartPolicies"]
        container["ports"][0]["containerPort"] = "9464"
        with pytest.raises(ValueError, match="containerPort"):
            read(document)


def test_the_trainjob_has_its_runtime() -> None:
    found = documents("trainjob.yaml")
    runtime, job = found["TrainingRuntime"], found["TrainJob"]["spec"]
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["runtimeRef"]["kind"] == "TrainingRuntime"
    # Trainer 2 finds its container by these names.
    (jobs,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = jobs["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert within(jobs, "template spec template spec containers 0 name") == "node"


def test_the_jobset_names_its_first_pod() -> None:
    job = documents("jobset.yaml")["JobSet"]
    (workers,) = job["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    command = within(spec, "template spec containers 0 command")
    host = f"{job['metadata']['name']}-{workers['name']}-0-0.{job['spec']['network']['subdomain']}"
    assert f"--master-addr={host}" in command
    assert f"--nnodes={spec['completions']}" in command
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"


def test_pods_of_the_pytorchjob_are_told_where_to_meet() -> None:
    """The operator has an address of a master's pod alone, or of the first worker of an elastic job."""
    spec = documents("pytorchjob.yaml")["PyTorchJob"]["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    elastic, replicas = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert elastic["rdzvBackend"] == "c10d"
    assert elastic["minReplicas"] == elastic["maxReplicas"] == replicas


def test_all_pods_start_again_when_one_fails() -> None:
    runtime = within(documents("trainjob.yaml")["TrainingRuntime"], "spec template spec")
    for jobs in (runtime, documents("jobset.yaml")["JobSet"]["spec"]):
        assert jobs["failurePolicy"]["maxRestarts"] > 0
        job = within(jobs, "replicatedJobs 0 template spec")
        assert job["backoffLimit"] == 0
        assert within(job, "template spec restartPolicy") == "Never"
