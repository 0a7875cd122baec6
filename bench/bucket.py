"""What a token bucket takes of time: rows that fit, rows of which every token must be lowered, and
single decoded tokens.

    OMP_NUM_THREADS=1 python bench/bucket.py

Random utilities. Gates of blocks (31, as in a backbone of 32 blocks) or of directions (2,048: 32
blocks, 4 sites, 16 directions). "fits": a budget of 1; "lowered": all gates ask for fp at a budget
of a third; "uneven": the same with costs that differ a thousandfold from gate to gate, so that few
gates are passed over by their running sum. Each setting is timed in rounds, all settings in turns;
a figure is the median over rounds with the smallest and the largest. The bucket works on the CPU
whatever device the model is on.
"""
import argparse
import platform
import statistics
import time

import numpy as np
import torch

from himalaya_hest.hest.bucket import TokenBuckets
from himalaya_hest.hest.gate_costs import GateCosts, direction_costs
from himalaya_hest.workshop.measuring import called, write_record

GATES = {"blocks": 31, "directions": 2048}


def costs_of(scope, uneven):
    if scope == "directions":
        widths = np.tile(np.repeat([8192., 8192., 8192., 15104.], 16), 32)
        return direction_costs(
            widths * (10.0 ** np.random.default_rng(0).uniform(-3, 0, len(widths)) if uneven
                else 1.0), (0.0, 0.5, 1.0))
    table = np.tile([0.0, 0.29, 0.94], (GATES[scope], 1)) * (
        10.0 ** np.random.default_rng(0).uniform(-3, 0, (GATES[scope], 1)) if uneven else 1.0)
    per_key = np.tile([0., 4e-5, 4e-5], (GATES[scope], 1))
    fixed = 1. + .06 * GATES[scope]
    return GateCosts((fixed + table[:, 2].sum(), 4e-5 * 32),
        (min(fixed, 0.1 * (fixed + table[:, 2].sum())), 4e-5), table, per_key, 0.5)


def inputs(gates, batch, n):
    rng = torch.Generator().manual_seed(0)
    utilities = torch.randn(batch, n, gates, 3, generator=rng)
    utilities[..., 0], utilities[..., 2] = 0., utilities[..., 2].abs() + 9.
    keys = torch.arange(1, n + 1).expand(batch, n)
    return (torch.full((batch, n, gates), 2), utilities, keys,
        torch.zeros(batch, n, dtype=torch.bool))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="records/bench/bucket_speed.json")
    args = parser.parse_args()
    settings = [(scope, kind, batch, n) for scope in GATES
        for batch, n in ((1, 1), (16, 1), (1, 512), (1, 4096)) for kind in (
            "fits", "lowered", "uneven")]
    found, lowered = {s: [] for s in settings}, {}
    for _ in range(args.rounds):
        for scope, kind, batch, n in settings:
            given, repeats = inputs(GATES[scope], batch, n), max(1, 64 // (batch * n))
            costs = costs_of(scope, kind == "uneven")
            buckets = [TokenBuckets(batch, 1.0 if kind == "fits" else 1 / 3, costs)
                for _ in range(repeats)]
            start = time.perf_counter()
            for b in buckets: states = b.spend(*given)
            found[scope, kind, batch,
                n].append((time.perf_counter() - start) / repeats / (batch * n) * 1e6)
            lowered[scope, kind, batch, n] = (states != given[0]).any(-1).float().mean().item()
    rows = [dict(scope=s[0], gates=GATES[s[0]], case=s[1], batch_size=s[2], n_tokens=s[3],
        lowered_share=lowered[s], token_us=statistics.median(t), token_us_low=min(t),
        token_us_high=max(t)) for s, t in found.items()]
    for r in rows:
        print(
            f"{r['scope']:10} {r['gates']:5} gates, {r['case']:8} batch "
            f"{r['batch_size']:2}, {r['n_tokens']:4} tokens: {r['token_us']:7.2f} us a "
            f"token [{r['token_us_low']:.2f}, {r['token_us_high']:.2f}], "
            f"{r['lowered_share']:.0%} lowered"
        )
    record = dict(command=called(__file__), rounds=args.rounds, device=platform.machine(),
        threads=torch.get_num_threads(), torch=torch.__version__, numpy=np.__version__, rows=rows)
    write_record(args.out, record)


if __name__ == "__main__": main()
