"""A causal language model that is continued a token at a time: for all running completions at once, each by its own
request's rules alone.

Used by one thread. Between two calls every completion is at a token boundary, so weights may change there.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from buffer.errors import ForebayError
from buffer.records import FinishReason
from producer.engine import errors
from producer.engine.base import Completion, Request
from producer.engine.batch import Batch
from producer.engine.digest import digest
from producer.engine.errors import EngineFailed
from producer.engine.sampling import draw, generator_of, processed
from producer.engine.shadow_names import TIED_HEAD, some
from producer.engine.stop_texts import cut_at_stop
from weight_sync.model_folder import tensor_names, tied_names
from weight_sync.shadow import ShadowReference, open_shadow

NOTHING_LOADED = -1  # version of the model folder's weights, which no publisher has sent


@dataclass(eq=False)
class Running:
    """One completion under way; ``end`` is called once, in the thread."""

    request: Request
    end: Callable[[Completion | ForebayError], None]
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)


class StepwiseModel:
    """The model, its tokenizer and what runs. Completions that end are told their callers within ``step``."""

    def __init__(
        self, path: str, dtype: str, device: str, *, limit: int | None, most_rows: int, **options: object
    ) -> None:
        """``limit``: most tokens of prompt and completion (none: what the model is made for)."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True, **options
        )
        self._model: Any = model.eval().requires_grad_(False).to(device)
        self._device = device
        self._most_rows = most_rows
        self._ends = _end_tokens(self._model, self._tokenizer)
        self._batch = Batch(self._model, device)
        self._rows: list[Running] = []
        self._waiting: deque[Running] = deque()
        self.version = NOTHING_LOADED
        self.limit: int = limit or self._model.config.get_text_config().max_position_embeddings
        stored = set(tensor_names(path)) - {TIED_HEAD}
        if odd := sorted(stored ^ (self._targets().keys() - {TIED_HEAD})):
            raise EngineFailed(
                f"transformers computes with other tensors than the folder stores: {some(odd)}",
                where=f"model {path}",
                cure="complete the folder, or use `engine.kind: vllm` where transformers rearranges a model's weights",
            )

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._rows or self._waiting)

    def add(self, request: Request, end: Callable[[Completion | ForebayError], None]) -> None:
        """Begin a completion at one of the next steps."""
        self._waiting.append(Running(request, end, generator_of(request)))

    def abort(self, request_id: str) -> None:
        """End a completion with what it has, if it is not over yet."""
        for row in (*self._rows, *self._waiting):
            if row.request.id == request_id:
                self._end(row, "abort")
        self._waiting = deque(row for row in self._waiting if row.request.id != request_id)
        self._keep([row for row in self._rows if row.request.id != request_id])

    def end_all(self, error: ForebayError) -> None:
        """End every completion with an error."""
        for row in (*self._rows, *self._waiting):
            row.end(error)
        self._rows, self._waiting = [], deque()

    def step(self) -> None:
        """One token more for each that runs, and the first for those that there is room for."""
        going = list(self._rows)
        if going:
            tokens = [row.token_ids[-1] for row in going]
            logits = self._batch.step(tokens, [row.length - 1 for row in going])
            going = [row for row, values in zip(going, logits, strict=True) if self._extend(row, values)]
            self._keep(going)
        for prompt, rows in self._admitted().items():
            values = self._batch.add(prompt, len(rows))
            self._rows += rows
            self._waiting = deque(row for row in self._waiting if row not in rows)
            self._keep([row for row in self._rows if row not in rows or self._extend(row, values)])

    @torch.no_grad()
    def load(self, shadow: ShadowReference, version: int) -> None:
        """Replace every weight in place; what runs keeps its cache, and its next tokens are of ``version``."""
        missing = self._targets()
        tied = tied_names(self._model)
        for name, tensor in open_shadow(shadow):
            if name in tied:
                continue  # its tensor is the embedding, which comes under its own name
            target = missing.pop(name)
            if target.shape != tensor.shape:
                raise EngineFailed(
                    f"{name!r} came with the shape {tuple(tensor.shape)}, the model has {tuple(target.shape)}"
                )
            target.copy_(tensor)
        if missing:
            raise EngineFailed(f"no weights reached the engine's {some(sorted(missing))}")
        self.version = version

    def digests(self) -> dict[str, str]:
        """Digest of each tensor that computes, by `rank:name` as other engines name them."""
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        return {f"0:{name}": digest(tensor) for name, tensor in tensors if tensor.numel()}

    @torch.inference_mode()
    def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Raw log-probs of tokens 1..., computed anew."""
        ids = torch.tensor([list(token_ids)], device=self._device)
        logs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return list(logs.gather(-1, ids[0, 1:, None])[:, 0].tolist())

    def _targets(self) -> dict[str, torch.Tensor]:
        """The tensors that a load writes, by their Hugging Face names."""
        tied = tied_names(self._model)
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in tied}

    def _admitted(self) -> dict[tuple[int, ...], list[Running]]:
        """Those that begin now, by prompt: the prompt of a group is computed once."""
        found: defaultdict[tuple[int, ...], list[Running]] = defaultdict(list)
        for row in islice(self._waiting, self._most_rows - len(self._rows)):
            found[tuple(row.request.prompt_token_ids)].append(row)
        return found

    def _keep(self, rows: list[Running]) -> None:
        if len(rows) < len(self._rows):
            places = [place for place, row in enumerate(self._rows) if row in rows]
            self._batch.keep(places, max((row.length for row in rows), default=0))
            self._rows = rows

    def _extend(self, row: Running, logits: torch.Tensor) -> bool:
        """Sample one token; whether the completion goes on."""
        request = row.request
        log_probs = processed(logits, request)
        token = draw(log_probs, request, row.generator)
        log_prob = float(log_probs[token])
        try:
            errors.refuse_nan([log_prob], version=self.version, request_id=request.id)
        except errors.EngineProducedNaN as error:
            row.end(error)
            return False
        row.token_ids.append(token)
        row.log_probs.append(log_prob)
        row.versions.append(self.version)
        if token in self._ends:
            return self._end(row, "stop")
        if request.stop and (text := cut_at_stop(self._text(row.token_ids), request.stop)) is not None:
            return self._end(row, "stop", text)
        if len(row.token_ids) >= request.max_tokens or row.length >= self.limit:
            return self._end(row, "length")
        return True

    def _end(self, row: Running, reason: FinishReason, text: str | None = None) -> bool:
        text = self._text(row.token_ids) if text is None else text
        row.end(Completion(row.token_ids, row.log_probs, row.versions, reason, text))
        return False

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's and those that the model's folder names for generation."""
    named = model.generation_config.eos_token_id
    more = named if isinstance(named, list) else [named]
    return frozenset(token for token in (tokenizer.eos_token_id, *more) if token is not None)
