"""What packing costs: train a stream with vectors, gains and keys as they are, evaluate it, put
everything on its grid, and evaluate it again.

    python bench/packing_cost.py --seeds 0 1 2

The two evaluations see the same trained adapter, so their difference is packing alone and not
another course of training. Writes records/bench/packing_cost.json.
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np


def both(seed, stream, bits):
    "Mean scores of all tasks after the stream, before and after packing."
    from accelerate import Accelerator
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.running.record import versions
    from himalaya_hest.running.continual_run import begin_run
    from himalaya_hest.running.loop import train_stream
    from himalaya_hest.running.loop import evaluate_seen
    from himalaya_hest.himalaya.packing import packed_bytes, snap_slots_
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(dict(adapter="himalaya", stream=stream, seed=seed, order_seed=seed,
            adapter_config={"atom_bits": 32}, results_dir=folder, cache_dir=f"{folder}/cache",
            evaluation={"latency_pairs": 0}))
        run = begin_run(config, quiet=True)
        run.accelerator = Accelerator(cpu=True)
        train_stream(run)
        run.position.task -= 1 # the stream has ended: look at all tasks once more
        core = run.adapter.tuner.core()
        exact, unpacked = evaluate_seen(run), sum(packed_bytes(core, bits=32).values())
        snap_slots_(core, (core.owner >= 0).nonzero().squeeze(1), bits)
        packed = evaluate_seen(run)
        names = list(exact)
        scores = {kind: {n: round(s[n]["score"], 4) for n in names}
            for kind, s in (("exact", exact), ("packed", packed))}
        means = {kind: float(np.mean(list(s.values()))) for kind, s in scores.items()}
        return (dict(seed=seed, world=run.world["digest"], lost=means["exact"] - means["packed"],
            means=means, scores=scores,
            mb={"exact": unpacked / 1e6,
                "packed": sum(packed_bytes(core, bits=bits).values()) / 1e6}), versions())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--stream", default="mini25")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("records/bench/packing_cost.json"))
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        run, packages = both(seed, args.stream, args.bits)
        runs.append(run)
        print(
            f"seed {seed}: exact {run['means']['exact']:.4f}, packed "
            f"{run['means']['packed']:.4f}, lost {run['lost']:+.4f}; "
            f"{run['mb']['exact']:.2f} -> {run['mb']['packed']:.2f} MB",
            flush=True,
        )
    lost = [r["lost"] for r in runs]
    out = dict(command="python " + " ".join(sys.argv), stream=args.stream, bits=args.bits,
        lost_mean=float(np.mean(lost)), lost_max=max(lost), runs=runs, versions=packages)
    args.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    print(f"lost {np.mean(lost):+.4f} on average of {len(runs)}; {args.out}")


if __name__ == "__main__": main()
