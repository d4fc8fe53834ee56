"""The Dockerfile and the scripts that it runs, compared with what the server does."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, BuildEngine
from tests.support.deployment import TARGETS, install, load, project, read, recipe, serve_arguments, target
from tests.support.random_models import save_random_model

from kvseek.server import launch
from kvseek.server.ports import Ports

PACKAGES = {path.parent.name for path in ROOT.glob("[a-z]*/__init__.py")} - {"tests"}  # as setup.py finds them


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
def test_images_hold_no_secret(name: str) -> None:
    words = " ".join(value for _, value in target(name).instructions)
    assert not re.search(r"(?i)token|password|secret|api_key", words)


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
