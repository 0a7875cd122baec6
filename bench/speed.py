"""Two checkouts of this project, the same run, in turns: process time, its ratio, and whether the
scores are the same.

    git worktree add ../before COMMIT
    python bench/speed.py --before ../before --rounds 5 --set stream=mini25 --set adapter=himalaya
    python bench/speed.py --before ../before --rounds 1 --set stream=local25 --set data_dir=FOLDER

Every run is a process of its own with a cache of its own, so imports, tokenising and evaluation are
all in it. The order turns with every round (before, after; after, before; …), so that what else the
machine does falls on both. Process time counts what this process did on a processor, whatever waits
beside it. The result joins the others in records/bench/speed.json under the name of the run.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from himalaya_hest.workshop.measuring import commit

# functions of module continual
PARTS = ("load_tasks", "world_of", "run_task", "evaluate_seen", "cpu_latency_overhead", "save_run")
ONE = """
import json, sys, time
given, parts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
try: from himalaya_hest.jobs.run import run_continual
except ImportError: from himalaya_hest.continual import run_continual # before there were floors
seconds = dict(imports=time.process_time())
def timed(name, f):
    def g(*a, **k):
        start = time.process_time()
        try: return f(*a, **k)
        finally: seconds[name] = seconds.get(name, 0.) + time.process_time() - start
    return g
ours = [m for n, m in sys.modules.items() if n.startswith("himalaya_hest.")]
# a part is timed wherever a module has imported it
for name in parts:
    for module in (m for m in ours if name in vars(m)):
        setattr(module, name, timed(name, vars(module)[name]))
record = run_continual(given, quiet=True)
told = dict(process_s=time.process_time(), parts_s=seconds, world=record["world"]["digest"])
print("RESULT" + json.dumps(told | {k: record[k] for k in ("matrix", "summary", "config")}))
"""


def one(checkout, parameters, threads):
    "Run once from a checkout; what ONE prints."
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        given = parameters | dict(results_dir=f"{folder}/runs", cache_dir=f"{folder}/cache",
            run_id="speed")
        done = subprocess.run([sys.executable, "-c", ONE, json.dumps(given), json.dumps(PARTS)],
            env=env, capture_output=True, text=True, cwd=folder)
    if done.returncode: raise SystemExit(f"the run failed in {checkout}:\n{done.stderr[-3000:]}")
    return json.loads(next(line for line in done.stdout.splitlines()
        if line.startswith("RESULT"))[6:])


def interval(ratios):
    "Mean ratio with Student's 95 % interval over rounds; no interval from one round."
    from scipy import stats
    mean = statistics.fmean(ratios)
    if len(ratios) < 2: return dict(mean=mean, low=None, high=None)
    half = float(stats.t.ppf(.975, len(ratios) - 1)) * statistics.stdev(ratios) / len(ratios) ** .5
    return dict(mean=mean, low=mean - half, high=mean + half)


def compare(before, after, parameters, rounds, threads):
    "Rounds of both checkouts in turns."
    runs = {"before": [], "after": []}
    for r in range(rounds):
        for name in ("before", "after") if r % 2 == 0 else ("after", "before"):
            runs[name].append(one(before if name == "before" else after, parameters, threads))
            print(f"round {r + 1} {name:6} {runs[name][-1]['process_s']:7.1f} s", flush=True)
    a, b = runs["before"][0], runs["after"][0]
    told = {k for k in a["config"] if k in b["config"] and k not in ("results_dir", "cache_dir")}
    given = lambda config: {k: ({x: config[k][x] for x in a["config"][k] if x in b["config"][k]}
        if isinstance(config[k], dict) else config[k]) for k in told}
    out = dict(ratio=interval([x["process_s"] / y["process_s"]
        for x, y in zip(runs["before"], runs["after"])]), rounds=rounds, threads=threads,
        same_world=all(x["world"] == a["world"] for x in runs["before"] + runs["after"]),
        same_scores=all(x["matrix"] == a["matrix"] for x in runs["before"] + runs["after"]),
        same_parameters=given(a["config"]) == given(b["config"]), world=a["world"],
        retained_accuracy_auc=[a["summary"]["retained_accuracy_auc"],
            b["summary"]["retained_accuracy_auc"]])
    for name, checkout in (("before", before), ("after", after)):
        mean = lambda part: round(statistics.fmean(x["parts_s"].get(part, 0.0) for x in runs[name]),
            2)
        out[name] = dict(commit=commit(checkout), process_s=[round(x["process_s"], 2)
            for x in runs[name]], parts_s={p: mean(p) for p in ("imports", *PARTS)})
    return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
        help="parameter of run_continual, nested ones with a dot")
    parser.add_argument("--name", help="name of the entry; default: made from the parameters")
    parser.add_argument("--out", type=Path, default=Path("records/bench/speed.json"))
    args = parser.parse_args()
    parameters = {}
    for pair in args.set:
        name, _, value = pair.partition("=")
        at, (*outer, last) = parameters, name.split(".")
        for o in outer: at = at.setdefault(o, {})
        at[last] = yaml.safe_load(value)
    after = Path(__file__).resolve().parent.parent
    shown = [p for p in args.set if not p.startswith("data_dir=")]
    entry = compare(args.before.resolve(), after, parameters, args.rounds, args.threads)
    entry |= dict(command=" ".join(
        ["python bench/speed.py --before CHECKOUT", f"--rounds {args.rounds}",
            *(f"--set {p}" for p in shown),
            *(["--set data_dir=FOLDER"] if len(shown) < len(args.set) else [])]),
        machine=dict(processor=platform.machine(), cpu_count=os.cpu_count(),
            python=platform.python_version()))
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    found[args.name or " ".join(shown)] = entry
    args.out.write_text(json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False)
        + "\n", encoding="utf-8")
    r = entry["ratio"]
    print(
        f"{r['mean']:.2f} times as fast"
        + (f" [{r['low']:.2f}, {r['high']:.2f}]" if r["low"] is not None else "")
        + f"; same world {entry['same_world']}, parameters {entry['same_parameters']}, "
        f"scores {entry['same_scores']}"
    )


if __name__ == "__main__": main()
