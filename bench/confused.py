"""What does a wrong task cost? Prompts of a finished run, answered by the task that the router finds
and by their own.

    himalaya-hest run stream=mini1000 n_tasks=250 instructions=absent adapter_config.r=4 \\
        training.max_train_rows=400 evaluation.after_tasks=[250] run_id=untold
    OMP_NUM_THREADS=1 python bench/confused.py runs/untold

Tasks that resemble one another may be taken for one another and lose nothing by it. Every prompt is
asked as the run asked it, and in `--asked` ways, each time four times: the router chooses the task
(`found`), the updates of its --nearest tasks are mixed by how likely it finds each (`mixed`), the
same only for prompts of which it finds none of these likelier than --unsure (`mixed_where_unsure`),
or the task is named (`named`). `cost` is the score found less the one named, `mixing` and
`mixing_where_unsure` the mixed one less the one found, `first` the share of prompts for which the
router chooses their own task. Means over tasks, with 95 % intervals over tasks (BCa).
"""
import argparse
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from himalaya_hest.hest.passes import in_place_of
from himalaya_hest.himalaya.router import task_scores
from himalaya_hest.himalaya.task_cores import task_update
from himalaya_hest.running.continual_run import begin_run
from himalaya_hest.running.evaluation import evaluate, evaluation_batches
from himalaya_hest.running.run_files import load_config
from himalaya_hest.workshop.measuring import called, circumstances, mean_interval, write_record


def mixture(core, n, unsure=1.):
    """A route that gives each prompt its n likeliest tasks, each as much as it is likely among them;
    the likeliest alone where it is likelier than `unsure`."""
    def route(e, tau):
        best = task_scores(core.router, e, tau).topk(min(n, len(core.names)))
        tasks, which = best.indices.unique(return_inverse=True)
        p = best.values.softmax(1) # the likeliest first
        p = torch.where(p[:, :1] > unsure, torch.eye(p.shape[1], dtype=p.dtype)[:1], p)
        weight = e.new_zeros(len(e), len(tasks)).scatter_(1, which, p)
        return task_update(core.tasks, core.tasks.kept(tasks), weight)
    return route


def asked(run, task, n, unsure):
    "Scores by the tasks found, both mixtures, and its own, and the share of prompts that find it."
    tuner, found = run.adapter.tuner, []
    def score(): return evaluate(run.adapter, [task], run.tokenizer)[0][task.name]["score"]
    for batch in evaluation_batches([task], 128, run.tokenizer): found += tuner.find_tasks(batch)
    by_router, core = score(), tuner.core()
    mixed = []
    for most in (1., unsure):
        with in_place_of(core, route=mixture(core, n, most)): mixed.append(score())
    tuner.set_task(task.name)
    try: return by_router, *mixed, score(), float(np.mean([f == task.name for f in found]))
    finally: tuner.set_task(None)


def told(rows):
    "Means over tasks, and the difference with its interval."
    found, mixed, unsure, named, first = np.array(rows).T
    return dict(found=found.mean(), mixed=mixed.mean(), mixed_where_unsure=unsure.mean(),
        named=named.mean(), first=first.mean(), cost=mean_interval(found - named),
        mixing=mean_interval(mixed - found), mixing_where_unsure=mean_interval(unsure - found))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--tasks", type=int, default=0, help="a seeded sample of so many; 0: all")
    parser.add_argument("--nearest", type=int, default=3, help="tasks of a mixture")
    parser.add_argument("--unsure", type=float, default=.5, help="probability of the likeliest")
    parser.add_argument("--asked", nargs="*", default=[], help="other ways of giving the instruction")
    parser.add_argument("--out", type=Path, default="records/bench/confused.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(a.run/"config.yaml")
    run = begin_run(replace(config, evaluation=config.evaluation | dict(instructions=a.asked)))
    run.adapter.model.load_adapter(a.run/"adapter", "default")
    run.adapter.model.eval()
    names, rows = run.order, {way: [] for way in (config.instructions, *a.asked)}
    if a.tasks: names = sorted(random.Random(0).sample(names, min(a.tasks, len(names))))
    for k, name in enumerate(names):
        data = run.data[name]
        tasks = {config.instructions: data.evaluation, **data.reworded}
        for way, of in rows.items(): of.append(asked(run, tasks[way], a.nearest, a.unsure))
        if not k % 20: print(f"{k}/{len(names)}", name, {w: of[-1] for w, of in rows.items()}, flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        run=config.run_id, n_tasks=len(run.order), asked=len(names), nearest=a.nearest, unsure=a.unsure,
        ways={way: told(of) for way, of in rows.items()}))


if __name__ == "__main__": main()
