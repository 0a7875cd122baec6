"""Does it matter how the masked router breaks ties? HIMALAYA with units ranked by whole numbers,
equal ones by index (`himalaya.router.open_units`), and by a float product, whose last bit hangs on
batch size and processor.

    OMP_NUM_THREADS=1 python bench/ties.py         # ten (seed, order) pairs on both worlds
    OMP_NUM_THREADS=1 python bench/ties.py --streams mini25 --pairs 3 --out /tmp/ties.json

Whole runs with the settings of records/main.parquet. AUC of each, and the mean of the paired
differences with its standard error.
"""
import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from himalaya_hest.himalaya import router as module
from himalaya_hest.jobs.run import run_continual
from himalaya_hest.workshop.measuring import circumstances

WHOLE = module.router_features


def by_rounding(router, e, tau):
    "φ with the units that the float product of scaled prototypes and signs ranks highest."
    t = module.nearest_prototype(router, (tau - router.t_mean) / router.t_scale)
    top = (t @ (router.wt / len(router.e_mean)**.5).T).topk(router.n_open, dim=1).indices
    return module.masked_features(
        router, e, torch.zeros(len(t), router.n_features, device=t.device).scatter_(1, top, 1.0))


def auc(stream, seed, rule, folder):
    "Retained-accuracy AUC of one run."
    module.router_features = rule
    try:
        record = run_continual(
            dict(adapter="himalaya", stream=stream, seed=seed, order_seed=seed,
                results_dir=str(folder / rule.__name__)), quiet=True)
    finally: module.router_features = WHOLE
    return record["summary"]["retained_accuracy_auc"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", default=["mini25_dev", "mini25"])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--runs", type=Path,
        help="folder of the runs; those that it has are not made again")
    parser.add_argument("--out", type=Path, default=Path("records/bench/ties.json"))
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for stream in a.streams:
            pairs = []
            for seed in range(a.pairs):
                pairs.append(dict(seed=seed, whole_numbers=auc(stream, seed, WHOLE, a.runs
                    or Path(temporary)), rounding=auc(stream, seed, by_rounding, a.runs
                        or Path(temporary))))
                print(stream, pairs[-1], flush=True)
            gain = np.array([p["whole_numbers"] - p["rounding"] for p in pairs])
            found = json.loads(a.out.read_text(encoding="utf-8")) if a.out.exists() else {}
            found[stream] = dict(
                circumstances=circumstances(
                    f"python bench/ties.py --streams {stream} --pairs {a.pairs}", "cpu"),
                whole_numbers=float(np.mean([p["whole_numbers"] for p in pairs])),
                rounding=float(np.mean([p["rounding"] for p in pairs])),
                difference=float(gain.mean()),
                standard_error=float(gain.std(ddof=1) / len(gain) ** 0.5), pairs=pairs)
            a.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
