"""The families of models that upstream's mixins are run on: small configurations of this project, as data.

The tests read it in one environment, `mixins_worker.py` in another, where transformers is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "decoder", "encoder", "encoder-decoder", "vision", "audio", "multimodal", "mixture of experts", "state space"
]
Inputs = Literal[
    "text", "text to text", "document", "image", "video", "speech", "spectrogram", "speech to text", "image and text"
]

WITHOUT_TOKENS: tuple[Inputs, ...] = ("image", "video", "speech", "spectrogram")

BATCH = 2
LENGTH = 7
VOCABULARY = 99
IMAGE, PATCH = 16, 4
FRAMES = 2
SAMPLES = 1200
MELS = 16
IMAGE_TOKEN = 98


@dataclass(frozen=True)
class Family:
    """One model type.

    Attributes:
        kind: what its models are.
        config: the name of its configuration class.
        models: the names of its model classes; upstream's tests check the gradients of those that have a loss.
        settings: arguments of the configuration, those of a configuration inside it as a mapping.
        inputs: what its models are called with.
        every_gradient: whether each parameter has a gradient in training.
        mixins: upstream's mixins beside ModelTesterMixin.
    """

    kind: Kind
    config: str
    models: tuple[str, ...]
    settings: Mapping[str, Any]
    inputs: Inputs = "text"
    every_gradient: bool = True
    mixins: tuple[str, ...] = ()
    length: int = LENGTH
    labels: tuple[int, ...] = ()


SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
TEXT = SIZES | SPECIAL_TOKENS | {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
DECODER = TEXT | {"num_key_value_heads": 2}
ENCODER = TEXT | {"type_vocab_size": 2}
BART = SPECIAL_TOKENS | {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
VISION = SIZES | {"image_size": IMAGE, "patch_size": PATCH, "num_channels": 3}
EXPERTS = DECODER | {"num_experts_per_tok": 2}
SPEECH = SIZES | {
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_stride": (4, 4, 4),
    "conv_kernel": (8, 8, 8),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "group",
    "mask_time_prob": 0.0,
    "hidden_dropout": 0.0,
    "layerdrop": 0.0,
    "pad_token_id": 0,
}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "decoder",
        "GPT2Config",
        ("GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForTokenClassification"),
        SPECIAL_TOKENS | {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
    "llama": Family(
        "decoder",
        "LlamaConfig",
        ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForTokenClassification"),
        DECODER,
        mixins=("training", "fsdp"),
    ),
    "qwen3": Family(
        "decoder",
        "Qwen3Config",
        ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
        DECODER | {"head_dim": 8},
        mixins=("tensor parallel",),
    ),
    "gemma2": Family(
        "decoder",
        "Gemma2Config",
        ("Gemma2ForCausalLM", "Gemma2ForTokenClassification"),
        DECODER | {"head_dim": 8, "sliding_window": 4},
    ),
    "opt": Family(
        "decoder",
        "OPTConfig",
        ("OPTForCausalLM", "OPTForSequenceClassification"),
        TEXT | {"ffn_dim": 32, "word_embed_proj_dim": 32, "layerdrop": 0.0},
    ),
    "bert": Family(
        "encoder",
        "BertConfig",
        ("BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering", "BertForMultipleChoice"),
        ENCODER,
    ),
    "electra": Family(
        "encoder",
        "ElectraConfig",
        ("ElectraForMaskedLM", "ElectraForTokenClassification"),
        ENCODER | {"embedding_size": 32},
    ),
    "modernbert": Family(
        "encoder",
        "ModernBertConfig",
        ("ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
        ENCODER | {"global_attn_every_n_layers": 2, "local_attention": 4},
    ),
    "deberta_v2": Family(
        "encoder",
        "DebertaV2Config",
        ("DebertaV2ForMaskedLM", "DebertaV2ForTokenClassification"),
        ENCODER,
    ),
    "bart": Family(
        "encoder-decoder",
        "BartConfig",
        ("BartForConditionalGeneration",),
        BART,
        "text to text",
    ),
    "mbart": Family("encoder-decoder", "MBartConfig", ("MBartForConditionalGeneration",), BART, "text to text"),
    "t5": Family("encoder-decoder", "T5Config", ("T5ForConditionalGeneration",), T5, "text to text"),
    "vit": Family(
        "vision",
        "ViTConfig",
        ("ViTForImageClassification", "ViTForMaskedImageModeling"),
        VISION | {"encoder_stride": PATCH},
        "image",
    ),
    "swin": Family(
        "vision",
        "SwinConfig",
        ("SwinForImageClassification",),
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2},
        "image",
    ),
    "dinov2": Family(
        "vision", "Dinov2Config", ("Dinov2ForImageClassification",), VISION | {"use_mask_token": False}, "image"
    ),
    "segformer": Family(
        "vision",
        "SegformerConfig",
        ("SegformerForImageClassification", "SegformerForSemanticSegmentation"),
        {
            "image_size": 64,
            "num_encoder_blocks": 4,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 1, 2, 2],
            "sr_ratios": [8, 4, 2, 1],
            "decoder_hidden_size": 8,
        },
        "image",
    ),
    "videomae": Family(
        "vision",
        "VideoMAEConfig",
        ("VideoMAEForVideoClassification",),
        VISION | {"num_frames": FRAMES, "tubelet_size": 1},
        "video",
    ),
    "wav2vec2": Family(
        "audio",
        "Wav2Vec2Config",
        ("Wav2Vec2ForCTC", "Wav2Vec2ForSequenceClassification"),
        SPEECH,
        "speech",
        every_gradient=False,
    ),
    "whisper": Family(
        "audio",
        "WhisperConfig",
        ("WhisperForConditionalGeneration",),
        BART | {"num_mel_bins": MELS, "max_source_positions": 30, "max_target_positions": 20},
        "speech to text",
        every_gradient=False,
        labels=(BATCH, LENGTH),
    ),
    "audio_spectrogram_transformer": Family(
        "audio",
        "ASTConfig",
        ("ASTForAudioClassification",),
        SIZES | {"patch_size": 2, "max_length": 24, "num_mel_bins": MELS, "frequency_stride": 2, "time_stride": 2},
        "spectrogram",
    ),
    "clip": Family(
        "multimodal",
        "CLIPConfig",
        ("CLIPForImageClassification",),
        {"text_config": TEXT, "vision_config": VISION, "projection_dim": 32},
        "image",
        every_gradient=False,
    ),
    "layoutlm": Family(
        "multimodal",
        "LayoutLMConfig",
        ("LayoutLMForSequenceClassification",),
        ENCODER | {"max_2d_position_embeddings": 100},
        "document",
    ),
    "llava": Family(
        "multimodal",
        "LlavaConfig",
        ("LlavaForConditionalGeneration",),
        {
            "text_config": DECODER | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            "image_token_id": IMAGE_TOKEN,
            "image_seq_length": 16,
            "vision_feature_layer": -1,
        },
        "image and text",
        every_gradient=False,
        length=24,
    ),
    "vilt": Family(
        "multimodal",
        "ViltConfig",
        ("ViltForQuestionAnswering",),
        ENCODER | VISION | {"num_labels": 3},
        "image and text",
        labels=(BATCH, 3),
    ),
    "mixtral": Family(
        "mixture of experts",
        "MixtralConfig",
        ("MixtralForCausalLM", "MixtralForSequenceClassification"),
        EXPERTS | {"num_local_experts": 4},
        mixins=("fsdp",),
    ),
    "olmoe": Family(
        "mixture of experts",
        "OlmoeConfig",
        ("OlmoeForCausalLM",),
        EXPERTS | {"num_experts": 4},
        mixins=("tensor parallel",),
    ),
    "qwen3_moe": Family(
        "mixture of experts",
        "Qwen3MoeConfig",
        ("Qwen3MoeForCausalLM", "Qwen3MoeForTokenClassification"),
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        mixins=("training",),
    ),
    "switch_transformers": Family(
        "mixture of experts",
        "SwitchTransformersConfig",
        ("SwitchTransformersForConditionalGeneration",),
        T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        "text to text",
    ),
    "mamba": Family(
        "state space",
        "MambaConfig",
        ("MambaForCausalLM",),
        SPECIAL_TOKENS | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    "mamba2": Family(
        "state space",
        "Mamba2Config",
        ("Mamba2ForCausalLM",),
        SPECIAL_TOKENS
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "falcon_mamba": Family(
        "state space",
        "FalconMambaConfig",
        ("FalconMambaForCausalLM",),
        SPECIAL_TOKENS | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    "jamba": Family(
        "state space",
        "JambaConfig",
        ("JambaForCausalLM", "JambaForSequenceClassification"),
        EXPERTS
        | {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
    ),
}
