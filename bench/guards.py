"""What a training step pays for what watches over it: torch's deterministic mode, the norm of the
gradient before the hooks see it, and a checkpoint.

    OMP_NUM_THREADS=1 python bench/guards.py

Steps of the mini study (batch 8), each with and without, interleaved, in processor time; the median
of the ratios of --pairs pairs of five steps, and its 95 % interval. `same` is a step over itself:
how far such a figure carries.
"""
import argparse
import contextlib
import json
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from himalaya_hest.running import training
from himalaya_hest.running.checkpoint import save_checkpoint, write_atomic
from himalaya_hest.running.resolve import resolve
from himalaya_hest.running.continual_run import begin_run
from himalaya_hest.running.guards import deterministic_kernels
from himalaya_hest.ground.hooks import TaskContext
from himalaya_hest.measures.statistics import median_interval
from himalaya_hest.adapters.registry import adapter_tensors
from himalaya_hest.workshop.measuring import circumstances

STEPS = 5


@contextlib.contextmanager
def without_norm():
    "Steps that trust every gradient."
    real, training.gradient_norm = training.gradient_norm, lambda parameters: torch.ones(())
    try: yield
    finally: training.gradient_norm = real


def interval(ratios):
    return dict(zip(("median", "low", "high"),
        [round(float(x), 4) for x in (np.median(ratios), *median_interval(ratios))]))


def stepper(adapter, micro_batches=1):
    """A function that takes one optimiser step of so many micro-batches, and one that writes a
    checkpoint."""
    run = begin_run(resolve(dict(adapter=adapter, n_tasks=1)), quiet=True)
    task, accelerator, parameters = (run.data[run.order[0]], Accelerator(cpu=True),
        run.config.training)
    run.adapter.hooks.on_task_start(
        TaskContext(task.task.name, 0, 100_000, task.make_loader(), task.told))
    optimizer, group = training.make_optimizer(run.adapter,
        parameters), list(islice(task.make_loader(), micro_batches))
    run.adapter.model.train()
    def save(folder, number):
        tensors = (adapter_tensors(run.adapter)
            | {f"hooks/{n}": t for n, t in run.adapter.hooks.state_dict().items()}
            | {f"moments/{n}": t for n, t in training.optimizer_state(optimizer).items()})
        save_checkpoint(folder, number, tensors, {})
    return lambda: training.train_step(run.adapter, optimizer, group, parameters, accelerator), save


def timed(step, context):
    with context:
        start = time.process_time()
        for _ in range(STEPS): step()
        return time.process_time() - start


def measured(adapter, pairs):
    step, save = stepper(adapter)
    for _ in range(2 * STEPS): step()
    ratios, plain, written = dict(deterministic=[], gradient_norm=[], same=[]), [], []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(pairs):
            took, ways = {}, dict(first=contextlib.nullcontext, watched=deterministic_kernels,
                trusting=without_norm, second=contextlib.nullcontext)
            for name in np.random.default_rng(i).permutation(list(ways)):
                took[name] = timed(step, ways[name]())
            for name, ratio in dict(
                deterministic=took["watched"] / took["first"],
                gradient_norm=took["first"] / took["trusting"],
                same=took["second"] / took["first"],
            ).items():
                ratios[name].append(ratio)
            start = time.perf_counter()
            save(folder, i)
            written.append(time.perf_counter() - start)
            step() # a write leaves caches cold
            plain.append(took["first"] / STEPS)
    out = {name: interval(r) for name, r in ratios.items()}
    return out | dict(step_ms=round(1e3 * float(np.median(plain)), 2),
        checkpoint_wall_ms=round(1e3 * float(np.median(written)), 2))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", nargs="+", default=["himalaya", "lora"])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("records/bench/guards.json"))
    a = parser.parse_args()
    found = dict(circumstances=circumstances("OMP_NUM_THREADS=1 python bench/guards.py", "cpu"),
        pairs=a.pairs)
    for adapter in a.adapters:
        found[adapter] = measured(adapter, a.pairs); print(adapter, found[adapter], flush=True)
    write_atomic(a.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__": main()
