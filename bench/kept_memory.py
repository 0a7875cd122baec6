"""What does a whole run cost where freed memory goes back to the system, as glibc has it, and where it stays?

    OMP_NUM_THREADS=1 python bench/kept_memory.py model=FOLDER source=local data_dir=FOLDER \
        scale=small stream=small3_dev n_tasks=1 training.max_steps=12 \
        evaluation.max_eval_rows=20 evaluation.latency_pairs=0
    python bench/kept_memory.py --rounds 1 mode=trial

Runs of the given parameters, HIMALAYA on the mini study where none are given, in turns, each a
process of its own: as a run is (ground.freed_memory), and with glibc's own number of mapped blocks in
the environment, which a run leaves as it is. Figures are process time, with imports and loading;
`system` is the share of it in which the system worked; `peak_mb` is the most that a process held.
Ratios are medians over rounds with the 95 % interval of a bootstrap over rounds. `same` says whether
all runs have the same scores.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from himalaya_hest.ground.freed_memory import NAMED_BY
from himalaya_hest.ground.table import Table
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

GLIBC = {"MALLOC_MMAP_MAX_": "65536"} # its own number, given by name


def whole_run(parameters, named):
    "Seconds, memory and scores of a run in a process of its own."
    own = {k: v for k, v in os.environ.items() if k not in NAMED_BY}
    with tempfile.TemporaryDirectory() as d:
        job = [sys.executable, "-m", "himalaya_hest.jobs.run", *parameters, f"results_dir={d}"]
        with subprocess.Popen(job, env=own | named, stdout=subprocess.DEVNULL) as run:
            _, status, used = os.wait4(run.pid, 0)
        if status: raise SystemExit(f"the run ended with {os.waitstatus_to_exitcode(status)}")
        record = json.loads(next(Path(d).glob("*/record.json")).read_bytes())
    return dict(user_s=used.ru_utime, system_s=used.ru_stime,
                peak_mb=used.ru_maxrss * 1024 / 1e6, score=record["summary"]["average_accuracy"])


def told(of): # runs of one way
    return dict(process_s=median(map(seconds, of)),
                system=median(x["system_s"] / seconds(x) for x in of),
                peak_mb=median(x["peak_mb"] for x in of))


def seconds(x): return x["user_s"] + x["system_s"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parameters", nargs="*", metavar="NAME=VALUE", help="of the run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--out", default="records/bench/kept_memory.json")
    args = parser.parse_args()
    turns = []
    for _ in range(args.rounds):
        turns.append((whole_run(args.parameters, GLIBC), whole_run(args.parameters, {})))
        print(*(f"{seconds(x):.1f} s" for x in turns[-1]), flush=True)
    given_back, kept = zip(*turns)
    rows = dict(given_back=told(given_back), kept=told(kept))
    write_record(args.out, dict(
        circumstances(called(__file__), "cpu"), rounds=args.rounds, **rows,
        same=len({x["score"] for turn in turns for x in turn}) == 1,
        ratio=ratio(*([seconds(x) for x in of] for of in (kept, given_back)))))
    print(Table("Process time of a run", ["freed memory", *rows["kept"]],
                [[n, *r.values()] for n, r in rows.items()]))


if __name__ == "__main__": main()
