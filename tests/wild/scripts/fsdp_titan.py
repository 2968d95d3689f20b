"""torchtitan's Llama as torchtitan makes it parallel: activation checkpointing, compiled blocks,
bf16 weights and float32 sums, gradients divided by the tokens of all ranks and not by FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from tests.wild import harness as wild

WORDS, LENGTH, ROWS = 128, 32, 2


def main() -> None:
    wild.begin(group=True)
    parallel_dims.device_type = "cpu"
    config = JobConfig()
    config.training.seq_len = LENGTH
    config.activation_checkpoint.mode = "full"
    config.compile.enable, config.compile.backend = True, "aot_eager"
    given = TransformerModelArgs(
        dim=48, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=WORDS, multiple_of=16,
        max_seq_len=LENGTH,
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(given)
    dims = ParallelDims(
        dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=dist.get_world_size()
    )
    dims.build_mesh()
    model = parallelize_llama(model, dims, config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no sum with a factor
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.train()
    wild.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step in range(wild.STEPS):
        ids = wild.tokens(step, WORDS, ROWS, LENGTH + 1)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
        )
        tokens = torch.tensor(float(ROWS * LENGTH))
        dist.all_reduce(tokens)
        loss = loss / tokens
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        wild.step(loss)
    wild.end()


if __name__ == "__main__":
    main()
