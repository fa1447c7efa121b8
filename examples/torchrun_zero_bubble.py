"""Train a byte-level GPT under torch.distributed.pipelining's own schedules, with twobp-fx's stage in them.

    torchrun --nproc-per-node 2 -m examples.torchrun_zero_bubble [--schedule NAME] [--steps N] [--checkpoint DIR]

The text is the Python standard library's own source, read as bytes: nothing is downloaded. Each rank takes an accelerator if there
is one for every rank of this machine (NCCL on GPUs), else they share the CPU (gloo). The rank that has the last stage prints the
loss. With a checkpoint folder, a run saves there as it goes, and continues from the newest checkpoint it finds: with the very
losses of a run that was never interrupted, on as many ranks as you like, since names are those of the whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule, get_schedule_class

import twobp_fx
from examples import gpt, text

SCHEDULES = ("ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble", "Interleaved1F1B", "LoopedBFS", "1F1B", "GPipe")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
MICROBATCHES = 8
BATCH = 4 * MICROBATCHES
LENGTH = 64
FLAT = sd.StateDictOptions(flatten_optimizer_state_dict=True)  # an entry a parameter, so that ranks can be put together


class Stage(nn.Module):
    """Some of a GPT's blocks, under their names in the whole: with the first one the embeddings, with the last one the head."""

    def __init__(self, model: gpt.GPT, blocks: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
        self.tokens, self.positions = (model.tokens, model.positions) if 0 in blocks else (None, None)
        self.norm, self.head = (model.norm, model.head) if len(model.blocks) - 1 in blocks else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def connect() -> torch.device:
    """Join the other ranks. Returns the device of this one."""
    device = torch.device("cpu")
    if enough := torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device if enough else None)
    return device


def build_schedule(options: argparse.Namespace, device: torch.device) -> tuple[_PipelineSchedule, Stage]:
    """The schedule of torch over this rank's stages of a GPT, and one module of all that these hold.

    Raises ValueError if the schedule does not fit the number of ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = get_schedule_class(options.schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    count = ranks if single else 2 * ranks
    if count > min(options.depth, MICROBATCHES):
        raise ValueError(f"{count} stages are too many for {options.depth} blocks and {MICROBATCHES} micro-batches")
    here = [rank] if single else [rank, count - 1 - rank if options.schedule in V_SHAPED else ranks + rank]
    torch.manual_seed(0)  # every rank makes the whole model, and keeps its part
    model = gpt.build(width=options.width, depth=options.depth, length=LENGTH)
    blocks = [part.tolist() for part in torch.arange(options.depth).tensor_split(count)]
    part = Stage(model, [block for i in here for block in blocks[i]]).to(device)
    stages = [
        twobp_fx.PipelineStage(Stage(model, blocks[i]), i, count, device, compiler=options.compiler)  # in place of torch's
        for i in here
    ]
    return kind(stages[0] if single else stages, MICROBATCHES, loss_fn=gpt.loss_fn), part


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each rank writes what it holds. A folder with a `.metadata` is complete: that file is written last."""
    weights, state = sd.get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder / f"step-{step}")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint. Returns how many steps were done before it; 0 if there is none."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    if not complete:
        return 0
    weights, state = sd.get_state_dict(model, optimizer, options=FLAT)
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=max(complete, key=lambda path: int(path.name.removeprefix("step-"))))
    sd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)
    return int(saved["step"])


def train(options: argparse.Namespace, schedule: _PipelineSchedule, part: Stage, device: torch.device) -> None:
    """Train this rank's part of the model."""
    first, last = part.tokens is not None, part.head is not None
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    done = resume(options.checkpoint, part, optimizer) if options.checkpoint else 0
    if last and done:
        print(f"continuing after step {done}", flush=True)

    data = text.load()
    entropy = text.unigram_entropy(data)
    for step in range(done + 1, options.steps + 1):
        x, y = text.batches(data, BATCH, LENGTH, torch.Generator().manual_seed(step))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([x.to(device)] if first else []),
            **({"target": y.to(device), "losses": losses} if last else {}),
            return_outputs=False,
        )
        optimizer.step()
        if last and (step == 1 or step % options.every == 0):
            loss = torch.stack(losses).mean().item()
            print(f"step {step:4d}   loss {loss:.6f}   (bytes by frequency alone: {entropy:.3f})", flush=True)
        if options.checkpoint and (step % options.every == 0 or step == options.steps):
            save(options.checkpoint, step, part, optimizer)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="ZBVZeroBubble", choices=SCHEDULES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="print the loss, and save, once in so many steps")
    parser.add_argument("--checkpoint", type=Path, help="a folder to save in, and to continue from")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8, help="how many blocks")
    options = parser.parse_args()
    device = connect()
    try:
        schedule, part = build_schedule(options, device)
    except ValueError as error:  # the same on every rank: one says it
        message = f"{options.schedule} over {dist.get_world_size()} ranks: {error}"
        sys.exit(message if dist.get_rank() == 0 else 0)
    train(options, schedule, part, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
