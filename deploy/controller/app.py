"""The controller holds no state: what it shows it reads from Redis, what it is asked it writes there as flags.

So it can die at any time and nothing of the run is lost; and every service obeys the flags, not the controller.
"""

from typing import Annotated, Any

import redis
from fastapi import APIRouter, Depends, FastAPI, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from buffer.errors import BufferUnavailable
from buffer.metrics import Control, Metrics
from buffer.pools import Pools
from deploy.controller import problems
from deploy.controller.answers import Health, Order, PoolList, Replicas, Scaled
from deploy.controller.auth import require
from deploy.controller.prometheus import exposition
from deploy.status import EVENTS, Status, read_pools, read_status
from deploy.waiting import has_ended

MEMBER = "controller-0"
DESCRIPTION = "Shows and steers one run of Forebay. Errors are problem documents (RFC 9457)."


def make_app(client: "redis.Redis", *, run: str, steps: int, heartbeat_seconds: float, token: str) -> FastAPI:
    """The HTTP service; ``client`` should give up within seconds, since people wait for the answers."""
    control, metrics, pools = Control(client, run), Metrics(client, run), Pools(client, run)
    app = FastAPI(
        title="Forebay controller",
        version="1",
        description=DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    problems.install(app)
    closed = APIRouter(dependencies=[Depends(require(token))], responses=problems.responses(401, 500, 503))

    def status(events: int = EVENTS) -> Status:
        return read_status(client, run=run, steps=steps, heartbeat_seconds=heartbeat_seconds, events=events)

    def refuse_ended(what: str) -> None:
        phase = control.get("phase")
        if has_ended(phase):
            raise HTTPException(409, f"the run has ended ({phase}): it cannot be {what}")

    def order(asked: str, flag: str, value: str, effect: str) -> Order:
        refuse_ended(f"asked to {asked}")
        control.set(flag, value)
        metrics.event("control", MEMBER, f"asked to {asked}")
        return Order(asked=asked, effect=effect)

    @app.get("/healthz", responses=problems.responses(503), tags=["health"])
    def healthz() -> Health:
        """Whether the controller and its Redis answer; open to everybody."""
        try:
            client.ping()
        except BufferUnavailable as error:
            raise HTTPException(503, "Redis does not answer") from error  # where it is, is not for everybody
        return Health()

    @closed.get("/v1/status", responses=problems.responses(422), tags=["show"])
    def show(events: Annotated[int, Query(ge=0, le=1000, description="How many events to show.")] = EVENTS) -> Status:
        """What the run is doing."""
        return status(events)

    @closed.get("/v1/pools", tags=["show"])
    def show_pools() -> PoolList:
        """What each pool of producers is to have and has."""
        return PoolList(pools=read_pools(client, run=run, heartbeat_seconds=heartbeat_seconds))

    @closed.patch("/v1/pools/{name}", status_code=202, responses=problems.responses(404, 409, 422), tags=["steer"])
    def scale(name: str, wanted: Replicas) -> Scaled:
        """Change the number of a pool's replicas; what is too much drains, what is missing is started."""
        refuse_ended("scaled")
        if control.get("stop"):
            raise HTTPException(409, "the run is stopping: it cannot be scaled")
        before = pools.scale(name, wanted.replicas)
        metrics.event("scale", MEMBER, f"asked to scale the pool {name} from {before} to {wanted.replicas} replicas")
        return Scaled(pool=name, before=before, replicas=wanted.replicas, effect=_effect(before, wanted.replicas))

    @closed.get("/metrics", tags=["show"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def prometheus() -> Response:
        """The same numbers for Prometheus."""
        return Response(exposition(status(events=0)), media_type=CONTENT_TYPE_LATEST)

    @closed.get("/openapi.json", tags=["show"])
    def openapi() -> dict[str, Any]:
        """This description."""
        return app.openapi()

    @closed.post("/v1/stop", status_code=202, responses=problems.responses(409), tags=["steer"])
    def stop() -> Order:
        """Drain: no new prompts, what is planned is trained, a checkpoint is written, the run ends."""
        return order("stop", "stop", "drain", "producers drain, the consumer checkpoints, then the run ends")

    @closed.post("/v1/pause", status_code=202, responses=problems.responses(409), tags=["steer"])
    def pause() -> Order:
        """Grant no leases until resumed; what runs is finished."""
        return order("pause", "pause", "1", "no new prompts are given out until the run is resumed")

    @closed.post("/v1/resume", status_code=202, responses=problems.responses(409), tags=["steer"])
    def resume() -> Order:
        """Go on after a pause."""
        return order("resume", "pause", "", "prompts are given out again")

    @closed.post("/v1/checkpoint", status_code=202, responses=problems.responses(409), tags=["steer"])
    def checkpoint() -> Order:
        """Write a checkpoint with the next step."""
        return order("checkpoint", "checkpoint", "1", "the next step writes a checkpoint")

    app.include_router(closed)
    _describe_problems(app)
    return app


def _effect(before: int, replicas: int) -> str:
    if replicas > before:
        return "new replicas start, prove the policy's weights, then take prompts"
    if replicas < before:
        return "the highest replicas finish their prompts or give them back, then leave"
    return "nothing: the pool is to have as many already"


def _describe_problems(app: FastAPI) -> None:
    """Add the problem document to the API's description, which FastAPI does for models of answers only."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schemas = made()["components"]["schemas"]
        if "Problem" not in schemas:
            problem = problems.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= problem.pop("$defs", {})
            schemas["Problem"] = problem
        return made()

    app.openapi = openapi  # type: ignore[method-assign]
