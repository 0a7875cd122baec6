"""What task 1,000 costs beside task 10: HIMALAYA learns one task, and answers its prompts, with so
many finished tasks already there.

    OMP_NUM_THREADS=1 python bench/long_stream.py
    OMP_NUM_THREADS=1 python bench/long_stream.py --finished 9 99 --rounds 2 --out /tmp/long.json

The finished tasks are random numbers and random prompts: what they cost does not depend on what
they say. A round takes all numbers of tasks in random order: a task's start, its 50 steps and its
end (`learn`), and answers to its 50 validation prompts (`answer`), in process time. Ratios to the first
number are medians over rounds, with the 95 % interval of a bootstrap over rounds. `peak_mb` is the
most memory of a process of its own that does one round.
"""
import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time

import torch
from accelerate import Accelerator

from himalaya_hest.adapters.registry import build_adapter
from himalaya_hest.ground.hooks import TaskContext
from himalaya_hest.ground.rows import RowStack
from himalaya_hest.himalaya.tuner import name_row
from himalaya_hest.running.backbone import load_backbone
from himalaya_hest.running.continual_run import begin_run
from himalaya_hest.running.evaluation import evaluation_batches, generate_batch
from himalaya_hest.running.record import peak_memory_mb
from himalaya_hest.running.resolve import resolve
from himalaya_hest.running.training import learn_task
from himalaya_hest.workshop.measuring import called, circumstances, ratio, spread, write_record


@torch.no_grad()
def filled(run, n, r):
    "An adapter with n finished tasks of random numbers."
    model, tokenizer, _ = load_backbone("mini")
    adapter = build_adapter("himalaya", model, tokenizer, "default", dict(r=r), None, 0)
    adapter.tuner.fit_statistics(tokenizer)
    core, gen = adapter.tuner.core(), torch.Generator().manual_seed(0)
    def prompts(mean, scale): # of one task, as far from generic text as it spreads
        draw = lambda *shape: torch.randn(*shape, len(mean), generator=gen)
        return mean + scale * (draw() + .3 * draw(8))
    for k in range(n):
        router = core.router
        router.add(prompts(router.e_mean, router.e_scale), prompts(router.t_mean, router.t_scale))
        core.tasks.begin(k)
        core.tasks.core.normal_(0, .1, generator=gen)
        core.tasks.keep()
        core.names.add(name_row(f"task {k}"))
    return adapter


def one_round(run, adapter):
    "Process time of learning a task and of answering its prompts; the task is taken away again."
    data, training = run.data[run.order[0]], run.config.training
    stacks = [m for m in adapter.tuner.core().modules() if isinstance(m, RowStack)]
    before = [s.rows.clone() for s in stacks]
    start = process_time()
    task = TaskContext(data.task.name, 0, data.n_batches, data.make_loader(), data.told)
    learn_task(adapter, task, data.make_loader, data.n_batches, training, run.accelerator)
    learned = process_time()
    adapter.model.eval()
    for batch in evaluation_batches([data.evaluation], 128, run.tokenizer):
        generate_batch(adapter.model, batch, run.tokenizer, adapter.takes_masks)
    answered = process_time()
    for stack, rows in zip(stacks, before): stack.rows = rows
    return learned - start, answered - learned


def measured(run, finished, rounds, r):
    "Times of each number of tasks."
    adapters = {n: filled(run, n, r) for n in finished}
    times, dice = {n: [] for n in finished}, random.Random(0)
    for k in range(rounds + 1):
        for n in dice.sample(finished, len(finished)):
            took = one_round(run, adapters[n])
            if k: times[n].append(took) # the first round warms up
    return {n: dict(zip(("learn", "answer"), zip(*t))) for n, t in times.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finished", type=int, nargs="+", default=[9, 99, 999], help="tasks there")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--r", type=int, default=4, help="rank of a task")
    parser.add_argument("--peak", action="store_true", help="print the memory of one round alone")
    parser.add_argument("--out", type=Path, default="records/bench/long_stream.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        of = dict(stream="mini25", n_tasks=1, adapter="lora", results_dir=folder)
        run = begin_run(resolve(of), quiet=True)
        run.accelerator = Accelerator(cpu=True)
        if a.peak:
            one_round(run, filled(run, a.finished[0], a.r))
            return print(peak_memory_mb())
        times = measured(run, a.finished, a.rounds, a.r)
    first, out = a.finished[0], {}
    for n, of in times.items():
        alone = [sys.executable, __file__, "--peak", "--finished", str(n), "--r", str(a.r)]
        peak = subprocess.run(alone, capture_output=True, text=True, check=True).stdout
        out[str(n)] = {
            k: dict(s=spread(v), of_first=ratio(v, times[first][k])) for k, v in of.items()}
        out[str(n)]["peak_mb"] = float(peak.split()[-1])
        print(n, out[str(n)], flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        rounds=a.rounds, r=a.r, finished=out))


if __name__ == "__main__": main()
