"""Every key that a checkpoint's files may state: used, allowed at one value only, or known to change nothing.

What a checkpoint says is what is served, or the checkpoint is refused. So a key that stands in no list here is an error, and a
new key of a new transformers is refused until someone has looked at what it does.

tokenizer_config.json has no list. How text is encoded is stated by tokenizer.json alone; from the other file come special tokens
with their names, further tokens and the chat template, as transformers reads them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from kvseek.core.errors import ConfigError

USE_ANOTHER = "use another checkpoint: kvseek's decoder has no such part"


@dataclass(frozen=True)
class KnownKeys:
    """The keys of one kind of file.

    Attributes
    ----------
    file : str
        What to call the file in messages.
    used : str
        Keys that kvseek reads, separated by blanks; whoever reads one checks its type and its range.
    neutral : mapping of str to tuple
        Keys that ask for something which the decoder lacks, each with the values at which they do not.
    idle : mapping of str to str
        A reason, and the keys that for this reason change nothing; "*" stands for any text.
    """

    file: str
    used: str
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)

    def check(self, values: Mapping[str, Any], architecture: str = "") -> None:
        """Raise ConfigError on the first key that is unknown, or has another value than its neutral ones.

        `architecture` is that of a GGUF file, whose name stands in its keys where "{arch}" stands in the lists.
        """
        for key, value in values.items():
            shown = reprlib.repr(value)  # which may be long
            start, _, rest = key.partition(".")
            listed = f"{{arch}}.{rest}" if architecture and start == architecture else key
            allowed = self.neutral.get(listed)
            if allowed is None and not self.knows(listed):
                raise ConfigError(
                    f"{key} = {shown}: must be a key that kvseek knows, because others may change what the model computes; if "
                    f"this one does not, remove it from {self.file}, else use another checkpoint"
                )
            if allowed is not None and not any(type(value) is type(one) and value == one for one in allowed):
                limit = " or ".join(map(json.dumps, allowed))
                raise ConfigError(f"{key} = {shown}: must be {limit}, or absent; {USE_ANOTHER}")

    def knows(self, key: str) -> bool:
        """Whether the key stands in one of the lists."""
        listed = (pattern for keys in self.idle.values() for pattern in keys.split())
        return key in self.used.split() or key in self.neutral or any(fnmatchcase(key, pattern) for pattern in listed)


# Settings of generation, which may stand in generation_config.json and, in old checkpoints, in config.json.
SAMPLING = """
    assistant_* bad_words_ids begin_suppress_tokens constraints decoder_start_token_id diversity_penalty do_sample
    dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale length_penalty
    max_length max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences penalty_alpha remove_invalid_values renormalize_logits repetition_penalty sequence_bias
    stop_strings suppress_tokens temperature token_healing top_h top_k top_p typical_p watermarking_config"""
RUNNING = """
    _attn_implementation* attn_implementation* _experts_implementation* experts_implementation _flash_attn_* flash_attn*
    flash_attention* use_flash_attn* use_flash_attention* use_flashattn* use_sdpa use_xformers use_kernels use_liger*
    cache_config cache_implementation compile_config continuous_batching_config disable_compile
    is_assistant low_memory max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    output_attentions output_hidden_states output_logits output_scores prefill_chunk_size prompt_lookup_num_tokens
    return_dict_in_generate speculation_type target_lookbehind use_cache use_mtp"""
NO_EXPERTS = (0, None)
NOT_QUANTISED: tuple[Any, ...] = (None, {}, False)
# What trainers and converters leave in both files of a checkpoint.
ORIGINS = """
    *_version _name_or_path name_or_path model_name base_model base_model_name_or_path _commit_hash _from_model_config _auto_class
    unsloth_* license author trust_remote_code"""
TOKENS = "unk_token_id sep_token_id cls_token_id mask_token_id padding_side"

# Keys of a Hugging Face config.json. transformers' own classes state nearly all of them; tests compare the lists with these.
CONFIG = KnownKeys(
    "config.json",
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_dim rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters
        original_max_position_embeddings partial_rotary_factor dual_chunk_attention_config attention_bias mlp_bias hidden_act
        tie_word_embeddings bos_token_id eos_token_id pad_token_id sliding_window layer_types use_sliding_window
        max_window_layers hidden_activation query_pre_attn_scalar rope_local_base_freq sliding_window_pattern
        _sliding_window_pattern use_bidirectional_attention use_qk_norm qkv_bias
        num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob shared_expert_intermediate_size
        decoder_sparse_step mlp_only_layers full_attention_interval attn_output_gate linear_num_key_heads
        linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim""",
    {
        "is_causal": (True,),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (None,),
        "pruned_heads": ({}, None),
        "num_labels": (1, 2),  # of a classifier; transformers makes a list of so many names
        "per_layer_config": ({}, None),
        "quantization": NOT_QUANTISED,
        "compression_config": NOT_QUANTISED,
        "load_in_4bit": NOT_QUANTISED,
        "load_in_8bit": NOT_QUANTISED,
        "transformers_weights": (None,),
        "n_routed_experts": NO_EXPERTS,
        "mamba_ssm_dtype": ("float32", None),  # of states
        "rope_interleaved": (False,),
        "qk_layernorm": (False,),
        "use_mrope": (False,),
        "clip_qkv": (None,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "embedding_multiplier": (1, 1.0),
        "residual_multiplier": (1, 1.0),
        "logits_scaling": (1, 1.0),
    },
    {
        "how the weights were initialised, trained and stored; the tensors' own headers state their types": """
            initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop pretraining_tp gradient_checkpointing
            gradient_checkpointing_kwargs use_gradient_checkpointing neftune_noise_alpha dtype torch_dtype use_bfloat16 bf16 fp16
            fp32 _pre_quantization_dtype finetuning_task loss_type z_loss_weight router_aux_loss_coef""",
        "the multi-token-prediction head, which its tensors state": "mtp_*",
        "how quantised weights are stored, which quantised.py reads": "quantization_config",
        "names, and code of the publisher's, which is not run": f"""
            {ORIGINS} auto_map custom_pipelines transformers.js_config is_llama_config""",
        "how transformers runs a model and what it hands out": """
            return_dict torchscript chunk_size_feed_forward tie_last_hidden_states is_decoder tie_encoder_decoder
            tf_legacy_loss output_router_logits""",
        "labels and tasks of other heads than the language model's": """
            id2label label2id problem_type task_specific_params prefix""",
        "a training length, where max_position_embeddings says how far positions reach": """
            max_sequence_length max_seq_length max_seq_len seq_length model_max_length tokenizer_model_max_length""",
        "what the tokenizer's own files state": f"tokenizer_class tokenizer_padding_side {TOKENS}",
        "settings of generation, which transformers too does not read from this file": SAMPLING + RUNNING,
    },
)
# Keys of rope_scaling and rope_parameters that transformers warns of and ignores in that kind, and so does kvseek.
IDLE_ROPE_KEYS = {
    "dynamic": "original_max_position_embeddings",
    "yarn": "attn_factor",  # of DeepSeek-R1-0528-Qwen3-8B, whose authors' own library reads it
}
# Keys of rope_scaling and rope_parameters, by kind: the fields of RopeScaling. transformers' other kinds are refused.
ROPE_KINDS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim truncate",
    "longrope": "factor original_max_position_embeddings short_factor long_factor attention_factor",
}
GENERATION = KnownKeys(
    "generation_config.json",
    "eos_token_id",
    {},
    {
        "where these values came from": ORIGINS,
        "tokens that only an empty prompt or a padded batch would need": f"bos_token_id pad_token_id {TOKENS}",
        "the form and the length of dialogues in the publisher's own code": "chat_format max_window_size",
        "what a request states for itself: sampling, penalties, lengths, stops, beams": SAMPLING,
        "how transformers generates and what it hands out": RUNNING,
    },
)
# Keys of a GGUF file; "{arch}" stands for the architecture's name.
GGUF = KnownKeys(
    "the file's metadata",
    """general.architecture {arch}.embedding_length {arch}.feed_forward_length {arch}.block_count {arch}.context_length
        {arch}.attention.head_count {arch}.attention.head_count_kv {arch}.attention.key_length {arch}.attention.value_length
        {arch}.attention.layer_norm_rms_epsilon {arch}.attention.sliding_window {arch}.rope.freq_base
        {arch}.rope.dimension_count {arch}.rope.scale_linear {arch}.rope.scaling.type {arch}.rope.scaling.factor
        {arch}.rope.scaling.original_context_length {arch}.rope.scaling.yarn_beta_fast {arch}.rope.scaling.yarn_beta_slow
        split.count tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type
        tokenizer.ggml.merges tokenizer.ggml.add_bos_token tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id
        tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id tokenizer.ggml.unknown_token_id
        tokenizer.ggml.padding_token_id tokenizer.ggml.scores tokenizer.ggml.add_space_prefix
        tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.precompiled_charsmap tokenizer.chat_template""",
    {
        "general.type": ("model",),
        "{arch}.expert_count": NO_EXPERTS,
        "{arch}.expert_used_count": NO_EXPERTS,
        "{arch}.attention.causal": (True,),
        "{arch}.use_parallel_residual": (False,),
        "tokenizer.ggml.add_eos_token": (False,),
        "tokenizer.ggml.add_sep_token": (False,),
    },
    {
        "the file's own form, which its reader knows": "GGUF.* general.alignment split.no split.tensors.count",
        "names, sources and licences": """
            general.name general.author general.version general.organization general.finetune general.basename
            general.description general.size_label general.license general.license.* general.url general.doi general.uuid
            general.repo_url general.source.* general.base_model.* general.dataset.* general.datasets general.tags
            general.languages""",
        "how the file was quantised; each tensor states its type": """
            general.quantization_version general.quantized_by general.file_type quantize.imatrix.* mradermacher.*""",
        "sampling, which a request states for itself": "general.sampling.*",
        "how the scaling was made": "{arch}.rope.scaling.finetuned",
        "sizes that the tensors state": "{arch}.vocab_size {arch}.tensor_data_layout",
        "parts of tokenizers of kinds that are refused, and a second description of the tokenizer": """
            tokenizer.ggml.token_type_count tokenizer.huggingface.json tokenizer.rwkv.world""",
        "special tokens of other uses than generating text, and further chat templates": """
            tokenizer.ggml.seperator_token_id tokenizer.ggml.cls_token_id tokenizer.ggml.mask_token_id
            tokenizer.ggml.fim_*_token_id tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id
            tokenizer.ggml.middle_token_id tokenizer.chat_template.* tokenizer.chat_templates""",
    },
)
# Of a mixture of experts.
GGUF_EXPERTS = replace(
    GGUF,
    used=f"{GGUF.used} {{arch}}.expert_count {{arch}}.expert_used_count {{arch}}.expert_feed_forward_length "
    "{arch}.expert_shared_feed_forward_length",
    neutral={key: values for key, values in GGUF.neutral.items() if values is not NO_EXPERTS},
)
# Keys of a TensorRT-LLM checkpoint's config.json, by TensorRT-LLM's PretrainedConfig, LLaMAConfig and QWenConfig.
TENSORRT_LLM = KnownKeys(
    "config.json",
    """architecture qwen_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_size norm_epsilon max_position_embeddings hidden_act rotary_base rotary_scaling
        rotary_embedding_dim attn_bias qk_layernorm tie_word_embeddings share_embedding_table sliding_window mapping
        use_parallel_embedding embedding_sharding_dim quantization moe runtime_defaults""",
    {
        "position_embedding_type": ("rope_gpt_neox", None),
        "mlp_bias": (False, None),
        "residual_mlp": (False, None),
        "use_logn_attn": (False, None),
        "remove_duplicated_kv_heads": (False, None),
        "fc_after_embed": (False, None),
        "use_input_layernorm_in_first_layer": (True, None),
        "use_last_layernorm": (True, None),
        "layer_idx_offset": (0, None),
        "moe_num_experts": NO_EXPERTS,
        "rotary_pct": (1, 1.0, None),
        "embedding_multiplier": (1, 1.0, None),
        "attention_multiplier": (1, 1.0, None),
        "residual_multiplier": (1, 1.0, None),
        "output_multiplier_scale": (1, 1.0, None),
    },
    {
        "types of weights, logits and caches; the tensors' own headers state theirs": "dtype logits_dtype kv_dtype",
        "how TensorRT-LLM compiles and runs the model": """
            disable_weight_only_quant_plugin has_partial_lora_mask use_prompt_tuning gather_context_logits
            gather_generation_logits""",
        "sizes of experts, of which there are none": """
            moe_intermediate_size moe_shared_expert_intermediate_size moe_top_k moe_normalization_mode moe_tp_mode""",
        "names, and labels of other heads": "model_type producer num_labels",
        "the length that logn attention starts from, which is refused": "seq_length",
    },
)
