"""How long does a training step take with 1, 2 and 4 threads, idle and beside two busy loops?

    python bench/threads.py --out records/bench/threads.json
    python bench/threads.py --quick

A step is forward and backward of 8 rows of 64 tokens through a frozen backbone, as
running.threads.step_of makes it: the mini backbone, and Llamas with random weights from 5 to 150
million parameters. The numbers of threads take turns; figures are medians and means of wall time,
since waiting is what is measured: a mean counts the steps in which a thread waited for its core.
`chosen` is what a run takes of itself, by running.threads. Two busy loops are two processes that
count; `load` is the machine's load average before them, which is near 0 where it was idle.

Then whole runs, each in a process of its own: HIMALAYA on the first three tasks of the mini stream
(with --quick a trial of two), with each number in OMP_NUM_THREADS and with none (`chosen`). `digest`
is that of the trained adapter: equal ones are equal to the last bit.
"""
import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch

from himalaya_hest.ground.table import Table
from himalaya_hest.running.backbone import load_backbone
from himalaya_hest.running.threads import NAMED_BY, chosen_threads, step_of, timed_in_turns
from himalaya_hest.workshop.measuring import (
    called, circumstances, llama_config, random_backbone, write_record)

NUMBERS, LOOPS = (1, 2, 4), 2
SHAPES = ((256, 6), (512, 8), (1024, 12)) # width and layers

RUN = """
import json, sys, time
from pathlib import Path
from safetensors.torch import load_file
from himalaya_hest.ground.files import tensor_digest
from himalaya_hest.jobs.run import run_continual
parameters = json.loads(sys.argv[1])
begun = time.perf_counter()
record = run_continual(parameters, quiet=True)
seconds = time.perf_counter() - begun
folder = Path(parameters["results_dir"])/record["run_id"]/"adapter"
digest = tensor_digest(load_file(folder/"adapter_model.safetensors"))
print(json.dumps(dict(s=seconds, threads=record["device"]["threads"], digest=digest[:12])))
"""


@contextlib.contextmanager
def busy(loops):
    "Processes that count, for as long as the block lasts, or this process."
    # a process that is killed ends no block, and its children would go on for ever
    program = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    there = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(loops)]
    try: yield
    finally:
        for p in there: p.kill(); p.wait()


def backbones(quick):
    "Pairs of a name and a function that makes the backbone."
    yield "mini", lambda: load_backbone("mini")[0]
    for width, layers in SHAPES[:1 if quick else None]:
        yield f"{layers} layers of {width}", lambda: random_backbone(llama_config(width, layers))


def steps_of(make, rounds, loops):
    "What a step of one backbone takes, in one state of the machine."
    model = make()
    with busy(loops):
        chosen = chosen_threads(model)
        times = timed_in_turns(step_of(model), list(NUMBERS), 600, rounds, patience=float("inf"))
    own = {n: dict(median_ms=1e3 * median(t), mean_ms=1e3 * mean(t)) for n, t in times.items()}
    return dict(parameters=sum(p.numel() for p in model.parameters()), loops=loops, threads=own,
                chosen=chosen.number, because=chosen.because)


def whole_run(threads, loops, quick, cache):
    "Seconds of a run in a process of its own; threads 0: it chooses."
    env = {k: v for k, v in os.environ.items() if k not in NAMED_BY}
    if threads: env |= dict(OMP_NUM_THREADS=str(threads))
    size = dict(n_tasks=2, mode="trial") if quick else dict(n_tasks=3)
    with tempfile.TemporaryDirectory() as folder, busy(loops):
        given = dict(results_dir=folder, cache_dir=cache, evaluation=dict(latency_pairs=0)) | size
        done = subprocess.run([sys.executable, "-c", RUN, json.dumps(given)], env=env,
                              capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f"a run with {threads} threads failed:\n{done.stderr}")
    return dict(asked=threads or "chosen", loops=loops) | json.loads(
        done.stdout.strip().splitlines()[-1])


def shown(record):
    "Both parts as tables."
    steps = [[r["backbone"], r["parameters"], r["loops"],
              *(r["threads"][n][f"{what}_ms"] for n in NUMBERS for what in ("median", "mean")),
              f"{r['chosen']} ({r['because']})"] for r in record["steps"]]
    columns = [f"{n}: {what} ms" for n in NUMBERS for what in ("median", "mean")]
    print(Table("A training step by threads", ["backbone", "parameters", "busy loops", *columns,
                                               "chosen"], steps), end="\n\n")
    runs = [[str(r["asked"]), r["threads"], r["loops"], r["s"], r["digest"]]
            for r in record["runs"]]
    print(Table("A run by threads", ["asked", "used", "busy loops", "s", "adapter"], runs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="steps of each (default: 9)")
    parser.add_argument("--quick", action="store_true", help="two backbones, a trial run")
    parser.add_argument("--out", default="", help="the record (default: none is written)")
    a = parser.parse_args()
    # what a user who says nothing has; the record says what the machine was doing meanwhile
    if named := [k for k in NAMED_BY if os.environ.get(k)]:
        parser.error(f"{', '.join(named)} is set, so nothing would be chosen: unset it")
    rounds = min(a.rounds, 4) if a.quick else a.rounds
    record = circumstances(called(__file__), "cpu") | dict(load=os.getloadavg()[0])
    record["steps"] = [dict(backbone=name) | steps_of(make, rounds, loops)
                       for name, make in backbones(a.quick) for loops in (0, LOOPS)]
    with tempfile.TemporaryDirectory() as cache:
        whole_run(1, 0, a.quick, cache) # which tokenises for all
        record["runs"] = [whole_run(n, loops, a.quick, cache)
                          for loops in (0, LOOPS) for n in (*NUMBERS, 0)]
    record["load_after"] = os.getloadavg()[0]
    shown(record)
    if a.out: write_record(a.out, record)
