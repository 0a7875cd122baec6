"""Run every combination of a grid file, several at once, and keep one small record of each.

    python bench/grid.py bench/grids/main.yaml
    python bench/grid.py bench/grids/main.yaml --pairs 3        # the first three (seed, order) pairs only
    python bench/grid.py bench/grids/main.yaml --dry-run        # lists the runs, and about how long they take

A grid file is YAML: `name`, `base` (parameters of `run_continual`), `axes` (a list of dictionaries parameter → list of values; each dictionary is a product, the
dictionaries are joined), and `pairs`: how often each run is repeated, with seed and order_seed 0, 1, ... (an entry of `axes` may name its own `pairs`). A nested parameter is
written with a dot (training.learning_rate). All runs of a pair come before those of the next one. Runs go to {results_dir}/{run_id}/ as always: finished ones are shown, killed ones go
on. Each record is written to nbs/records/{name}/{run_id}.json as soon as its run has ended, without histories (but of studies of energy), with the command beside it.
"""
import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

KEPT = ("run_id", "role", "config", "summary", "matrix", "tasks", "world", "versions", "device", "code_version", "bytes", "kept_bytes", "dictionary", "row_values", "searched", "tracker")
OF_TASK = ("name", "kind", "metric", "group", "shared_instruction", "chance", "steps")
ONE = """import json, resource, sys
from himalaya_hest.continual import run_continual
run_continual(json.loads(sys.argv[1]), quiet=True)
used = resource.getrusage(resource.RUSAGE_SELF)
print("process_s", used.ru_utime + used.ru_stime)"""


def combinations(grid, pairs=None):
    "Parameters of every run of a grid, pair by pair; at most `pairs` pairs."
    runs = []
    for place, axes in enumerate(grid["axes"]):
        axes = dict(axes)
        repeated = axes.pop("pairs", grid.get("pairs"))
        for values in itertools.product(*axes.values()):
            run = json.loads(json.dumps(grid.get("base", {})))
            for name, value in zip(axes, values):
                outer, dot, inner = name.partition(".")
                if dot: run.setdefault(outer, {})[inner] = value
                else: run[name] = value
            for i in range(repeated or 1):
                if pairs is None or max(i, run.get("seed", 0)) < pairs: runs.append((i, run | (dict(seed=i, order_seed=i) if repeated else {})))
    return [run for _, run in sorted(runs, key=lambda r: r[0])]


def execute(parameters, threads):
    "Run one combination in a process of its own; returns whether it ended well."
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.time()
    done = subprocess.run([sys.executable, "-c", ONE, json.dumps(parameters)], env=env, capture_output=True, text=True)
    label = {k: v for k, v in parameters.items() if k != "results_dir"}
    process_s = float(done.stdout.split()[-1]) if done.returncode == 0 else float("nan")
    print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {time.time() - start:6.0f} s ({process_s:.0f} s of a processor) {label}", flush=True)
    if done.returncode: print(done.stderr[-2000:], flush=True)
    return done.returncode == 0


def compact(record, command):
    "What is committed of a record: the matrix and, after the last task, what was measured beside it, rounded to four places."
    out = {"command": command} | {k: record[k] for k in KEPT if k in record}
    out["matrix"] = [[None if x is None else round(x, 4) for x in row] for row in record["matrix"]]
    out["scores"] = [{task: {k: round(v, 4) if isinstance(v, float) else v for k, v in metrics.items()} for task, metrics in record["scores"][-1].items()}] # after the last task
    out["config"] = {k: v for k, v in out["config"].items() if k not in ("results_dir", "cache_dir", "overwrite")}
    out["task_info"] = [{k: task.get(k) for k in OF_TASK} for task in record["task_info"]]
    if "energy" in record: out |= dict(energy=record["energy"], history=record["history"])
    if "search" in record: out["search"] = {k: record["search"][k] for k in ("name", "n_trials", "best")}
    return out


def write_record(source, out, command):
    "One compact record, with a line for each of its larger parts."
    record = json.loads(source.read_text(encoding="utf-8"))
    text = json.dumps(compact(record, command), ensure_ascii=False, separators=(",", ":"))
    out.mkdir(parents=True, exist_ok=True)
    (out/f"{record['run_id']}.json").write_text(text.replace('],[', '],\n[').replace(',"', ',\n"') + "\n", encoding="utf-8")


def dry_run(runs, workers):
    "Print what would run; every run is checked as if it did."
    from himalaya_hest.config import resolve
    from himalaya_hest.plan import make_plan, plan_numbers
    total = [0., 0.]
    for r in runs:
        c = resolve(r)
        there = (Path(c.results_dir)/c.run_id/"record.json").exists()
        hours = [0., 0.] if there else plan_numbers(make_plan(r))["hours"]["one CPU thread"]
        total = [a + b for a, b in zip(total, hours)]
        print("there already     " if there else f"{60 * hours[0]:5.1f} to {60 * hours[1]:5.1f} min", c.run_id, {k: v for k, v in r.items() if k != "results_dir"})
    print(f"{len(runs)} runs, {60 * total[0] / workers:.0f} to {60 * total[1] / workers:.0f} minutes with {workers} workers")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--pairs", type=int, help="only the first (seed, order) pairs")
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--results-dir", default="runs/grid")
    parser.add_argument("--out", type=Path, help="default: nbs/records/{name}")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and about how long they take")
    args = parser.parse_args()
    grid = yaml.safe_load(args.grid.read_text(encoding="utf-8"))
    runs = [r | dict(results_dir=args.results_dir) for r in combinations(grid, args.pairs)]
    if args.dry_run: return dry_run(runs, args.workers)
    from himalaya_hest.config import resolve
    ids = [resolve(r).run_id for r in runs]
    if twice := sorted({i for i in ids if ids.count(i) > 1}): sys.exit(f"{args.grid}: these runs are asked for twice: {', '.join(twice)}")
    out, command = args.out or Path("nbs/records")/grid["name"], f"python bench/grid.py {args.grid}"
    def done(run_id, parameters):
        if not execute(parameters, args.threads): return False
        write_record(Path(args.results_dir)/run_id/"record.json", out, command)
        return True
    start = time.time()
    with ThreadPoolExecutor(args.workers) as pool: ok = list(pool.map(done, ids, runs))
    print(f"{sum(ok)} of {len(runs)} records in {out}, {(time.time() - start) / 60:.1f} minutes with {args.workers} workers")
    sys.exit(0 if all(ok) else 1)


if __name__ == "__main__": main()
