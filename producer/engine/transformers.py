"""An engine in plain PyTorch, slow and small: one thread owns the model.

Whatever is asked of the engine is done by that thread between two tokens, so that a pause, a load or an abort meets
every completion at a token boundary.
"""

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from buffer.errors import DeadlineExceeded, ForebayError, SpecError
from producer.engine import errors, platform
from producer.engine.base import Completion, Request
from producer.engine.errors import EngineFailed
from producer.engine.shadow_names import check_names
from producer.engine.stepwise import StepwiseModel
from producer.settings import ModelSettings, PoolSettings
from weight_sync.manifest import decode
from weight_sync.model_folder import check_config, tensor_names
from weight_sync.shadow import ShadowReference

START_SECONDS = 600.0
CALL_SECONDS = 600.0  # most that the engine's thread may take to answer a call
STOP_SECONDS = 20.0
DEVICES = {"cpu": "cpu", "cuda": "cuda", "ascend": "npu"}
MOST_ROWS = 256  # completions computed together, unless `max_num_seqs` says otherwise
ARGUMENTS = ("attn_implementation", "max_model_len", "max_num_seqs")
T = TypeVar("T")


class TransformersEngine:
    """A causal language model of transformers, in a thread of this process."""

    def __init__(self, model: ModelSettings, pool: PoolSettings, folder: Path) -> None:
        """``folder``: the run folder, which every engine is given; this one writes nothing there."""
        self._settings = model
        self._pool = pool
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[ForebayError], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: EngineFailed | None = None  # why the thread takes no more calls
        self._model: StepwiseModel | None = None
        self._stepping = False
        self._broken = ""
        self._layout = ""

    async def start(self) -> None:
        path = self._settings.path
        check_config(path)
        tensor_names(path)  # raises when there are no weights
        arguments = self._arguments()
        kind = platform.choose(self._pool.platform)
        self._thread = threading.Thread(target=self._run, name="transformers engine", daemon=True)
        self._thread.start()
        try:
            await self._call(functools.partial(self._open, DEVICES[kind], arguments), "start", START_SECONDS)
            await self.resume()
        except BaseException:
            await self.stop()
            raise
        self._layout = f"transformers {_release()} {kind} {self._settings.dtype}"

    def _arguments(self) -> dict[str, Any]:
        given = self._pool.engine.args
        if wrong := sorted(given.keys() - set(ARGUMENTS)):
            raise SpecError(
                f"the transformers engine has no argument `{wrong[0]}`",
                where="producers.<pool>.engine.args",
                cure=f"use {', '.join(ARGUMENTS)}, or `engine.kind: vllm`",
            )
        return given

    async def generate(self, request: Request) -> Completion:
        model = self._running()
        errors.refuse_length(len(request.prompt_token_ids), model.limit, request_id=request.id)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        tell = _teller(answer)
        self._post(functools.partial(model.add, request, tell), tell)
        try:
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(EngineFailed):
                self._post(functools.partial(model.abort, request.id))
            raise

    async def abort(self, request_id: str) -> None:
        await self._call(functools.partial(self._running().abort, request_id), "abort a request")

    async def pause(self) -> None:
        await self._call(functools.partial(self._set_stepping, False), "pause")

    async def resume(self) -> None:
        await self._call(functools.partial(self._set_stepping, True), "resume")

    async def load(self, shadow: ShadowReference, version: int) -> None:
        model = self._running()
        if self._stepping:
            raise errors.not_paused()
        if self._broken:
            raise errors.unusable(self._broken, self._settings.path)
        names = [entry.name for entry in decode(shadow.manifest).tensors]
        check_names(names, tensor_names(self._settings.path), self._settings.path)
        # Whatever interrupts a load, nobody knows then which weights are in.
        self._broken = f"the load of version {version} did not end"
        try:
            await self._call(functools.partial(model.load, shadow, version), "load weights")
        except EngineFailed as error:
            self._broken = f"the load of version {version} failed: {error.what}"
            raise errors.unusable(self._broken, self._settings.path) from error
        self._broken = ""

    async def digests(self) -> Mapping[str, str]:
        return await self._call(self._running().digests, "give digests")

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        model = self._running()
        if not 0 < len(token_ids) <= model.limit:
            raise ForebayError(
                f"a sequence of {len(token_ids)} tokens cannot be scored: the engine takes {model.limit}",
                cure="lower `weight_sync.probe_tokens`, or raise `max_model_len` in `producers.<pool>.engine.args`",
            )
        return await self._call(functools.partial(model.log_probs, token_ids), "score a sequence")

    def layout(self) -> str:
        return self._layout

    async def check(self) -> None:
        self._running()
        if self._broken and self._stepping:
            raise errors.unusable(self._broken, self._settings.path)

    async def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._calls.put((self._end, lambda _: None))
        await asyncio.to_thread(thread.join, STOP_SECONDS)
        if thread.is_alive():
            raise DeadlineExceeded(
                f"the engine's thread did not end within {STOP_SECONDS:.0f} s", where=f"model {self._settings.path}"
            )

    # -- how the event loop asks the thread
    def _running(self) -> StepwiseModel:
        if self._ended is not None:
            raise EngineFailed(self._ended.what, where=self._ended.where, cure=self._ended.cure)
        if self._model is None:
            raise EngineFailed("the engine is not running", cure="start it first")
        return self._model

    async def _call(self, function: Callable[[], T], what: str, seconds: float = CALL_SECONDS) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        tell = _teller(answer)
        self._post(lambda: tell(function()), tell)
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not {what} within {seconds:.0f} s",
                where=f"model {self._settings.path}",
                cure="give the engine more threads or a smaller model; this producer ends and its prompts go back",
            ) from None

    def _post(self, function: Callable[[], Any], refuse: Callable[[ForebayError], None] = lambda _: None) -> None:
        """Have the thread call ``function``; ``refuse`` is called instead of, or after, a call that fails."""
        self._calls.put((function, refuse))
        if self._ended is not None:  # its thread does not look any more
            self._refuse_calls(self._ended)

    # -- in the thread
    def _run(self) -> None:
        try:
            while self._ended is None:
                self._answer_calls()
                if self._stepping and self._model is not None and self._ended is None:
                    self._model.step()
        except Exception as error:  # noqa: BLE001 - the last stop of the thread: whoever asks is told
            self._ended = EngineFailed(
                f"the engine has died: {type(error).__name__}: {errors.first_line(error)}",
                where=f"model {self._settings.path}",
                cure="if memory ran out, lower `engine.concurrency`, or `max_num_seqs` in `engine.args`",
            )
        assert self._ended is not None
        if self._model is not None:
            self._model.end_all(self._ended)
            self._model = None
        self._refuse_calls(self._ended)

    def _answer_calls(self) -> None:
        """Those that are there; wait for one while there is nothing to compute."""
        idle = not (self._stepping and self._model is not None and self._model.busy)
        with contextlib.suppress(queue.Empty):
            while self._ended is None:
                function, refuse = self._calls.get(block=idle)
                idle = False
                try:
                    function()
                except ForebayError as error:
                    refuse(error)
                except Exception as error:  # noqa: BLE001 - whoever asked is told
                    refuse(EngineFailed(f"the engine failed: {type(error).__name__}: {errors.first_line(error)}"))

    def _refuse_calls(self, fault: EngineFailed) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                _, refuse = self._calls.get_nowait()
                refuse(fault)

    def _open(self, device: str, arguments: Mapping[str, Any]) -> None:
        if device == "cpu":
            torch.set_num_threads(platform.cpu_threads(self._pool.engine.threads))
        options = dict(arguments)
        try:
            self._model = StepwiseModel(
                self._settings.path,
                self._settings.dtype,
                device,
                limit=options.pop("max_model_len", None),
                most_rows=options.pop("max_num_seqs", MOST_ROWS),
                **options,
            )
        except ForebayError:
            raise
        except Exception as error:
            raise EngineFailed(
                f"transformers did not start: {type(error).__name__}: {errors.first_line(error)}",
                where=f"model {self._settings.path}",
                cure="correct the model folder or `producers.<pool>.engine.args`",
            ) from error

    def _set_stepping(self, stepping: bool) -> None:
        self._stepping = stepping

    def _end(self) -> None:
        self._ended = EngineFailed("the engine is stopped", where=f"model {self._settings.path}")


def _teller(answer: "asyncio.Future[Any]") -> Callable[[Any], None]:
    """Answers a future of the running loop from another thread, with a result or an error."""
    loop = asyncio.get_running_loop()

    def settle(result: Any) -> None:
        if answer.done():  # cancelled meanwhile
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def tell(result: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result)

    return tell


def _release() -> str:
    import transformers

    return str(transformers.__version__)
