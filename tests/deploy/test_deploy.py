"""Dockerfile, its scripts, compose file, Kubernetes manifests and docs/deploy.md, compared with what the server does."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.builder.test_capacity import LLAMA, document, save
from tests.conftest import ROOT, BuildEngine
from tests.support.deployment import (
    DOCKER,
    TARGETS,
    install,
    load,
    project,
    read,
    recipe,
    serve_arguments,
    size,
    target,
)
from tests.support.random_models import save_random_model

from kvseek.engine.parallel.nodes import KEY_VARIABLE, LEAST_KEY_CHARACTERS, Nodes
from kvseek.server import launch, replicas, serve
from kvseek.server.ports import Ports
from kvseek.server.settings import SERVE_FLAGS, ServeSettings, settings_of

PACKAGES = {path.parent.name for path in ROOT.glob("[a-z]*/__init__.py")} - {"tests"}  # as setup.py finds them
SHUTDOWN_SECONDS = ServeSettings().drain_seconds + 4 * launch.STOP_SECONDS
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

PLAN = re.compile(r"    kvseek (build --plan .*?)\\\n(.*?)\n")
OTHER_PROCESSES = 3 << 30  # doors and Triton, as the manifest says
# https://github.com/kubernetes-sigs/lws, api/leaderworkerset/v1: variables that the controller sets in every container.
VARIABLES = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "kvseek-ranks-0.kvseek-ranks.default",
}


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


# Dockerfile


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_copied_exists_and_is_not_ignored(name: str) -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    files = [file for step in target(name).install_steps for file in step.files]
    assert len(files) > len(PACKAGES)
    for source, _ in files:
        assert (ROOT / source).exists(), source
        assert source in kept, f"{source} is not in the build context"
    assert kept == {source for source, _ in files}, "more in the build context than is used"


def test_every_package_is_copied() -> None:
    dependencies, whole = target("gpu").install_steps
    assert {name for _, name in dependencies.files} == {"pyproject.toml", "constraints.txt", "docker/install.py"}
    settings = project()
    assert PACKAGES | {"setup.py"} <= {name for _, name in whole.files}
    assert {settings["project"]["readme"], *settings["project"]["license-files"]} <= {name for _, name in whole.files}


@pytest.mark.parametrize("name", TARGETS)
def test_base_images_are_pinned(name: str) -> None:
    (base,) = target(name).values("FROM")
    assert re.fullmatch(r"\S+:\d+\.\d+\S* AS \w+", base), base


@pytest.mark.parametrize("name", TARGETS)
def test_images_do_not_run_as_root(name: str) -> None:
    (user,) = target(name).values("USER")
    identity, group = user.split(":")
    assert int(identity) > 0
    order = [instruction for instruction, _ in target(name).instructions]
    assert "RUN" not in order[order.index("USER") :]
    assert any(f"useradd --uid {identity} " in line for line in target(name).values("RUN"))
    pod = read("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    security = pod["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(identity), int(group))
    assert security["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("name", TARGETS)
def test_the_images_command_serves_on_the_default_ports(name: str) -> None:
    arguments = serve_arguments(target(name).command)
    ports = Ports()
    served = arguments.http_port, arguments.grpc_port, arguments.metrics_port, arguments.openai_port
    assert served == (ports.http, ports.grpc, ports.metrics, ports.openai)
    (exposed,) = target(name).values("EXPOSE")
    assert [int(port) for port in exposed.split()] == list(served)
    assert arguments.host == "0.0.0.0"
    assert arguments.log == launch.STANDARD_OUTPUT
    assert arguments.engine_dir == Path("/engine")


@pytest.mark.parametrize("name", TARGETS)
def test_the_health_check_waits_for_a_slow_start(name: str) -> None:
    image = target(name)
    start = image.healthcheck_options["--start-period"]
    assert start.endswith("m")
    assert int(start[:-1]) * 60 >= serve_arguments(image.command).ready_seconds
    assert image.healthcheck[-1] == "/opt/kvseek/healthcheck.py"
    timeout = float(image.healthcheck_options["--timeout"].rstrip("s"))
    assert timeout > load("healthcheck").TIMEOUT_SECONDS


def test_shell_of_the_dockerfile_parses() -> None:
    for name in TARGETS:
        for step in target(name).install_steps:
            subprocess.run(["sh", "-n", "-c", step.command], check=True)
            assert shlex.split(step.command)[:2] == ["python3", recipe.INSTALLER]
            assert shlex.split(step.command)[2] == name


# docker/install.py


def test_the_gpu_image_keeps_its_torch() -> None:
    kept = install.keep_torch((ROOT / "constraints.txt").read_text(), "2.10.0a0+b4e4ee81d3.nv25.12").splitlines()
    assert [line for line in kept if re.match(r"torch\W", line)] == ["torch==2.10.0a0+b4e4ee81d3.nv25.12"]
    assert any(line.startswith("numpy==") for line in kept)


def test_requirements_are_those_of_the_project() -> None:
    settings = project()["project"]
    extras = [each for name in ("guided", "otel", "replicas") for each in settings["optional-dependencies"][name]]
    assert install.requirements(settings, "cpu") == ["setuptools", *settings["dependencies"], *extras]
    assert set(install.requirements(settings, "gpu")) == {
        *install.requirements(settings, "cpu"),
        *settings["optional-dependencies"]["cuda"],
    }
    assert f"{install.SERVER}==" in (ROOT / "constraints.txt").read_text()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/health/ready" and self.server.ready else 400)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def test_the_health_check_asks_the_server(web_server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    check = load("healthcheck")
    monkeypatch.setenv("KVSEEK_METRICS_PORT", str(web_server.server_port))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody answers there
    web_server.ready = True  # type: ignore[attr-defined]
    assert check.main() == 0
    web_server.ready = False  # type: ignore[attr-defined]
    assert check.main() == 1
    web_server.server_close()
    assert check.main() == 1


def test_an_engine_can_be_read_by_the_images_user(tmp_path: Path, build_engine: BuildEngine) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    before = os.umask(0o022)
    try:
        engine = build_engine(model, "pariskv", "--kernels", "reference", "--max_seq_len", "256")
    finally:
        os.umask(before)
    unreadable = [path.name for path in engine.rglob("*") if path.is_file() and not path.stat().st_mode & 0o004]
    assert not unreadable
    assert (engine / "codebooks.safetensors").is_file()


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


@pytest.mark.parametrize(("name", "manifest"), manifests(), ids=[name for name, _ in manifests()])
def test_manifests_fit_the_apis_schema(name: str, manifest: Any) -> None:
    """Unknown fields are faults too. A LeaderWorkerSet is no resource of the API itself, but the pods' templates in it are."""
    if manifest["kind"] == "LeaderWorkerSet":
        group = manifest["spec"]["leaderWorkerTemplate"]
        templates = [group["leaderTemplate"], group["workerTemplate"]]
        metadata = manifest["metadata"]
        parts = [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": one} for one in templates
        ]
    else:
        parts = [manifest]
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


# Several hosts: the schema of LeaderWorkerSet is not among those that kubernetes-validate has, so fields outside of the pods'
# templates are compared with the names and values of its API v1 that are written down here.


@pytest.fixture(scope="module")
def group() -> Any:
    return read("kubernetes/several-hosts/leader-worker-set.yaml")


@pytest.fixture(scope="module")
def leader(group: Any) -> Any:
    return group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]


@pytest.fixture(scope="module")
def worker(group: Any) -> Any:
    return group["spec"]["leaderWorkerTemplate"]["workerTemplate"]


@pytest.fixture(scope="module")
def policy() -> Any:
    return read("kubernetes/several-hosts/network-policy.yaml")


def only_container(template: Any) -> Any:
    (only,) = template["spec"]["containers"]
    return only


def command(template: Any) -> list[str]:
    """What the container runs, with the variables that it will have."""
    known = VARIABLES | {"POD_IP": "10.0.0.5"}
    own = {one["name"] for one in only_container(template)["env"]} | set(VARIABLES)

    def value(match: re.Match[str]) -> str:
        assert match[1] in own
        return known[match[1]]

    return ["kvseek", *(re.sub(r"\$\((\w+)\)", value, word) for word in only_container(template)["args"])]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plan that docs/parallelism.md prints and the manifest asks memory for."""
    found = PLAN.search((ROOT / "docs/parallelism.md").read_text(encoding="utf-8"))
    _, *words = " ".join(found.groups()).split()
    model = save(tmp_path_factory.mktemp("models") / "Llama-3.1-8B", LLAMA)
    return document([str(model) if word == model.name else word for word in words])


def test_all_hosts_run_ranks_of_one_engine(
    group: Any, leader: Any, worker: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * LEAST_KEY_CHARACTERS)
    nodes, threads = [], []
    for template, rank in ((leader, 0), (worker, 1)):
        arguments = serve_arguments(command(template))
        settings = settings_of(arguments, SERVE_FLAGS)
        assert arguments.node_rank == rank
        if rank:
            serve._check_node(arguments)
        nodes.append(settings.nodes)
        assert settings.nodes.ranks(plan["tp_size"], rank)
        threads.append(settings.threads)
        assert str(settings.threads) == only_container(template)["resources"]["limits"]["cpu"]
        (key,) = [one for one in only_container(template)["env"] if one["name"] == KEY_VARIABLE]
        text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
        secret = key["valueFrom"]["secretKeyRef"]
        assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in text
    assert nodes[0].count == nodes[1].count == group["spec"]["leaderWorkerTemplate"]["size"]
    assert nodes[0].port == nodes[1].port
    assert threads[0] == threads[1]


def test_memory_is_what_the_plan_says(group: Any, leader: Any, worker: Any, plan: Any) -> None:
    hosts = group["spec"]["leaderWorkerTemplate"]["size"]
    own = plan["engine"]["host_total"] / hosts
    (shm,) = [volume for volume in leader["spec"]["volumes"] if volume["name"] == "shm"]
    others = size(shm["emptyDir"]["sizeLimit"]) + OTHER_PROCESSES
    for template, needed in ((leader, own + others), (worker, own)):
        resources = only_container(template)["resources"]
        assert resources["requests"] == resources["limits"]
        assert needed <= size(resources["limits"]["memory"]) < needed + (1 << 30)


def test_the_leader_is_found_and_the_workers_are_not(leader: Any, worker: Any) -> None:
    selectors = [
        read("kubernetes/service.yaml")["spec"]["selector"],
        read("kubernetes/network-policy.yaml")["spec"]["podSelector"]["matchLabels"],
        read("kubernetes/disruption-budget.yaml")["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= leader["metadata"]["labels"].items()
        assert not selector.items() <= worker["metadata"]["labels"].items()
    deployment = read("kubernetes/deployment.yaml")["spec"]["template"]
    assert leader["metadata"]["annotations"] == deployment["metadata"]["annotations"]
    ours, theirs = only_container(leader), only_container(deployment)
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "volumeMounts", "securityContext"):
        assert ours[name] == theirs[name]
    assert ours["ports"][: len(theirs["ports"])] == theirs["ports"]


def test_ranks_alone_reach_the_ports_of_ranks(leader: Any, worker: Any, policy: Any) -> None:
    spec = policy["spec"]
    ranks = spec["podSelector"]["matchLabels"]
    for template in (leader, worker):
        assert ranks.items() <= template["metadata"]["labels"].items()
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": ranks}}], "without namespaceSelector: of this namespace"
    to_ranks, to_names = spec["egress"]
    assert to_ranks == {"to": rule["from"], "ports": rule["ports"]}
    assert {port["port"] for port in to_names["ports"]} == {53}
    endpoint, chosen = rule["ports"]
    nodes = Nodes(2, "10.0.0.5", int(serve_arguments(command(leader)).rdzv_endpoint.rpartition(":")[2]))
    assert endpoint == {"port": nodes.port}
    for template in (leader, worker):
        (sysctl,) = template["spec"]["securityContext"]["sysctls"]
        assert sysctl["name"] == "net.ipv4.ip_local_port_range"
        assert [int(port) for port in sysctl["value"].split()] == [chosen["port"], chosen["endPort"]]
    inside = range(chosen["port"], chosen["endPort"] + 1)
    assert nodes.port not in inside
    doors = Ports()
    for port in (doors.http, doors.grpc, doors.metrics, doors.openai):
        assert port not in (nodes.port, *inside), "ranks do not open the doors"


def test_the_leader_ends_before_the_workers(leader: Any, worker: Any) -> None:
    seconds = [int(only_container(one)["lifecycle"]["preStop"]["exec"]["command"][1]) for one in (leader, worker)]
    graces = [one["spec"]["terminationGracePeriodSeconds"] for one in (leader, worker)]
    assert graces[0] > seconds[0] + SHUTDOWN_SECONDS
    assert seconds[1] >= seconds[0] + SHUTDOWN_SECONDS
    assert graces[1] > seconds[1] + launch.STOP_SECONDS


def test_the_folder_is_applied_by_itself() -> None:
    """`kubectl apply -f docker/kubernetes/` does not descend: it would start the Deployment and the set."""
    folder = ROOT / "docker/kubernetes/several-hosts"
    assert {path.name for path in folder.iterdir()} == {"leader-worker-set.yaml", "network-policy.yaml"}
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    for name in re.findall(r"docker/kubernetes/[\w./-]+", text):
        assert Path(ROOT / name).exists(), name


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
    assert newest[1] == version
