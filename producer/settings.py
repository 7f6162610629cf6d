"""Settings of the producers: data, rewards, sampling, engine; what one producer process is handed."""

from typing import Any, Literal

from pydantic import Field

from buffer.settings import BufferSettings, Settings
from weight_sync.settings import CommunicatorName, UpdateMode, WeightSyncSettings


class ModelSettings(Settings):
    """The model that is post-trained."""

    path: str
    """Folder in Hugging Face format (config, tokenizer, safetensors)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type that producers compute in and that weights travel in."""


class DataSettings(Settings):
    """A set of prompts."""

    path: str
    """A JSONL or Parquet file, or a folder written by `datasets.save_to_disk`."""
    split: str | None = None
    """Split of a Hugging Face dataset folder that holds several."""
    prompt_key: str = "question"
    """Column of the question: a string, or a list of chat messages."""
    answer_key: str | None = "answer"
    """Column of the reference answer that rewards compare with; null when no reward needs one."""
    task_key: str | None = None
    """Column of the task's name; null: every row is of the task `default`."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first rows."""


class PromptSettings(Settings):
    """How a row becomes the tokens that the model sees."""

    template: str = "chat"
    """`chat` (the model's own chat template), `raw` (the text as it is), `r1_zero` (think/answer tags, answer in
    \\boxed{}), or the path of a Jinja file that is given `question` (and `messages`)."""
    system: str | None = None
    """System message put in front (template `chat` only)."""
    max_tokens: int = Field(default=1024, gt=0)
    """Longest prompt in tokens; a longer one is dropped in the ledger with the reason `over-long prompt`."""


class SamplingSettings(Settings):
    """How completions are sampled for training."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; it enters the trainer's log-probs too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus truncation; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the most likely one; 0 is off."""
    max_tokens: int = Field(default=1024, gt=0)
    """Longest completion in tokens; a longer one is cut and finishes as `length`."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion besides the end-of-sequence token."""


class RewardSettings(Settings):
    """One part of the reward; the reward of a sample is the weighted sum of its parts."""

    name: str
    """`math`, `exact`, `format`, or `package.module:function` for a function of your own."""
    weight: float = 1.0
    """Weight in the sum."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """How long one sample may take to be judged; then the scorer process is replaced and the sample is `failed`."""
    retries: int = Field(default=1, ge=0)
    """How often a failed scoring is tried again before the sample counts as `failed`."""
    options: dict[str, Any] = {}
    """Keyword arguments of a function of your own."""


class EngineSettings(Settings):
    """The engine that a pool runs."""

    kind: Literal["vllm", "transformers"] = "vllm"
    """Which engine; `transformers` is plain PyTorch on the model's own code: slow, and without vLLM's limits."""
    concurrency: int = Field(default=32, gt=0)
    """Prompts in the engine at the same time."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads of one engine; none: half of the cores, shared among the replicas of the machine."""
    kv_cache_gib: int = Field(default=1, gt=0)
    """vLLM on the CPU only: memory of the key-value cache in GiB."""
    args: dict[str, Any] = {}
    """Further vLLM engine arguments, passed through (`tensor_parallel_size`, `gpu_memory_utilization`, ...); of the
    `transformers` engine: `max_model_len`, `max_num_seqs`, `attn_implementation`."""


class PoolSettings(Settings):
    """One named pool of producers."""

    replicas: int = Field(default=1, ge=0)
    """How many producers to start with; `forebay scale` changes it while the run goes on."""
    max_replicas: int = Field(default=64, gt=0)
    """Most replicas that the pool may be scaled to."""
    tasks: tuple[str, ...] = ()
    """Tasks (`data.task_key`) whose prompts this pool answers; none named: all."""
    platform: Literal["auto", "cpu", "cuda", "ascend"] = "auto"
    """Hardware; `auto` takes what the environment has installed: vllm-ascend, CUDA, CPU."""
    communicator: CommunicatorName | None = None
    """How weights arrive; none: hccl on Ascend, nccl on CUDA, gloo on CPU."""
    engine: EngineSettings = EngineSettings()
    """The engine of this pool."""
    update_mode: UpdateMode = "in_flight"
    """How new weights meet running requests; each token knows its version in every mode. `in_flight`: pause, load,
    resume; requests go on with what they have computed. `drain`: no prompt begins until those that run have ended, so
    that a group has one version; what has not ended within `drain_seconds` is aborted and its prompts go back.
    `abort_resume`: requests are aborted, and go on from their tokens so far, computed anew with the new weights."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long a producer told to stop (or to load, in the mode `drain`) may finish its running prompts before it gives
    them back."""
    price: float = Field(default=1.0, ge=0)
    """Cost of one device-hour, in any currency; read by the autoscaler."""


class EvaluationSettings(Settings):
    """Held-out evaluation, by policy version."""

    data: DataSettings
    """The held-out prompts."""
    every: int = Field(default=10, gt=0)
    """Evaluate each version that is a multiple of this, and the first and the last one."""
    max_tokens: int = Field(default=1024, gt=0)
    """Longest completion in an evaluation, in tokens (greedy)."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long one evaluation may take before another producer is asked."""


class ProducerSettings(Settings):
    """All that one producer process is handed; composed by `deploy` from the run spec."""

    run: str
    """Name of the run: the prefix of its keys."""
    seed: int
    """The run's seed: order of prompts and sampling seeds follow from it."""
    member: str
    """This replica's name, unique in the run (`producer-0`)."""
    pool: str
    """The pool that it belongs to."""
    folder: str
    """The run folder (logs, temporary shadows of weights)."""
    model: ModelSettings
    data: DataSettings
    prompt: PromptSettings
    sampling: SamplingSettings
    rewards: tuple[RewardSettings, ...]
    settings: PoolSettings
    """The pool's own part."""
    evaluation: EvaluationSettings | None
    weight_sync: WeightSyncSettings
    buffer: BufferSettings
    redis_url: str
    """Where the buffer is, resolved."""
    groups_per_step: int
    group_size: int
    max_staleness: int
    dynamic_sampling: bool
    passes: int | None
    """How often the data may be gone through; none: as often as the steps need."""
