"""Does a new task gain from the nearest finished one? HIMALAYA learns tasks of the development world
and a variant of each, with few steps or many, from three starts: random directions and no core as
the method does (`fresh`), directions of the nearest finished task (`directions`), and its cores as
well (`whole`). The router says which task is nearest: the one under which the new task's prompts are
likeliest in the mean.

    OMP_NUM_THREADS=1 python bench/warm_start.py
    OMP_NUM_THREADS=1 python bench/warm_start.py --steps 10 --n-tasks 8 --out /tmp/warm_start.json

`new` are the scores of the stream's own tasks right after they were learned, the first left out,
`twin` those of their variants, whose twin is among the finished tasks. Differences to `fresh` are
means over tasks, with the 95 % BCa interval over tasks.
"""
import argparse
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from himalaya_hest.bridge.routed import batch_contexts
from himalaya_hest.himalaya.router import task_scores
from himalaya_hest.himalaya.tuner import HimalayaHooks, HimalayaModel
from himalaya_hest.jobs.run import run_continual
from himalaya_hest.measures.statistics import bca_interval
from himalaya_hest.workshop.measuring import called, circumstances, write_record

STARTS = ("fresh", "directions", "whole")


class FromNearest(HimalayaHooks):
    "Begins a task where the nearest finished one ended."
    @torch.no_grad()
    def on_task_start(self, task):
        super().on_task_start(task)
        cores, router = self.core.tasks, self.core.router
        if self.start == "fresh" or not (n := len(cores.finished)): return
        pairs = [self.contexts(b) for b in islice(task.loader, self.context_batches)]
        # the last mean is the new task's own
        nearest = task_scores(router, *map(torch.cat, zip(*pairs)))[:, :n].mean(0).argmax()
        q, d, core = cores.kept(nearest[None])
        cores.q.copy_(q[0]); cores.d.copy_(d[0])
        if self.start == "whole": cores.core.copy_(core[0])


def learned(start, steps, stream, seed, folder):
    "Scores of all tasks right after each was learned."
    def make_hooks(self, name):
        c = self.peft_config[name]
        contexts = partial(batch_contexts, self, name)
        hooks = FromNearest(self.cores[name], contexts, c.context_batches, c.seed)
        hooks.start = start
        return hooks
    HimalayaModel.make_hooks = make_hooks
    record = run_continual(dict(
        stream=str(stream), adapter="himalaya", seed=seed,
        results_dir=f"{folder}/{start}-{steps}-{seed}",
        training=dict(max_steps=steps, num_train_epochs=-(-steps // 50)),
        evaluation=dict(latency_pairs=0, after_tasks=[])), quiet=True)
    return np.array([row[i] for i, row in enumerate(record["matrix"])])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 10, 25, 50, 100])
    parser.add_argument("--n-tasks", type=int, default=25, help="each with a variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default="records/bench/warm_start.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        own, stream = Path(folder)/"own.yaml", Path(folder)/"twins.yaml"
        own.write_text(f"{{name: own, extends: mini25_dev, first: {a.n_tasks}}}")
        stream.write_text(f"{{name: twins, extends: own.yaml, variants: {2 * a.n_tasks}}}")
        for steps in a.steps:
            scores = {s: learned(s, steps, stream, a.seed, folder) for s in STARTS}
            groups = {"new": slice(1, a.n_tasks), "twin": slice(a.n_tasks, None)}
            out[str(steps)] = {g: {s: float(v[at].mean()) for s, v in scores.items()} | {
                f"{s} less fresh": [float(d.mean()), *bca_interval(d)]
                for s in STARTS[1:] for d in [scores[s][at] - scores["fresh"][at]]}
                for g, at in groups.items()}
            print(steps, out[str(steps)], flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        stream="mini25_dev and a variant of each task", n_tasks=2 * a.n_tasks, seed=a.seed,
        steps=out))


if __name__ == "__main__": main()
