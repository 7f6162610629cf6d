"""An engine of either kind on a tiny random model, and transformers on the same weights to compare it with."""

import asyncio
import importlib.util
import itertools
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch

from producer.engine.base import Completion, Engine, Request
from producer.engine.transformers import TransformersEngine
from producer.engine.vllm import VllmEngine
from producer.settings import ModelSettings, PoolSettings
from weight_sync import proof
from weight_sync.manifest import Manifest, plan_layout
from weight_sync.model_folder import read_tensors
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import Shadow, checksum, create_shadow

ROOT = Path(__file__).resolve().parents[2]
EOS = 1
SHAPE = {"hidden": 64, "layers": 2, "std": 0.15}  # of the models: with so wide a spread log-probs tell weights apart
T = TypeVar("T")
Kind = Literal["vllm", "transformers"]
Tensors = dict[str, torch.Tensor]


def write_model(folder: Path, **options: Any) -> Path:
    spec = importlib.util.spec_from_file_location("arithmetic_model", ROOT / "examples" / "arithmetic" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.write_model(folder, **options))


def engine_for(
    kind: Kind, model: Path, folder: Path, *, args: Mapping[str, Any] | None = None, dtype: str = "float32"
) -> Engine:
    settings = PoolSettings.model_validate({"engine": {"kind": kind, "threads": 1, "args": args or {}}})
    model_settings = ModelSettings.model_validate({"path": str(model), "dtype": dtype})
    if kind == "transformers":
        return TransformersEngine(model_settings, settings, folder)
    extension = "tests.producer.corrupting_worker.CorruptingLoader"
    return VllmEngine(model_settings, settings, folder, worker_extension=extension)


@contextmanager
def shadow_with(tensors: Tensors, version: int, folder: Path) -> Iterator[tuple[Shadow, Manifest]]:
    """A shadow as a receiver hands it over."""
    places = [(name, str(value.dtype).removeprefix("torch."), value.shape) for name, value in tensors.items()]
    shadow = create_shadow(plan_layout(places, 1 << 16), folder / "shadows", "test")
    try:
        shadow.write(tensors.items())
        entries = tuple(
            msgspec.structs.replace(entry, checksum=checksum(shadow.buckets, entry)) for entry in shadow.layout.tensors
        )
        manifest = Manifest(
            version=version,
            step=version,
            fence=0,
            tensors=entries,
            bucket_sizes=shadow.layout.bucket_sizes,
            probe_token_ids=(),
            probe_log_probs=(),
        )
        yield shadow, manifest
    finally:
        shadow.close()


@dataclass
class Bench:
    """One running engine, its model, and transformers' idea of it."""

    kind: Kind
    tied: bool
    model: Path
    folder: Path
    engine: Any  # of the Engine protocol; vLLM's has tests of its inner parts too
    runner: asyncio.Runner
    reference: Any
    tokenizer: Any
    version: int = 0
    ids: Iterator[int] = field(default_factory=itertools.count)
    load_seconds: list[float] = field(default_factory=list)

    def run(self, action: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
        return self.runner.run(asyncio.wait_for(action, seconds))

    def request(self, prompt: Sequence[int], **changes: Any) -> Request:
        values: dict[str, Any] = {
            "id": f"r{next(self.ids)}",
            "prompt_token_ids": prompt,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 24,
            "stop": (),
            "seed": 1,
        }
        return Request(**(values | changes))

    def generate(self, prompt: Sequence[int], **changes: Any) -> Completion:
        return self.run(self.engine.generate(self.request(prompt, **changes)))

    def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            return list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))

        return self.run(all_of_them())

    def initial(self) -> Tensors:
        return dict(read_tensors(self.model))

    async def load(self, tensors: Tensors, version: int | None = None) -> int:
        """Through a shadow, as the service does; also into the reference."""
        self.version = self.version + 1 if version is None else version
        with shadow_with(tensors, self.version, self.folder) as (shadow, manifest):
            await self.engine.pause()
            started = time.monotonic()
            try:
                await self.engine.load(shadow.reference(manifest), self.version)
            finally:
                self.load_seconds.append(time.monotonic() - started)
                await self.engine.resume()
        self.compare_with(tensors)
        return self.version

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def compare_with(self, tensors: Tensors) -> None:
        """From here on the reference computes with these."""
        self.reference.load_state_dict(tensors, strict=False)

    def expected(self, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Transformers' log-probs of tokens 1..., shape (len - 1, vocabulary)."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([list(token_ids)])).logits[0, :-1].float()
        return (logits / temperature).log_softmax(-1)

    def expected_of(self, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Transformers' raw log-probs of a completion's tokens."""
        logs = self.expected([*prompt, *token_ids])[-len(token_ids) :]
        return logs.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]

    def difference(self, token_ids: Sequence[int]) -> float:
        found = torch.tensor(self.run(self.engine.log_probs(token_ids)))
        return float((found - self.expected_of(token_ids[:1], token_ids[1:])).abs().max())


@contextmanager
def running_bench(kind: Kind, tied: bool, folder: Path) -> Iterator[Bench]:
    """Start an engine and end it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = write_model(folder / "model", tied=tied, **SHAPE)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    engine = engine_for(kind, model, folder)
    with asyncio.Runner() as runner:
        started = time.monotonic()
        runner.run(engine.start())
        print(f"\nengine started in {time.monotonic() - started:.1f} s: {engine.layout()}")
        bench = Bench(kind, tied, model, folder, engine, runner, reference, AutoTokenizer.from_pretrained(model))
        try:
            yield bench
        finally:
            if bench.load_seconds:
                print(f"\nloads took {', '.join(f'{seconds * 1000:.0f}' for seconds in bench.load_seconds)} ms")
            runner.run(engine.stop())


def changed(tensors: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: value + torch.randn(value.shape, generator=generator) * 0.02 for name, value in tensors.items()}


def tokens_of(seed: int, count: int = 40) -> list[int]:
    return torch.randint(4, 260, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def self_test(bench: Bench) -> proof.SelfTestResult:
    """The load-path self-test, with transformers as the trainer."""
    settings = WeightSyncSettings()

    def log_probs(tensors: Iterator[tuple[str, torch.Tensor]], token_ids: Sequence[int]) -> list[float]:
        bench.compare_with(dict(tensors))
        return list(bench.expected_of(token_ids[:1], token_ids[1:]).tolist())

    reference = proof.make_reference(
        log_probs,
        lambda: read_tensors(bench.model),
        noise=settings.self_test_noise,
        seed=3,
        dtype="float32",
        token_ids=proof.probe_sequence(260, settings.probe_tokens, 3),
    )
    return bench.run(proof.self_test(bench.engine, bench.model, reference, bench.folder / "shadows", settings))
