"""Run every combination of a grid file, several at once, and keep one small record of each.

    python bench/grid.py bench/grids/compare_main10.yaml --workers 2 --threads 1
    python bench/grid.py bench/grids/compare_main10.yaml --dry-run        # lists the runs, and about how long they take

A grid file is YAML: `name`, `base` (parameters of `run_continual`), and `axes` (a list of dictionaries parameter → list of
values; each dictionary is a product, the dictionaries are joined). A nested parameter is written with a dot (training.learning_rate).
Runs go to {results_dir}/{run_id}/ as always: finished ones are shown, killed ones go on. Each record is written to
nbs/records/{name}/{run_id}.json without histories and per-row details, with the command beside it.
"""
import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

KEPT = ("run_id", "role", "config", "summary", "matrix", "tasks", "world", "versions", "device", "code_version", "bytes", "kept_bytes", "dictionary")
ONE = "import json, sys\nfrom himalaya_hest.continual import run_continual\nrun_continual(json.loads(sys.argv[1]), quiet=True)"


def combinations(grid):
    "Parameters of every run of a grid."
    for axes in grid["axes"]:
        for values in itertools.product(*axes.values()):
            run = json.loads(json.dumps(grid.get("base", {})))
            for name, value in zip(axes, values):
                outer, dot, inner = name.partition(".")
                if dot: run.setdefault(outer, {})[inner] = value
                else: run[name] = value
            yield run


def execute(parameters, threads):
    "Run one combination in a process of its own; returns the record or the end of what it printed."
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.time()
    done = subprocess.run([sys.executable, "-c", ONE, json.dumps(parameters)], env=env, capture_output=True, text=True)
    label = {k: v for k, v in parameters.items() if k != "results_dir"}
    print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {time.time() - start:6.0f} s {label}", flush=True)
    if done.returncode: print(done.stderr[-2000:], flush=True)
    return done.returncode == 0


def compact(record, command):
    "What is committed of a record: scores rounded to four places."
    out = {"command": command} | {k: record[k] for k in KEPT if k in record}
    out["matrix"] = [[None if x is None else round(x, 4) for x in row] for row in record["matrix"]]
    out["config"] = {k: v for k, v in out["config"].items() if k not in ("results_dir", "cache_dir", "overwrite")}
    return out


def seconds_a_task(records="nbs/records"):
    "Median wall time a task by (adapter, protocol), of the committed records."
    found = {}
    for p in Path(records).glob("*/*.json"):
        r = json.loads(p.read_text(encoding="utf-8"))
        if "summary" in r: found.setdefault((r["config"]["adapter"], r["config"]["protocol"]), []).append(r["summary"]["wall_s"] / len(r["tasks"]))
    return {k: statistics.median(v) for k, v in found.items()}


def estimate(config, known):
    "Seconds of a run: those of its adapter a task, or of the slowest known one, and .06 s for each evaluation of a task beyond what 25 tasks get."
    from himalaya_hest.config import evaluation_schedule
    from himalaya_hest.tasks import load_stream
    n = config.n_tasks or len(load_stream(config.stream).tasks)
    pace = known.get((config.adapter, config.protocol)) or max((s for (_, protocol), s in known.items() if protocol == config.protocol), default=4.)
    evaluations = sum(evaluation_schedule(n, config.evaluation["after_tasks"])) - 13 * n
    return pace * n + .06 * max(0, evaluations)


def dry_run(runs, workers):
    "Print what would run; every run is checked as if it did."
    from himalaya_hest.config import resolve
    known, total = seconds_a_task(), 0.
    for r in runs:
        c = resolve(r)
        there = (Path(c.results_dir)/c.run_id/"record.json").exists()
        s = 0. if there else estimate(c, known)
        total += s
        print("there already" if there else f"about {s:6.0f} s", c.run_id, {k: v for k, v in r.items() if k != "results_dir"})
    print(f"{len(runs)} runs, about {total / 60:.0f} minutes of one thread each, {total / 60 / workers:.0f} minutes with {workers} workers")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--results-dir", default="runs/grid")
    parser.add_argument("--out", type=Path, help="default: nbs/records/{name}")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and about how long they take")
    args = parser.parse_args()
    grid = yaml.safe_load(args.grid.read_text(encoding="utf-8"))
    runs = [r | dict(results_dir=args.results_dir) for r in combinations(grid)]
    if args.dry_run: return dry_run(runs, args.workers)
    from himalaya_hest.config import resolve
    ids = [resolve(r).run_id for r in runs]
    with ThreadPoolExecutor(args.workers) as pool: ok = list(pool.map(lambda r: execute(r, args.threads), runs))
    out = args.out or Path("nbs/records")/grid["name"]
    out.mkdir(parents=True, exist_ok=True)
    command = f"python bench/grid.py {args.grid} --workers {args.workers} --threads {args.threads}"
    for i in (i for i, good in zip(ids, ok) if good):
        record = json.loads((Path(args.results_dir)/i/"record.json").read_text(encoding="utf-8"))
        text = json.dumps(compact(record, command), ensure_ascii=False, separators=(",", ":"))
        (out/f"{i}.json").write_text(text.replace('],[', '],\n[').replace(',"', ',\n"') + "\n", encoding="utf-8")
    print(f"{sum(ok)} of {len(runs)} records in {out}")
    sys.exit(0 if all(ok) else 1)


if __name__ == "__main__": main()
