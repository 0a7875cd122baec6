"""What single exchanges do to learning: the hard tasks of the development world, each alone, with
one thing changed.

    python bench/ideas.py --seeds 0 1 2
    python bench/ideas.py --only "vectors by width" gamma

The tasks are those that HIMALAYA's first version learned worst against LoRA alone. Nothing can be
forgotten here, so the mean over the tasks is what is learned. Writes records/bench/ideas_dev.json,
keeping rows that were not run again.
"""
import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import yaml

TASKS = ("conll2003", "qqp", "trec", "squad_v2", "rte", "ag_news", "code_alpaca", "mrpc")
IDEAS = {"default": {},
    "vectors by width": {"adapter_config": {"parts": {"vector_spaces": "width"}}},
    "betas .9, .999": {"training": {"adam_beta1": 0.9, "adam_beta2": 0.999}},
    "warm-up of a tenth": {"training": {"warmup_ratio": 0.1}},
    "vector rate 110": {"adapter_config": {"vector_rate": 110.0}},
    "gain rate 10": {"adapter_config": {"gain_rate": 10.0}},
    "gamma 8": {"adapter_config": {"gamma": 8.0}}, "16 batches for growth": {
        "adapter_config": {"growth_batches": 16}}, "8 slots a task and sequence": {
            "adapter_config": {"slots_per_task": 8, "slots_per_sequence": 8}},
    "two epochs": {"training": {"num_train_epochs": 2}},
    "lora alone": {"adapter": "lora", "training": {"learning_rate": 0.01}},
    "lora alone, betas .8, .95, no warm-up": {"adapter": "lora",
        "training": {"learning_rate": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.95,
            "warmup_ratio": 0.0}}}


def stream_file(folder):
    "The hard tasks as a stream."
    import himalaya_hest
    path = Path(himalaya_hest.__file__).parent/"data"/"streams"/"mini25_dev.yaml"
    stream = yaml.safe_load(path.read_text(encoding="utf-8"))
    stream["tasks"] = [t for t in stream["tasks"] if t["name"] in TASKS]
    out = Path(folder)/"hard.yaml"
    out.write_text(yaml.safe_dump(stream, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return str(out)


def learned(idea, seed):
    "Task → score, each task trained alone."
    from himalaya_hest.jobs.run import run_continual
    with tempfile.TemporaryDirectory() as folder:
        base = dict(adapter="himalaya", stream=stream_file(folder), protocol="single", seed=seed,
            results_dir=folder, cache_dir=f"{folder}/cache", evaluation={"latency_pairs": 0})
        record = run_continual(base | IDEAS[idea], quiet=True)
    return {t: round(record["matrix"][i][i], 4)
        for i, t in enumerate(record["tasks"])}, record["code_version"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(IDEAS), default=list(IDEAS),
        metavar="IDEA")
    parser.add_argument("--out", type=Path, default=Path("records/bench/ideas_dev.json"))
    args = parser.parse_args()
    out = (json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists()
        else {"stream": "mini25_dev", "tasks": list(TASKS), "ideas": {}})
    for idea in args.only:
        runs = [learned(idea, s) for s in args.seeds]
        means = [float(np.mean(list(scores.values()))) for scores, _ in runs]
        out["ideas"][idea] = dict(changed=IDEAS[idea], mean=round(float(np.mean(means)), 4),
            means=[round(m, 4) for m in means], seeds=args.seeds, scores=[s for s, _ in runs],
            code_version=runs[0][1], command="python bench/ideas.py --only " + json.dumps(idea)
            + " --seeds " + " ".join(map(str, args.seeds)))
        args.out.write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{idea}: {np.mean(means):.3f} ({', '.join(f'{m:.3f}' for m in means)})", flush=True)


if __name__ == "__main__": main()
