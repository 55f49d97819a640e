"""Lightning Fabric on several ranks: each has its own Fabric, data and checkpoints.

    mpirun -n 2 python examples/lightning_fabric.py --checkpoint checkpoint

Start it again with the same folder and more epochs, and it goes on where it was saved.
docs/integrations/fabric.md explains each part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_oldsgd import OLDSGD, Agent
from hpc_oldsgd.integrations import newest, start

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
args = parser.parse_args()

rank, n = start()  # before Fabric
torch.set_num_threads(1)
torch.manual_seed(0)  # the same first weights on every rank
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:1600], dtype=torch.float32) / 16, torch.tensor(labels[:1600])
data = TensorDataset(x, y)
sampler = DistributedSampler(data, num_replicas=n, rank=rank)  # this rank's share
loader = DataLoader(data, batch_size=len(sampler) // 40, sampler=sampler)  # 20 steps an epoch

fabric = Fabric(accelerator="auto", devices=1, plugins=LightningEnvironment())
model = nn.Sequential(
    *(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()),
    *(nn.Dropout(0.2), nn.Linear(32, 10)),
)
model = fabric.to_device(model)
torch.manual_seed(1 + rank)  # every rank drops out other units
inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
own = args.checkpoint / f"rank-{rank}"
with Agent(model, inner, OLDSGD(tau=5), topology="ring") as agent:
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 10, 0.9)
    model, optimizer = fabric.setup(model, agent.as_optimizer())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    saved = newest(own, "epoch-*.ckpt")
    if saved:
        fabric.load(saved, state)
    for epoch in range(state["epoch"], args.epochs):
        sampler.set_epoch(epoch)  # a loader set up by Fabric would count from 0 after a resume
        for k, batch in enumerate(loader):
            images, labels = fabric.to_device(batch)
            loss = nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss / 2)
            if k % 2:  # the gradient of two batches
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        state["epoch"] = epoch + 1
        fabric.save(own / f"epoch-{epoch + 1}.ckpt", state)  # after 20 steps: between two rounds
    weights = agent.mean_state_dict()
    model.eval()
    with agent.mean_weights(), torch.no_grad():
        right = (model(fabric.to_device(x)).argmax(1) == fabric.to_device(y)).float().mean()
if rank == 0:
    print(f"{agent.t} steps, accuracy {right:.1%}")
