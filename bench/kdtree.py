"""From which number of atoms does the exact index pay against brute force?

    OMP_NUM_THREADS=1 python bench/kdtree.py --out records/bench/kdtree.json

Brute force is one matrix product and an argmax, which is exact for unit vectors. Atoms and queries
have width 128 and come either from the whole sphere or from a sphere of low dimension inside it.
CPU time of the process, single thread; in every repeat all ways are timed one after another in
turn; medians with the interval between the second smallest and the second largest of 9 repeats (96
% for a median). Indices are compared first.
"""
import argparse
import json
import platform
import statistics
import time

import numpy as np
import torch

from himalaya_hest.himalaya.published.tree import KDTree
from himalaya_hest.ground.linalg import unit

WIDTH, REPEATS, FANOUTS, BATCHES = 128, 9, (4, 8, 16), (1, 32)
SIZES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
DIMENSIONS = (2, 4, 8, WIDTH - 1) # of the sphere the rows lie on; 127 is the whole one


def rows(n, dimension, gen):
    "Unit vectors on one fixed sphere of the given dimension."
    frame = torch.linalg.qr(
        torch.randn(WIDTH, dimension + 1, generator=torch.Generator().manual_seed(dimension))).Q
    return unit(torch.randn(n, dimension + 1, generator=gen)) @ frame.T


def clock(f, times):
    begun = time.process_time()
    for _ in range(times): f()
    return (time.process_time() - begun) / times


def summary(values):
    v = sorted(values)
    return [float(f"{x:.3g}") for x in (statistics.median(v), v[1], v[-2])]


def measure(n, dimension, batch, seed):
    "Microseconds a query for each way, and the ratio brute force : tree of paired times."
    gen = torch.Generator().manual_seed(seed)
    atoms, x = rows(n, dimension, gen), rows(batch, dimension, gen)
    trees, build = {}, {}
    for f in FANOUTS:
        trees[f] = KDTree(n, fanout=f)
        build[f] = clock(lambda: trees[f].rebuild(atoms), 1)
    ways = {"brute": lambda: (x @ atoms.T).argmax(1)} | {str(f): (lambda t=t: t.nearest(x))
        for f, t in trees.items()}
    found = {f: t.nearest(x) for f, t in trees.items()}
    assert all(torch.equal(r.index, ways["brute"]()) for r in found.values()), (n, dimension)
    times = {k: max(1, min(50, int(.006 / max(clock(w, 1), 1e-6)))) for k, w in ways.items()}
    took = {k: [] for k in ways}
    for _ in range(REPEATS):
        for k, w in ways.items(): took[k].append(clock(w, times[k]) / batch * 1e6)
    return {"atoms": n, "dimension": dimension, "batch": batch, "brute_us": summary(took["brute"]),
        "tree_us": {k: summary(v) for k, v in took.items() if k != "brute"},
        "ratio": {k: summary([b / t for b, t in zip(took["brute"], v)]) for k, v in took.items()
            if k != "brute"}, "compared": {str(f): float(
                f"{float(r.compared.float().mean()) / n:.3g}") for f, r in found.items()},
        "build_s": {str(f): round(s, 4) for f, s in build.items()}}


def pays_from(measured):
    """Smallest size from which on the whole interval of the ratio lies above one, by dimension,
    batch and fanout; null where there is none."""
    out = {}
    for m in sorted(measured, key=lambda m: m["atoms"]):
        for f, (_, low, _) in m["ratio"].items():
            key = f"{m['dimension']}/{m['batch']}/{f}"
            out[key] = (out.get(key) or m["atoms"]) if low > 1 else None
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    p.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    torch.set_num_threads(1)
    measured = []
    for n in a.sizes:
        for dimension in DIMENSIONS:
            for batch in BATCHES:
                measured.append(measure(n, dimension, batch, a.seed))
                print(n, dimension, batch, measured[-1]["brute_us"], measured[-1]["tree_us"],
                    flush=True)
    result = {
        "command": (
            "OMP_NUM_THREADS=1 python bench/kdtree.py --out records/bench/kdtree.json"
            if tuple(a.sizes) == SIZES
            else f"python bench/kdtree.py --sizes {' '.join(map(str, a.sizes))}"
        ),
        "width": WIDTH,
        "leaf": 4,
        "repeats": REPEATS,
        "seed": a.seed,
        "device": "cpu, one thread of a shared machine",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "columns": "ratio and *_us: [median, second smallest, second largest] of the repeats; "
        "compared: distances computed, per atom (those of the first leaf twice)",
        "cpu_s": round(time.process_time()),
        "pays_from": pays_from(measured),
        "measured": measured,
    }
    print(result["cpu_s"], "s of CPU;", result["pays_from"])
    if a.out:
        head = json.dumps({k: v for k, v in result.items() if k != "measured"}, indent=1)
        body = ",\n".join("  " + json.dumps(m) for m in measured)
        with open(a.out, "w", encoding="utf-8") as f:
            f.write(f'{head[:-2]},\n "measured": [\n{body}\n ]\n}}\n')


if __name__ == "__main__": main()
