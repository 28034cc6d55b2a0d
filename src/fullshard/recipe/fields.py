"""The recipe: frozen dataclasses whose field names are the YAML keys, the command-line flags and the log keys.

Imports neither torch nor transformers, so that a mistake in a YAML is reported in well under a second.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from fullshard.errors import UserError, error_line

if not TYPE_CHECKING:
    from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, restricted_number_type

    HalfOpenUnitInterval = restricted_number_type("HalfOpenUnitInterval", float, [(">=", 0), ("<", 1)])
    FloatAboveOne = restricted_number_type("FloatAboveOne", float, (">", 1))
else:  # The other way round, jsonargparse would run the branch and lose the ranges.
    PositiveInt: TypeAlias = int
    NonNegativeInt: TypeAlias = int
    PositiveFloat: TypeAlias = float
    NonNegativeFloat: TypeAlias = float
    ClosedUnitInterval: TypeAlias = float
    HalfOpenUnitInterval: TypeAlias = float
    FloatAboveOne: TypeAlias = float


@dataclass(frozen=True)
class RopeParameters:
    """Rotary position embedding, in transformers' spelling."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    """Scaling of the frequencies; `default` is none."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the inverse frequencies: inv_freq[i] = rope_theta ** (-2 i / head_dim)."""
    factor: PositiveFloat | None = None
    """Ratio of the longest to the original position (scaled types only)."""
    low_freq_factor: PositiveFloat | None = None
    """Wavelengths above original_max_position_embeddings / low_freq_factor are divided by `factor` (llama3)."""
    high_freq_factor: PositiveFloat | None = None
    """Wavelengths below original_max_position_embeddings / high_freq_factor stay as they are (llama3)."""
    original_max_position_embeddings: PositiveInt | None = None
    """Positions before scaling."""


@dataclass(frozen=True)
class ModelConfig:
    """Fields of transformers' LlamaConfig, in its spelling."""

    vocab_size: PositiveInt = 4096
    """Rows of the embedding; at least the tokenizer's size."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream; a multiple of num_attention_heads."""
    intermediate_size: PositiveInt = 688
    """Width of the gated MLP."""
    num_hidden_layers: PositiveInt = 2
    """Decoder layers."""
    num_attention_heads: PositiveInt = 4
    """Query heads."""
    num_key_value_heads: PositiveInt = 2
    """Key and value heads; divides num_attention_heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; hidden_size / num_attention_heads when null. Even, for the rotation."""
    hidden_act: str = "silu"
    """Activation of the MLP's gate."""
    max_position_embeddings: PositiveInt = 2048
    """Longest row in tokens."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weight matrices."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_word_embeddings: bool = False
    """Use the embedding as output head."""
    attention_bias: bool = False
    """Bias in the four attention projections."""
    attention_dropout: HalfOpenUnitInterval = 0.0
    """Dropout probability of the attention weights."""
    mlp_bias: bool = False
    """Bias in the three MLP projections."""
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)

    @property
    def head_width(self) -> int:
        """Channels of a head: head_dim, or what it defaults to."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.num_attention_heads * self.head_width

    @property
    def key_width(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_width


@dataclass(frozen=True)
class SourcePlace:
    """Where documents are and how they are found in it."""

    path: str = ""
    """`stdlib` (the running interpreter's standard library), a Hub name, a folder, or a builder of `datasets` (`text`, `json`, ...)."""
    name: str | None = None
    """Configuration of a Hub dataset."""
    revision: str | None = None
    """Commit, tag or branch of a Hub dataset."""
    data_files: list[str] | None = None
    """Training files: paths, folders, globs or URLs."""
    split: str = "train"
    """Training split of a Hub dataset or folder."""
    text_column: str = "text"
    """Column that holds a document's text."""
    tokens_column: str | None = None
    """Column that holds a document's token ids; then nothing is tokenized."""


@dataclass(frozen=True)
class SourceConfig(SourcePlace):
    """One source of documents among several (`data.mixture`); the same keys stand in `data` itself for a single one."""

    weight: PositiveFloat = 1.0
    """Share of the training tokens, relative to the other sources'."""


@dataclass(frozen=True)
class DataConfig(SourcePlace):
    """Documents -> tokens -> packed rows of sequence_length + 1."""

    path: str = "stdlib"
    """`stdlib` (the running interpreter's standard library), a Hub name, a folder, or a builder of `datasets` (`text`, `json`, ...)."""
    mixture: list[SourceConfig] = field(default_factory=list)
    """Several sources with weights, instead of the keys above. Weights hold in tokens."""
    evaluation_files: list[str] | None = None
    """Held-out files."""
    evaluation_split: str | None = None
    """Held-out split of a Hub dataset or folder."""
    evaluation_path: str | None = None
    """Held-out source of its own, as `path`; with evaluation_files and evaluation_split."""
    evaluation_name: str | None = None
    """Configuration of evaluation_path on the Hub."""
    evaluation_documents: NonNegativeInt = 0
    """The first so many documents of each source are held out instead of files or a split."""
    tokenizer: str = "bundled"
    """`bundled` (byte-level BPE, 4,096 tokens), a folder, a tokenizer.json, or a Hub name."""
    sequence_length: PositiveInt = 128
    """Tokens per row that the model sees; at most model.max_position_embeddings."""
    num_streams: PositiveInt = 384
    """Logical streams into which the files are cut and from which a batch takes its rows in turn: so many places are mixed. The data order
    is theirs, not the machine's. A multiple of the number of processes."""
    shuffle_window: PositiveInt = 256
    """Documents of a stream that are put in random order together; 1 keeps the order within a file. Files are always shuffled."""
    carry_remainder: bool = True
    """What an epoch of a stream leaves over after its last full row begins the next epoch's first row; false drops it."""
    document_mask: bool = False
    """Attention and positions restart at each document of a row, and its first token is no target. False: a row is one context."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What a row or file that cannot be read does: stops the run, or is left out and counted."""
    csv_as_text: bool = True
    """Read each field of a csv as the text that stands there. False: as pandas reads it, `NA` as missing and `007` as the number 7."""
    num_workers: NonNegativeInt = 1
    """Loader processes per rank, which read and tokenize ahead; 0: the training process does it. The order does not depend on it."""
    max_retries: NonNegativeInt = 8
    """Times in a row that a read is tried again after a connection error, with growing waits; then the run saves and stops."""
    timeout_seconds: PositiveFloat = 30.0
    """Silence of a remote file after which a read is given up and tried again."""
    log_documents: bool = False
    """Write which documents each row holds to <output_dir>/documents/, for debugging."""


@dataclass(frozen=True)
class TrainConfig:
    """Batch arithmetic and length of the run."""

    max_steps: PositiveInt = 900
    """Optimizer steps."""
    global_batch_size: PositiveInt = 16
    """Rows per optimizer step over all devices; a multiple of micro_batch_size x world size."""
    micro_batch_size: PositiveInt | None = None
    """Rows per device per forward; null: all of a device's rows at once. Forwards per step (gradient accumulation) are derived."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global L2 norm to which gradients are clipped; null does not clip."""
    spike_factor: FloatAboveOne | None = None
    """A step whose gradient norm exceeds so many medians of the last 128 good ones is skipped; null: only one that is not finite."""
    max_bad_steps: PositiveInt = 10
    """Skipped steps in a row that count as divergence."""
    on_divergence: Literal["rollback", "stop"] = "rollback"
    """`rollback`: go back to the last checkpoint before the first of them and leave out the data since; `stop`: end the run."""
    max_rollbacks: NonNegativeInt = 3
    """Rollbacks of a run, after which it stops."""
    max_time: PositiveFloat | None = None
    """Seconds since the launch after which the run saves and ends with exit code 75, to be started again; null: no limit."""
    timeout_seconds: PositiveFloat = 1800.0
    """Seconds without progress of a rank, waits for remote data aside, after which the run ends and each rank's stacks are in hang/."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape after warmup. wsd: constant, then linear decay over decay_steps."""
    warmup_steps: NonNegativeInt = 20
    """Optimizer steps of linear warmup from 0."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps of the final decay (wsd only)."""
    min_learning_rate_ratio: ClosedUnitInterval = 0.1
    """Floor of the decay as a share of learning_rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only: not on norms, biases."""
    beta1: HalfOpenUnitInterval = 0.9
    """Decay of the first moment."""
    beta2: HalfOpenUnitInterval = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


@dataclass(frozen=True)
class ShardingConfig:
    """What Accelerate's YAML cannot say."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks."""
    forward_prefetch: PositiveInt | None = None
    """Units gathered ahead of the one in use in forward, each held whole; null: none asked for, on a GPU the next one overlaps anyway."""
    backward_prefetch: PositiveInt | None = None
    """Units gathered ahead in backward, each held whole; null: one."""
    reshard_after_forward_size: PositiveInt | None = None
    """Ranks over which a unit stays sharded from its forward to its backward: a divisor of the shard size, such as the GPUs of a machine.
    The gather in backward then stays among them, for 1/so many of the parameters in the compute type; null: all ranks."""
    reshard_after_backward: bool = True
    """Free a unit after its backward. False keeps all units whole from one micro batch to the next, and saves the gather in between."""
    activation_checkpointing: Literal["none", "full", "every_n", "selective"] | None = None
    """Decoder layers that keep their input alone and are computed again in backward: all, or the first of every so many. selective: each
    layer keeps the outputs of its matrix products and attention, the rest is computed again. null: what the accelerate YAML says."""
    activation_checkpointing_every: PositiveInt | None = None
    """Layers of which the first is checkpointed (every_n only)."""
    activation_checkpointing_offload: bool = False
    """Keep the inputs of checkpointed layers in host memory until backward (full and every_n). Without a GPU that is the same memory."""
    gradient_sync: Literal["every_step", "every_micro_batch"] | None = None
    """When gradients are reduced over ranks. every_step: less communication; FSDP then holds the whole gradient, in reduce_dtype, on every
    rank from one micro batch to the next. null: with FSDP every micro batch, with DDP, which holds it anyway, every step."""


DEFAULT_SHARDING = ShardingConfig()


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out loss."""

    every: NonNegativeInt = 0
    """Optimizer steps between evaluations; 0: at the end only."""
    max_rows: NonNegativeInt = 384
    """Held-out rows; 0 switches evaluation off."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves, what it keeps, and from what it continues."""

    every: NonNegativeInt = 0
    """Optimizer steps between checkpoints; the last step is saved too. 0: only where a signal, max_time or a lost source ends a run."""
    resume: str = "auto"
    """`auto`: from the newest whole checkpoint in output_dir, from the start if there is none; `never`; or the folder of a checkpoint."""
    keep_last: PositiveInt | None = 3
    """Newest checkpoints to keep; null keeps all. The one that the run was resumed from stays."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that are multiples of this stay too; null: none."""
    async_save: bool = True
    """Training waits for the copy to host memory only; the rest is written beside it. Takes that memory: the shards once more."""
    checksums: bool = True
    """Write a checksum of each file, and check them when the run is resumed; false: sizes only."""
    on_failure: Literal["stop", "warn"] = "stop"
    """What a save that fails does: ends the run, or is told while training goes on. Older checkpoints stay as they are."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys of the recipe, or sections, that may differ from what the checkpoint was saved with."""
    grace_seconds: PositiveFloat = 25.0
    """Seconds after SIGTERM, SIGINT, SIGHUP, SIGQUIT or SIGUSR1 in which the run saves and ends; what is not saved by then is given up."""
    export: Literal["float32", "bfloat16", "float16", "never"] = "float32"
    """Type of the weights in the Hugging Face folder <output_dir>/model that the end of training writes."""


@dataclass(frozen=True)
class LoggingConfig:
    """Terminal, metrics.jsonl, trackers."""

    trackers: list[str] = field(default_factory=lambda: ["wandb"])
    """Any that Accelerate knows (wandb, tensorboard, mlflow, ...); [] for metrics.jsonl alone."""
    project: str = "fullshard"
    """Project of the trackers. Where it is not written, what their environment says (WANDB_PROJECT, ...) holds."""
    run_name: str | None = None
    """W&B display name; null: WANDB_NAME of the environment, or the last part of output_dir."""
    every: PositiveInt = 10
    """Optimizer steps between logged lines. The first and the last step are always logged."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device at the compute precision, 1e12 FLOP/s; null: from the GPU's name. Without it mfu_pct is not logged."""
    weights_hash: bool = True
    """Print a hash of the weights that the run starts with (gathers one parameter at a time)."""
    sample_prompts: list[str] = field(default_factory=lambda: ["import ", "def ", "class "])
    """Prompts completed by the model when training ends."""
    sample_tokens: NonNegativeInt = 48
    """Tokens per completion; 0 for none."""


@dataclass(frozen=True)
class Recipe:
    """A pretraining run."""

    output_dir: str = "runs/debug"
    """Folder of the run: config.yaml, metrics.jsonl, checkpoints/, wandb/."""
    seed: NonNegativeInt = 0
    """Of initial weights, data order and dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Not a key of the recipe. Dotted key -> file or `command line` that set it; under "" the file, if any. For error messages."""


# Keys that hold a path, or paths; in each source of data.mixture `path` and `data_files`. Other things may stand there too: names, URLs.
PATH_KEYS = (
    "output_dir",
    "data.path",
    "data.data_files",
    "data.evaluation_files",
    "data.evaluation_path",
    "data.tokenizer",
    "checkpoint.resume",
)


def mistake(recipe: Recipe, key: str, fix: str) -> UserError:
    """The line for a value that is well-formed but does not fit: where it was written, key, value, fix."""
    source = recipe.sources.get(key, recipe.sources.get("", "recipe"))
    return UserError(error_line(source, key, functools.reduce(getattr, key.split("."), recipe), fix))
