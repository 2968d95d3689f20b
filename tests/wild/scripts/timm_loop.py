"""A loop from timm's parts: model, optimizer with layer decay, schedule by updates, loss, EMA."""

import numpy as np
import timm
import timm.data
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils
from torch.nn.parallel import DistributedDataParallel

from tests.wild import harness as wild


def main() -> None:
    wild.begin(group=True)
    np.random.seed(wild.RANK)
    net = timm.create_model("test_vit", pretrained=False, num_classes=10)
    wild.watch(net)
    optimizer = timm.optim.create_optimizer_v2(
        net, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75
    )
    average = timm.utils.ModelEmaV3(net, decay=0.99)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    wild.line(model, optimizer)
    schedule, _ = timm.scheduler.create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=2, warmup_epochs=0, updates_per_epoch=wild.STEPS
    )
    mix = timm.data.Mixup(mixup_alpha=0.1, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=10)
    measure = timm.loss.SoftTargetCrossEntropy()
    size = net.patch_embed.img_size[0]
    for step in range(wild.STEPS):
        image, target = mix(wild.data(step, 4, 3, size, size), wild.tokens(step, 10, 4))
        loss = measure(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        timm.utils.dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        average.update(net, step=step)
        schedule.step_update(num_updates=step)
        wild.step(timm.utils.reduce_tensor(loss.detach(), 2))
    wild.end()


if __name__ == "__main__":
    main()
