"""FSDP2 in the way of PyTorch's own example: built on the meta device, units prefetched by hand,
and a checkpoint of whole tensors that every rank puts in pieces again."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.wild import harness as wild

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 128, 32, 48, 4, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        parts = self.mixed(self.norms[0](x)).chunk(3, dim=2)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float()


def begin_weights(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def save_and_load(model: nn.Module) -> None:
    """Whole tensors to rank 0's file; then each rank takes its part of them."""
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    path = wild.OUT / "model.pt"
    if wild.RANK == 0:
        torch.save(whole, path)
    dist.barrier()
    found = torch.load(path, mmap=True)
    own = model.state_dict()
    parts = {
        name: nn.Parameter(distribute_tensor(value, own[name].device_mesh, own[name].placements))
        for name, value in found.items()
    }
    model.load_state_dict(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed", action="store_true", help="weights in bf16, sums in float32")
    parser.add_argument("--prefetch", action="store_true", help="two units ahead, by hand")
    parser.add_argument("--accumulate", action="store_true", help="reduce with the last of two")
    parser.add_argument("--keep", action="store_true", help="do not reshard after forward")
    args = parser.parse_args()
    wild.begin(group=True)
    with torch.device("meta"):
        model = Model()
    how = {}
    if args.mixed:
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if args.keep:
        how["reshard_after_forward"] = False
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    if args.prefetch:
        for at, layer in enumerate(model.layers):
            layer.set_modules_to_forward_prefetch(list(model.layers[at + 1 : at + 3]))
            layer.set_modules_to_backward_prefetch(list(model.layers[max(at - 2, 0) : at][::-1]))
    torch.manual_seed(0)
    begin_weights(model)
    wild.watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    parts = 2 if args.accumulate else 1
    for step in range(wild.STEPS):
        for part in range(parts):
            if args.prefetch:
                model.unshard()
            model.set_requires_gradient_sync(part == parts - 1)
            ids = wild.tokens(parts * step + part, WORDS, 4, LENGTH)
            logits = model(ids)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            (loss / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        wild.step(loss)
        if step == wild.STEPS // 2:
            save_and_load(model)
    wild.end()


if __name__ == "__main__":
    main()
