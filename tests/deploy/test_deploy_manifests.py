"""Compose file, Prometheus' configuration, Kubernetes manifests and docs/deploy.md, compared with what the server does."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import ROOT
from tests.support.deployment import DOCKER, TARGETS, install, project, read, serve_arguments, size, target

from kvseek.server import launch, replicas
from kvseek.server.ports import Ports
from kvseek.server.settings import ServeSettings

# The launcher ends its processes one after the other: the engine, when requests have had their time, the doors, Triton.
SHUTDOWN_SECONDS = ServeSettings().drain_seconds + 4 * launch.STOP_SECONDS
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(scope="module")
def deployment() -> Any:
    return read("kubernetes/deployment.yaml")


@pytest.fixture
def pod(deployment: Any) -> Any:
    return deployment["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Any) -> Any:
    (only,) = pod["containers"]
    return only


# Compose and Prometheus


@pytest.mark.parametrize("name", TARGETS)
def test_compose_services(name: str) -> None:
    service = read("compose.yaml")["services"][f"kvseek-{name}"]
    assert service["build"]["target"] == name
    assert (DOCKER / service["build"]["context"] / "Dockerfile").resolve() == ROOT / "Dockerfile"
    assert service["image"] == f"kvseek:{project()['project']['version']}-{name}"
    ports = Ports()
    assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in dataclasses.astuple(ports)]
    (engine,) = service["volumes"]
    assert engine["target"] == str(serve_arguments(target(name).command).engine_dir)
    assert engine["read_only"]
    assert size(service["shm_size"]) >= 1 << 30
    assert re.fullmatch(r"\$\{MEMORY_LIMIT:-\d+g\}", service["mem_limit"])
    assert int(service["stop_grace_period"].rstrip("s")) > SHUTDOWN_SECONDS


def test_prometheus_scrapes_the_metrics_port() -> None:
    services = read("compose.yaml")["services"]
    assert re.fullmatch(r"prom/prometheus:v\d+\.\d+\.\d+", services["prometheus"]["image"])
    for volume in services["prometheus"]["volumes"]:
        assert (DOCKER / volume["source"]).is_file()
    (job,) = read("prometheus.yaml")["scrape_configs"]
    (targets,) = job["static_configs"]
    (alias,) = services["kvseek-gpu"]["networks"]["default"]["aliases"]
    assert targets["targets"] == [f"{alias}:{Ports().metrics}"]
    inside = {volume["target"] for volume in services["prometheus"]["volumes"]}
    assert set(read("prometheus.yaml")["rule_files"]) <= inside


# Kubernetes


def test_probes_ask_endpoints_that_exist(container: Any) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == dataclasses.asdict(Ports())
    for probe in PROBES:
        request = container[probe]["httpGet"]
        assert request["path"] in ("/v2/health/ready", "/v2/health/live")
        assert request["port"] == "metrics", "clients may have taken all connections of the HTTP port"
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live", "a full queue is no reason to restart"


def test_the_server_gives_up_loading_before_kubernetes_does(container: Any, deployment: Any) -> None:
    probe = container["startupProbe"]
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience >= serve_arguments(target("gpu").command).ready_seconds + 300, (
        "the launcher hashes the engine before"
    )
    assert deployment["spec"]["progressDeadlineSeconds"] > patience


def test_the_server_can_end_before_it_is_killed(pod: Any, container: Any) -> None:
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + SHUTDOWN_SECONDS


def test_pods_of_several_nodes_can_mount_the_engine() -> None:
    (mode,) = read("kubernetes/engine-volume.yaml")["spec"]["accessModes"]
    assert read("kubernetes/autoscaler.yaml")["spec"]["maxReplicas"] == 1 or mode in ("ReadOnlyMany", "ReadWriteMany")


def test_the_service_reaches_the_pods(deployment: Any, container: Any) -> None:
    service = read("kubernetes/service.yaml")
    template = deployment["spec"]["template"]["metadata"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == template["labels"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    assert template["annotations"]["prometheus.io/port"] == str(Ports().metrics)
    assert container["image"].endswith(f"/kvseek:{project()['project']['version']}-gpu")


def test_the_autoscaler_follows_a_metric_that_exists(deployment: Any) -> None:
    autoscaler = read("kubernetes/autoscaler.yaml")["spec"]
    target_ref = autoscaler["scaleTargetRef"]
    assert (target_ref["kind"], target_ref["name"]) == (deployment["kind"], deployment["metadata"]["name"])
    (metric,) = autoscaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    (rule,) = re.findall(r"```yaml\n(rules:.*?)```", text, re.DOTALL)
    (custom,) = yaml.safe_load(rule)["rules"]["custom"]
    assert custom["name"]["as"] == name
    exported = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert custom["seriesQuery"].partition("{")[0] in exported
    assert int(metric["pods"]["target"]["averageValue"]) < ServeSettings().max_queue_size


def test_the_network_policy_is_about_the_servers_pods(deployment: Any, container: Any) -> None:
    policy = read("kubernetes/network-policy.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert ports == {port["name"] for port in container["ports"]}
    assert policy["egress"] == []


def manifests() -> list[tuple[str, Any]]:
    return [
        (f"{path.name}: {document['kind']}", document)
        for path in sorted((DOCKER / "kubernetes").rglob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(("name", "document"), manifests(), ids=[name for name, _ in manifests()])
def test_manifests_fit_the_apis_schema(name: str, document: Any) -> None:
    """Unknown fields are faults too. A LeaderWorkerSet is no resource of the API itself, but the pods' templates in it are."""
    if document["kind"] == "LeaderWorkerSet":
        group = document["spec"]["leaderWorkerTemplate"]
        templates = [group["leaderTemplate"], group["workerTemplate"]]
        metadata = document["metadata"]
        parts = [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": one} for one in templates
        ]
    else:
        parts = [document]
    for part in parts:
        kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)


def test_the_budget_is_about_the_servers_pods(deployment: Any) -> None:
    budget = read("kubernetes/disruption-budget.yaml")["spec"]
    assert budget["selector"] == deployment["spec"]["selector"]
    assert budget["maxUnavailable"] == 1, "minAvailable 1 would forbid to drain the node of a single pod"


def test_the_router_finds_the_servers_pods(deployment: Any, container: Any) -> None:
    """Its flags are those of `kvseek serve --replicas`, but for what tells it where the servers are."""
    text = (DOCKER / "kubernetes/router.yaml").read_text(encoding="utf-8")
    parts = {part["kind"]: part for part in yaml.safe_load_all(text)}
    template = parts["Deployment"]["spec"]["template"]
    (router,) = template["spec"]["containers"]
    arguments = router["args"]
    ((label, value),) = deployment["spec"]["selector"]["matchLabels"].items()
    assert arguments[arguments.index("--selector") + 1] == f"{label}={value}"
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert f"--service-discovery-port={Ports().openai}" in arguments
    assert f"--port={ports['openai']}" in arguments
    assert f"--prometheus-port={ports['metrics']}" in arguments
    own = replicas.flags(["http://a"], "0.0.0.0", ports["openai"], ports["metrics"], "key")
    expected = {*own[own.index("--policy") : own.index("--control-plane-api-keys")]}
    assert not any("KEY)" in word for word in arguments), "other processes of the node would see it"
    assert '"--control-plane-api-keys", "router:kvseek:admin:" + os.environ["CONTROL_KEY"]' in router["command"][-1]
    given = {part for word in arguments for part in word.split("=", 1)}
    assert expected <= given
    assert parts["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert parts["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert parts["RoleBinding"]["subjects"][0]["name"] == template["spec"]["serviceAccountName"]
    assert parts["RoleBinding"]["roleRef"]["name"] == parts["Role"]["metadata"]["name"]
    assert "replicas" in install.EXTRAS, "the image has the router"


def test_the_router_knows_its_flags() -> None:
    """smg itself reads them, and is told to print its help."""
    text = (DOCKER / "kubernetes/router.yaml").read_text(encoding="utf-8")
    deployment = next(part for part in yaml.safe_load_all(text) if part["kind"] == "Deployment")
    (router,) = deployment["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, "-m", "smg", "launch", *router["args"], "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    known = set(re.findall(r"--[a-z-]+", found.stdout))
    assert {word.partition("=")[0] for word in router["args"] if word.startswith("--")} <= known


# docs/deploy.md


def test_commands_in_the_documentation_name_what_exists() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for goal in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{''.join(goal)}:", makefile, re.MULTILINE), goal
    for path in re.findall(r"-f (docker/\S+)", text):
        assert (ROOT / path).exists(), path
    stopping = {int(seconds) for seconds in re.findall(r"--stop-timeout (\d+)", text)}
    assert min(stopping) > SHUTDOWN_SECONDS


def test_all_places_name_the_projects_version() -> None:
    """pyproject.toml decides; what cannot read it follows."""
    version = project()["project"]["version"]
    images = (
        "docker/compose.yaml",
        "docker/kubernetes/deployment.yaml",
        "docker/kubernetes/router.yaml",
        "docker/kubernetes/several-hosts/leader-worker-set.yaml",
        "docs/deploy.md",
    )
    for name in images:
        assert set(re.findall(r"kvseek:(\d[\d.]*)-[cg]pu", (ROOT / name).read_text())) == {version}, name
    assert f'"version": "{version}"' in (ROOT / "docs/builder.md").read_text()
    newest = re.search(r"^## \[(\d[\d.]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
