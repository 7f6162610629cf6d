"""Each token of a completion comes with the log-prob and the version it was sampled with, and none is recomputed.

Token ids go in and come out: nothing is tokenized again. A prefix computed under an older version is never used by a
request that starts under a newer one: requests are salted with what was loaded when they started.
"""

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, cast

import psutil

from buffer.errors import DeadlineExceeded, ForebayError, SpecError
from buffer.records import FinishReason
from producer.engine import errors, platform, vllm_release
from producer.engine.base import Completion, Request
from producer.engine.errors import EngineFailed, first_line
from producer.engine.shadow_names import check_names
from producer.engine.vllm_release import EngineDead, Release, RequestRefused
from producer.settings import ModelSettings, PoolSettings
from weight_sync.manifest import decode
from weight_sync.model_folder import read_config, tensor_names
from weight_sync.shadow import ShadowReference

START_SECONDS = 600.0
CALL_SECONDS = 600.0  # most that the workers may take to answer a call
STOP_SECONDS = 20.0
DEAD_POLL_SECONDS = 1.0
NOTHING_LOADED = -1  # version of the model folder's weights, which no publisher has sent
LOG_LINES = 12  # of the engine's log in the error of a failed start
WORKER_EXTENSION = "producer.engine.vllm_worker.WeightLoader"
OURS = {
    "model": "`model.path`",
    "tokenizer": "`model.path`",
    "dtype": "`model.dtype`",
    "worker_extension_cls": "Forebay's weight loader",
    "logprobs_mode": "`processed_logprobs`, which training needs",
}
"""Engine arguments that are not the user's, and what they are taken from."""


class VllmEngine:
    """vLLM's `AsyncLLM`; its core is a child process that ends with this one."""

    def __init__(
        self,
        model: ModelSettings,
        pool: PoolSettings,
        folder: Path,
        *,
        start_seconds: float = START_SECONDS,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        """``folder``: the run folder; vLLM's log goes to its `logs`. ``worker_extension``: a subclass of Forebay's."""
        self._model = model
        self._pool = pool
        self._log = folder / "logs" / f"engine-{os.getpid()}.log"
        self._start_seconds = start_seconds
        self._worker_extension = worker_extension
        self._release: Release | None = None
        self._layout = ""
        self._version = NOTHING_LOADED
        self._loads = 0
        self._scores = itertools.count()
        self._stepping = asyncio.Event()
        self._broken = ""
        self._own_processes: list[psutil.Process] = []

    async def start(self) -> None:
        read_config(self._model.path)
        tensor_names(self._model.path)  # raises when there are no weights
        kind = platform.choose(self._pool.platform)
        engine = self._pool.engine
        arguments = self._arguments(kind)
        parallel = {name: int(arguments.get(name, 1)) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        variables = platform.environment(
            kind,
            threads=engine.threads,
            kv_cache_gib=engine.kv_cache_gib,
            workers=math.prod(parallel.values()),
            start_seconds=self._start_seconds,
        )
        platform.apply(variables, self._log)
        resource_tracker.ensure_running()  # this process's own: it does not end with the engine
        before = set(psutil.Process().children(recursive=True))
        read_from = self._log.stat().st_size if self._log.exists() else 0
        try:
            # In a thread: the service goes on telling that it is alive while the model loads.
            self._release = await asyncio.wait_for(
                asyncio.to_thread(vllm_release.start, arguments), self._start_seconds + STOP_SECONDS
            )
        except TimeoutError:
            await asyncio.to_thread(_end, _children_since(before))
            raise DeadlineExceeded(
                f"vLLM did not start within {self._start_seconds:.0f} s; its log ends with\n{self._tail(read_from)}",
                where=str(self._log),
                cure="see the log; give the engine more time or a smaller model",
            ) from None
        except ForebayError:
            raise
        except Exception as error:
            await asyncio.to_thread(_end, _children_since(before))
            raise EngineFailed(
                f"vLLM did not start: {first_line(error)}\n{self._tail(read_from)}".rstrip(),
                where=f"model {self._model.path}, log {self._log}",
                cure="correct the model folder or `producers.<pool>.engine.args` by what the log says",
            ) from error
        self._own_processes = _children_since(before)
        kernels = sorted({str(found) for found in await self._call("forebay_kernels")})
        self._layout = " ".join(
            part
            for part in (
                f"vllm {vllm_release.version()}",
                kind,
                self._model.dtype,
                f"tp{parallel['tensor_parallel_size']}",
                f"pp{parallel['pipeline_parallel_size']}",
                *kernels,
            )
            if part
        )
        await self._within(self._running().set_version(NOTHING_LOADED), "take a version")
        self._stepping.set()

    def _arguments(self, kind: platform.Platform) -> dict[str, Any]:
        given = self._pool.engine.args
        if wrong := sorted(OURS.keys() & given.keys()):
            raise SpecError(
                f"`{wrong[0]}` cannot be set: it is {OURS[wrong[0]]}",
                where="producers.<pool>.engine.args",
                cure=f"remove `{wrong[0]}`",
            )
        arguments: dict[str, Any] = {
            "model": self._model.path,
            "tokenizer": self._model.path,
            "dtype": self._model.dtype,
            "seed": 0,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": self._worker_extension,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "enable_log_requests": False,
        }
        if kind == "cpu":
            arguments["enforce_eager"] = True  # nothing is compiled there, so there is nothing to warm up
        return arguments | given

    async def generate(self, request: Request) -> Completion:
        await self._until_stepping()
        release = self._running()
        errors.refuse_length(len(request.prompt_token_ids), release.limit(), request_id=request.id)
        try:
            answer = await release.answer(request, salt=self._salt(), detokenize=bool(request.stop))
        except EngineDead as error:
            raise self._dead() from error
        except RequestRefused as error:
            raise ForebayError(
                f"vLLM refuses a request: {first_line(error)}",
                where=f"request {request.id}",
                cure="correct the sampling settings, or raise the engine's limit in `producers.<pool>.engine.args`",
            ) from error
        self._check(request, answer)
        text = answer.text if request.stop else release.decode(answer.token_ids)
        return Completion(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs,
            versions=answer.versions,
            finish_reason=cast(FinishReason, answer.finish_reason),
            text=text,
        )

    async def _until_stepping(self) -> None:
        """An engine that dies while it is paused never steps again."""
        while not self._stepping.is_set():
            if self._running().dead():
                raise self._dead()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stepping.wait(), DEAD_POLL_SECONDS)

    def _check(self, request: Request, answer: vllm_release.Answer) -> None:
        version = max(answer.versions, default=self._version)
        errors.refuse_nan(answer.log_probs, version=version, request_id=request.id)
        if answer.finish_reason not in ("stop", "length", "abort"):
            raise EngineFailed(
                f"vLLM ended a request with {answer.finish_reason!r}",
                where=f"request {request.id}",
                cure=f"see {self._log}",
            )
        count = len(answer.token_ids)
        if len(answer.log_probs) != count or len(answer.versions) != count:
            raise EngineFailed(
                f"vLLM gave {count} tokens, {len(answer.log_probs)} log-probs and {len(answer.versions)} versions",
                where=f"request {request.id}",
                cure="use the engine's version that Forebay pins",
            )

    async def abort(self, request_id: str) -> None:
        await self._within(self._running().abort(request_id), "abort a request")

    async def pause(self) -> None:
        self._stepping.clear()
        await self._within(self._running().pause(), "pause")

    async def resume(self) -> None:
        await self._within(self._running().resume(), "resume")
        self._stepping.set()

    async def load(self, shadow: ShadowReference, version: int) -> None:
        if self._stepping.is_set():
            raise errors.not_paused()
        if self._broken:
            raise self._unusable()
        names = [entry.name for entry in decode(shadow.manifest).tensors]
        check_names(names, tensor_names(self._model.path), self._model.path)
        # Whatever interrupts a load, nobody knows then which weights are in.
        self._broken = f"the load of version {version} did not end"
        try:
            answers = await self._call("forebay_load", shadow.path, shadow.manifest)
        except EngineFailed as error:
            self._broken = f"the load of version {version} failed: {error.what}"
            raise
        if faults := [str(answer) for answer in answers if answer]:
            self._broken = f"the load of version {version} failed: {faults[0]}"
            raise self._unusable()
        self._loads += 1
        self._version = version
        await self._within(self._running().set_version(version), "take a version")
        self._broken = ""

    async def digests(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for worker in await self._call("forebay_digests"):
            found |= worker
        return found

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        number = next(self._scores)
        salt = f"score {number}"  # of its own: never a cached prefix, and nothing that others could use
        scored = self._running().score(f"score-{os.getpid()}-{number}", token_ids, salt=salt)
        try:
            return cast(list[float], await self._within(scored, "score a sequence"))
        except RequestRefused as error:
            raise ForebayError(
                f"vLLM refuses to score a sequence of {len(token_ids)} tokens: {first_line(error)}",
                cure="lower `weight_sync.probe_tokens`, or raise `max_model_len` in `producers.<pool>.engine.args`",
            ) from error

    def layout(self) -> str:
        return self._layout

    async def check(self) -> None:
        if self._running().dead():
            raise self._dead()
        if self._broken and self._stepping.is_set():
            raise self._unusable()

    async def stop(self) -> None:
        release, self._release = self._release, None
        self._stepping.clear()
        if release is not None:
            try:
                await asyncio.wait_for(asyncio.to_thread(release.shutdown), STOP_SECONDS)
            finally:
                await asyncio.to_thread(_end, self._own_processes)

    def _salt(self) -> str:
        # A version may be loaded twice (the self-test does), so the version alone would not do.
        return f"{self._version}.{self._loads}"

    def _running(self) -> Release:
        if self._release is None:
            raise EngineFailed("the engine is not running", cure="start it first")
        return self._release

    async def _call(self, method: str, *arguments: str) -> list[Any]:
        return cast(list[Any], await self._within(self._running().call(method, *arguments), f"answer `{method}`"))

    async def _within(self, action: Any, what: str) -> Any:
        try:
            return await asyncio.wait_for(action, CALL_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(
                f"vLLM did not {what} within {CALL_SECONDS:.0f} s",
                where=str(self._log),
                cure="see the engine's log; this producer ends and its prompts go back",
            ) from None
        except (ForebayError, RequestRefused):
            raise
        except Exception as error:
            if self._release is not None and self._release.dead():
                raise self._dead() from error
            raise EngineFailed(
                f"vLLM did not {what}: {first_line(error)}", where=str(self._log), cure="see the engine's log"
            ) from error

    def _dead(self) -> EngineFailed:
        return EngineFailed(
            "vLLM's engine process has died",
            where=str(self._log),
            cure="see the log; if the kernel killed it, give the machine more memory or the engine a smaller cache",
        )

    def _unusable(self) -> EngineFailed:
        return errors.unusable(self._broken, self._model.path)

    def _tail(self, start: int) -> str:
        """The last lines that vLLM logged after ``start`` bytes."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])


def _children_since(before: set[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child not in before]


def _end(processes: Sequence[psutil.Process]) -> None:
    """Kill what is left of them; a child whose parent was killed is in the list itself."""
    _, alive = psutil.wait_procs(list(processes), timeout=0)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=STOP_SECONDS)
