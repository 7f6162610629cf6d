"""A replica serves a version only with evidence that it computes with it; without evidence it has failed (invariant 6).

(a) The load-path self-test, when a replica joins: both sides add the same noise to every tensor of the initial weights;
the engine's log-probs must move as the trainer's did. A layer, a head or a shard that a load leaves stale, or a config
that is read differently, shows, since the noise moves log-probs far more than kernels differ. (b) Checksums are the
receiver's. (c) Digests of the tensors that compute are equal among replicas of equal layout. (d) The probe of each
version may quarantine, never certify: one optimizer step can move log-probs less than kernels differ.
"""

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from buffer.errors import DeadlineExceeded, ForebayError, ProofFailed
from weight_sync.manifest import Manifest, TensorEntry, plan_layout
from weight_sync.model_folder import read_tensors
from weight_sync.registry import ProofRecord, SelfTestReference
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import Shadow, ShadowReference, checksum, create_shadow

T = TypeVar("T")
Tensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Gives the initial weights under their Hugging Face names, anew at each call."""
LogProbs = Callable[[Iterator[tuple[str, torch.Tensor]], Sequence[int]], Sequence[float]]
"""Raw log-probs of a sequence's tokens 1..., computed with exactly the given weights."""

SELF_TEST_VERSION = -1  # what tokens would carry; none is sampled
SMALLEST_SCALE = 0.02  # of the noise, before `self_test_noise`: tensors of zeros get noise too
FLOOR_FACTOR = 5.0  # noisy weights differ by up to three times what the initial ones do between kernels
SMALLEST_BOUND = {"float32": 1e-4, "bfloat16": 2e-3}
ENGINE_SECONDS = 600.0  # most that the engine may take to answer one call: a load of a large model is the longest
LOG_PROBS = "compute the log-probs of a sequence"
LEAST_CHANGE = 5.0  # the noise must move log-probs by so many times what is tolerated


class ProvedEngine(Protocol):
    """What the proof needs of an engine (producer.engine.base.Engine is one)."""

    async def pause(self) -> None:
        """Stop stepping."""

    async def resume(self) -> None:
        """Go on."""

    async def load(self, shadow: ShadowReference, version: int) -> None:
        """Replace every weight."""

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Raw log-probs of tokens 1..."""


@dataclass(frozen=True)
class SelfTestResult:
    """What the load-path self-test measured: mean absolute differences of log-probs."""

    noise_floor: float  # engine and trainer on the initial weights
    noise_floor_max: float
    change: float  # of the trainer's log-probs under the noise
    difference: float  # engine and trainer under the noise
    bound: float  # what `difference` may be


@dataclass(frozen=True)
class ProbeResult:
    """Log-probs of the probe's tokens, engine against trainer."""

    version: int
    mean: float
    max: float
    tolerance: float
    passed: bool

    def check(self, noise_floor: float) -> None:
        """Raise ProofFailed unless it passed."""
        if not self.passed:
            raise ProofFailed(
                f"with version {self.version} the engine's log-probs differ from the trainer's by {self.mean:.2e} in "
                f"the mean (at most {self.max:.2e}); {self.tolerance:.2e} is tolerated and {noise_floor:.2e} was "
                "measured on the initial weights",
                cure="the replica is quarantined; restart it; if it fails again, compare the replicas' digests",
            )


def probe_sequence(vocabulary: int, count: int, seed: int) -> list[int]:
    """Token ids for self-test and probe: anything will do that is not likely, so that every layer has a say."""
    raw = np.random.Philox(key=_key(seed, "probe")).random_raw(count)
    return [int(value) for value in raw % np.uint64(vocabulary)]


def tolerance(settings: WeightSyncSettings, dtype: str) -> float:
    """Largest mean absolute difference of log-probs, engine against trainer, that is a matter of kernels."""
    return settings.probe_tolerance_float32 if dtype == "float32" else settings.probe_tolerance_bfloat16


# -- (a) the self-test, on the trainer's side
def make_reference(
    log_probs: LogProbs, tensors: Tensors, *, noise: float, seed: int, dtype: str, token_ids: Sequence[int]
) -> SelfTestReference:
    """The reference of the initial weights, which must be those of the model folder that engines load.

    ``noise`` is `self_test_noise`; ``dtype`` is the type that weights travel in.
    """
    wire: torch.dtype = getattr(torch, dtype)
    scales = {name: noise_scale(_on_wire(tensor, wire), noise) for name, tensor in tensors()}
    plain = log_probs(((name, _on_wire(tensor, wire)) for name, tensor in tensors()), token_ids)
    noisy = log_probs(noisy_tensors(tensors(), scales, seed, dtype), token_ids)
    return SelfTestReference(
        seed=seed,
        dtype=dtype,
        scales=scales,
        token_ids=tuple(int(token) for token in token_ids),
        log_probs=tuple(float(value) for value in plain),
        noisy_log_probs=tuple(float(value) for value in noisy),
    )


def noise_scale(tensor: torch.Tensor, noise: float) -> float:
    """Standard deviation of a tensor's noise; 0 for what is not floating-point. Part of the reference: its last bits
    may differ between machines."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    mean_square = float(tensor.detach().to(torch.float32).square().mean(dtype=torch.float64))
    return noise * max(mean_square**0.5, SMALLEST_SCALE)


def noisy_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], scales: Mapping[str, float], seed: int, dtype: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with their noise, in the type that travels: the same bits on every machine."""
    wire: torch.dtype = getattr(torch, dtype)
    for name, tensor in tensors:
        if name not in scales:
            raise _names_differ([name], "the trainer")
        plain = _on_wire(tensor, wire)
        if scales[name] == 0.0:
            yield name, plain
            continue
        noise = unit_noise(name, plain.numel(), seed).reshape(plain.shape)
        # Two operations, each rounded on its own: fused, they would round differently on other processors.
        noise.mul_(scales[name])
        yield name, noise.add_(plain.to(torch.float32)).to(plain.dtype)


def unit_noise(name: str, count: int, seed: int) -> torch.Tensor:
    """``count`` float32 of mean 0 and deviation 1, from the seed and the tensor's name.

    Uniform, from a generator's raw bits: normal numbers take library functions that round differently elsewhere.
    """
    raw = np.random.Philox(key=_key(seed, name)).random_raw(-(-count // 4))
    levels = np.frombuffer(raw.astype("<u8").tobytes(), dtype="<u2", count=count).astype(np.float32)
    levels -= np.float32(32767.5)
    levels *= np.float32(3**0.5 / 32768)
    return torch.from_numpy(levels)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")


def _on_wire(tensor: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    plain = tensor.detach().cpu()
    return plain.to(wire) if plain.is_floating_point() else plain


# -- (a) the self-test, on the engine's side
async def self_test(
    engine: ProvedEngine,
    model_path: str | Path,
    reference: SelfTestReference,
    shadow_folder: str | Path,
    settings: WeightSyncSettings,
) -> SelfTestResult:
    """Prove that a load through a shadow reaches every tensor that computes. The engine has the initial weights, from
    its own loader, and has them again afterwards, from the shadow. Raises ProofFailed, saying what differs."""
    ids = list(reference.token_ids)
    allowed = tolerance(settings, reference.dtype)
    own = await _answer(engine.log_probs(ids), LOG_PROBS)
    floor, floor_max = differences(own, reference.log_probs)
    _demand(
        floor <= allowed,
        f"on the initial weights, by the engine's own loader, its log-probs differ from the trainer's by {floor:.2e} "
        f"in the mean; {allowed:.2e} is tolerated",
        "the two sides read the model folder differently: compare config.json (rope, head size, tied embeddings)",
    )
    bound = min(allowed, max(FLOOR_FACTOR * floor, SMALLEST_BOUND.get(reference.dtype, allowed)))
    change, _ = differences(reference.noisy_log_probs, reference.log_probs)
    _demand(
        change >= LEAST_CHANGE * bound,
        f"the self-test's noise moves log-probs by {change:.2e} only, where {bound:.2e} is tolerated",
        "raise `weight_sync.self_test_noise`",
    )
    shadow = _shadow_of(model_path, reference, shadow_folder, settings)
    try:
        noisy = await _with_weights(
            engine,
            shadow,
            noisy_tensors(read_tensors(model_path), reference.scales, reference.seed, reference.dtype),
            ids,
        )
        restored = await _with_weights(engine, shadow, read_tensors(model_path), ids)
    finally:
        shadow.close()
    difference, _ = differences(noisy, reference.noisy_log_probs)
    unmoved, _ = differences(noisy, own)
    _demand(
        difference <= bound,
        f"after a load of changed weights the engine's log-probs differ by {difference:.2e} in the mean from what they "
        f"must be; {bound:.2e} is tolerated. The change itself is {change:.2e}, the engine moved by {unmoved:.2e}",
        "the load leaves something stale (a layer, the head, a shard): use the engine's version that Forebay pins",
    )
    back, _ = differences(restored, own)
    _demand(
        back <= bound,
        f"after the initial weights were loaded again, log-probs differ by {back:.2e} in the mean from those before; "
        f"{bound:.2e} is tolerated",
        "the load leaves something stale (a layer, the head, a shard): use the engine's version that Forebay pins",
    )
    return SelfTestResult(
        noise_floor=floor, noise_floor_max=floor_max, change=change, difference=difference, bound=bound
    )


def _shadow_of(
    model_path: str | Path, reference: SelfTestReference, folder: str | Path, settings: WeightSyncSettings
) -> Shadow:
    places = [
        (
            name,
            reference.dtype if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch."),
            tensor.shape,
        )
        for name, tensor in read_tensors(model_path)
    ]
    missing = reference.scales.keys() - {name for name, _, _ in places}
    if missing:
        raise _names_differ(sorted(missing), "the engine's model folder")
    return create_shadow(plan_layout(places, settings.bucket_bytes), folder, "self-test")


async def _with_weights(
    engine: ProvedEngine, shadow: Shadow, tensors: Iterable[tuple[str, torch.Tensor]], ids: list[int]
) -> list[float]:
    """The engine's log-probs after a load of the tensors through the shadow."""
    # In a thread: with a large model it takes minutes, and the engine's loop has a heartbeat to keep.
    entries = await asyncio.to_thread(_fill, shadow, tensors)
    manifest = Manifest(
        version=SELF_TEST_VERSION,
        step=0,
        fence=0,
        tensors=entries,
        bucket_sizes=shadow.layout.bucket_sizes,
        probe_token_ids=tuple(ids),
        probe_log_probs=(),
    )
    await _answer(engine.pause(), "pause")
    try:
        await _answer(engine.load(shadow.reference(manifest), SELF_TEST_VERSION), "load weights")
    finally:
        await _answer(engine.resume(), "resume")
    return await _answer(engine.log_probs(ids), LOG_PROBS)


def _fill(shadow: Shadow, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorEntry, ...]:
    """Write the tensors; their places with checksums."""
    shadow.write(tensors)
    return tuple(
        msgspec.structs.replace(entry, checksum=checksum(shadow.buckets, entry)) for entry in shadow.layout.tensors
    )


async def _answer(action: Awaitable[T], what: str) -> T:
    """What the engine answers, within a bound."""
    try:
        return await asyncio.wait_for(action, ENGINE_SECONDS)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the engine did not {what} within {ENGINE_SECONDS:.0f} s",
            where="the proof of what it computes with",
            cure="the engine is stuck: see its log; this producer ends and its prompts go back",
        ) from None


# -- (c) digests
def summarise(digests: Mapping[str, str]) -> str:
    """One digest over those of all tensors that compute."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


def compare_digests(records: Iterable[ProofRecord]) -> dict[str, str]:
    """Replicas whose digest differs from that of most others of the same layout and version, and what is wrong; where
    there is no majority, all of them are named."""
    alike: dict[tuple[str, int], list[ProofRecord]] = defaultdict(list)
    for record in records:
        if record.digest:
            alike[record.layout, record.version].append(record)
    odd: dict[str, str] = {}
    for (_, version), group in alike.items():
        counts = Counter(record.digest for record in group)
        if len(counts) == 1:
            continue
        (most, votes), *_ = counts.most_common()
        majority = 2 * votes > len(group)
        for record in group:
            if not majority or record.digest != most:
                others = ", ".join(sorted(other.member for other in group if other.digest != record.digest))
                odd[record.member] = f"computes version {version} with other tensors than {others}, of equal layout"
    return odd


# -- (d) the probe
async def probe(engine: ProvedEngine, manifest: Manifest, allowed: float) -> ProbeResult:
    """Compare the engine's log-probs with the manifest's. NaN never passes. Raises ProofFailed without a probe."""
    found: Sequence[float] = []
    if manifest.probe_token_ids:
        found = await _answer(engine.log_probs(manifest.probe_token_ids), LOG_PROBS)
    mean, largest = differences(found, manifest.probe_log_probs)
    return ProbeResult(manifest.version, mean, largest, allowed, mean <= allowed)


def differences(found: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """Mean and largest absolute difference; NaN where one side has NaN. Raises ProofFailed for unequal lengths."""
    if len(found) != len(expected) or not len(found):
        raise ProofFailed(
            f"the engine gave {len(found)} log-probs for a probe of {len(expected)}",
            cure="run the same release of Forebay on both sides",
        )
    apart = np.abs(np.asarray(found, dtype=np.float64) - np.asarray(expected, dtype=np.float64))
    return float(apart.mean()), float(apart.max())


def _demand(fulfilled: bool, what: str, cure: str) -> None:
    if not fulfilled:
        raise ProofFailed(what, where="load-path self-test", cure=cure)


def _names_differ(names: Sequence[str], who: str) -> ForebayError:
    return ProofFailed(
        f"{who} does not have {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}",
        where="load-path self-test",
        cure="start trainer and producers from the same model folder",
    )
