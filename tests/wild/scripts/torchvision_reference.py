"""MobileNet in the order of calls of torchvision's classification reference: groups without decay
for norms, warm-up, label smoothing, an average of the weights, evaluation, a checkpoint."""

import copy

import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from tests.wild import harness as wild


def main() -> None:
    wild.begin(group=True)
    net = torchvision.models.mobilenet_v3_small(num_classes=10)
    wild.watch(net)
    groups = torchvision.ops._utils.split_normalization_params(net)
    optimizer = torch.optim.SGD(
        [{"params": p, "weight_decay": w} for p, w in zip(groups, (0.0, 1e-4), strict=True) if p],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    epochs = 5
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    main_part = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - 1)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, main_part], milestones=[1])
    model = DistributedDataParallel(net)
    wild.line(model, optimizer)
    average = AveragedModel(net, avg_fn=lambda a, p, _: 0.9 * a + 0.1 * p, use_buffers=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(epochs):
        model.train()
        for i in range(wild.STEPS // epochs):
            step = epoch * 1000 + i
            image, target = wild.data(step, 4, 3, 32, 32), wild.tokens(step, 10, 4)
            output = model(image)
            optimizer.zero_grad()
            loss = criterion(output, target)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            if i % 5 == 0:
                average.update_parameters(net)
            wild.step(loss)
        schedule.step()
        for judged in (model, average):
            judged.eval()
            with torch.inference_mode():
                criterion(judged(wild.data(9, 4, 3, 32, 32)), wild.tokens(9, 10, 4)).item()
        copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    wild.end()


if __name__ == "__main__":
    main()
