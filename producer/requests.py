"""Requests meet an update as the pool's mode says: they go on, have ended, or go on from their tokens so far; a token
that was sampled is never lost or changed.

While the door is closed nothing begins in the engine. Whoever closes it opens it again, however the update ends.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from buffer.errors import DeadlineExceeded, ForebayError
from producer.engine.base import Completion, Engine, Request
from producer.engine.stop_texts import cut_at_stop

ABORT_AGAIN_SECONDS = 0.2  # an abort that came before its request does nothing
Decode = Callable[[Sequence[int]], str]


class Requests:
    """The requests of one engine that are answered for training. Used from one event loop."""

    def __init__(self, engine: Engine, decode: Decode) -> None:
        """``decode``: the text of tokens, special ones left out."""
        self._engine = engine
        self._decode = decode
        self._door = asyncio.Event()
        self._door.set()
        self._inside: dict[str, str] = {}  # requests that the engine has, and what it knows them as
        self._interrupted: set[str] = set()  # as the engine knows them
        self._left = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether requests may begin."""
        return self._door.is_set()

    def close_door(self) -> None:
        """Let nothing begin."""
        self._door.clear()

    def open_door(self) -> None:
        """Let requests begin, and interrupted ones go on."""
        self._door.set()

    async def answer(self, requests: Sequence[Request]) -> list[Completion]:
        """Every completion in the order of the requests, which all begin under one version; when one fails or the
        caller is cancelled, the others end too."""
        await self._until_open()
        for request in requests:
            self._inside[request.id] = request.id
        running = [asyncio.create_task(self._answer(request)) for request in requests]
        try:
            return list(await asyncio.gather(*running))
        except BaseException:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        finally:
            for request in requests:
                self._leave(request)

    async def ended(self, seconds: float) -> bool:
        """Whether every request has ended within ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._inside:
                    self._left.clear()
                    await self._left.wait()
        return not self._inside

    async def abort(self, seconds: float, *, go_on: bool) -> None:
        """End what the engine has, at the latest within ``seconds``. With ``go_on`` they go on from their tokens when
        the door opens; else they are answered as aborted."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._inside:
            if (left := deadline - asyncio.get_running_loop().time()) <= 0:
                raise DeadlineExceeded(
                    f"{len(self._inside)} aborted requests did not end within {seconds:.0f} s",
                    where="the update of the weights",
                    cure="the engine is stuck: see its log; this producer ends and its prompts go back",
                )
            ids = list(self._inside.values())
            if go_on:
                self._interrupted |= set(ids)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(self._engine.abort(one) for one in ids)), left)
            await self.ended(min(ABORT_AGAIN_SECONDS, left))

    async def _answer(self, request: Request) -> Completion:
        """One completion, over however many interruptions."""
        so_far, current = None, request
        while True:
            try:
                found = await self._engine.generate(current)
            except BaseException:
                with contextlib.suppress(ForebayError):
                    await self._engine.abort(current.id)
                raise
            finally:
                self._leave(request)
            whole = found if so_far is None else self._joined(request, so_far, found)
            interrupted = current.id in self._interrupted
            self._interrupted.discard(current.id)
            if not interrupted or whole.finish_reason != "abort":
                return whole
            if len(whole.token_ids) >= request.max_tokens:
                return replace(whole, finish_reason="length")
            so_far, current = whole, continued(request, whole.token_ids)
            await self._until_open()
            self._inside[request.id] = current.id

    def _joined(self, request: Request, before: Completion, after: Completion) -> Completion:
        """Both parts as one completion. A stop text that lies over the seam ends it, which the engine could not see."""
        tokens = before.token_ids + after.token_ids
        finish, text = after.finish_reason, self._decode(tokens)
        if cut_at_stop(text, request.stop) is not None:
            count = len(before.token_ids)
            while (cut := cut_at_stop(self._decode(tokens[:count]), request.stop)) is None:
                count += 1
            tokens, text, finish = tokens[:count], cut, "stop"
        count = len(tokens)
        return Completion(
            token_ids=tokens,
            log_probs=(before.log_probs + after.log_probs)[:count],
            versions=(before.versions + after.versions)[:count],
            finish_reason=finish,
            text=text,
        )

    async def _until_open(self) -> None:
        while not self._door.is_set():  # it may have closed again before this task runs
            await self._door.wait()

    def _leave(self, request: Request) -> None:
        if self._inside.pop(request.id, None) is not None:
            self._left.set()


def continued(request: Request, token_ids: Sequence[int]) -> Request:
    """The rest of a completion that has ``token_ids``; its random numbers are its own, not the first part's again."""
    count = len(token_ids)
    seed = request.seed
    if seed is not None:
        seed = int(np.random.SeedSequence([seed, count]).generate_state(1, np.uint32)[0]) >> 1
    return replace(
        request,
        id=f"{request.id}+{count}",
        prompt_token_ids=[*request.prompt_token_ids, *token_ids],
        max_tokens=request.max_tokens - count,
        seed=seed,
    )
