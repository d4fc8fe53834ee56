"""`kvseek build --check`: compares an engine's logits with those of transformers' model of the same checkpoint.

transformers reads the checkpoint from the disk one module at a time, so that no model is too large for memory. An engine with
other logits is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.gguf import GgufCheckpoint
from kvseek.builder.checkpoints.hugging_face import HuggingFaceCheckpoint
from kvseek.builder.checkpoints.model_config import ARCHITECTURES, DELTA_KEYS
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import OwnNumbers, WeightFormat, own_numbers, total_size
from kvseek.core.config import EXTENT_TOKENS, FP8_GROUPS, EngineConfig, read_config
from kvseek.core.errors import CapacityError, CheckError, ConfigError, KernelError
from kvseek.core.manifest import read_manifest, verify
from kvseek.core.model_config import ModelConfig
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, NOT_FINITE
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.cpu import bfloat16_works
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.parallel.cuda.gpus import ranks_share_gpus

PROMPT_TOKENS, GREEDY_TOKENS, SEED = 64, 8, 20
WHOLE_BYTES = 1_000_000_000  # of a GGUF file's weights as float32: transformers can only dequantise all of them at once

# The largest difference of two logits that rounding explains, in standard deviations of transformers' logits over the vocabulary.
# transformers computes in float32 with the checkpoint's own numbers, so only the engine's rounding may make a difference.
# Predicted: one rounding is off by 6e-8 (float32), 5e-4 (float16) or 4e-3 (bfloat16) of a number; some hundred roundings on
# the way through the layers add up like their square root; the largest of thousands of errors is 4 to 5 times the usual one.
# That makes 3e-6, 0.025 and 0.2. A weight of 8 bits is off by about 0.6 % (int8) or 2.6 % (fp8): 0.3 and 1.
# Measured on random models of 3 to 24 layers, the needle model (Qwen3) and SmolLM2 (30 layers, whose few very large activations
# round worst): float32 2e-6 to 1.1e-5, bfloat16 0.025 to 0.24, int8 0.04 to 0.56, fp8 0.14 to 0.70. float16, which needs a GPU,
# is not measured; its numbers have three bits more than bfloat16's. Weights that are rounded to int4: 0.75 to 2.0, SmolLM2 3.6;
# their limit finds only logits that have nothing to do with each other.
# The other limits are three times the largest, because models differ (float32: ninety times, which is still little). Logits that
# have nothing to do with each other are 5 to 8 apart. A small mistake may hide behind 8 bits, but not in float32.
LIMITS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75}
PRECISION_LIMITS = {
    "none": 0.0,
    "int8": 1.5,
    "fp8": 2.0,
    FP8_GROUPS: 2.0,
    INT4: 5.0,
    INT8_GROUPS: 0.0,
    INT8_ASYMMETRIC: 0.0,
}  # beside the dtype's


@dataclass(frozen=True)
class Comparison:
    """An engine beside transformers: logits after a prompt and after each of the engine's greedy tokens but the last.

    Attributes
    ----------
    difference : float
        Largest difference of two logits; NaN if the engine's are not finite.
    spread : float
        Standard deviation of transformers' logits of one step over the vocabulary, mean over the steps.
    limit : float
        Largest `difference` / `spread` that rounding explains.
    tokens, expected : tuple of int
        The engine's greedy tokens, and transformers' after the same tokens.
    unchecked : str
        See Reference.
    """

    difference: float
    spread: float
    limit: float
    tokens: tuple[int, ...]
    expected: tuple[int, ...]
    unchecked: str

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.limit * self.spread


def prompt_ids(config: EngineConfig) -> list[int]:
    """Draw the prompt, with a fixed seed, from the whole vocabulary, of which a text would use little.

    It is so short that all rows stay in the window, where every method attends to all of them. The engine must have room for
    more than GREEDY_TOKENS tokens.
    """
    dense = max(config.cache.full_threshold, config.cache.sink + config.cache.local)
    most = min(PROMPT_TOKENS, config.max_input_len, config.max_seq_len - GREEDY_TOKENS, dense - GREEDY_TOKENS)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(config.model.vocab_size, (max(1, most),), generator=generator).tolist()


def compare(directory: Path, checkpoint: Checkpoint, kept: bool | None = None) -> Comparison:
    """Run an engine, then transformers on the same tokens; raises CheckError if transformers cannot run the checkpoint.

    transformers reads the prompt and the engine's tokens in one pass, so its weights are read once. If its likeliest token is
    the engine's after each of them, it would have drawn the same tokens by itself.
    """
    config = read_config(directory)
    kept = keeps(config, own_numbers(checkpoint, config.device)) if kept is None else kept
    prompt = prompt_ids(config)
    with closing(load_decoder(directory, _small(config))) as decoder:
        tokens, found = greedy(decoder, prompt, GREEDY_TOKENS)
    reference = reference_logits(checkpoint, [*prompt, *tokens[:-1]], len(tokens))
    expected = reference.logits
    return Comparison(
        difference=float((found - expected).abs().max()),
        spread=float(expected.std(dim=-1).mean()),
        limit=LIMITS[config.dtype] if kept else _rounded_limit(config),
        tokens=tuple(tokens),
        expected=tuple(expected.argmax(dim=-1).tolist()),
        unchecked=reference.unchecked,
    )


def keeps(config: EngineConfig, own: OwnNumbers | None) -> bool:
    """Whether an engine's narrow weights are the checkpoint's own, so that nothing but its dtype rounds."""
    return (
        own is not None and own.precision == config.weight_only_precision and (own.head or not config.quantize_lm_head)
    )


def _rounded_limit(config: EngineConfig) -> float:
    return max(LIMITS[config.dtype], PRECISION_LIMITS[config.weight_only_precision])


def _small(config: EngineConfig) -> EngineConfig:
    """The same engine with memory for one short request; TensorRT's plans fix their limits."""
    if config.runtime == "tensorrt":
        return config
    cache = dataclasses.replace(config.cache, kv_cache_host_memory_bytes=None, kv_cache_device_memory_bytes=None)
    length = min(config.max_seq_len, EXTENT_TOKENS)
    most = min(config.max_input_len, length)
    return dataclasses.replace(config, cache=cache, max_batch_size=1, max_seq_len=length, max_input_len=most)


def greedy(decoder: Decoder, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Draw `count` greedy tokens in slot 0; returns them and the logits [count, vocabulary] that each was drawn from."""
    decoder.cache.open(0, len(prompt) + count)
    prefill = decoder.prefill([(0, prompt)])
    while prefill.progress < 1:
        prefill.advance(decoder.config.prefill_chunk_tokens)
    rows = [prefill.finish()[0].float().cpu()]
    tokens = [int(rows[0].argmax())]
    while len(tokens) < count:
        rows.append(decoder.decode(tokens[-1:], [0])[0][0])
        tokens.append(int(rows[-1].argmax()))
    decoder.cache.close(0)
    return tokens, torch.stack(rows)


class CheckResult(NamedTuple):
    """What a check found, as a line of text; `checked` is False if this machine cannot run the engine."""

    text: str
    checked: bool


def check_engine(directory: Path, checkpoint: Checkpoint, kept: bool | None = None) -> CheckResult:
    """Compare an engine directory with transformers' model of its checkpoint.

    Parameters
    ----------
    kept : bool, optional
        What `keeps` finds of the checkpoint's `own_numbers`; None: they are looked for.

    Raises
    ------
    CheckError
        If the logits are further apart than rounding explains, or transformers cannot run the checkpoint.
    KvseekError
        If the engine cannot be loaded.
    """
    config = read_config(directory)
    if reason := _cannot_run(config):
        return CheckResult(f"not compared with transformers: {reason}", checked=False)
    _refuse_other_model(config, checkpoint)
    try:
        comparison = compare(directory, checkpoint, kept)
    except (KernelError, CapacityError) as error:  # such as a GPU of another architecture, or one that is in use
        if config.device == "cpu":
            raise
        return CheckResult(f"not compared with transformers: the engine cannot be run here ({error})", checked=False)
    if not comparison.agrees:
        raise CheckError(
            f"{checkpoint.path}: {_describe(comparison, config)}: the engine does not compute what transformers computes from "
            "this checkpoint. Check that config.json and weights belong together; if they do, this is a fault of kvseek: please "
            "report it. --no-check builds the engine all the same"
        )
    note = f" ({comparison.unchecked})" if comparison.unchecked else ""
    return CheckResult(f"compared with transformers: {_describe(comparison, config)}{note}", checked=True)


def check_existing(directory: Path, model: Path | None, console: Console) -> int:
    """Check an engine directory that was built before; returns 0 if it agrees, 1 if it cannot be compared here.

    Without the checkpoint's path it is what bears the manifest's name here or beside the engine. Raises as `check_engine`, and
    ConfigError if there is no checkpoint.
    """
    verify(directory)
    if model is None:
        name, places = read_manifest(directory).source_model, (Path.cwd(), directory.resolve().parent)
        model = next((folder / name for folder in places if (folder / name).exists()), None)
        if model is None:
            raise ConfigError(
                f"model: {directory} was built from {name}, which is neither in {places[0]} nor in {places[1]}; name the "
                "checkpoint with --model"
            )
    found = check_engine(directory, open_checkpoint(model, text_only=None))
    console.print(f"{directory}: {found.text}", soft_wrap=True)
    return 0 if found.checked else 1


def _cannot_run(config: EngineConfig) -> str:
    """Say why this machine cannot run the engine, or why there is nothing to compare; empty if it can."""
    if config.device == "cuda" and not torch.cuda.is_available():
        return "the engine is for device = 'cuda', and PyTorch sees no GPU here; run kvseek build --check where there is one"
    if config.device == "cuda" and config.tp_size > max(1, torch.cuda.device_count()) and not ranks_share_gpus():
        return f"PyTorch sees fewer GPUs here than tp_size = {config.tp_size}; run kvseek build --check where there are as many"
    if config.max_seq_len <= GREEDY_TOKENS:
        return f"max_seq_len = {config.max_seq_len} has no room for a prompt and {GREEDY_TOKENS} tokens"
    if config.device == "cpu" and config.dtype == "bfloat16" and not bfloat16_works():
        return "this processor cannot multiply dtype = 'bfloat16'; run kvseek build --check on another machine"
    return ""


def _refuse_other_model(config: EngineConfig, checkpoint: Checkpoint) -> None:
    engine, model = config.model, checkpoint.config
    for name in ("architecture", "vocab_size", "num_layers", "hidden_size"):
        found, expected = getattr(model, name), getattr(engine, name)
        if found != expected:
            raise ConfigError(
                f"model = {str(checkpoint.path)!r}: {name} = {found!r}, the engine's is {expected!r}: name the checkpoint that "
                "the engine was built from"
            )


def _describe(comparison: Comparison, config: EngineConfig) -> str:
    precision = config.weight_only_precision
    rounding = config.dtype if precision == "none" else f"{precision} and {config.dtype}"
    same = [ours == theirs for ours, theirs in zip(comparison.tokens, comparison.expected, strict=True)]
    tokens = "are equal" if all(same) else f"differ from number {1 + same.index(False)} on"
    return (
        f"logits differ by up to {comparison.difference:.3g} ({rounding} explains {comparison.limit * comparison.spread:.3g}), "
        f"{len(same)} greedy tokens {tokens}"
    )


# What transformers computes


class Reference(NamedTuple):
    """What transformers computes."""

    logits: Tensor  # float32 [rows, vocabulary]
    unchecked: (
        str  # what of the checkpoint's reading is kvseek's own, and so not compared; empty if transformers read it all
    )


def reference_logits(checkpoint: Checkpoint, ids: Sequence[int], rows: int) -> Reference:
    """Compute the logits after each of the last `rows` tokens of `ids`; raises CheckError if there are no finite ones."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            model, unchecked = _model(checkpoint, Path(folder))
            # In one pass, which reads each weight once, unless longrope's frequencies change between the steps.
            changes = len(ids) - rows + 1 <= checkpoint.config.short_reach < len(ids)
            logits = generated_logits(model.eval(), ids, rows, rows if changes else 1)
        except CheckError:
            raise
        except Exception as error:  # whatever transformers raises: it has no class of errors of its own
            raise CheckError(
                f"transformers cannot run {checkpoint.path} ({_first_line(error)}): there is nothing to compare the engine "
                "with; mend the checkpoint, or build with --no-check"
            ) from None
    if not logits.isfinite().all():
        raise CheckError(
            f"{checkpoint.path}: transformers' own logits are not finite: weights of the checkpoint hold NaN or infinity, or "
            f"overflow; {NOT_FINITE}"
        )
    return Reference(logits, unchecked)


@torch.inference_mode()
def generated_logits(model: Any, ids: Sequence[int], rows: int, passes: int) -> Tensor:
    """Compute transformers' logits after each of the last `rows` tokens of `ids`, float32 [rows, vocabulary].

    With `passes` = 1 all tokens are read at once. With `passes` = `rows` the last rows - 1 tokens are read one by one into
    transformers' cache, as when it generates them.
    """
    parts, cache, stop = [], None, len(ids) - passes + 1
    for start, end in [(0, stop), *((n, n + 1) for n in range(stop, len(ids)))]:
        keep = rows if passes == 1 else 1
        found = model(torch.tensor([ids[start:end]]), past_key_values=cache, use_cache=passes > 1, logits_to_keep=keep)
        cache = found.past_key_values
        parts.append(found.logits[0].float())
    return torch.cat(parts)


def _model(checkpoint: Checkpoint, folder: Path) -> tuple[Any, str]:
    """Make transformers' model, and say what of the checkpoint transformers did not read itself."""
    if isinstance(checkpoint, HuggingFaceCheckpoint) and checkpoint.quantised_by is None:
        return _own_model(checkpoint.path, folder), ""
    reason = _foreign(checkpoint)
    if not reason:
        try:
            return _gguf_model(checkpoint.path), ""
        except (
            Exception
        ) as error:  # such as a file with no tokenizer, from which transformers takes the vocabulary's size
            reason = f"transformers cannot read this GGUF file ({_first_line(error)})"
    return _filled_model(checkpoint), f"{reason}; tensors and configuration are as kvseek reads them"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _foreign(checkpoint: Checkpoint) -> str:
    """Say why transformers should not read a quantised or a foreign checkpoint; empty for most GGUF files."""
    if checkpoint.quantised_by is not None:
        return f"transformers needs further packages, or a GPU, for weights by {checkpoint.quantised_by}"
    if not isinstance(checkpoint, GgufCheckpoint):
        return "transformers does not read TensorRT-LLM checkpoints"
    if len(checkpoint.files) > 1:
        return "transformers does not read GGUF files of several parts"
    if checkpoint.config.rope_scaling is not None:  # stated by a tensor that transformers does not look at
        return "transformers ignores the RoPE scaling of GGUF files"
    if checkpoint.config.output_bias or checkpoint.config.mlp_bias:  # stated by tensors, too
        return "transformers ignores the biases of GGUF files of architecture llama"
    if total_size(checkpoint.config, WeightFormat(torch.float32)) > WHOLE_BYTES:
        return "transformers would dequantise the whole GGUF file at once"
    return ""


def _own_model(path: Path, folder: Path) -> Any:
    """Let transformers read a directory: its files are mapped, and each module's weights are read when the module runs."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        device_map={"": "disk"},
        offload_folder=folder,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):
        raise CheckError(
            f"{path}: transformers finds no tensor {missing[0]} ({len(missing)} in all), and would draw it at random; "
            "use a checkpoint that has it, or build with --no-check"
        )
    return model


def _gguf_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )


def _filled_model(checkpoint: Checkpoint) -> Any:
    """Make transformers' model of kvseek's configuration, without weights; each module's are read when the module runs."""
    from accelerate import cpu_offload, init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):  # RoPE's frequencies are buffers, which no checkpoint holds
        model = AutoModelForCausalLM.from_config(hugging_face_config(checkpoint.config), dtype=torch.float32)
    tensors = _Tensors(checkpoint, [name for name, _ in model.named_parameters()])
    return cpu_offload(model, torch.device("cpu"), state_dict=tensors)


def hugging_face_config(model: ModelConfig) -> Any:
    """Translate a model's configuration to transformers' own class."""
    import transformers

    names = {ours: theirs for theirs, ours in ARCHITECTURES.items() if theirs != "MistralForCausalLM"}
    kind = "TextConfig" if model.architecture.startswith("qwen3_5") else "Config"
    config_class = getattr(transformers, names[model.architecture].replace("ForCausalLM", kind))
    experts, states = model.experts, model.delta_net
    mixture: dict[str, Any] = {"num_experts": 0} if model.architecture == "qwen3_next" else {}
    if experts is not None:
        mixture = {name: getattr(experts, name) for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob")}
        mixture |= {"moe_intermediate_size": experts.intermediate_size, "mlp_only_layers": list(experts.dense_layers)}
        if experts.shared_intermediate_size is not None:
            mixture |= {"shared_expert_intermediate_size": experts.shared_intermediate_size}
            mixture |= {"qkv_bias": model.qkv_bias} if model.architecture == "qwen2_moe" else {}
    if states is not None:
        kinds = [
            "linear_attention" if model.has_state(layer) else "full_attention" for layer in range(model.num_layers)
        ]
        mixture |= {"layer_types": kinds, **{key: getattr(states, name) for name, key in DELTA_KEYS.items()}}
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
    biases = {"attention_bias": model.output_bias} | ({"mlp_bias": True} if model.mlp_bias else {})
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = {name: value for name, value in dataclasses.asdict(model.rope_scaling).items() if value is not None}
        rope = {"rope_type": scaling.pop("kind"), **scaling}
    if states is not None:
        rope["partial_rotary_factor"] = (model.rotary_dim or model.head_dim) / model.head_dim
    return config_class(
        **{name: getattr(model, name) for name in same},
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        **biases,
        **mixture,
        tie_word_embeddings=model.tie_word_embeddings,
        rope_parameters={"rope_theta": model.rope_theta, **rope},
    )


class _Tensors(Mapping[str, Tensor]):
    """A checkpoint's tensors by their Hugging Face names, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, names: list[str]) -> None:
        self._checkpoint, self._names = checkpoint, names

    def __getitem__(self, name: str) -> Tensor:
        prefix, _, fused = name.partition(".experts.")
        if fused:  # transformers stacks the experts
            parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
            assert self._checkpoint.config.experts is not None, "transformers has made the model of this configuration"
            each = [f"{prefix}.experts.{expert}." for expert in range(self._checkpoint.config.experts.num_experts)]
            read = [[self._checkpoint.tensor(f"{one}{part}.weight") for part in parts] for one in each]
            return torch.stack([torch.cat(tensors).float() for tensors in read])
        tied = self._checkpoint.config.tie_word_embeddings and name == "lm_head.weight"
        return self._checkpoint.tensor("model.embed_tokens.weight" if tied else name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing progress and advice into the builder's."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    accelerate = getLogger("accelerate")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accelerate_level = accelerate.level
    accelerate.setLevel(ERROR)  # it announces that weights stay on the disk, which is what is wanted
    try:
        yield
    finally:
        accelerate.setLevel(accelerate_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
