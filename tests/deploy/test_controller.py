"""The controller is a real process here, asked over HTTP as people and programs would."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from buffer import server
from buffer.errors import SpecError
from buffer.metrics import Metrics
from buffer.pools import Desired, Pools
from buffer.settings import BufferSettings
from deploy.controller.app import make_app
from deploy.controller.auth import is_loopback, refuse_exposure
from deploy.controller.client import ControllerClient, ControllerError
from deploy.controller.settings import ControllerProcessSettings
from deploy.status import Status
from tests.buffer.world import World
from tests.deploy.shown import join, trained_run

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-this-test"
HEARTBEAT = 0.3
PROBLEM = "application/problem+json"
CLOSED = [
    ("GET", "/v1/status"),
    ("GET", "/v1/pools"),
    ("PATCH", "/v1/pools/{name}"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/stop"),
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
    ("POST", "/v1/checkpoint"),
]


@dataclass
class Running:
    """A controller's process."""

    process: "subprocess.Popen[str]"
    url: str
    folder: Path
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {TOKEN}"})

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        options.setdefault("headers", self.headers)
        return httpx.request(method, self.url + path, timeout=15, trust_env=False, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, seconds: float = 10.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(
    folder: Path, buffer: server.EmbeddedServer, *, run: str, host: str = "127.0.0.1", port: int, token: str = TOKEN
) -> Running:
    """Start the process as `forebay run` does; not waiting for it."""
    (folder / "redis").mkdir(exist_ok=True)
    (folder / "redis" / server.PASSWORD_FILE).write_text(buffer.password)
    settings = ControllerProcessSettings(
        run=run,
        folder=str(folder),
        steps=5,
        host=host,
        port=port,
        token_env="TOKEN_OF_THE_TEST",
        buffer=BufferSettings(heartbeat_seconds=HEARTBEAT),
        redis_url=buffer.url,
    )
    path = folder / "controller.json"
    path.write_text(settings.model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.controller.service", "--settings", str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TOKEN_OF_THE_TEST": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return Running(process, f"http://{host}:{port}", folder)


def wait_until_healthy(running: Running, status: int = 200, seconds: float = 20.0) -> httpx.Response:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if (answer := running.ask("GET", "/healthz", headers={})).status_code == status:
                return answer
        except httpx.TransportError:
            pass
        if running.process.poll() is not None or time.monotonic() > deadline:
            running.process.kill()
            pytest.fail(f"the controller does not answer {status}: {running.process.communicate()[0]}")
        time.sleep(0.05)


RUN = "controlled"


@pytest.fixture(scope="module")
def process(running_server: server.EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One controller for all tests that do not end it: it holds no state."""
    running = spawn(tmp_path_factory.mktemp("controlled"), running_server, run=RUN, port=free_port())
    try:
        wait_until_healthy(running)
        yield running
    finally:
        running.kill()


@pytest.fixture
def world(client: "redis.Redis") -> World:
    """The controller's run, with nothing in it."""
    world = World(client, RUN)
    for member in world.members.all():
        if member.role != "controller":
            world.members.leave(member.name, member.incarnation)
    kept = ("member:controller-0", "members", "incarnations")
    for key in client.scan_iter(f"forebay:{{{RUN}}}:*"):
        if not key.decode().endswith(kept):
            client.unlink(key)
    return world


@pytest.fixture
def controller(process: Running, world: World) -> Running:
    """The controller of an empty run."""
    return process


@pytest.fixture
def own(client: "redis.Redis", tmp_path: Path) -> World:
    """A run for a test that starts or ends controllers of its own."""
    return World(client, f"own-{tmp_path.name}")


def is_problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    problem = answer.json()
    assert problem["status"] == status
    assert {"type", "title", "detail", "instance"} <= set(problem)
    assert "Traceback" not in answer.text
    return problem


def logged(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "logs" / "controller.log").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_the_status_is_that_of_the_run(controller: Running, world: World) -> None:
    empty = controller.ask("GET", "/v1/status")
    assert empty.status_code == 200
    assert empty.json()["step"] is None
    trained_run(world)
    status = Status.model_validate_json(controller.ask("GET", "/v1/status").content)
    assert (status.run, status.step, status.version, status.steps) == (world.run, 3, 3, 5)
    assert controller.ask("GET", "/v1/status?events=0").json()["events"] == []


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_nobody_gets_in_without_the_token(controller: Running, world: World, method: str, path: str) -> None:
    needed, invalid = 'Bearer realm="forebay"', 'Bearer realm="forebay", error="invalid_token"'
    refused: dict[str | bytes, str] = {
        "": needed,
        "Bearer": needed,
        "Basic " + TOKEN: needed,
        "Bearer " + TOKEN[:-1]: invalid,
        "Bearer " + TOKEN + "x": invalid,
        "Bearer t\u00f6ken".encode("latin-1"): invalid,
    }
    for authorization, challenge in refused.items():
        answer = controller.ask(method, path, headers={"Authorization": authorization} if authorization else {})
        is_problem(answer, 401)
        assert answer.headers["www-authenticate"] == challenge, authorization
        assert TOKEN not in answer.text
    assert [world.control.get(flag) for flag in ("stop", "pause", "checkpoint")] == ["", "", ""]


def test_every_route_but_healthz_needs_the_token(world: World) -> None:
    app = make_app(world.client, run=world.run, steps=1, heartbeat_seconds=1.0, token=TOKEN)
    described = {
        (method.upper(), path): operation
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    }
    assert set(described) == {*CLOSED, ("GET", "/healthz")}
    assert {at for at, operation in described.items() if not operation.get("security")} == {("GET", "/healthz")}


def test_people_steer_the_run_by_flags(controller: Running, world: World) -> None:
    for path, flag, value in (
        ("pause", "pause", "1"),
        ("resume", "pause", ""),
        ("checkpoint", "checkpoint", "1"),
        ("stop", "stop", "drain"),
    ):
        answer = controller.ask("POST", f"/v1/{path}")
        assert answer.status_code == 202
        assert answer.json()["asked"] == path
        assert world.control.get(flag) == value
    events = Metrics(world.client, world.run).events()
    assert [event["text"] for event in events if event["kind"] == "control"] == [
        f"asked to {path}" for path in ("pause", "resume", "checkpoint", "stop")
    ]


def with_pools(world: World) -> Pools:
    pools = Pools(world.client, world.run)
    pools.declare({"producer": Desired(1, 8), "slow": Desired(0, 2)})
    return pools


def test_the_pools_are_shown_with_what_they_are_to_have_and_have(controller: Running, world: World) -> None:
    assert controller.ask("GET", "/v1/pools").json() == {"pools": []}
    trained_run(world)
    with_pools(world)
    join(world, "p0", "serving", 3, pid="77", host="here")
    pools = {pool["name"]: pool for pool in controller.ask("GET", "/v1/pools").json()["pools"]}
    assert set(pools) == {"producer", "slow"}
    assert (pools["producer"]["desired"], pools["producer"]["max_replicas"], pools["producer"]["running"]) == (1, 8, 2)
    first, second = pools["producer"]["replicas"]
    assert (first["name"], first["state"], first["version"], first["pid"], first["host"]) == (
        "p0", "serving", 3, 77, "here",
    )  # fmt: skip
    assert second["pid"] is None
    assert pools["slow"]["replicas"] == []


def test_a_pool_is_scaled_within_its_bounds_and_it_is_told_who_asked_for_what(
    controller: Running, world: World
) -> None:
    pools = with_pools(world)
    answer = controller.ask("PATCH", "/v1/pools/producer", json={"replicas": 3})
    assert answer.status_code == 202
    assert answer.json() == {
        "pool": "producer",
        "before": 1,
        "replicas": 3,
        "effect": "new replicas start, prove the policy's weights, then take prompts",
    }
    assert pools.desired()["producer"].replicas == 3
    (event,) = Metrics(world.client, world.run).events()
    assert (event["kind"], event["who"]) == ("scale", "controller-0")
    assert event["text"] == "asked to scale the pool producer from 1 to 3 replicas"
    assert "then leave" in controller.ask("PATCH", "/v1/pools/producer", json={"replicas": 0}).json()["effect"]
    assert "nothing" in controller.ask("PATCH", "/v1/pools/producer", json={"replicas": 0}).json()["effect"]
    assert pools.desired()["producer"].replicas == 0


def test_a_pool_that_is_not_there_is_404_and_named(controller: Running, world: World) -> None:
    with_pools(world)
    for name in ("prodcuer", "a%2Fb", "%7Bx%7D"):
        problem = is_problem(controller.ask("PATCH", f"/v1/pools/{name}", json={"replicas": 1}), 404)
    assert problem["detail"] == "the run has no pool `{x}`"
    assert problem["cure"] == "name one of: producer, slow"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"replicas": -1}, "body.replicas"),
        ({"replicas": "3"}, "body.replicas"),
        ({"replicas": True}, "body.replicas"),
        ({"replicas": 1.5}, "body.replicas"),
        ({}, "body.replicas"),
        ({"replicas": 1, "replica": 2}, "body.replica"),
        ([], "body"),
    ],
)
def test_a_size_that_is_none_is_refused_and_changes_nothing(
    controller: Running, world: World, body: Any, where: str
) -> None:
    pools = with_pools(world)
    problem = is_problem(controller.ask("PATCH", "/v1/pools/producer", json=body), 422)
    assert problem["errors"][0]["where"] == where
    assert pools.desired()["producer"].replicas == 1


def test_a_size_out_of_a_pools_bounds_is_422_with_the_bound(controller: Running, world: World) -> None:
    pools = with_pools(world)
    problem = is_problem(controller.ask("PATCH", "/v1/pools/slow", json={"replicas": 3}), 422)
    assert problem["detail"] == "the pool `slow` takes 0 to 2 replicas, not 3"
    assert problem["where"] == "producers.slow.max_replicas"
    huge = controller.ask("PATCH", "/v1/pools/slow", content=b'{"replicas": 1' + b"0" * 400 + b"}")
    is_problem(huge, 422)
    assert pools.desired()["slow"].replicas == 0


def test_a_run_that_stops_or_has_ended_is_not_scaled(controller: Running, world: World) -> None:
    pools = with_pools(world)
    world.control.set("stop", "drain")
    refused = controller.ask("PATCH", "/v1/pools/producer", json={"replicas": 2})
    assert "the run is stopping" in is_problem(refused, 409)["detail"]
    world.control.set("phase", "finished")
    refused = controller.ask("PATCH", "/v1/pools/producer", json={"replicas": 2})
    assert "the run has ended (finished)" in is_problem(refused, 409)["detail"]
    assert pools.desired()["producer"].replicas == 1


def test_the_client_scales_a_pool_and_says_why_it_cannot(controller: Running, world: World) -> None:
    with_pools(world)
    client = ControllerClient(controller.url, TOKEN)
    scaled = client.scale("producer", 2)
    assert (scaled.pool, scaled.before, scaled.replicas) == ("producer", 1, 2)
    assert [(pool.name, pool.desired) for pool in client.pools().pools] == [("producer", 2), ("slow", 0)]
    with pytest.raises(ControllerError, match="no pool `a b\\?`") as unknown:
        client.scale("a b?", 1)
    assert unknown.value.cure == "name one of: producer, slow"
    with pytest.raises(ControllerError, match="takes 0 to 2 replicas, not 5"):
        client.scale("slow", 5)
    with pytest.raises(ControllerError, match="body.replicas: Input should be greater than or equal to 0"):
        client.scale("slow", -1)


@pytest.mark.parametrize("phase", ["finished", "stopped", "failed: the loss is NaN"])
def test_a_run_that_has_ended_takes_no_orders(controller: Running, world: World, phase: str) -> None:
    world.control.set("phase", phase)
    assert phase in is_problem(controller.ask("POST", "/v1/pause"), 409)["detail"]
    assert world.control.get("pause") == ""


def test_every_error_is_a_problem_document(controller: Running, world: World) -> None:
    assert "/nowhere" in is_problem(controller.ask("GET", "/nowhere"), 404)["detail"]
    refused = controller.ask("DELETE", "/v1/status")
    is_problem(refused, 405)
    assert refused.headers["allow"] == "GET"
    invalid = is_problem(controller.ask("GET", "/v1/status?events=many"), 422)
    assert invalid["errors"][0]["where"] == "query.events"
    is_problem(controller.ask("GET", "/v1/status?events=-1"), 422)
    world.client.set(f"forebay:{{{world.run}}}:metrics:steps", "what does not belong there")
    broken = is_problem(controller.ask("GET", "/v1/status"), 500)
    assert broken["detail"] == "an unexpected error in the controller"
    deadline = time.monotonic() + 10  # the log gets what the answer does not say, a moment after it
    while not any("wrong kind of value" in line.get("exception", "") for line in logged(controller.folder)):
        assert time.monotonic() < deadline, logged(controller.folder)
        time.sleep(0.05)


def test_prometheus_reads_the_same_numbers(controller: Running, world: World) -> None:
    trained_run(world)
    answer = controller.ask("GET", "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    samples = dict(row.rsplit(" ", 1) for row in answer.text.splitlines() if not row.startswith("#"))
    run = f'run="{world.run}"'
    assert samples[f"forebay_step{{{run}}}"] == "3.0"
    assert samples[f"forebay_accuracy{{{run}}}"] == "0.75"
    assert samples[f'forebay_prompts{{{run},state="trained"}}'] == "9.0"
    assert samples[f'forebay_producer_running{{pool="producer",producer="p0",{run}}}'] == "2.0"
    with_pools(world)
    text = controller.ask("GET", "/metrics").text
    for sample in ("pool_desired", "pool_running", "pool_tokens_per_second", "pool_staleness_versions"):
        assert f'forebay_{sample}{{pool="producer",{run}}} ' in text


def test_the_api_is_described_with_its_problems_and_its_token(controller: Running) -> None:
    described = controller.ask("GET", "/openapi.json").json()
    status = described["paths"]["/v1/status"]["get"]
    assert status["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Status")
    for code in ("401", "422", "500", "503"):
        assert status["responses"][code]["content"][PROBLEM]["schema"]["$ref"].endswith("/Problem")
    assert "application/json" not in status["responses"]["422"]["content"]
    schemas = described["components"]["schemas"]
    assert {"cure", "detail", "errors"} <= set(schemas["Problem"]["properties"])
    assert schemas["Status"]["properties"]["waiting"]["description"].startswith("Who waits on whom")
    text = json.dumps(described)
    references = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert references <= set(schemas)


@pytest.mark.slow
def test_a_controller_is_a_member_until_a_newer_one_takes_over_and_ends_on_sigterm(
    own: World, running_server: server.EmbeddedServer, tmp_path: Path
) -> None:
    older = spawn(tmp_path, running_server, run=own.run, port=free_port())
    wait_until_healthy(older)
    (member,) = own.members.all("controller")
    assert (member.name, member.state, member.alive) == ("controller-0", "serving", True)
    newer = spawn(tmp_path, running_server, run=own.run, port=free_port())
    try:
        wait_until_healthy(newer)
        assert older.process.wait(15) == 5
        (member,) = own.members.all("controller")
        assert member.incarnation == 2
        time.sleep(3 * HEARTBEAT)
        assert own.members.all("controller")[0].seconds_since_report < 3 * HEARTBEAT
        started = time.monotonic()
        assert newer.end() == 0
        assert time.monotonic() - started < 5.0
    finally:
        older.kill()
        newer.kill()
    assert own.members.all("controller") == []
    lines = logged(tmp_path)
    assert lines[-1]["event"] == "ended"
    assert TOKEN not in json.dumps(lines)


def test_a_port_in_use_ends_the_start_with_its_cause_and_cure(
    own: World, running_server: server.EmbeddedServer, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = spawn(tmp_path, running_server, run=own.run, port=port)
        output, _ = running.process.communicate(timeout=20)
    assert running.process.returncode == 1
    assert f"the controller cannot listen on port {port}: Address already in use" in output
    assert "cure: stop what listens there, or give another `controller.port`" in output
    assert "Traceback" not in output
    assert own.members.all("controller") == []


def test_a_blank_token_lets_nobody_listen(own: World, running_server: server.EmbeddedServer, tmp_path: Path) -> None:
    running = spawn(tmp_path, running_server, run=own.run, host="0.0.0.0", port=free_port(), token="  ")
    output, _ = running.process.communicate(timeout=20)
    assert running.process.returncode == 2
    assert "everybody on the network could steer the run" in output
    for host in ("0.0.0.0", "::", "10.0.0.3", "node-7"):
        assert not is_loopback(host)
        with pytest.raises(SpecError):
            refuse_exposure(host, "", "TOKEN")
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"))
    refuse_exposure("0.0.0.0", "a token", "TOKEN")
    with pytest.raises(ValueError, match="everybody"):
        make_app(own.client, run=own.run, steps=1, heartbeat_seconds=1.0, token="")


def test_without_a_variable_a_token_is_made_and_kept_private(
    own: World, running_server: server.EmbeddedServer, tmp_path: Path
) -> None:
    running = spawn(tmp_path, running_server, run=own.run, port=free_port(), token="")
    try:
        wait_until_healthy(running)
        token = tmp_path / "token"
        assert token.stat().st_mode & 0o777 == 0o600
        answer = running.ask("GET", "/v1/status", headers={"Authorization": f"Bearer {token.read_text()}"})
        assert answer.status_code == 200
    finally:
        running.kill()


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for text, cause in ((None, "No such file"), ('{"run": 3}', "the settings are malformed: run")):
        if text is not None:
            path.write_text(text)
        result = subprocess.run(
            [sys.executable, "-m", "deploy.controller.service", "--settings", str(path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert result.returncode == 2
        assert cause in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_while_redis_is_away_it_says_so_and_afterwards_goes_on(tmp_path: Path) -> None:
    own = server.start(tmp_path / "redis")
    running = spawn(tmp_path, own, run="away", port=free_port())
    try:
        wait_until_healthy(running)
        own.stop()
        asked = time.monotonic()
        problem = is_problem(running.ask("GET", "/healthz", headers={}), 503)
        assert time.monotonic() - asked < 5.0
        assert str(own.port) not in json.dumps(problem)  # open to everybody: no word of where Redis is
        assert "Redis" in is_problem(running.ask("GET", "/v1/status"), 503)["detail"]
        assert is_problem(running.ask("POST", "/v1/stop"), 503)["cure"]
        again = server.start(tmp_path / "redis", port=own.port)
        try:
            wait_until_healthy(running)
            assert running.ask("GET", "/v1/status").status_code == 200
            again.process.send_signal(signal.SIGSTOP)  # answers nothing, keeps its connections
            is_problem(running.ask("GET", "/v1/status"), 503)
            asked = time.monotonic()
            assert running.end() == 0
            assert time.monotonic() - asked < 5.0
        finally:
            again.process.send_signal(signal.SIGCONT)
            again.stop()
    finally:
        running.kill()
        own.stop()


def test_the_client_steers_a_run_and_reads_its_status(controller: Running, world: World) -> None:
    trained_run(world)
    client = ControllerClient(controller.url, TOKEN)
    assert client.status().step == 3
    assert client.pause().asked == "pause"
    assert world.control.get("pause") == "1"
    assert client.resume().asked == "resume"
    assert client.checkpoint().asked == "checkpoint"
    assert client.stop().effect.startswith("producers drain")
    assert world.control.get("stop") == "drain"


def test_the_client_says_what_is_wrong_and_what_to_do(controller: Running, world: World) -> None:
    with pytest.raises(ControllerError, match="refuses the token") as refused:
        ControllerClient(controller.url, "another").status()
    assert "file `token`" in refused.value.cure
    world.control.set("phase", "finished")
    with pytest.raises(ControllerError, match="the run has ended"):
        ControllerClient(controller.url, TOKEN).stop()
    with pytest.raises(ControllerError, match="cannot be reached") as unreachable:
        ControllerClient(f"http://127.0.0.1:{free_port()}", TOKEN).stop()
    assert unreachable.value.where.startswith("http://127.0.0.1:")
    with pytest.raises(ControllerError, match="cannot be reached"):
        ControllerClient("no address", TOKEN).stop()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ControllerError, match="did not answer within 0.3 s"):
            ControllerClient(f"http://127.0.0.1:{silent.getsockname()[1]}", TOKEN, seconds=0.3).status()
