"""Does a new task gain from the nearest finished ones? HIMALAYA learns tasks of the development
world and a variant of each, with few steps or many and from few rows or many, from four starts:
random directions and no core as the method does (`fresh`), directions of the nearest finished task
(`directions`), its cores as well (`whole`), and a mixture of the nearest three (`mixture`). The
router says which task is nearest: the one under which the new task's prompts are likeliest in the
mean. In the mixture each of the three has as much as it explains of these prompts, the posterior's
mean over them; its directions are those in which the mixed updates of all sites are largest.

    OMP_NUM_THREADS=1 python bench/warm_start.py
    OMP_NUM_THREADS=1 python bench/warm_start.py --steps 10 --rows --n-tasks 8 --seeds 0 \
        --work runs/warm_few --out runs/warm_few.json

With fewer rows than the steps take they come again: --rows rows in the 50 steps that a task has.
`new` are the scores of the stream's own tasks right after they were learned, the first left out,
`twin` those of their variants, whose twin is among the finished tasks. Differences to `fresh` are
means over tasks, each a mean over --seeds, with the 95 % BCa interval over tasks.
"""
import argparse
from pathlib import Path

import numpy as np
import torch

from himalaya_hest.himalaya.router import task_scores
from himalaya_hest.himalaya.tuner import HimalayaHooks, HimalayaModel
from himalaya_hest.jobs.run import run_continual
from himalaya_hest.workshop.measuring import called, circumstances, mean_interval, write_record

STARTS = ("fresh", "directions", "whole", "mixture")
BATCH, ALL_ROWS, STEPS = 8, 400, 50 # rows of a step, rows and steps of a task, at scale mini


def mixed(q, d, core, weights):
    """Directions and cores, as many as one task has, of the weighted sum of tasks' updates
    Σ w dᵀ C q: the best for all sites together (truncated higher-order SVD)."""
    r, updates = q.shape[1], torch.einsum("u,uiD,usij,ujR->sDR", weights, d, core, q)
    def largest(gram): return torch.linalg.eigh(gram).eigenvectors[:, -r:].T
    q = largest(torch.einsum("sDR,sDT->RT", updates, updates))
    d = largest(torch.einsum("sDR,sTR->DT", updates, updates))
    return q, d, d @ updates @ q.T


class FromNearest(HimalayaHooks):
    "Begins a task where the nearest finished ones ended."
    @torch.no_grad()
    def on_task_start(self, task):
        super().on_task_start(task)
        cores, router = self.core.tasks, self.core.router
        if self.start == "fresh" or not (n := len(cores.finished)): return
        # the last mean is the new task's own
        scores = task_scores(router, *self.contexts_of(task.loader))[:, :n]
        if self.start == "mixture":
            share, nearest = scores.softmax(1).mean(0).topk(min(3, n))
            q, d, core = mixed(*cores.kept(nearest), share / share.sum())
        else: q, d, core = (x[0] for x in cores.kept(scores.mean(0).argmax()[None]))
        cores.q.copy_(q); cores.d.copy_(d)
        if self.start != "directions": cores.core.copy_(core)


def learned(start, steps, rows, stream, seed, folder):
    "Scores of all tasks right after each was learned, in so many steps and from so many rows."
    FromNearest.start = start
    HimalayaModel.hooks_cls = FromNearest
    record = run_continual(dict(
        stream=str(stream), adapter="himalaya", seed=seed,
        results_dir=f"{folder}/{start}-{steps}-{rows}-{seed}",
        training=dict(max_steps=steps, max_train_rows=rows,
                      num_train_epochs=-(-steps * BATCH // rows)),
        evaluation=dict(latency_pairs=0, after_tasks=[])), quiet=True)
    return np.array([row[i] for i, row in enumerate(record["matrix"])])


def beside(scores):
    "Means of each start, and what it has over a fresh one."
    less = {s: scores[s] - scores["fresh"] for s in STARTS[1:]}
    return {s: float(v.mean()) for s, v in scores.items()} | {
        f"{s} less fresh": mean_interval(d) for s, d in less.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[5, 10, 25, 50, 100])
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 40, 100])
    parser.add_argument("--n-tasks", type=int, default=25, help="each with a variant")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default="runs/warm_start", help="goes on from there")
    parser.add_argument("--out", type=Path, default="records/bench/warm_start.json")
    a = parser.parse_args()
    if not a.steps + a.rows: parser.error("--steps and --rows are both without a number")
    torch.set_num_threads(1)
    groups = {"new": slice(1, a.n_tasks), "twin": slice(a.n_tasks, None)}
    cases = [(n, ALL_ROWS) for n in a.steps] + [(STEPS, n) for n in a.rows]
    out = []
    a.work.mkdir(parents=True, exist_ok=True)
    own, stream = a.work/"own.yaml", a.work/"twins.yaml"
    own.write_text(f"{{name: own, extends: mini25_dev, first: {a.n_tasks}}}")
    stream.write_text(f"{{name: twins, extends: own.yaml, variants: {2 * a.n_tasks}}}")
    for steps, rows in cases:
        scores = {s: [learned(s, steps, rows, stream, k, a.work) for k in a.seeds]
                  for s in STARTS}
        for group, at in groups.items():
            of = {s: np.mean([v[at] for v in found], 0) for s, found in scores.items()}
            out.append(dict(steps=steps, rows=rows, group=group) | beside(of))
        print(out[-2:], flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        stream="mini25_dev and a variant of each task", n_tasks=2 * a.n_tasks, seeds=a.seeds,
        cases=out))


if __name__ == "__main__": main()
