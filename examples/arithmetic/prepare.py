"""The example begins with a model that answers less than half of the problems, and knows how to answer all of them.

`python examples/arithmetic/prepare.py [FOLDER]` (in the consumer's environment) writes three-digit additions to train
and to evaluate on, and a small model pre-trained on other ones. It learns from a pupil who mostly forgets to
carry: so its most likely answer is wrong wherever there is a carry, and right answers are among its samples, which is
what reinforcement learning can work with. The share of right answers is bounded by the data, however long pre-training
takes, and the deadline bounds that on a slow machine. The same parameters give the same data, and the same model where
the machine computes alike. What is finished is marked so, and is not done again.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Threads that spin while they wait make every step tens of times slower on a machine that others use too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script's path holds its own folder only

from examples.arithmetic.model import EOS_ID, build_tokenizer, write_model
from weight_sync.model_folder import save_portable

OUT = Path(__file__).resolve().parent / "out"
MARK = "finished.json"
IGNORED = -100  # label of a token that is not learned
SMALLEST, LARGEST = 100, 999  # operands
PROMPT_LENGTH = len("347+585=")
ANSWER_LENGTH = len("1998") + 1  # and the end of text

Problem = tuple[int, int]


@dataclass(frozen=True)
class Preparation:
    """Everything that decides what is prepared."""

    seed: int = 21
    train_rows: int = 4096
    heldout_rows: int = 256
    validation_rows: int = 256  # of problems that no file has; they decide when to stop
    hidden: int = 256
    layers: int = 4
    spread: float = 0.06  # standard deviation of the first weights
    careless: float = 0.65  # share of the pre-training examples that are worked without carrying
    batch: int = 32
    learning_rate: float = 1e-3
    warm_up_steps: int = 200
    steps: int = 1000  # at most
    evaluate_every: int = 200
    stop_at: float = 0.45  # greedy accuracy on the validation problems
    deadline_seconds: float = 170.0
    threads: int = 2


@dataclass(frozen=True)
class Problems:
    """Disjoint sets of problems."""

    train: list[Problem]
    heldout: list[Problem]
    validation: list[Problem]
    pretraining: torch.Tensor  # (n, 2)


def draw_problems(preparation: Preparation) -> Problems:
    """All pairs of operands in an order that follows from the seed, cut into the sets."""
    generator = torch.Generator().manual_seed(preparation.seed)
    span = LARGEST - SMALLEST + 1
    order = torch.randperm(span * span, generator=generator)
    pairs = torch.stack([order // span, order % span], dim=1) + SMALLEST
    sizes = [preparation.heldout_rows, preparation.validation_rows, preparation.train_rows]
    heldout, validation, train, rest = pairs.split([*sizes, len(pairs) - sum(sizes)])
    return Problems(_as_problems(train), _as_problems(heldout), _as_problems(validation), rest)


def _as_problems(pairs: torch.Tensor) -> list[Problem]:
    return [(int(left), int(right)) for left, right in pairs.tolist()]


def question(problem: Problem) -> str:
    return f"{problem[0]}+{problem[1]}="


def answer(problem: Problem) -> str:
    return str(problem[0] + problem[1])


def write_rows(path: Path, problems: Sequence[Problem]) -> None:
    rows = ({"question": question(problem), "answer": answer(problem)} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def batches(preparation: Preparation, pool: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels, without end; a wrong answer differs from the right one in one digit."""
    generator = torch.Generator().manual_seed(preparation.seed + 1)
    tokenizer = build_tokenizer()
    digit_ids = torch.tensor([tokenizer.token_to_id(digit) for digit in "0123456789"])
    plus, equals = tokenizer.token_to_id("+"), tokenizer.token_to_id("=")
    size = preparation.batch
    while True:
        pairs = pool[torch.randint(len(pool), (size,), generator=generator)]
        careful = torch.rand(size, generator=generator) >= preparation.careless
        total = sums(pairs[:, 0], pairs[:, 1], careful)
        length = torch.where(total >= 1000, 4, 3)
        columns = torch.arange(ANSWER_LENGTH)
        place = (length[:, None] - 1 - columns).clamp(min=0)
        answers = digit_ids[total[:, None] // 10**place % 10]
        answers = torch.where(columns < length[:, None], answers, EOS_ID)
        learned = columns <= length[:, None]
        left, right = (digit_ids[pairs[:, side, None] // 10 ** torch.arange(2, -1, -1) % 10] for side in (0, 1))
        prompts = torch.cat([left, torch.full((size, 1), plus), right, torch.full((size, 1), equals)], dim=1)
        labels = torch.cat([torch.full_like(prompts, IGNORED), answers.masked_fill(~learned, IGNORED)], dim=1)
        yield torch.cat([prompts, answers], dim=1), labels


def sums(left: torch.Tensor, right: torch.Tensor, careful: torch.Tensor) -> torch.Tensor:
    """Written addition, digit under digit; where it is not ``careful`` (n,), nothing is carried to the left."""
    units = left % 10 + right % 10
    tens = left // 10 % 10 + right // 10 % 10 + (units >= 10) * careful
    hundreds = left // 100 + right // 100 + (tens >= 10) * careful
    return 100 * hundreds + 10 * (tens % 10) + units % 10


@torch.no_grad()
def greedy_accuracy(model: nn.Module, problems: Sequence[Problem]) -> float:
    """Share of the problems that are answered exactly, with the end of text after the answer."""
    tokenizer = build_tokenizer()
    ids = torch.tensor([tokenizer.encode(question(problem)).ids for problem in problems])
    for _ in range(ANSWER_LENGTH):
        chosen = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, chosen], dim=1)
    right = 0
    for problem, completion in zip(problems, ids[:, PROMPT_LENGTH:].tolist(), strict=True):
        expected = [*tokenizer.encode(answer(problem)).ids, EOS_ID]
        right += completion[: len(expected)] == expected
    return right / len(problems)


def pretrain(model: nn.Module, preparation: Preparation, problems: Problems) -> None:
    """Train until the accuracy on the validation problems is reached, or steps or time are up."""
    began = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=preparation.learning_rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, preparation))
    loss_sum = torch.zeros(())
    for step, (ids, labels) in enumerate(batches(preparation, problems.pretraining), start=1):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, PROMPT_LENGTH - 1 :]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, PROMPT_LENGTH:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss_sum += loss.detach()
        seconds = time.monotonic() - began
        late = seconds > preparation.deadline_seconds
        if step % preparation.evaluate_every == 0 or step == preparation.steps or late:
            accuracy = greedy_accuracy(model, problems.validation)
            mean = float(loss_sum) / ((step - 1) % preparation.evaluate_every + 1)
            loss_sum.zero_()
            print(f"step {step:>5}  loss {mean:.3f}  accuracy {accuracy:.3f}  {seconds:4.0f} s", flush=True)
            if accuracy >= preparation.stop_at or step == preparation.steps:
                return
            if late:
                print(f"stopped by the deadline of {preparation.deadline_seconds:.0f} s; this machine is slow or busy")
                return


def _rate(step: int, preparation: Preparation) -> float:
    """Share of the learning rate: a linear rise, then a linear fall to a tenth."""
    if step < preparation.warm_up_steps:
        return (step + 1) / preparation.warm_up_steps
    done = (step - preparation.warm_up_steps) / max(1, preparation.steps - preparation.warm_up_steps)
    return 1.0 - 0.9 * min(1.0, done)


def digest_of(preparation: Preparation) -> str:
    """Of the parameters and of the code that they are parameters of."""
    digest = hashlib.sha256(json.dumps(asdict(preparation), sort_keys=True).encode())
    for name in ("model.py", "prepare.py"):
        digest.update((Path(__file__).resolve().parent / name).read_bytes())
    return digest.hexdigest()


def is_finished(folder: Path, preparation: Preparation) -> bool:
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return isinstance(mark, dict) and mark.get("digest") == digest_of(preparation)


def prepare(folder: Path, preparation: Preparation) -> None:
    """Make the folder, unless it is there."""
    if is_finished(folder, preparation):
        print(f"{folder} is prepared already (remove it to prepare it again)")
        return
    from transformers import AutoModelForCausalLM

    began = time.monotonic()
    torch.set_num_threads(preparation.threads)
    if folder.exists():
        (folder / MARK).unlink(missing_ok=True)
        shutil.rmtree(folder / "model", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    problems = draw_problems(preparation)
    write_rows(folder / "train.jsonl", problems.train)
    write_rows(folder / "heldout.jsonl", problems.heldout)
    place = write_model(
        folder / "model",
        hidden=preparation.hidden,
        layers=preparation.layers,
        std=preparation.spread,
        seed=preparation.seed,
    )
    model = AutoModelForCausalLM.from_pretrained(str(place), torch_dtype=torch.float32, local_files_only=True)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"pre-training a model of {size / 1e6:.1f} M parameters, {preparation.steps} steps at most", flush=True)
    pretrain(model, preparation, problems)
    save_portable(model, None, place)
    accuracy = greedy_accuracy(model, problems.heldout)
    mark = {"digest": digest_of(preparation), "heldout_accuracy": accuracy, "parameters": asdict(preparation)}
    (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
    print(f"held-out accuracy {accuracy:.3f} after {time.monotonic() - began:.0f} s")
    print(f"wrote {folder}: model, {len(problems.train)} problems to train on, {len(problems.heldout)} held out")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the arithmetic example: data and a pre-trained model.")
    parser.add_argument("folder", type=Path, nargs="?", default=OUT, help=f"default: {OUT.name} beside this script")
    prepare(parser.parse_args().folder, Preparation())


if __name__ == "__main__":
    main()
