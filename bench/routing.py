r"""Does the router find the task, and what does it cost? No adapter is trained: prompts of each task
are shown to the router as a task's start shows them, then the evaluation's prompts are asked.

    OMP_NUM_THREADS=1 python bench/routing.py stream=mini25 --asked absent paraphrased paraphrased_hard
    OMP_NUM_THREADS=1 python bench/routing.py stream=mini1000 --ways own
    OMP_NUM_THREADS=1 python bench/routing.py scale=small stream=local25 model=FOLDER source=local \
        data_dir=FOLDER training.max_length=256

Each way of giving the instruction is used in training and evaluation alike (`own`, `unmarked`,
`shared`, `shuffled`, `absent`), and `--asked` ways in the evaluation alone, after training on own
ones. Beside the router's first and first three tasks stands the nearest task by the cosine of the
same features' means, and `centroids`: the first task where each leaves two or three means, of groups
of its prompts. `novel`: a fifth of the tasks is left out, five times over; how well are their
prompts told from those of known tasks by how strange they are to the nearest task (AUROC), and which
share of both does `abstain` leave to the bare backbone at so many standard deviations? The time is
that of finding the task of one prompt, with as many tasks as there are and with means near to
theirs up to `--n-tasks`, against a forward pass of the backbone over that prompt: by the router,
which looks at all of them, and by SciPy's KD-tree of the same means (`tree`), which finds the
nearest by the sum of both distances and is not what the router does.

    OMP_NUM_THREADS=1 python bench/routing.py scale=small stream=local25 model=FOLDER source=local \
        data_dir=FOLDER training.max_length=256 --ways own --n-tasks 1000 10000 100000 \
        --out records/bench/routing_keys.json
"""
import argparse
from dataclasses import replace
from pathlib import Path
from time import process_time

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from scipy.spatial import KDTree

from himalaya_hest.bridge.routed import batch_contexts
from himalaya_hest.himalaya.router import Router, solved, strangeness, task_scores
from himalaya_hest.running.continual_run import begin_run
from himalaya_hest.running.evaluation import evaluation_batches
from himalaya_hest.running.resolve import resolve
from himalaya_hest.running.run_files import read_arguments
from himalaya_hest.streams.batching import prompt_row
from himalaya_hest.streams.mini_world import twin_of
from himalaya_hest.workshop.measuring import auroc, called, circumstances, ratio, write_record

WAYS = ("own", "unmarked", "shared", "shuffled", "absent")
N_STD = (4, 6, 8, 12) # of `abstain`


def read(run, tasks):
    "Means (e, τ) of every prompt, by task."
    found = [[None] * len(t.prompts) for t in tasks]
    for batch in evaluation_batches(tasks, 16, run.tokenizer):
        pairs = zip(*batch_contexts(run.adapter.tuner, "default", batch))
        for (i, j), pair in zip(batch["rows"], pairs): found[i][j] = pair
    return [tuple(torch.stack(x) for x in zip(*rows)) for rows in found]


def fitted(run, known):
    "A router with these tasks."
    own = run.adapter.tuner.core().router
    router = Router(len(own.e_mean), own.content.k, n_counted=len(own.counted), keeps_spread=True)
    router.load_state_dict({n: t for n, t in own.state_dict().items() if ".rows" not in n}, strict=False)
    for pair in known: router.add(*pair)
    return router


def share_right(router, asked):
    "Of each task's prompts: found first, among the first three, nearest by cosine of the features."
    views = [(v.means.rows.float() * v.scales.rows) for v in (router.content, router.instruction)]
    means = torch.nn.functional.normalize(torch.cat(views, 1), dim=1)
    out = []
    for i, pair in enumerate(asked):
        order = task_scores(router, *pair).argsort(1, descending=True)
        near = torch.nn.functional.normalize(torch.cat(router.features(*pair), 1), dim=1) @ means.T
        hits = order[:, 0] == i, (order[:, :3] == i).any(1), near.argmax(1) == i
        out.append([float(h.float().mean()) for h in hits])
    return np.array(out)


def several_centroids(run, known, asked, n):
    """Share of prompts that find their task where each task leaves n means: those of groups of its
    prompts, by k-means in the content's features."""
    own, groups, task_of = fitted(run, []), [], []
    for t, pair in enumerate(known):
        z = own.features(*pair)[0].numpy()
        _, group = kmeans2(z, n, minit="++", seed=0)
        for g in np.unique(group):
            inside = torch.from_numpy(group == g)
            groups.append(tuple(x[inside] for x in pair)); task_of.append(t)
    router, task_of = fitted(run, groups), torch.tensor(task_of)
    right = [(task_of[task_scores(router, *pair).argmax(1)] == t).float().mean()
        for t, pair in enumerate(asked)]
    return float(torch.stack(right).mean())


def twin(router, names, asked):
    """Share of prompts that find their task or another of the same twin of the mini world, as `rte`
    and `rte_v2` are; None where tasks have no twins."""
    try: twins = [twin_of(name) for name in names]
    except ValueError: return None
    if len(set(twins)) == len(twins): return None
    found = [task_scores(router, *pair).argmax(1).tolist() for pair in asked]
    return float(np.mean([np.mean([twins[k] == t for k in ks]) for ks, t in zip(found, twins)]))


def novel(run, known, asked):
    """Of prompts of known tasks against those left out, five times over: AUROC of how strange a prompt
    is to its nearest task, and the share that `abstain` leaves to the bare backbone."""
    far = {True: [], False: []}
    for fold in range(5):
        inside = [i % 5 != fold for i in range(len(known))]
        router = fitted(run, [pair for pair, there in zip(known, inside) if there])
        for pair, there in zip(asked, inside):
            far[there].append(strangeness(router, *pair, task_scores(router, *pair).argmax(1)))
    a, b = (torch.cat(far[k]).numpy() for k in (True, False))
    return dict(novel_auroc=auroc(b, a),
        abstains={str(n): dict(known=float((a > n).mean()), novel=float((b > n).mean())) for n in N_STD})


def many(run, known, n):
    "A router of n tasks: those there are, then others near to them."
    router, more = fitted(run, known), torch.arange(n) % len(known)
    drawn = torch.Generator().manual_seed(0)
    for view in (router.content, router.instruction):
        for stack in (view.means, view.scales): stack.rows = stack.rows[more]
        apart = torch.randint(-8, 9, (n, view.k), generator=drawn)
        apart[:len(known)] = 0
        view.means.rows = (view.means.rows.int() + apart).clamp(-127, 127).to(torch.int8)
    return router


def tree_of(router, pair):
    "What finds the nearest mean of both views by a KD-tree."
    views = router.content, router.instruction
    tree = KDTree(torch.cat([solved(v)[2] for v in views], 1).numpy())
    def found():
        at = [z @ solved(v)[0] for v, z in zip(views, router.features(*pair))]
        return tree.query(torch.cat(at, 1).numpy())[1]
    return found


@torch.no_grad()
def cost(run, known, n_tasks, rounds):
    "Time of finding the task of one prompt over that of a forward pass, and both, medians in ms."
    batch = evaluation_batches([run.data[run.order[0]].evaluation], 1, run.tokenizer)[0]
    ids, backbone = batch["input_ids"], run.adapter.model.get_base_model()
    pair, times, out = tuple(x[:1] for x in known[0]), {}, {}
    calls = dict(forward=lambda: backbone(input_ids=ids))
    for n in sorted({len(known), *n_tasks}):
        router = many(run, known, n)
        calls["all", n] = lambda r=router: task_scores(r, *pair).argmax(1)
        calls["tree", n] = tree_of(router, pair)
    with run.adapter.model.disable_adapter():
        for name, call in [*calls.items()] * (rounds + 1):
            start = process_time(); call(); times.setdefault(name, []).append(process_time() - start)
    full = times.pop("forward")[1:]
    def told(t): return dict(ratio(t[1:], full), route_ms=1e3 * float(np.median(t[1:])))
    for (how, n), t in times.items():
        out.setdefault(str(n), {}).update(told(t) if how == "all" else dict(tree=told(t)))
    return dict(tokens=ids.shape[1], forward_ms=1e3 * float(np.median(full)), routed=out)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parameters", nargs="*", help="of a run, as name=value")
    parser.add_argument("--asked", nargs="*", default=["absent"], help="in the evaluation alone")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS,
        help="in training and evaluation")
    parser.add_argument("--n-tasks", type=int, nargs="+", default=[25, 100, 1000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="default: records/bench/routing-STREAM.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    given = read_arguments(a.parameters)
    training = dict(max_train_rows=400) | given.pop("training", {})
    table, time, of = {}, None, lambda **kw: dict(adapter="himalaya", training=training, **given, **kw)
    for how in a.ways:
        more = dict(evaluation=dict(instructions=a.asked)) if how == "own" else {}
        run = begin_run(resolve(of(instructions=how, **more)))
        data = [run.data[name] for name in run.order]
        known = read(run, [replace(d.evaluation, references=(), prompts=tuple(
            {k: v for k, v in prompt_row(row).items() if k in d.evaluation.prompts[0]}
            for row in d.train.to_list())) for d in data])
        asked = read(run, [d.evaluation for d in data])
        router = fitted(run, known)
        rows = {how: asked} | {f"own, asked {w}": read(run, [d.reworded[w] for d in data])
            for w in (a.asked if how == "own" else ())}
        for name, pairs in rows.items():
            shares = share_right(router, pairs)
            first, three, cosine = shares.mean(0)
            table[name] = dict(first=first, first_three=three, cosine=cosine,
                centroids={str(n): several_centroids(run, known, pairs, n) for n in (2, 3)},
                twin=twin(router, run.order, pairs), **novel(run, known, pairs),
                tasks={d.task.name: s[0] for d, s in zip(data, shares)})
            print(name, {k: v for k, v in table[name].items() if k != "tasks"}, flush=True)
        if how == "own": time = cost(run, known, a.n_tasks, a.rounds)
    stream = run.config.stream
    write_record(a.out or f"records/bench/routing-{Path(stream).stem}.json", circumstances(
        called(__file__), "cpu") | dict(stream=stream, model=given.get("model", "mini"), n_tasks=len(data),
            ways=table, time=time))


if __name__ == "__main__": main()
