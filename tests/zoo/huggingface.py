"""Models of `transformers` with tiny random configurations; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tests.zoo.modules import ROWS, Batch, Case
from torch import Tensor, nn

VOCABULARY = 96
HUGGINGFACE: dict[str, Callable[[], Case]] = {}

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "use_cache": False,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **_NO_DROPOUT,
}
_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    **_NO_DROPOUT,
}
_SEQUENCE_TO_SEQUENCE = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "use_cache": False,
}


def tokens(length: int = 16) -> Tensor:
    """Rows of random token ids."""
    return torch.randint(3, VOCABULARY, (ROWS, length))


def language(length: int = 16) -> Batch:
    """Tokens, a mask and the tokens again as labels."""
    ids = tokens(length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def unmasked(length: int = 16) -> Batch:
    """Tokens and labels, for models that take no mask."""
    ids = tokens(length)
    return {"input_ids": ids, "labels": ids.clone()}


def pictures(size: int = 32, channels: int = 3) -> Tensor:
    """Random images."""
    return torch.randn(ROWS, channels, size, size)


def classified(size: int = 32) -> Batch:
    """Images and their class."""
    return {"pixel_values": pictures(size), "labels": torch.randint(0, 5, (ROWS,))}


def own_loss(module: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model computes itself."""
    return module(**batch).loss


def _add(
    name: str,
    model: str,
    config: str,
    options: dict[str, Any],
    batch: Callable[[], Batch] = language,
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss,
    prepare: Callable[[nn.Module], Any] = lambda module: None,
) -> None:
    def build() -> Case:
        import transformers

        torch.manual_seed(0)
        module = getattr(transformers, model)(getattr(transformers, config)(**options)).float()
        prepare(module)
        return Case(module.train(), lambda b: loss(module, b), batch())

    HUGGINGFACE[name] = build


# ---------------------------------------------------------------------- decoders

_GPT2 = {
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 4,
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "use_cache": False,
}
_STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_add("gpt2", "GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_STILL})
_add("gpt2_dropout", "GPT2LMHeadModel", "GPT2Config", _GPT2)
_add(
    "gpt2_checkpointed",
    "GPT2LMHeadModel",
    "GPT2Config",
    {**_GPT2, **_STILL},
    prepare=lambda module: module.gradient_checkpointing_enable(),
)
_add("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER)
_add("llama", "LlamaForCausalLM", "LlamaConfig", _GROUPED)
_add("llama_with_cache", "LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "use_cache": True})
_add("phi", "PhiForCausalLM", "PhiConfig", _DECODER)
_add(
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2Config",
    {**_GROUPED, "head_dim": 8, "sliding_window": 8},
)
_add(
    "bloom",
    "BloomForCausalLM",
    "BloomConfig",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "n_layer": 6,
        "n_head": 4,
        "use_cache": False,
    },
)
_add(
    "mixtral_with_router_loss",
    "MixtralForCausalLM",
    "MixtralConfig",
    {**_GROUPED, "num_local_experts": 4, "output_router_logits": True},
)
_add(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeConfig",
    {
        **_GROUPED,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
)
_add(
    "mamba",
    "MambaForCausalLM",
    "MambaConfig",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 6,
        "use_cache": False,
    },
    batch=unmasked,
)
_add(
    "rwkv",
    "RwkvForCausalLM",
    "RwkvConfig",
    {
        "vocab_size": VOCABULARY,
        "context_length": 32,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "intermediate_size": 48,
        "use_cache": False,
    },
    batch=unmasked,
)


# ---------------------------------------------------------------------- encoders


def _sentences() -> Batch:
    ids = tokens()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 3, (ROWS,)),
    }


_add("bert", "BertForMaskedLM", "BertConfig", _ENCODER)
_add(
    "bert_classifier",
    "BertForSequenceClassification",
    "BertConfig",
    {**_ENCODER, "num_labels": 3},
    batch=_sentences,
)
_add("albert", "AlbertForMaskedLM", "AlbertConfig", {**_ENCODER, "embedding_size": 16})
_add(
    "distilbert",
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 6,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 64,
    },
)
_add(
    "deberta_v2",
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    {
        **_ENCODER,
        "relative_attention": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
    },
)
_add(
    "longformer",
    "LongformerForMaskedLM",
    "LongformerConfig",
    {**_ENCODER, "attention_window": 8, "num_hidden_layers": 4},
    batch=lambda: language(32),
)
_add(
    "bigbird",
    "BigBirdForMaskedLM",
    "BigBirdConfig",
    {
        **_ENCODER,
        "attention_type": "block_sparse",
        "block_size": 4,
        "num_random_blocks": 1,
        "num_hidden_layers": 4,
    },
    batch=lambda: language(64),
)
_add(
    "xlnet",
    "XLNetLMHeadModel",
    "XLNetConfig",
    {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_layer": 5,
        "n_head": 4,
        "d_inner": 48,
        "dropout": 0.0,
    },
)

# ---------------------------------------------------------------------- encoder and decoder

_add(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
    },
)
_add("bart", "BartForConditionalGeneration", "BartConfig", _SEQUENCE_TO_SEQUENCE)
_add(
    "bart_with_layer_drop",
    "BartForConditionalGeneration",
    "BartConfig",
    {**_SEQUENCE_TO_SEQUENCE, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4},
)
_add(
    "whisper",
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {
        **_SEQUENCE_TO_SEQUENCE,
        "num_mel_bins": 16,
        "max_source_positions": 32,
        "max_target_positions": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    batch=lambda: {"input_features": torch.randn(ROWS, 16, 64), "labels": tokens()},
)

# ---------------------------------------------------------------------- images, sound, both

_add("vit", "ViTForImageClassification", "ViTConfig", {**_IMAGES, "num_labels": 5}, classified)
_add(
    "beit",
    "BeitForImageClassification",
    "BeitConfig",
    {**_IMAGES, "num_labels": 5, "drop_path_rate": 0.0, "use_relative_position_bias": True},
    classified,
)
_add(
    "dinov2",
    "Dinov2ForImageClassification",
    "Dinov2Config",
    {**{k: v for k, v in _IMAGES.items() if k != "intermediate_size"}, "num_labels": 5},
    classified,
)
_add(
    "vit_mae",
    "ViTMAEForPreTraining",
    "ViTMAEConfig",
    {
        **_IMAGES,
        "num_hidden_layers": 4,
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 48,
    },
    batch=lambda: {"pixel_values": pictures()},
)
_add(
    "swin",
    "SwinForImageClassification",
    "SwinConfig",
    {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2, 2],
        "num_heads": [2, 2, 4],
        "window_size": 4,
        "drop_path_rate": 0.0,
        "num_labels": 5,
    },
    classified,
)
_add(
    "convnext",
    "ConvNextForImageClassification",
    "ConvNextConfig",
    {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1], "num_labels": 5},
    batch=lambda: classified(64),
)
_add(
    "segformer",
    "SegformerForImageClassification",
    "SegformerConfig",
    {
        "depths": [1, 2, 1, 1],
        "hidden_sizes": [8, 16, 32, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "hidden_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "num_labels": 5,
    },
    batch=lambda: classified(64),
)


def _patches(module: nn.Module, batch: Batch) -> Tensor:
    return module(past_values=batch["past"], future_values=batch["future"]).loss


_add(
    "patchtst",
    "PatchTSTForPrediction",
    "PatchTSTConfig",
    {
        "num_input_channels": 2,
        "context_length": 32,
        "patch_length": 8,
        "patch_stride": 8,
        "prediction_length": 8,
        "d_model": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "ffn_dim": 32,
    },
    batch=lambda: {"past": torch.randn(ROWS, 32, 2), "future": torch.randn(ROWS, 8, 2)},
    loss=_patches,
)
_add(
    "wav2vec2",
    "Wav2Vec2ForCTC",
    "Wav2Vec2Config",
    {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "conv_dim": (16, 16, 16),
        "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 3),
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "activation_dropout": 0.0,
        "final_dropout": 0.0,
        "ctc_loss_reduction": "mean",
        "pad_token_id": 0,
        "layerdrop": 0.5,
        "mask_time_length": 2,
        "mask_time_prob": 0.2,
    },
    batch=lambda: {
        "input_values": torch.randn(ROWS, 1000),
        "labels": torch.randint(1, 32, (ROWS, 6)),
    },
)


# ---------------------------------------------------------------------- built in another way


def _add_case(name: str, build: Callable[[Any], Case]) -> None:
    def seeded() -> Case:
        import transformers

        torch.manual_seed(0)
        return build(transformers)

    HUGGINGFACE[name] = seeded


def _reformer(library: Any) -> Case:
    config = library.ReformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        feed_forward_size=16,
        attn_layers=["local", "lsh", "local", "lsh"],
        axial_pos_embds=False,
        max_position_embeddings=64,
        is_decoder=True,
        lsh_attn_chunk_length=8,
        local_attn_chunk_length=8,
        num_buckets=2,
        hidden_dropout_prob=0.0,
        hash_seed=0,
        use_cache=False,
    )
    module = library.ReformerModelWithLMHead(config).train()

    def loss(b: Batch) -> Tensor:
        # it asks the clock for a seed, `torch.seed()`: not even two plain runs are equal then
        with mock.patch.object(torch, "seed", return_value=1234):
            return own_loss(module, b)

    return Case(module, loss, unmasked(32))


_add_case("reformer", _reformer)


def _detr_model(library: Any) -> tuple[nn.Module, Batch]:
    backbone = library.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = library.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        use_pretrained_backbone=False,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=5,
        dropout=0.0,
        num_labels=5,
        auxiliary_loss=False,
    )
    batch = {
        "pixel_values": pictures(64),
        "classes": torch.randint(0, 5, (ROWS, 5)),
        "boxes": torch.rand(ROWS, 5, 4),
    }
    return library.DetrForObjectDetection(config).train(), batch


def _detr(library: Any) -> Case:
    module, batch = _detr_model(library)

    def loss(b: Batch) -> Tensor:
        out = module(pixel_values=b["pixel_values"])
        classes = F.cross_entropy(out.logits[..., :5].flatten(0, 1), b["classes"].flatten())
        return classes + F.l1_loss(out.pred_boxes, b["boxes"])

    return Case(module, loss, batch)


def _detr_with_matching(library: Any) -> Case:
    """The loss assigns predictions to boxes on the host, by their values."""
    module, batch = _detr_model(library)

    def match(distance: list[list[float]]) -> list[int]:
        free, found = set(range(len(distance))), []
        for row in distance:
            best = min(free, key=lambda column: row[column])
            free.remove(best)
            found.append(best)
        return found

    def loss(b: Batch) -> Tensor:
        out = module(pixel_values=b["pixel_values"])
        total = out.logits.new_zeros(())
        for row in range(len(out.logits)):
            boxes = out.pred_boxes[row]
            order = match(torch.cdist(boxes.detach(), b["boxes"][row]).tolist())
            total = total + F.l1_loss(boxes, b["boxes"][row][order])
            total = total + F.cross_entropy(out.logits[row, :, :5], b["classes"][row][order])
        return total / len(out.logits)

    return Case(module, loss, batch)


_add_case("detr", _detr)
_add_case("detr_with_matching", _detr_with_matching)


def _clip(library: Any) -> Case:
    """Two towers; a loss over all pairs of the batch."""
    width = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    special = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = library.CLIPConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            **special,
            **width,
        },
        vision_config={"image_size": 32, "patch_size": 8, **width},
        projection_dim=16,
    )
    module = library.CLIPModel(config).train()
    ids = tokens()
    ids[:, -1] = 2
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pictures(),
    }
    return Case(module, lambda b: module(**b, return_loss=True).loss, batch)


def _llava(library: Any) -> Case:
    """Image features are scattered into the token embeddings where the placeholder stands."""
    vision = library.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    config = library.LlavaConfig(
        vision_config=vision,
        text_config=library.LlamaConfig(**{**_GROUPED, "num_hidden_layers": 4}),
        image_token_index=90,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    module = library.LlavaForConditionalGeneration(config).train()
    ids = torch.randint(3, 80, (ROWS, 24))
    ids[:, :16] = 90
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
        "pixel_values": pictures(),
    }
    return Case(module, lambda b: own_loss(module, b), batch)


_add_case("clip", _clip)
_add_case("llava", _llava)
