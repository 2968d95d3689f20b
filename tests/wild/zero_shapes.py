"""The models of `zero_models`, tiny, made on the spot, and what each is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WORDS, ROWS = 512, 4

Batch = dict[str, Any]


class Scored(nn.Module):
    """A model of images and its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.inner(images).float(), labels)


class Denoiser(nn.Module):
    """A UNet of diffusers and its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.inner(images, times).sample, images)


def _transformers(kind: str, **config: Any) -> nn.Module:
    import transformers

    cls = getattr(transformers, kind)
    made: nn.Module = cls(cls.config_class(**config))
    return made


_DECODER = {
    "vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _lora() -> nn.Module:
    import peft

    model = _transformers("LlamaForCausalLM", **_DECODER)
    made: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    return made


class Paired(nn.Module):
    """CLIP with its own contrastive loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found = self.inner(input_ids=tokens, pixel_values=images, return_loss=True)
        loss: torch.Tensor = found.loss
        return loss


def _clip() -> nn.Module:
    shared = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
              "num_attention_heads": 4}  # fmt: skip
    text = {**shared, "vocab_size": WORDS, "eos_token_id": WORDS - 1}
    vision = {**shared, "image_size": 32, "patch_size": 8}
    return Paired(_transformers("CLIPModel", text_config=text, vision_config=vision))


def _speech() -> nn.Module:
    return _transformers(
        "Wav2Vec2ForCTC", vocab_size=32, **_ENCODER, hidden_dropout=0, activation_dropout=0,
        feat_proj_dropout=0, attention_dropout=0, final_dropout=0, layerdrop=0, mask_time_prob=0,
        conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )  # fmt: skip


def _detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    return _transformers(
        "DetrForObjectDetection", use_timm_backbone=False, use_pretrained_backbone=False,
        backbone=None, backbone_config=backbone, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_attention_heads=4,
        decoder_attention_heads=4, num_queries=10, num_labels=5, dropout=0,
    )  # fmt: skip


def _qwen2_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return _transformers(
        "Qwen2VLForConditionalGeneration",
        text_config={**_DECODER, "rope_parameters": rope, **_SPECIAL},
        vision_config={
            "depth": 2, "embed_dim": 64, "num_heads": 4, "mlp_ratio": 2, "hidden_size": 128,
            "patch_size": 8,
        },
        image_token_id=500, video_token_id=501, vision_start_token_id=502, vision_end_token_id=503,
    )  # fmt: skip


def _llava() -> nn.Module:
    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
              "patch_size": 8}  # fmt: skip
    return _transformers(
        "LlavaForConditionalGeneration",
        text_config={"model_type": "llama", **_DECODER, **_SPECIAL},
        vision_config=vision, image_token_index=500,
    )  # fmt: skip


def _eager_experts() -> nn.Module:
    """Each expert by itself, with the tokens that chose it."""
    model: Any = _transformers(
        "MixtralForCausalLM", **_DECODER, num_local_experts=4, num_experts_per_tok=2
    )
    model.set_experts_implementation("eager")
    made: nn.Module = model
    return made


class Segmented(nn.Module):
    """SAM and a loss of its masks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, points: torch.Tensor, masks: torch.Tensor
                ) -> torch.Tensor:  # fmt: skip
        found = self.inner(pixel_values=images, input_points=points, multimask_output=False)
        return functional.binary_cross_entropy_with_logits(found.pred_masks[:, 0], masks)


def _sam() -> nn.Module:
    vision = {
        "hidden_size": 64, "output_channels": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1, 3],
        "num_pos_feats": 16, "mlp_dim": 128,
    }  # fmt: skip
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 8}
    decoder = {
        "hidden_size": 32,
        "mlp_dim": 64,
        "num_attention_heads": 4,
        "iou_head_hidden_dim": 32,
    }
    made = _transformers(
        "SamModel", vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    return Segmented(made)


class Detector(nn.Module):
    """A detector of torchvision, of which each image has a list of boxes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: list[torch.Tensor], targets: list[Batch]) -> torch.Tensor:
        found: dict[str, torch.Tensor] = self.inner(images, targets)
        return torch.stack(list(found.values())).sum()


def _detector(kind: str) -> nn.Module:
    from torchvision.models import detection

    sizes = {"min_size": 128, "max_size": 128}
    if kind == "retinanet":
        inner = detection.retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=5, **sizes
        )
    else:
        inner = getattr(detection, f"{kind}_resnet50_fpn")(
            weights=None, weights_backbone=None, num_classes=5, rpn_pre_nms_top_n_train=200,
            rpn_post_nms_top_n_train=100, box_batch_size_per_image=32, **sizes,
        )  # fmt: skip
    return Detector(inner)


def _torchvision() -> nn.Module:
    import torchvision

    return Scored(torchvision.models.resnet18(num_classes=10))


def _timm() -> nn.Module:
    import timm

    return Scored(timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, depth=4))


def _diffusers() -> nn.Module:
    import diffusers

    return Denoiser(
        diffusers.UNet2DModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: _transformers("LlamaForCausalLM", **_DECODER),
    "Qwen3, tied": lambda: _transformers(
        "Qwen3ForCausalLM", **_DECODER, head_dim=32, tie_word_embeddings=True
    ),
    "Mixtral": lambda: _transformers(
        "MixtralForCausalLM", **_DECODER, num_local_experts=4, num_experts_per_tok=2
    ),
    "Qwen3-MoE": lambda: _transformers(
        "Qwen3MoeForCausalLM", **_DECODER, head_dim=32, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2,
    ),
    "GPT-2": lambda: _transformers(
        "GPT2LMHeadModel", vocab_size=WORDS, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0,
    ),
    "BERT": lambda: _transformers("BertForMaskedLM", vocab_size=WORDS, **_ENCODER),
    "T5": lambda: _transformers(
        "T5ForConditionalGeneration", vocab_size=WORDS, d_model=128, d_kv=32, d_ff=256,
        num_layers=3, num_heads=4, dropout_rate=0, decoder_start_token_id=0,
    ),
    "ViT": lambda: _transformers(
        "ViTForImageClassification", image_size=64, patch_size=8, num_labels=10, **_ENCODER
    ),
    "Whisper": lambda: _transformers(
        "WhisperForConditionalGeneration", vocab_size=WORDS, d_model=128, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=100, num_mel_bins=16,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0,
    ),
    "OPT": lambda: _transformers(
        "OPTForCausalLM", vocab_size=WORDS, hidden_size=128, ffn_dim=256, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=64, dropout=0,
    ),
    "BART": lambda: _transformers(
        "BartForConditionalGeneration", vocab_size=WORDS, d_model=128, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=128, dropout=0,
    ),
    "Mamba": lambda: _transformers(
        "MambaForCausalLM", vocab_size=WORDS, hidden_size=64, num_hidden_layers=3, state_size=8,
    ),
    "DeBERTa-v2": lambda: _transformers(
        "DebertaV2ForMaskedLM", vocab_size=WORDS, **_ENCODER, relative_attention=True,
        pos_att_type=["p2c", "c2p"], max_position_embeddings=128,
    ),
    "CLIP": _clip,
    "Wav2Vec2": _speech,
    "Gemma 3": lambda: _transformers(
        "Gemma3ForCausalLM", **_DECODER, **_SPECIAL, head_dim=32, sliding_window=16,
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        query_pre_attn_scalar=32, tie_word_embeddings=True,
    ),
    "DeepSeek-V3": lambda: _transformers(
        "DeepseekV3ForCausalLM", **(_DECODER | {"num_key_value_heads": 4}), n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1, n_group=2,
        topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=32,
    ),
    "BLOOM": lambda: _transformers(
        "BloomForCausalLM", vocab_size=WORDS, hidden_size=128, n_layer=4, n_head=4,
        hidden_dropout=0, attention_dropout=0,
    ),
    "XLNet": lambda: _transformers(
        "XLNetLMHeadModel", vocab_size=WORDS, d_model=128, n_layer=3, n_head=4, d_inner=256,
        dropout=0,
    ),
    "ModernBERT": lambda: _transformers(
        "ModernBertForMaskedLM", vocab_size=WORDS, hidden_size=128, intermediate_size=256,
        num_hidden_layers=4, num_attention_heads=4, local_attention=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    ),
    "Swin": lambda: _transformers(
        "SwinForImageClassification", image_size=64, patch_size=4, embed_dim=32, depths=[2, 2],
        num_heads=[2, 4], window_size=4, num_labels=10, drop_path_rate=0,
    ),
    "UMT5": lambda: _transformers(
        "UMT5ForConditionalGeneration", vocab_size=WORDS, d_model=128, d_kv=32, d_ff=256,
        num_layers=3, num_heads=4, dropout_rate=0, decoder_start_token_id=0,
    ),
    "Gemma 2": lambda: _transformers(
        "Gemma2ForCausalLM", **_DECODER, **_SPECIAL, head_dim=32, sliding_window=16,
        query_pre_attn_scalar=32,
    ),
    "StarCoder2": lambda: _transformers(
        "Starcoder2ForCausalLM", **_DECODER, **_SPECIAL, residual_dropout=0, embedding_dropout=0,
    ),
    "Falcon": lambda: _transformers(
        "FalconForCausalLM", vocab_size=WORDS, hidden_size=128, num_hidden_layers=4,
        num_attention_heads=4, **_SPECIAL,
    ),
    "GPT-J": lambda: _transformers(
        "GPTJForCausalLM", vocab_size=WORDS, n_positions=128, n_embd=128, n_layer=4, n_head=4,
        rotary_dim=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **_SPECIAL,
    ),
    "GLM-4": lambda: _transformers("Glm4ForCausalLM", **_DECODER, **_SPECIAL, head_dim=32),
    "OLMoE": lambda: _transformers(
        "OlmoeForCausalLM", **_DECODER, **_SPECIAL, num_experts=4, num_experts_per_tok=2,
    ),
    "RecurrentGemma": lambda: _transformers(
        "RecurrentGemmaForCausalLM", vocab_size=WORDS, hidden_size=128, intermediate_size=256,
        num_hidden_layers=3, num_attention_heads=4, lru_width=128, attention_window_size=16,
        **_SPECIAL,
    ),
    "ELECTRA": lambda: _transformers(
        "ElectraForMaskedLM", vocab_size=WORDS, embedding_size=64, **_ENCODER,
    ),
    "DINOv2": lambda: _transformers(
        "Dinov2ForImageClassification", image_size=64, patch_size=8, num_labels=10, mlp_ratio=2,
        **{k: v for k, v in _ENCODER.items() if k != "intermediate_size"},
    ),
    "ConvNeXt V2": lambda: _transformers(
        "ConvNextV2ForImageClassification", image_size=64, hidden_sizes=[32, 64, 96, 128],
        depths=[2, 2, 2, 2], num_labels=10,
    ),
    "Phi-3": lambda: _transformers("Phi3ForCausalLM", **_DECODER, **_SPECIAL),
    "OLMo 2": lambda: _transformers("Olmo2ForCausalLM", **_DECODER, **_SPECIAL),
    "Mamba-2": lambda: _transformers(
        "Mamba2ForCausalLM", vocab_size=WORDS, hidden_size=64, num_hidden_layers=3, state_size=16,
        num_heads=8, head_dim=16, n_groups=2, chunk_size=16, **_SPECIAL,
    ),
    "ALBERT": lambda: _transformers(
        "AlbertForMaskedLM", vocab_size=WORDS, embedding_size=64, **_ENCODER
    ),
    "SegFormer": lambda: _transformers(
        "SegformerForSemanticSegmentation", depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64],
        decoder_hidden_size=32, num_attention_heads=[1, 2, 3, 4], num_labels=10, drop_path_rate=0,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0, classifier_dropout_prob=0,
    ),
    "GPT-NeoX": lambda: _transformers(
        "GPTNeoXForCausalLM", vocab_size=WORDS, hidden_size=128, intermediate_size=256,
        num_hidden_layers=4, num_attention_heads=4, attention_dropout=0, hidden_dropout=0,
    ),
    "Granite MoE": lambda: _transformers(
        "GraniteMoeForCausalLM", **_DECODER, num_local_experts=4, num_experts_per_tok=2,
        pad_token_id=0,
    ),
    "Cohere": lambda: _transformers("CohereForCausalLM", **_DECODER, **_SPECIAL, logit_scale=0.25),
    "StableLM": lambda: _transformers(
        "StableLmForCausalLM", **_DECODER, **_SPECIAL, use_parallel_residual=True,
    ),
    "RoFormer": lambda: _transformers(
        "RoFormerForMaskedLM", vocab_size=WORDS, embedding_size=64, **_ENCODER,
    ),
    "MobileBERT": lambda: _transformers(
        "MobileBertForMaskedLM", vocab_size=WORDS, hidden_size=128, embedding_size=64,
        intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, true_hidden_size=64,
        intra_bottleneck_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    ),
    "FNet": lambda: _transformers(
        "FNetForMaskedLM", vocab_size=WORDS, hidden_size=128, intermediate_size=256,
        num_hidden_layers=4, hidden_dropout_prob=0,
    ),
    "SmolLM3": lambda: _transformers(
        "SmolLM3ForCausalLM", **_DECODER, **_SPECIAL, no_rope_layer_interval=2,
    ),
    "Cohere 2": lambda: _transformers(
        "Cohere2ForCausalLM", **_DECODER, **_SPECIAL, sliding_window=16, logit_scale=0.25,
    ),
    "Granite": lambda: _transformers(
        "GraniteForCausalLM", **_DECODER, **_SPECIAL, embedding_multiplier=12.0,
        logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.03,
    ),
    "gpt-oss": lambda: _transformers(
        "GptOssForCausalLM", **_DECODER, **_SPECIAL, head_dim=32, sliding_window=16,
        num_local_experts=4, num_experts_per_tok=2,
    ),
    "Falcon-H1": lambda: _transformers(
        "FalconH1ForCausalLM", **_DECODER, **_SPECIAL, head_dim=32, mamba_d_ssm=128,
        mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16,
    ),
    "Qwen3-Next": lambda: _transformers(
        "Qwen3NextForCausalLM", **_DECODER, **_SPECIAL, head_dim=32, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "LFM2": lambda: _transformers(
        "Lfm2ForCausalLM", **_DECODER, **_SPECIAL, full_attn_idxs=[1, 3],
    ),
    "Qwen2-VL": _qwen2_vl,
    "DETR": _detr,
    "LLaVA": _llava,
    "Mixtral, eager experts": _eager_experts,
    "SAM": _sam,
    "Faster R-CNN": lambda: _detector("fasterrcnn"),
    "Mask R-CNN": lambda: _detector("maskrcnn"),
    "RetinaNet": lambda: _detector("retinanet"),
    "Llama with LoRA (peft)": _lora,
    "ResNet-18 (torchvision)": _torchvision,
    "ViT (timm)": _timm,
    "UNet (diffusers)": _diffusers,
}  # fmt: skip


def batch_of(name: str, step: int) -> Batch:
    """What the model of that name is called with."""
    g = torch.Generator().manual_seed(step)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g)

    if name.startswith("UNet"):
        return {"images": torch.randn(ROWS, 3, 16, 16, generator=g), "times": whole(1000, ROWS)}
    if name.endswith(("(torchvision)", "(timm)")):
        return {"images": torch.randn(ROWS, 3, 64, 64, generator=g), "labels": whole(10, ROWS)}
    if name == "CLIP":
        return {
            "images": torch.randn(ROWS, 3, 32, 32, generator=g),
            "tokens": whole(WORDS, ROWS, 16),
        }
    if name == "Wav2Vec2":
        sounds = torch.randn(ROWS, 1600, generator=g)
        return {"input_values": sounds, "labels": 1 + whole(31, ROWS, 8)}
    if name in ("ViT", "Swin", "DINOv2", "ConvNeXt V2"):
        images = torch.randn(ROWS, 3, 64, 64, generator=g)
        return {"pixel_values": images, "labels": whole(10, ROWS)}
    if name == "SegFormer":
        images = torch.randn(ROWS, 3, 64, 64, generator=g)
        return {"pixel_values": images, "labels": whole(10, ROWS, 64, 64)}
    if name == "DETR":
        images = torch.randn(ROWS, 3, 64, 64, generator=g)
        seen = [
            {
                "class_labels": whole(5, 3),
                "boxes": 0.1 + 0.4 * torch.rand(3, 4, generator=g),
            }
            for _ in range(ROWS)
        ]
        return {"pixel_values": images, "labels": seen}
    if name in ("Faster R-CNN", "Mask R-CNN", "RetinaNet"):
        corners = 60 * torch.rand(ROWS, 3, 2, generator=g)
        sides = 10 + 50 * torch.rand(ROWS, 3, 2, generator=g)
        boxes = torch.cat([corners, corners + sides], dim=2)
        masks = (torch.rand(ROWS, 3, 128, 128, generator=g) < 0.5).to(torch.uint8)
        return {
            "images": [torch.rand(3, 128, 128, generator=g) for _ in range(ROWS)],
            "targets": [
                {"boxes": boxes[n], "labels": 1 + whole(4, 3), "masks": masks[n]}
                for n in range(ROWS)
            ],
        }
    if name == "SAM":
        return {
            "images": torch.randn(ROWS, 3, 64, 64, generator=g),
            "points": 64 * torch.rand(ROWS, 1, 2, 2, generator=g),
            "masks": (torch.rand(ROWS, 1, 32, 32, generator=g) < 0.5).float(),
        }
    if name == "LLaVA":
        tokens = whole(500, ROWS, 64)
        tokens[:, 4:20] = 500
        images = torch.randn(ROWS, 3, 32, 32, generator=g)
        return {"input_ids": tokens, "labels": tokens.clone(), "pixel_values": images}
    if name == "Qwen2-VL":
        tokens = whole(500, ROWS, 64)
        tokens[:, 4], tokens[:, 5:9] = 502, 500  # an image begins, and its four tokens
        return {
            "input_ids": tokens, "labels": tokens.clone(), "mm_token_type_ids": 1 * (tokens == 500),
            "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 8 * 8, generator=g),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        }  # fmt: skip
    if name == "Whisper":
        sounds = torch.randn(ROWS, 16, 200, generator=g)
        return {"input_features": sounds, "labels": whole(WORDS, ROWS, 32)}
    tokens = whole(WORDS, ROWS, 64)
    return {"input_ids": tokens, "labels": tokens.clone()}
