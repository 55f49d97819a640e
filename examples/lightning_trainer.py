"""The Lightning Trainer on several ranks: each has its own Trainer, data and checkpoints.

    mpirun -n 2 python examples/lightning_trainer.py --checkpoint checkpoint

Start it again with the same folder and more epochs, and it goes on where it was saved.
docs/integrations/lightning.md explains each part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_oldsgd import OLDSGD, Agent
from hpc_oldsgd.integrations import newest, start

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
args = parser.parse_args()

rank, n = start()  # before the Trainer
torch.set_num_threads(1)
torch.manual_seed(0)  # the same first weights on every rank


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()),
            *(nn.Dropout(0.2), nn.Linear(32, 10)),
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> dict:  # the model is on its device now
        inner = torch.optim.AdamW(self.parameters(), lr=3e-3)
        # Lightning has loaded the checkpoint's weights already, each rank its own. The optimizer
        # brings them again, with all the rest.
        self.agent = Agent(self, inner, OLDSGD(tau=5), topology="ring", sync=True)
        optimizer = self.agent.as_optimizer()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_end(self) -> None:
        self.weights = self.agent.mean_state_dict()
        self.eval()
        with self.agent.mean_weights(), torch.no_grad():
            right = self.net(x.to(self.device)).argmax(1).cpu() == y
        self.accuracy = right.float().mean().item()
        self.agent.finish()


images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:1600], dtype=torch.float32) / 16, torch.tensor(labels[:1600])
data = TensorDataset(x, y)
sampler = DistributedSampler(data, num_replicas=n, rank=rank)  # this rank's share
loader = DataLoader(data, batch_size=len(sampler) // 40, sampler=sampler)  # 20 steps an epoch

own = args.checkpoint / f"rank-{rank}"
model = Digits()
torch.manual_seed(1 + rank)  # every rank drops out other units
trainer = L.Trainer(
    accelerator="auto",
    devices=1,
    plugins=LightningEnvironment(),  # this rank is no part of a world that Lightning knows
    max_epochs=args.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=ModelCheckpoint(own, filename="{epoch}", save_top_k=-1),  # every epoch
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
saved = newest(own, "*.ckpt")
trainer.fit(model, loader, ckpt_path=saved)
weights = model.weights
if rank == 0:
    print(f"{model.agent.t} steps, accuracy {model.accuracy:.1%}")
