"""The Hugging Face Trainer on several ranks: each has its own Trainer, data and checkpoints.

    mpirun -n 2 python examples/hf_trainer.py --checkpoint checkpoint

Start it again with the same folder and more epochs, and it goes on where it was saved.
docs/integrations/hugging-face-trainer.md explains each part. The text is a random walk.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_oldsgd import OLDSGD, Agent
from hpc_oldsgd.integrations import newest, start

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
args = parser.parse_args()

rank, n = start()  # before TrainingArguments
torch.set_num_threads(1)
torch.manual_seed(0)  # the same data and first weights on every rank
walks = torch.randint(-1, 2, (320, 16)).cumsum(1) % 32
data = [{"input_ids": walk, "labels": walk} for walk in walks[rank::n]]  # this rank's share

own = args.checkpoint / f"rank-{rank}"
settings = TrainingArguments(
    output_dir=str(own),
    num_train_epochs=args.epochs,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    save_steps=10,  # a multiple of tau
    save_total_limit=2,  # another rank may be one behind
    seed=1 + rank,  # every rank has its own order of data and drops out other units
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to="none",
    logging_strategy="no",
)
sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).to(settings.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
with Agent(model, optimizer, OLDSGD(tau=5), topology="ring") as agent:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95)
    trainer = Trainer(
        model, settings, train_dataset=data, optimizers=(agent.as_optimizer(), scheduler)
    )
    # The Trainer writes this file last.
    saved = newest(own, "checkpoint-*/trainer_state.json")
    trainer.train(resume_from_checkpoint=saved and str(saved.parent))
    with agent.mean_weights():
        loss = trainer.evaluate(data)["eval_loss"]
    weights = agent.mean_state_dict()
if rank == 0:
    print(f"{agent.t} steps, loss {loss:.3f} of the mean model on rank 0's data")
