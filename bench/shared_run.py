"""What two processes gain that share a run, and what they pay for exchanging gradients.

    OMP_NUM_THREADS=1 python bench/shared_run.py

Two processes on this machine (Gloo). `step`: an optimiser step of the mini study of two
micro-batches of 8 rows, by both processes with one each, over the same step by the first alone with
both; wall time, interleaved, the median of the ratios of --pairs pairs of five steps and its 95 %
interval. Half would be the ideal. `same` is the step of one process over itself. `exchange_ms`:
what of a shared step is spent in the sum over processes, waiting for the other included.
`exchange`: that sum alone for as many numbers as adapters of Llama-2-7B train (counted on meta
tensors), which is sent in float64, and once more where nothing has to be sent.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from guards import STEPS, interval, stepper

from himalaya_hest.running import training
from himalaya_hest.running.checkpoint import write_atomic
from himalaya_hest.running.resolve import resolve
from himalaya_hest.ground.processes import start_processes
from himalaya_hest.ground.processes import as_only_process, is_main_process, summed
from himalaya_hest.workshop.measuring import circumstances

SEVEN_B = ("lora", "himalaya", "lora-bank", "lilac+ewc")


def timed(work, alone):
    "Wall seconds of some steps, of the first process alone or of both."
    dist.barrier()
    start = time.perf_counter()
    if alone:
        if is_main_process():
            with as_only_process(): [work() for _ in range(STEPS)]
    else: [work() for _ in range(STEPS)]
    dist.barrier()
    return time.perf_counter() - start


def step_ratios(adapter, pairs):
    (step, _), spent, real = stepper(adapter, 2), [0.], training.summed
    def clocked(tensors):
        start = time.perf_counter()
        try: return real(tensors)
        finally: spent[0] += time.perf_counter() - start
    training.summed = clocked
    for alone in (True, False, True, False): timed(step, alone)
    ratios, exchange, single = dict(shared=[], same=[]), [], []
    for i in range(pairs):
        took = {}
        for name in np.random.default_rng(i).permutation(["alone", "again", "shared"]):
            spent[0] = 0.
            took[name] = timed(step, name != "shared")
            if name == "shared": exchange.append(1e3 * spent[0] / STEPS)
        ratios["shared"].append(took["shared"] / took["alone"])
        ratios["same"].append(took["again"] / took["alone"])
        single.append(1e3 * took["alone"] / STEPS)
    training.summed = real
    return {k: interval(r) for k, r in ratios.items()} | dict(
        single_step_ms=round(float(np.median(single)), 2),
        exchange_ms=round(float(np.median(exchange)), 2))


def exchanged(numbers, rounds=30):
    """Wall ms of the sum of so many float32 numbers over processes, and of what remains of it where
    there is nobody else."""
    x, out = torch.zeros(numbers), {}
    for name in ("two processes", "alone"):
        times = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            if name == "alone":
                with as_only_process(): summed([x])
            else: summed([x])
            times.append(1e3 * (time.perf_counter() - start))
        out[name] = dict(median_ms=round(float(np.median(times)), 3),
            quartiles_ms=[round(float(q), 3) for q in np.percentile(times, [25, 75])])
    return dict(numbers=numbers, sent_mb=round(8 * numbers / 1e6, 3)) | out


def trained(adapter):
    from himalaya_hest.running.shapes import adapter_size, model_config
    config = resolve(dict(adapter=adapter, scale="full", stream="mini25", source="mini"))
    return adapter_size(config, model_config(config.model), 25).trained


def worker(args):
    start_processes()
    found = {a: step_ratios(a, args.pairs) for a in args.adapters}
    found |= dict(exchange={a: exchanged(n) for a, n in json.loads(args.numbers).items()})
    if is_main_process(): args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", nargs="+", default=["himalaya", "lora"])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("records/bench/shared_run.json"))
    parser.add_argument("--numbers", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.numbers: return worker(args)
    numbers = {a: trained(a) for a in SEVEN_B}
    with tempfile.TemporaryDirectory() as d:
        out = Path(d)/"found.json"
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", "2", __file__, "--adapters", *args.adapters, "--pairs",
            str(args.pairs), "--out", str(out), "--numbers", json.dumps(numbers)], check=True)
        found = json.loads(out.read_text())
    write_atomic(args.out,
        json.dumps(dict(circumstances=circumstances("OMP_NUM_THREADS=1 python bench/shared_run.py",
            "cpu"), pairs=args.pairs) | found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__": main()
