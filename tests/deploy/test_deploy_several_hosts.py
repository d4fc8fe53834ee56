"""Manifests of an engine on several hosts, compared with what `kvseek serve` and `kvseek build --plan` do.

The schema of LeaderWorkerSet is not among those that kubernetes-validate has: fields outside of the pods' templates are compared
with the names and values of its API v1 that are written down here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.builder.planning.test_plan import LLAMA, save
from tests.conftest import ROOT
from tests.support.deployment import read, serve_arguments, size

from kvseek.builder.options import FitOptions, parse
from kvseek.builder.planning.report import fit_document
from kvseek.engine.parallel.nodes import KEY_VARIABLE, LEAST_KEY_CHARACTERS, Nodes
from kvseek.server import launch, serve
from kvseek.server.ports import Ports
from kvseek.server.settings import SERVE_FLAGS, ServeSettings, settings_of

SHUTDOWN_SECONDS = ServeSettings().drain_seconds + 4 * launch.STOP_SECONDS
PLAN = re.compile(r"    kvseek (build --plan .*?)\\\n(.*?)\n")
OTHER_PROCESSES = 3 << 30  # doors and Triton, as the manifest says
# https://github.com/kubernetes-sigs/lws, api/leaderworkerset/v1: variables that the controller sets in every container.
VARIABLES = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "kvseek-ranks-0.kvseek-ranks.default",
}


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


def container(template: Any) -> Any:
    (only,) = template["spec"]["containers"]
    return only


def command(template: Any) -> list[str]:
    """What the container runs, with the variables that it will have."""
    known = VARIABLES | {"POD_IP": "10.0.0.5"}
    own = {one["name"] for one in container(template)["env"]} | set(VARIABLES)

    def value(match: re.Match[str]) -> str:
        assert match[1] in own
        return known[match[1]]

    return ["kvseek", *(re.sub(r"\$\((\w+)\)", value, word) for word in container(template)["args"])]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plan that docs/parallelism.md prints and the manifest asks memory for."""
    found = PLAN.search((ROOT / "docs/parallelism.md").read_text(encoding="utf-8"))
    assert found is not None
    _, *words = " ".join(found.groups()).split()
    model = save(tmp_path_factory.mktemp("models") / "Llama-3.1-8B", LLAMA)
    options = parse([str(model) if word == model.name else word for word in words])
    assert isinstance(options, FitOptions)
    return fit_document(options)


def test_the_fields_are_those_of_the_api(group: Any) -> None:
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = group["spec"]
    assert set(spec) == {"replicas", "startupPolicy", "leaderWorkerTemplate"}
    assert set(spec["leaderWorkerTemplate"]) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert spec["startupPolicy"] == "LeaderCreated"
    service = read("kubernetes/service.yaml")["metadata"]["name"]
    assert group["metadata"]["name"] != service, "the controller makes a headless Service of the set's name"


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
        assert str(settings.threads) == container(template)["resources"]["limits"]["cpu"]
        (key,) = [one for one in container(template)["env"] if one["name"] == KEY_VARIABLE]
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
        resources = container(template)["resources"]
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
    ours, theirs = container(leader), container(deployment)
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
    seconds = [int(container(one)["lifecycle"]["preStop"]["exec"]["command"][1]) for one in (leader, worker)]
    graces = [one["spec"]["terminationGracePeriodSeconds"] for one in (leader, worker)]
    assert graces[0] > seconds[0] + SHUTDOWN_SECONDS
    assert seconds[1] >= seconds[0] + SHUTDOWN_SECONDS
    assert graces[1] > seconds[1] + launch.STOP_SECONDS


def test_nothing_is_asked_for_that_is_not_used(leader: Any, worker: Any) -> None:
    """Rows on the CPU are ordinary memory; only Triton, which the workers do not have, uses /dev/shm."""
    for template in (leader, worker):
        assert set(container(template)["resources"]["limits"]) == {"cpu", "memory"}, "ranks run on CPUs only"
    mounts = {mount["mountPath"] for mount in container(worker)["volumeMounts"]}
    assert "/dev/shm" not in mounts
    assert "/tmp" in mounts, "the root is read-only"


def test_the_folder_is_applied_by_itself() -> None:
    """`kubectl apply -f docker/kubernetes/` does not descend: it would start the Deployment and the set."""
    folder = ROOT / "docker/kubernetes/several-hosts"
    assert {path.name for path in folder.iterdir()} == {"leader-worker-set.yaml", "network-policy.yaml"}
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    for name in re.findall(r"docker/kubernetes/[\w./-]+", text):
        assert Path(ROOT / name).exists(), name
