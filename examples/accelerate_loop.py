"""A training loop of one's own with accelerate, watched.

accelerate launch examples/accelerate_loop.py                       # trains
accelerate launch examples/accelerate_loop.py --learning-rate 1e30  # goes bad, and tells where
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from overflowstat import Monitor


def train(learning_rate: float = 0.1, mixed_precision: str = "no", accumulation: int = 2, batches: int = 16) -> Monitor:
    """Fit a small network to the sum of its inputs; returns the monitor, detached."""
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    inputs = torch.randn(4 * batches, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # prepare() may have put the model into another one, as DistributedDataParallel; the names are to be its own.
    with Monitor(accelerator.unwrap_model(model)) as monitor:
        for x, target in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), target)
                monitor.judge("loss", loss)  # which no module of the model gave
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()
    return monitor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--accumulation", type=int, default=2, help="batches for each step of the optimizer")
    chosen = parser.parse_args()
    watched = train(chosen.learning_rate, chosen.mixed_precision, chosen.accumulation)
    print(f"{watched.batch_number} batches, {watched.total_calls} calls of modules, and all numbers finite")
