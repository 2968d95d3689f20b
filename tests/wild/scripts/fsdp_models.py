"""Models of libraries, sharded per block by hand: a diffusion transformer, a mixture of experts."""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.wild import harness as wild

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def dit() -> tuple[nn.Module, nn.ModuleList, Callable[[nn.Module, int], torch.Tensor]]:
    """The transformer of Stable Diffusion 3, and the flow from noise that it learns to guess."""
    from diffusers import SD3Transformer2DModel

    net = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        clean, added = wild.data(step, 2, 4, 8, 8), wild.data(step + 5000, 2, 4, 8, 8)
        times = wild.tokens(step, 1000, 2)
        part = (times / 1000).view(-1, 1, 1, 1)
        guess = model(
            hidden_states=(1 - part) * clean + part * added,
            encoder_hidden_states=wild.data(step + 10000, 2, 5, 24),
            pooled_projections=wild.data(step + 15000, 2, 16),
            timestep=times,
        ).sample
        return nn.functional.mse_loss(guess.float(), added - clean)

    return net, net.transformer_blocks, loss


def experts() -> tuple[nn.Module, nn.ModuleList, Callable[[nn.Module, int], torch.Tensor]]:
    """Mixtral with its loss of balance: which experts are used differs by rank and step."""
    from transformers import MixtralConfig, MixtralForCausalLM

    net = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            max_position_embeddings=32,
            output_router_logits=True,
        )
    )
    net.gradient_checkpointing_enable({"use_reentrant": False})

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        ids = wild.tokens(step, 128, 2, 32)
        return model(input_ids=ids, labels=ids).loss

    return net, net.model.layers, loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("dit", "experts"))
    args = parser.parse_args()
    wild.begin(group=True)
    model, blocks, loss_of = dit() if args.model == "dit" else experts()
    model.train()
    for block in blocks:
        fully_shard(block, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    wild.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(wild.STEPS):
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wild.step(loss)
    wild.end()


if __name__ == "__main__":
    main()
