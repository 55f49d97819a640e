"""An ordinary PyTorch training loop, and the lines that make it decentralized.

    mpirun -n 4 python examples/drop_in.py

Every rank trains on its own part of scikit-learn's handwritten digits and exchanges models with two
neighbours on a ring. Only the lines marked (1) to (4) differ from training on one GPU.
"""

from __future__ import annotations

import argparse

from hpc_oldsgd import OLDSGD, Agent  # (1) before mpi4py, which starts MPI

import torch
from mpi4py import MPI  # (1)
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--tau", type=int, default=5, help="local steps between two mixings")
args = parser.parse_args()

rank, n = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)
torch.manual_seed(0)  # the same first weights on every rank

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
x_test, y_test = x[1500:], y[1500:]
x_train, y_train = x[:1500][rank::n], y[:1500][rank::n]  # (2) this rank's share of the data

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
torch.manual_seed(rank)  # every rank draws other batches

with Agent(model, optimizer, OLDSGD(tau=args.tau), topology="ring") as agent:  # (3)
    for _ in range(args.steps):
        batch = torch.randint(len(x_train), (32,))
        loss = nn.functional.cross_entropy(model(x_train[batch]), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        agent.step()  # (4) in place of optimizer.step()
        scheduler.step()
    agent.x.copy_(agent.mean())  # the mean of all agents, running statistics included

model.eval()
with torch.no_grad():
    accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
if rank == 0:
    print(f"{n} agents, {args.steps} steps: test accuracy {accuracy:.1%}, last loss {loss:.3f}")
