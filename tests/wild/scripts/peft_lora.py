"""LoRA by peft on a small Llama: few parameters train, the rest is frozen."""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from tests.wild import harness as wild


def main() -> None:
    wild.begin(group=True)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=32,
        )
    )
    net = get_peft_model(
        base,
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    wild.watch(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    wild.line(model, optimizer)
    for step in range(wild.STEPS):
        ids = wild.tokens(step, 128, 4, 32)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wild.step(loss)
    wild.end()


if __name__ == "__main__":
    main()
