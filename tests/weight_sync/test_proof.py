"""The proof passes a replica that computes with what it was given, and no other."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from buffer.errors import DeadlineExceeded, ProofFailed
from tests.weight_sync.material import Tiny, content
from weight_sync import proof
from weight_sync.manifest import Manifest
from weight_sync.proof import (
    SelfTestResult,
    compare_digests,
    make_reference,
    noise_scale,
    noisy_tensors,
    probe,
    probe_sequence,
    self_test,
    summarise,
    tolerance,
    unit_noise,
)
from weight_sync.registry import ProofRecord, SelfTestReference
from weight_sync.settings import WeightSyncSettings
from weight_sync.shadow import ShadowReference, open_shadow

SETTINGS = WeightSyncSettings(bucket_bytes=1024)
IDS = probe_sequence(50, 32, 1)


class Engine:
    """Computes with a model of its own. As in an engine that repacks weights, a tied head is a tensor apart."""

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self.tied = tied
        self.model = Tiny(tied=False, seed=99)
        self.forgets: Callable[[str], bool] = lambda name: False
        self.loads, self.running, self.calls = 0, True, [""]
        self.put(proof.read_tensors(folder))

    def put(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                if not self.forgets(name):
                    self.model.get_parameter(name).copy_(tensor)
                if name == "embed.weight" and self.tied and not self.forgets("lm_head.weight"):
                    self.model.lm_head.weight.copy_(tensor)

    async def pause(self) -> None:
        self.running = False

    async def resume(self) -> None:
        self.running = True

    async def load(self, shadow: ShadowReference, version: int) -> None:
        assert not self.running
        self.loads += 1
        self.put(open_shadow(shadow))

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        assert self.running
        return log_probs_of(self.model, token_ids)


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, ids: Sequence[int]) -> list[float]:
    scores = model(torch.tensor(list(ids)))[:-1].log_softmax(-1)
    return [float(value) for value in scores.gather(1, torch.tensor(list(ids)[1:])[:, None])[:, 0]]


def write_folder(folder: Path, model: Tiny) -> Path:
    folder.mkdir()
    save_file(dict(model.tensors()), folder / "model.safetensors")
    return folder


def reference_for(model: Tiny, *, noise: float = 0.1, dtype: str = "float32") -> SelfTestReference:
    trainer = Tiny(tied=model.lm_head.weight is model.embed.weight)

    def log_probs(tensors: Iterator[tuple[str, torch.Tensor]], ids: Sequence[int]) -> list[float]:
        with torch.no_grad():
            for name, tensor in tensors:
                trainer.get_parameter(name).copy_(tensor)
        return log_probs_of(trainer, ids)

    return make_reference(log_probs, model.tensors, noise=noise, seed=5, dtype=dtype, token_ids=IDS)


class Bench:
    """A model folder, the trainer's reference of it, and an engine that has read it."""

    def __init__(self, tmp_path: Path, *, tied: bool, **options: Any) -> None:
        self.model = Tiny(tied=tied)
        self.folder = write_folder(tmp_path / "model", self.model)
        self.reference = reference_for(self.model, **options)
        self.engine = Engine(self.folder, tied=tied)
        self.shadows = tmp_path / "shadows"

    def test(self) -> SelfTestResult:
        return asyncio.run(self_test(self.engine, self.folder, self.reference, self.shadows, SETTINGS))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_loads_everything_passes_and_has_its_weights_again(
    tmp_path: Path, tied: bool, dtype: str
) -> None:
    bench = Bench(tmp_path, tied=tied, dtype=dtype)
    result = bench.test()
    assert result.change > 10 * result.bound > 0
    assert result.difference < result.bound / 10
    assert result.noise_floor <= tolerance(SETTINGS, dtype)
    assert bench.engine.loads == 2
    restored = dict(bench.engine.model.named_parameters())
    wire = getattr(torch, dtype)
    assert all(torch.equal(restored[name], tensor.to(wire).float()) for name, tensor in bench.model.tensors())
    assert list(bench.shadows.glob("*")) == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "stale"),
    [
        ("float32", "lm_head.weight"),
        ("float32", "layers.0.weight"),
        ("float32", "layers.1.weight"),
        ("float32", "layers.0.bias"),
        ("float32", "layers.1.bias"),
        # One bias moves log-probs less than bfloat16 kernels differ: there only digests can see it.
        ("bfloat16", "lm_head.weight"),
        ("bfloat16", "layers.0.weight"),
        ("bfloat16", "layers.1.weight"),
    ],
)
def test_one_stale_layer_or_head_is_caught(tmp_path: Path, tied: bool, dtype: str, stale: str) -> None:
    bench = Bench(tmp_path, tied=tied, dtype=dtype)
    bench.engine.forgets = lambda name: name == stale
    with pytest.raises(ProofFailed, match="after a load of changed weights .*\n.*\n.*the load leaves something stale"):
        bench.test()
    assert bench.engine.running


def test_a_shard_that_is_loaded_to_the_wrong_place_is_caught(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=False)

    def put(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                rows = tensor.roll(8, 0) if name == "layers.1.weight" else tensor
                bench.engine.model.get_parameter(name).copy_(rows)

    bench.engine.put = put  # type: ignore[method-assign]
    with pytest.raises(ProofFailed, match="after a load of changed weights"):
        bench.test()


def test_weights_that_do_not_come_back_are_caught(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=True)
    bench.engine.forgets = lambda name: bench.engine.loads == 2 and name == "layers.1.weight"
    with pytest.raises(ProofFailed, match="after the initial weights were loaded again"):
        bench.test()


def test_a_folder_that_is_read_differently_is_caught_before_any_load(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=True)
    with torch.no_grad():
        bench.engine.model.layers[0].weight.mul_(1.5)
    with pytest.raises(ProofFailed, match="read the model folder differently"):
        bench.test()
    assert bench.engine.loads == 0


def test_nan_never_passes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=True)
    with torch.no_grad():
        bench.engine.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(ProofFailed, match="differ from the trainer's by nan"):
        bench.test()


def test_noise_that_would_show_nothing_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=True, noise=1e-6)
    with pytest.raises(ProofFailed, match="raise `weight_sync.self_test_noise`"):
        bench.test()


def test_sides_that_start_from_different_tensors_are_told_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=True)
    untied = Tiny(tied=False)
    untied.load_state_dict(bench.model.state_dict())
    bench.reference = reference_for(untied)
    with pytest.raises(ProofFailed, match="the engine's model folder does not have lm_head.weight"):
        bench.test()


def test_an_engine_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, tied=True)
    monkeypatch.setattr(proof, "ENGINE_SECONDS", 0.2)

    async def hang(shadow: ShadowReference, version: int) -> None:
        await asyncio.sleep(60)

    bench.engine.load = hang  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="the engine did not load weights within"):
        bench.test()
    assert bench.engine.running


# -- the noise
def test_the_noise_is_the_same_in_every_process_environment_and_machine() -> None:
    """Both environments run this test, with unlike versions of NumPy, and find what is written here."""
    assert digest_of(unit_noise("model.embed_tokens.weight", 1001, 7)) == "ebca969b257e77e3"
    assert digest_of(unit_noise("model.embed_tokens.weight", 1001, 8)) != "ebca969b257e77e3"
    tensors = [("a", torch.arange(1000.0) / 7), ("b", torch.arange(30.0).reshape(5, 6) - 3), ("n", torch.arange(4))]
    scales = {"a": 0.1, "b": 0.0123, "n": 0.0}
    for dtype, expected in (("float32", "53deb93de846a423"), ("bfloat16", "1ca5d2374a67211c")):
        noisy = [tensor for _, tensor in noisy_tensors(tensors, scales, 7, dtype)]
        assert digest_of(*noisy) == expected
        assert torch.equal(noisy[2], tensors[2][1])
    assert probe_sequence(32000, 6, 7) == [29044, 2644, 1877, 31249, 14327, 9228]


def digest_of(*tensors: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest("".join(content(tensor)[2] for tensor in tensors).encode())


def test_the_noise_has_mean_0_and_deviation_1_and_differs_by_tensor() -> None:
    noise = unit_noise("w", 200_000, 1)
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    assert torch.equal(noise[:999], unit_noise("w", 999, 1))
    other = unit_noise("v", 200_000, 1)
    assert abs(float(torch.corrcoef(torch.stack([noise, other]))[0, 1])) < 0.01


def test_every_floating_point_tensor_gets_noise_also_one_of_zeros() -> None:
    assert noise_scale(torch.full((10,), 3.0), 0.1) == pytest.approx(0.3)
    assert noise_scale(torch.zeros(10), 0.1) > 0
    assert noise_scale(torch.zeros(10, dtype=torch.int64), 0.1) == 0
    assert noise_scale(torch.empty(0), 0.1) == 0


def test_a_tensor_that_the_trainer_lacks_is_named() -> None:
    with pytest.raises(ProofFailed, match="the trainer does not have extra"):
        list(noisy_tensors([("extra", torch.zeros(2))], {}, 1, "float32"))


# -- the probe
def probe_manifest(log_probs: Sequence[float], ids: Sequence[int] = IDS) -> Manifest:
    return Manifest(
        version=4,
        step=4,
        fence=1,
        tensors=(),
        bucket_sizes=(),
        probe_token_ids=tuple(ids),
        probe_log_probs=tuple(log_probs),
    )


def test_the_probe_passes_within_the_tolerance_and_measures_the_difference(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=True)
    expected = [value + 1e-4 for value in log_probs_of(bench.model, IDS)]
    result = asyncio.run(probe(bench.engine, probe_manifest(expected), 1e-3))
    assert result.passed and result.version == 4
    assert result.mean == pytest.approx(1e-4, rel=0.05) and result.max == pytest.approx(1e-4, rel=0.1)
    result.check(noise_floor=1e-5)


def test_the_probe_beyond_the_tolerance_fails_and_shows_the_noise_floor(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tied=True)
    expected = [value + 0.02 for value in log_probs_of(bench.model, IDS)]
    result = asyncio.run(probe(bench.engine, probe_manifest(expected), 1e-3))
    assert not result.passed
    with pytest.raises(
        ProofFailed, match="version 4 .* by 2.00e-02 in the mean.*1.00e-03 is tolerated and 3.00e-05 was measured"
    ):
        result.check(noise_floor=3e-5)


@pytest.mark.parametrize("log_probs", [[float("nan")] * (len(IDS) - 1), [0.0, float("inf")] + [0.0] * (len(IDS) - 3)])
def test_a_probe_that_is_not_finite_fails(tmp_path: Path, log_probs: list[float]) -> None:
    bench = Bench(tmp_path, tied=True)
    assert not asyncio.run(probe(bench.engine, probe_manifest(log_probs), 1e9)).passed


@pytest.mark.parametrize(("ids", "log_probs"), [((), ()), (IDS, [0.0] * 5)])
def test_a_version_without_a_probe_that_fits_fails(
    tmp_path: Path, ids: Sequence[int], log_probs: Sequence[float]
) -> None:
    bench = Bench(tmp_path, tied=True)
    with pytest.raises(ProofFailed, match="log-probs for a probe of"):
        asyncio.run(probe(bench.engine, probe_manifest(log_probs, ids), 1e-3))


def test_the_tolerance_follows_the_type() -> None:
    assert tolerance(SETTINGS, "float32") == SETTINGS.probe_tolerance_float32
    assert tolerance(SETTINGS, "bfloat16") == SETTINGS.probe_tolerance_bfloat16


# -- digests
def record(member: str, digest: str, *, layout: str = "l", version: int = 1) -> ProofRecord:
    return ProofRecord(member=member, incarnation=1, version=version, layout=layout, checksums_ok=True, digest=digest)


def test_the_replica_that_differs_from_the_most_is_named() -> None:
    odd = compare_digests([record("a", "x"), record("b", "y"), record("c", "x")])
    assert list(odd) == ["b"]
    assert "version 1 with other tensors than a, c" in odd["b"]


def test_without_a_majority_all_are_named() -> None:
    assert set(compare_digests([record("a", "x"), record("b", "y")])) == {"a", "b"}
    assert set(compare_digests([record(m, d) for m, d in zip("abcd", "xxyy", strict=True)])) == set("abcd")


def test_only_equal_layouts_and_versions_are_compared() -> None:
    records = [record("a", "x"), record("b", "y", layout="other"), record("c", "z", version=2), record("d", "")]
    assert compare_digests(records) == {}
    assert compare_digests([]) == {}


def test_a_summary_depends_on_names_and_digests_and_not_on_their_order() -> None:
    assert summarise({"a": "1", "b": "2"}) == summarise({"b": "2", "a": "1"})
    different = [{"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "1"}, {}]
    assert len({summarise(each) for each in different}) == len(different)
