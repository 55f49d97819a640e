"""A loop with Hugging Face Accelerate on several ranks: each has its own data and checkpoints.

    mpirun -n 2 python examples/accelerate_loop.py --checkpoint checkpoint

Start it again with the same folder and more epochs, and it goes on where it was saved.
docs/integrations/accelerate.md explains each part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_oldsgd import OLDSGD, Agent
from hpc_oldsgd.integrations import newest, start

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
args = parser.parse_args()

rank, n = start()  # before the Accelerator
torch.set_num_threads(1)
torch.manual_seed(0)  # the same first weights on every rank
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:1600], dtype=torch.float32) / 16, torch.tensor(labels[:1600])
data = TensorDataset(x, y)
sampler = DistributedSampler(data, num_replicas=n, rank=rank)  # this rank's share
loader = DataLoader(data, batch_size=len(sampler) // 40, sampler=sampler)  # 20 steps an epoch

own = args.checkpoint / f"rank-{rank}"
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = nn.Sequential(
    *(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()),
    *(nn.Dropout(0.2), nn.Linear(32, 10)),
)
model = model.to(accelerator.device)
torch.manual_seed(1 + rank)  # every rank drops out other units
inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
with Agent(model, inner, OLDSGD(tau=5), topology="ring") as agent:
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 10, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, agent.as_optimizer(), loader, scheduler
    )
    done = 0
    saved = newest(own, "epoch-*/random_states_0.pkl")  # Accelerate writes this file last
    if saved:
        accelerator.load_state(saved.parent)
        done = int(saved.parent.name.split("-")[1])
    for epoch in range(done, args.epochs):
        loader.set_epoch(epoch)  # it would count from 0 after a resume
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        # After 20 steps, so between two rounds. As safetensors it would write no views of x.
        accelerator.save_state(own / f"epoch-{epoch + 1}", safe_serialization=False)
    weights = agent.mean_state_dict()
    model.eval()
    with agent.mean_weights(), torch.no_grad():
        right = (model(x.to(agent.x)).argmax(1).cpu() == y).float().mean()
if rank == 0:
    print(f"{agent.t} steps, accuracy {right:.1%}")
