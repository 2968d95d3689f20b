"""lightly: DINO's student and teacher, whose loss keeps a centre of all ranks, or SimCLR with the
other ranks' images as negatives."""

import argparse
import copy

import torch
from lightly.loss import DINOLoss, NTXentLoss
from lightly.models.modules import DINOProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.wild import harness as wild


def backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(2), nn.Flatten())  # fmt: skip


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = backbone()
        self.student_head = DINOProjectionHead(64, 32, 16, 48, freeze_last_layer=1)
        self.teacher = copy.deepcopy(self.student)
        self.teacher_head = DINOProjectionHead(64, 32, 16, 48)
        deactivate_requires_grad(self.teacher)
        deactivate_requires_grad(self.teacher_head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student_head(self.student(x))

    def forward_teacher(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher_head(self.teacher(x))


def dino() -> None:
    module = Student()
    measure = DINOLoss(output_dim=48, warmup_teacher_temp_epochs=2)
    wild.watch(module, measure)
    # With buffers to broadcast, several forwards before a backward are an error of DDP's own.
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    wild.line(model, optimizer)
    for step in range(wild.STEPS):
        momentum = cosine_schedule(step, wild.STEPS, 0.9, 1)
        update_momentum(module.student, module.teacher, m=momentum)
        update_momentum(module.student_head, module.teacher_head, m=momentum)
        views = [wild.data(step + 1000 * view, 4, 3, 8, 8) for view in range(4)]
        teacher = [module.forward_teacher(view) for view in views[:2]]
        student = [model(view) for view in views]
        epoch = step // 5
        loss = measure(teacher, student, epoch=epoch)
        loss.backward()
        module.student_head.cancel_last_layer_gradients(current_epoch=epoch)
        optimizer.step()
        optimizer.zero_grad()
        wild.step(loss)


def simclr() -> None:
    module = nn.Sequential(backbone(), SimCLRProjectionHead(64, 32, 16))
    wild.watch(module)
    model = DistributedDataParallel(module)
    measure = NTXentLoss(memory_bank_size=0, gather_distributed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9)
    wild.line(model, optimizer)
    for step in range(wild.STEPS):
        one, other = wild.data(step, 8, 3, 8, 8), wild.data(step + 5000, 8, 3, 8, 8)
        found = model(torch.cat([one, one + 0.3 * other]))
        loss = measure(*found.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wild.step(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--simclr", action="store_true")
    wild.begin(group=True)
    simclr() if parser.parse_args().simclr else dino()
    wild.end()
