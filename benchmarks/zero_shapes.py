"""Fourteen models of transformers with drawn weights, for the benchmarks of the memory engine."""

from __future__ import annotations

from typing import Any

import torch

from evener import zero


def tiny_of(config: dict[str, Any]) -> dict[str, Any]:
    """The same architecture, small."""
    small = {
        "hidden_size": 64, "d_model": 64, "n_embd": 64, "intermediate_size": 128, "d_ff": 128,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "moe_intermediate_size": 64,
        "num_hidden_layers": 3, "num_layers": 2, "n_layer": 3, "encoder_layers": 2,
        "decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_head": 4,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "d_kv": 16, "vocab_size": 4096, "image_size": 56, "num_experts": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_source_positions": 50,
        "num_mel_bins": 16,
    }  # fmt: skip
    return {key: small.get(key, value) for key, value in config.items()}


MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    # name: (class, configuration, tokens of a sequence)
    "llama 2.7B": ("LlamaForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
        "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 32000}, 1024),
    "qwen3 4B": ("Qwen3ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True}, 1024),
    "mixtral 2.2B": ("MixtralForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 7,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2}, 1024),
    "t5 3B": ("T5ForConditionalGeneration", {
        "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32,
        "vocab_size": 32128, "decoder_start_token_id": 0}, 512),
    "gpt2 xl": ("GPT2LMHeadModel", {
        "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}, 1024),
    "bert 2.5B": ("BertForMaskedLM", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 40, "vocab_size": 30522}, 512),
    "gemma 2.5B": ("GemmaForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "vocab_size": 256000}, 1024),
    "gemma2 2.6B": ("Gemma2ForCausalLM", {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 256000}, 1024),
    "gemma3 3.9B": ("Gemma3ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262144}, 1024),
    "qwen3 moe 2.6B": ("Qwen3MoeForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 48, "num_experts_per_tok": 8}, 1024),
    "whisper 1.5B": ("WhisperForConditionalGeneration", {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
        "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120, "vocab_size": 51866, "num_mel_bins": 128,
        "max_source_positions": 1500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1}, 384),
    "vit 1B": ("ViTForImageClassification", {
        "hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 40,
        "num_attention_heads": 16, "image_size": 224, "patch_size": 14}, 256),
    "llama3 shape 2.8B": ("LlamaForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 1024),
    "qwen3 4B lora": ("Qwen3ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True}, 1024),
}  # fmt: skip

BUDGETS: dict[str, tuple[float, float, float]] = {
    "llama 2.7B": (8, 24, 80),
    "qwen3 4B": (8, 40, 60),
    "mixtral 2.2B": (8, 16, 24),
    "t5 3B": (8, 24, 60),
    "gpt2 xl": (6, 16, 40),
    "bert 2.5B": (6, 8, 24),
    "gemma 2.5B": (10, 24, 60),
    "gemma2 2.6B": (8, 24, 60),
    "gemma3 3.9B": (8, 24, 60),
    "qwen3 moe 2.6B": (8, 16, 40),
    "whisper 1.5B": (6, 12, 40),
    "vit 1B": (4, 8, 24),
    "llama3 shape 2.8B": (8, 24, 60),
    "qwen3 4B lora": (8, 16, 40),
}


def rows_in_order() -> list[tuple[str, float, int]]:
    """(model, budget in GB, rows of the batch): each model's tight budget first."""
    return [
        (model, budgets[at], 4 * rows if model == "vit 1B" else rows)
        for rows in (8, 2)
        for at in range(3)
        for model, budgets in BUDGETS.items()
    ]


def drawn(name: str, tiny: bool) -> Any:
    """The model with weights, where torch's current device is; without LoRA's adapters."""
    import transformers  # type: ignore[import-not-found,unused-ignore]

    kind, config, _ = MODELS[name]
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**(tiny_of(config) if tiny else config))).train()


def model_of(name: str, tiny: bool) -> Any:
    """The model without memory; for LoRA with adapters that are."""
    with zero.empty_weights():
        model = drawn(name, tiny)
        if name.endswith("lora"):
            import peft  # type: ignore[import-not-found,unused-ignore]

            model = peft.get_peft_model(
                model, peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
            )
    return model.train()


def batch_of(name: str, rows: int, model: Any, device: str, tiny: bool) -> dict[str, torch.Tensor]:
    """What the model is called with, with labels."""
    generator = torch.Generator(device).manual_seed(rows)
    length = 32 if tiny else MODELS[name][2]
    config = model.config

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device=device, generator=generator)

    if name.startswith("vit"):
        size = config.image_size
        pixels = torch.randn(rows, 3, size, size, device=device, generator=generator)
        return {"pixel_values": pixels, "labels": whole(2, rows)}
    labels = whole(config.vocab_size, rows, length)
    if name.startswith("whisper"):
        shape = rows, config.num_mel_bins, 2 * config.max_source_positions
        sounds = torch.randn(*shape, device=device, generator=generator)
        return {"input_features": sounds, "labels": labels}
    return {"input_ids": labels, "labels": labels.clone()}
