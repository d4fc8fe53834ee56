"""Replicas behind the real router: where conversations go, what a dead replica costs, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import ROOT, BuildEngine, RandomModel
from tests.server.test_metrics import dashboard_expressions, names_in
from tests.support.door_processes import write_keys
from tests.support.live_server import command_line
from tests.support.waiting import wait_for

from kvseek.server import replicas
from kvseek.server.errors import ServerError
from kvseek.server.processes import Program
from kvseek.server.serve import main

pytestmark = [pytest.mark.server, pytest.mark.slow]
LIMITS = ("--max_seq_len", "900", "--max_batch_size", "2")
SECONDS = 300.0
WORDS = "the harbour and its ships " * 8
FIRST, SECOND = "the-first-key-of-tests", "the-second-key-of-tests"
BEARER = {"Authorization": f"Bearer {FIRST}"}


class Service:
    """A running `kvseek serve --replicas 2`."""

    def __init__(self, directory: Path, log: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "kvseek.cli.main", "serve", "--engine_dir", str(directory), "--replicas", "2"]
        command += ["--openai_port", "0", "--metrics_port", "0", "--log", str(log)]
        command += ["--threads", "2", "--drain_seconds", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(3)]
        found = re.fullmatch(r"ready: OpenAI (http://\S+/v1), metrics (\S+)/metrics\n", lines[2])
        assert found is not None, lines
        self.url, self.metrics_url = found.groups()
        self.replicas = [re.search(r"OpenAI (\S+)/v1", line)[1] for line in lines[:2]]  # type: ignore[index]
        self.model = requests.get(f"{self.url}/models", timeout=30).json()["data"][0]["id"]

    def ask(
        self, messages: list[dict[str, str]], session: str = "", key: str = FIRST, **fields: Any
    ) -> requests.Response:
        body = {"model": self.model, "messages": messages, "max_tokens": 4, **fields}
        headers = {"x-session-id": session} if session else {}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        return requests.post(f"{self.url}/chat/completions", json=body, headers=headers, timeout=60, stream=True)

    def replica_of(self, session: str) -> str:
        answer = self.ask([{"role": "user", "content": f"{session} at {time.time()}"}], session)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-smg-routed-worker-id"])

    def process_of(self, replica: str, program: str) -> int:
        """Process id of a replica's engine or doors; the doors listen at its port."""
        port = replica.rpartition(":")[2]
        commands = {
            int(folder.name): command_line(int(folder.name)).split("\0") for folder in Path("/proc").glob("[0-9]*")
        }
        (doors,) = (words for words in commands.values() if ["--openai_port", port] in map(list, pairwise(words)))
        socket = doors[doors.index("--socket") + 1]
        (pid,) = (pid for pid, words in commands.items() if program in words and socket in words)
        return pid


def names(text: str) -> set[str]:
    """Names of samples, as they are written."""
    return set(re.findall(r"^([A-Za-z_][\w:]*)", text, re.MULTILINE))


def up(service: Service) -> dict[tuple[str, str], float]:
    """What `kvseek:up` says, by process and replica."""
    text = requests.get(f"http://{service.metrics_url}/metrics", timeout=30).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == "kvseek:up"]
    return {(sample.labels["process"], sample.labels.get("replica", "")): sample.value for sample in samples}


@pytest.fixture(scope="module")
def service(
    random_model: RandomModel, build_engine: BuildEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    directory = build_engine(random_model("llama"), "full", *LIMITS)
    folder = tmp_path_factory.mktemp("log")
    keys = write_keys(folder / "keys", FIRST, SECOND)
    service = Service(directory, folder / "server.log", "--api_key_file", str(keys))
    try:
        yield service
    finally:
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(SECONDS) == 0


def test_a_conversation_returns_to_the_replica_that_has_read_its_beginning(service: Service) -> None:
    replicas = set()
    for number in range(6):
        messages, seen = [{"role": "user", "content": f"{number}: {WORDS}"}], set()
        for _ in range(3):
            answer = service.ask(messages)
            seen.add(answer.headers["x-smg-routed-worker-id"])
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        assert len(seen) == 1
        replicas |= seen
    assert replicas <= set(service.replicas)


def test_a_header_names_the_session(service: Service) -> None:
    places = {f"s{number}": service.replica_of(f"s{number}") for number in range(12)}
    assert set(places.values()) == set(service.replicas), "both are used"
    assert all(service.replica_of(session) == place for session, place in places.items())


def test_a_dead_replicas_sessions_move_and_the_others_stay(service: Service) -> None:
    before = {f"s{number}": service.replica_of(f"s{number}") for number in range(12)}
    victim = before["s0"]
    # Found before, so that the stream does not end meanwhile.
    engine = service.process_of(victim, "kvseek.server.engine.process")
    stream = service.ask([{"role": "user", "content": "x"}], "s0", max_tokens=800, ignore_eos=True, stream=True)
    lines = stream.iter_lines()
    assert next(lines).startswith(b"data: ")
    os.kill(engine, signal.SIGKILL)
    rest = [line for line in lines if line]
    assert any(b'"error"' in line for line in rest), "the request in flight is told"
    left = next(replica for replica in service.replicas if replica != victim)

    def served() -> bool:
        return service.ask([{"role": "user", "content": "y"}], "s0").status_code == 200

    wait_for(served, "an answer in the dead replica's session", 60)
    staying = [session for session, place in before.items() if place == left]
    assert staying
    assert all(service.replica_of(session) == left for session in staying)
    # Its supervisor starts the engine again, and the router finds it.
    wait_for(lambda: requests.get(f"{victim}/health", timeout=5).status_code == 200, "the replica again", SECONDS)
    numbers = count()
    wait_for(lambda: service.replica_of(f"new {next(numbers)}") == victim, "new sessions on the replica", 60)


def test_the_metrics_of_all_replicas_are_at_one_port(service: Service) -> None:
    wait_for(lambda: all(up(service).values()), "all up", 60)
    assert up(service).keys() == {("router", ""), *((name, n) for name in ("engine", "triton") for n in ("0", "1"))}
    text = requests.get(f"http://{service.metrics_url}/metrics", timeout=30).text
    own = requests.get(f"{service.replicas[0]}/metrics", headers=BEARER, timeout=30).text
    assert "nv_" in own
    assert names(own) <= names(text), "Triton's keep their names, too"
    for expression in dashboard_expressions():  # as of one server
        assert names_in(expression) <= names(text), expression
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["kvseek:generation_tokens"].type == "counter"
    assert families["kvseek:time_to_first_token_seconds"].type == "histogram"
    running = families["kvseek:num_requests_running"].samples
    assert [sample.labels["replica"] for sample in running] == ["0", "1"]
    restarts = {(s.labels["process"], s.labels.get("replica", "")) for s in families["kvseek:process_restarts"].samples}
    assert {("router", ""), ("metrics", ""), ("doors", "0"), ("doors", "1")} <= restarts
    health = {"KVSEEK_METRICS_PORT": service.metrics_url.rpartition(":")[2]}
    assert (
        subprocess.run([sys.executable, str(ROOT / "docker/healthcheck.py")], env=health, check=False).returncode == 0
    )


def test_a_replica_whose_metrics_port_is_silent_shows_as_down(service: Service) -> None:
    wait_for(lambda: all(up(service).values()), "all up", 60)
    pid = service.process_of(service.replicas[1], "kvseek.server.frontend")
    os.kill(pid, signal.SIGSTOP)
    try:
        down = {"0": 1.0, "1": 0.0}
        wait_for(lambda: {n: value for (name, n), value in up(service).items() if name == "engine"} == down, "down")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: all(up(service).values()), "all up again", 60)


def test_clients_cannot_change_the_routers_workers(service: Service) -> None:
    workers = f"{service.url.removesuffix('/v1')}/workers"
    assert requests.get(workers, timeout=5).status_code == 401
    assert requests.post(workers, json={"url": "http://127.0.0.1:1"}, timeout=5).status_code == 401


def test_each_replica_checks_keys_and_each_key_is_a_tenant(service: Service) -> None:
    messages = [{"role": "user", "content": f"tenants: {WORDS * 8}"}]
    for key in ("", "third-key") * 10:  # more often than a router would try a replica that fails
        answer = service.ask(messages, key=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    cached = {}
    for key in (FIRST, SECOND):
        for number in range(2):
            answer = service.ask(messages, "one", key)
            assert answer.status_code == 200, answer.text
            cached[key, number] = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached[FIRST, 0] < 30 > cached[SECOND, 0], "though both asked the same replica"
    assert min(cached[FIRST, 1], cached[SECOND, 1]) > 100
    for replica in service.replicas:  # who goes past the router needs one too
        assert requests.post(f"{replica}/v1/chat/completions", json={}, timeout=30).status_code == 401
        assert requests.get(f"{replica}/metrics", timeout=30).status_code == 401


def test_a_session_continues_its_responses(service: Service) -> None:
    """A response is kept by one replica, and the header leads back to it."""

    def ask(path: str, **body: Any) -> requests.Response:
        headers = {**BEARER, "x-session-id": "responses"}
        return requests.post(
            f"{service.url}/{path}", json={"model": service.model, **body}, headers=headers, timeout=60
        )

    previous = None
    for _ in range(6):  # more often than another replica would be spared by chance
        answer = ask("responses", input="Is it lit?", max_output_tokens=4, previous_response_id=previous)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
    message = ask("messages", messages=[{"role": "user", "content": "Is it lit?"}], max_tokens=4)
    assert (message.status_code, message.json().get("type")) == (200, "message"), message.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "0"), "replicas = 0: must be >= 1"),
        (("--replicas", "2", "--grpc_port", "7000"), "grpc_port = 7000: must be left out with --replicas"),
        (("--replicas", "2", "--metrics_port", "off"), "metrics_port = 'off': must be a port with --replicas"),
        (("--replicas", "2", "--api_key_file", "keys"), "keys: cannot be read"),
    ],
)
def test_what_replicas_cannot_have_is_refused(
    flags: tuple[str, ...],
    message: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--engine_dir", str(directory), *flags]) == 1
    assert message in capsys.readouterr().err


def test_the_routers_key_is_in_a_private_file_and_on_no_command_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def see(programs: Sequence[Program], *_: Any, **__: Any) -> None:
        command = programs[0].command
        arguments = Path(command[-1])
        assert arguments.stat().st_mode & 0o777 == 0o600
        key = json.loads(arguments.read_text())[-1].rpartition(":")[2]
        assert len(key) == 64
        assert not any(key in word for word in command)
        raise Seen

    server = SimpleNamespace(openai_url="http://127.0.0.1:1/v1", metrics_url="127.0.0.1:1")
    monkeypatch.setattr(replicas, "running_server", lambda *_, **__: contextlib.nullcontext(server))
    monkeypatch.setattr(replicas, "supervisor_of", see)
    with pytest.raises(Seen), replicas.running_replicas(directory, 1, openai_port=0):
        pass


def test_a_missing_router_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"the router smg is not installed; pip install 'kvseek\[replicas\]'"):
        replicas.check_router()
