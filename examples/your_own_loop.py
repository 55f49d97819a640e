"""A training loop with all that a long run needs: save and resume, uneven data, the mean, metrics.

    mpirun -n 2 python examples/your_own_loop.py --checkpoint checkpoint

Start it again with the same folder, and it goes on where it was saved. docs/your-own-loop.md
explains each part. Every rank has another number of handwritten digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_oldsgd import OLDSGD, Agent  # before mpi4py, which starts MPI

import torch
from mpi4py import MPI
from sklearn.datasets import load_digits
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
parser.add_argument(
    "--end-at", type=int, default=None, help="end at this step, as a job limit does"
)
args = parser.parse_args()

rank, n = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)
torch.manual_seed(0)  # the same first weights on every rank
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
own = torch.arange(1500)[rank::n][: 1500 // n - 100 * rank]  # later ranks have less


def epoch_batches(epoch: int) -> list[Tensor]:
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(epoch))
    return list(own[order].split(32))


model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 4 * 4, 10)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
torch.manual_seed(1 + rank)  # every rank drops out other pixels

with Agent(model, optimizer, OLDSGD(tau=5), topology="ring") as agent:
    first, done = 0, 0
    if any(args.checkpoint.glob("step-*")):
        at = agent.load(args.checkpoint, scheduler=scheduler)
        first, done = at["epoch"], at["done"]
    for epoch in range(first, args.epochs):
        for batch in agent.batches(epoch_batches(epoch)[done:]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            agent.step()
            scheduler.step()
            done += 1
            if agent.at_boundary and agent.t % args.save_every == 0:
                agent.save(args.checkpoint, scheduler=scheduler, epoch=epoch, done=done)
            if agent.t == args.end_at:
                raise SystemExit
        done = 0
        with agent.mean_weights(), torch.no_grad():
            model.eval()
            right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
            model.train()
        metrics = agent.metrics()
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {right:.1%}, {metrics['step']} steps", flush=True)
    weights = agent.mean_state_dict()
if rank == 0:
    print(f"sum of the mean weights {sum(w.double().sum().item() for w in weights.values()):.17g}")
