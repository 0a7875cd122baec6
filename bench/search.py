"""Search the settings of many adapters on the development stream: several adapters at once, with
one small record of each.

    python bench/search.py --workers 2                      # every adapter of the studies, 12 trials each
    python bench/search.py --only lora lora+ewc             # some of them
    python bench/search.py --ship                           # write himalaya_hest/data/searched.json from the records,
                                                            # of scale small from records/small_dev.parquet

A search that was killed goes on with the same command, and further processes with the same
--results-dir share its trials. After a search every parameter is tried at both ends of its range
over three tasks: where nothing changes, it is dead. Each record is written to
records/bench/search/{adapter}-{preset}.json.
"""
import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ADAPTERS = ["himalaya", "lora-bank", "lora", "lora+ewc", "olora", "gpm-lora", "lilac+ewc",
    "lora-masked", "lora-masked+ewc", "reft+ewc",
    "coltas+ewc", "glodis+ewc", "osf", "vera", "ia3", "oft", "fourierft", "randlora"]
# a form of an adapter that a study compares beside its default, searched alike; it is no default of
# anything
FORMS = {"lora-bank-wide": ("r 8 on q and v", dict(adapter="lora-bank",
    adapter_config=dict(r=8, target_modules=["q_proj", "v_proj"])))}
ONE = "import sys; sys.path.insert(0, 'bench'); from search import one; one(*sys.argv[1:])"


def parameters(name, trials, results_dir):
    adapter, _, form = name.partition(":")
    of = dict(adapter=adapter) | (dict(preset=form) if form else {})
    if name in FORMS: of = FORMS[name][1]
    return of | dict(n_trials=int(trials), results_dir=results_dir)


def one(name, trials, results_dir, out):
    "Search one adapter and write its record."
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.jobs.run import run_continual
    from himalaya_hest.running.record import versions
    from himalaya_hest.running.continual_run import code_version
    from himalaya_hest.jobs.search import search
    from himalaya_hest.jobs.search import dead_parameters
    from himalaya_hest.running.run_lock import locked
    config = resolve(parameters(name, trials, results_dir))
    def run(parameters, on_task): return run_continual(parameters, quiet=True, on_task=on_task)
    found = search(config, run)
    ends = Path(results_dir)/"search"/f"{found['name']}-ends"
    # processes that shared the trials come here at once: the first runs the ends, the others read
    with locked(ends.with_suffix(".lock"), wait=True): found["dead"] = dead_parameters(config, run, ends)
    if name in FORMS: found["form"] = FORMS[name][0]
    found = (dict(command=f"python bench/search.py --only {name} --trials {trials}") | found
        | dict(versions=versions(), code_version=code_version()))
    path = Path(out)/f"{name.replace(':', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def ship(out):
    "The best settings as the package's defaults."
    from himalaya_hest.jobs.search import best_setting
    found = {p.stem: json.loads(p.read_text(encoding="utf-8"))
        for p in sorted(Path(out).glob("*.json"))}
    names = {name.replace(":", "-"): name for name in ADAPTERS}
    shipped = {names[stem]: best_setting(r) for stem, r in found.items() if stem in names}
    path = Path("himalaya_hest/data/searched.json")
    every = dict(mini=shipped, small=of_trials("records/small_dev.parquet"))
    path.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{', '.join(f'{len(v)} of scale {k}' for k, v in every.items())} adapters in {path}")


def of_trials(path, n_trials=6):
    """The best of a grid's trials, where all were made; a form with a rank or sites of its own is no
    default."""
    import pandas as pd
    trials = {}
    for record in map(json.loads, pd.read_parquet(path).record):
        if not {"r", "target_modules"} & set(record["config"]["adapter_config"]):
            trials.setdefault(record["config"]["adapter"], []).append(record)
    def setting(record):
        config = record["config"]
        found = dict(training=dict(learning_rate=config["training"]["learning_rate"]))
        if config["adapter_config"]: found["adapter_config"] = config["adapter_config"]
        if config["adapter"].endswith("+ewc"): found["ewc"] = dict(strength=config["ewc"]["strength"])
        return found
    def score(record): return record["summary"]["retained_accuracy_auc"]
    return {a: setting(max(r, key=score)) for a, r in trials.items() if len(r) >= n_trials}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*ADAPTERS, *FORMS], metavar="ADAPTER",
        help="adapter, or adapter:preset")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2, help="searches at once")
    parser.add_argument("--results-dir", default="runs/search")
    parser.add_argument("--out", default="records/bench/search")
    parser.add_argument("--ship", action="store_true")
    args = parser.parse_args()
    if args.ship: return ship(args.out)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false"}
    def execute(name):
        start = time.time()
        done = subprocess.run(
            [sys.executable, "-c", ONE, name, str(args.trials), args.results_dir, args.out],
            env=env, capture_output=True, text=True)
        print(
            f"{'ok    ' if done.returncode == 0 else 'FAILED'} {time.time() - start:6.0f} "
            f"s {name}\n{done.stdout if done.returncode == 0 else done.stderr[-2000:]}",
            flush=True,
        )
        return done.returncode == 0
    with ThreadPoolExecutor(args.workers) as pool: ok = list(pool.map(execute, args.only))
    sys.exit(0 if all(ok) else 1)


if __name__ == "__main__": main()
