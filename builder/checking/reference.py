"""transformers' logits of a checkpoint, read from the disk one module at a time, so that no model is too large for memory."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.gguf import GgufCheckpoint
from kvseek.builder.checkpoints.hugging_face import HuggingFaceCheckpoint
from kvseek.builder.checkpoints.model_config import ARCHITECTURES
from kvseek.builder.checkpoints.weights import WeightFormat, total_size
from kvseek.core.config import ModelConfig
from kvseek.core.errors import CheckError
from kvseek.core.weight_only import NOT_FINITE

CPU = torch.device("cpu")
WHOLE_BYTES = 1_000_000_000  # of a GGUF file's weights as float32: transformers can only dequantise all of them at once


@dataclass(frozen=True)
class Reference:
    """What transformers computes, in float32.

    Attributes
    ----------
    logits : Tensor, float32 [rows, vocabulary]
    unchecked : str
        What of the checkpoint's reading is kvseek's own here, and therefore not compared; empty if transformers read it all.
    """

    logits: Tensor
    unchecked: str


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
    if isinstance(checkpoint, HuggingFaceCheckpoint):
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
    """Say why transformers should not read a checkpoint that is no Hugging Face directory; empty for most GGUF files."""
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
    return cpu_offload(model, CPU, state_dict=_Tensors(checkpoint, [name for name, _ in model.named_parameters()]))


def hugging_face_config(model: ModelConfig) -> Any:
    """Translate a model's configuration to transformers' own class."""
    import transformers

    names = {ours: theirs for theirs, ours in ARCHITECTURES.items() if theirs != "MistralForCausalLM"}
    config_class = getattr(transformers, names[model.architecture].replace("ForCausalLM", "Config"))
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
    biases = {"attention_bias": model.output_bias} | ({"mlp_bias": True} if model.mlp_bias else {})
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = {name: value for name, value in dataclasses.asdict(model.rope_scaling).items() if value is not None}
        rope = {"rope_type": scaling.pop("kind"), **scaling}
    return config_class(
        **{name: getattr(model, name) for name in same},
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        **biases,
        tie_word_embeddings=model.tie_word_embeddings,
        rope_parameters={"rope_theta": model.rope_theta, **rope},
    )


class _Tensors(Mapping[str, Tensor]):
    """A checkpoint's tensors by their Hugging Face names, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, names: list[str]) -> None:
        self._checkpoint, self._names = checkpoint, names

    def __getitem__(self, name: str) -> Tensor:
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
