"""PyTorch Geometric: graph attention over batches of graphs, trained by a schedule-free AdamW."""

import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, GINEConv, global_add_pool
from torch_geometric.nn.norm import GraphNorm

from tests.wild import harness as wild


def graphs(count: int) -> list[Data]:
    made = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        nodes = 4 + index % 7
        x = torch.randn(nodes, 6, generator=generator)
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        kind = torch.randn(3 * nodes, 4, generator=generator)
        made.append(Data(x=x, edge_index=edges, edge_attr=kind, y=x.sum().view(1)))
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATv2Conv(6, 8, heads=2, edge_dim=4, dropout=0.1)
        self.second = GINEConv(nn.Linear(16, 16), train_eps=True, edge_dim=4)
        self.norm, self.out = GraphNorm(16), nn.Linear(16, 1)

    def forward(self, x, edges, kind, batch):
        x = self.first(x, edges, kind).relu()
        x = self.norm(self.second(x, edges, kind), batch).relu()
        return self.out(global_add_pool(x, batch)).squeeze(1)


def main() -> None:
    wild.begin(group=True)
    net = Net()
    wild.watch(net)
    model = DistributedDataParallel(net)
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=5)
    wild.line(model, optimizer)
    data = graphs(128)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    done = 0
    while done < wild.STEPS:
        sampler.set_epoch(done)
        model.train()
        optimizer.train()
        for batch in loader:
            found = model(batch.x, batch.edge_index, batch.edge_attr, batch.batch)
            loss = nn.functional.huber_loss(found, batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wild.step(loss)
            done += 1
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            batch = next(iter(DataLoader(data, batch_size=16)))
            found = net(batch.x, batch.edge_index, batch.edge_attr, batch.batch)
            wild.step(nn.functional.huber_loss(found, batch.y))
    wild.end()


if __name__ == "__main__":
    main()
