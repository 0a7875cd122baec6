"""The package's side of `bench/outside.py`: the order of the rows, the same trainings through
`run_continual`, and the comparison.

    OMP_NUM_THREADS=1 python bench/outside_ours.py order --model M --data D --runs R
    OMP_NUM_THREADS=1 python bench/outside.py --model M --data D --runs R
    OMP_NUM_THREADS=1 python bench/outside_ours.py run --model M --data D --runs R
    python bench/outside_ours.py compare --model M --data D --runs R

`run`: adapter `lora`, protocol `single` over the three tasks, source `local`, prompts through the
chat template, in RUNS/package; whatever was cut off goes on. Loss, norm of the gradient and rate of
each step go to RUNS/package-<seed>.jsonl as they come. `compare` writes records/bench/outside.json:
the largest differences of losses, norms and rates over the steps, answers that differ, accuracies
by each side's own score, and the paired difference over seeds.
"""
import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import peft
import transformers
from outside import BATCH, LORA, OPTIMISER, ROWS, STEPS, TASKS, WARMUP, options

from himalaya_hest.jobs.run import run_continual
from himalaya_hest.running import loop, training
from himalaya_hest.streams.batching import row_order
from himalaya_hest.streams.sources import LocalSource
from himalaya_hest.streams.stream import load_stream
from himalaya_hest.streams.tasks import mixed_seed
from himalaya_hest.workshop.measuring import circumstances

AS = dict(loss=0, gradient_norm=1, learning_rate=2) # places in a step's list


def order(a):
    "Numbers of the training rows in the order of a run, from 0, by task and seed."
    source, out = LocalSource(a.data), {}
    for task in load_stream("local25").tasks:
        if task.name not in a.tasks: continue
        rows = source.numbered_rows(task, "train", ROWS)
        numbers = [rows[i][0] - 1 for i in range(len(rows))]
        out[task.name] = {
            s: [numbers[i] for i in row_order(len(rows), mixed_seed(s, task.name))]
            for s in a.seeds}
    a.runs.mkdir(parents=True, exist_ok=True)
    (a.runs / "order.json").write_text(json.dumps(out) + "\n", encoding="utf-8")


class Noted:
    "Inside, each step of a run adds a line to a file."
    def __init__(self, path):
        self.path, self.seen = path, {}
        self.norm, self.step, self.note = training.gradient_norm, training.train_step, loop._note_step
    def measured(self, parameters):
        self.seen["norm"] = self.norm(parameters)
        return self.seen["norm"]
    def stepped(self, adapter, optimizer, *more):
        self.seen["rate"] = optimizer.param_groups[0]["lr"]
        return self.step(adapter, optimizer, *more)
    def noted(self, run, state, n_steps):
        line = dict(task=run.lessons[run.position.task].task.name, step=state.step,
                    values=[state.loss, float(self.seen["norm"]), self.seen["rate"]])
        with self.path.open("a", encoding="utf-8") as file: file.write(json.dumps(line) + "\n")
        self.note(run, state, n_steps)
    def __enter__(self):
        training.gradient_norm, training.train_step = self.measured, self.stepped
        loop._note_step = self.noted
    def __exit__(self, *error):
        training.gradient_norm, training.train_step = self.norm, self.step
        loop._note_step = self.note


def run(a):
    "The trainings of all seeds through the package."
    stream = a.runs / "outside.yaml"
    stream.write_text(f"name: outside\nextends: local25\nonly: [{', '.join(a.tasks)}]\n")
    for seed in a.seeds:
        with Noted(a.runs / f"package-{seed}.jsonl"):
            run_continual(dict(
                adapter="lora", adapter_config=LORA, protocol="single", stream=str(stream),
                source="local", data_dir=str(a.data), model=str(a.model), dtype="float32",
                chat_template=True, seed=seed, run_id=f"outside-{seed}",
                results_dir=str(a.runs / "package"), cache_dir=str(a.runs / "cache"),
                training=OPTIMISER | dict(
                    warmup_ratio=WARMUP, max_steps=a.steps, max_train_rows=ROWS, bf16=False,
                    per_device_train_batch_size=BATCH // a.accumulation,
                    gradient_accumulation_steps=a.accumulation),
                evaluation=dict(
                    max_eval_rows=150, per_device_eval_batch_size=50, latency_pairs=0),
            ), quiet=True)


def ours(a, task, seed):
    "Steps, answers and score of the package; of a step that was made twice the later line."
    lines = map(json.loads, (a.runs / f"package-{seed}.jsonl").read_text().splitlines())
    steps = {x["step"]: x["values"] for x in lines if x["task"] == task}
    folder = a.runs / "package" / f"outside-{seed}"
    said = map(json.loads, (folder / "predictions.jsonl").read_text().splitlines())
    record = json.loads((folder / "record.json").read_text())
    return dict(steps=[steps[k] for k in sorted(steps)],
                answers=[x["answer"] for x in said if x["task"] == task],
                accuracy=record["matrix"][-1][record["tasks"].index(task)])


def compared(a, task, seed):
    "One task and seed: what differs."
    theirs = json.loads((a.runs / f"trainer-{task}-{seed}.json").read_text(encoding="utf-8"))
    mine = ours(a, task, seed)
    x, y = np.array(theirs["steps"]), np.array(mine["steps"])
    apart = np.abs(x - y).max(0)
    return dict(
        task=task, seed=seed, steps=len(x), accuracy=dict(
            trainer=theirs["accuracy"], package=mine["accuracy"]),
        answers=len(theirs["answers"]), answers_that_differ=[
            [i, s, t] for i, (s, t) in enumerate(zip(theirs["answers"], mine["answers"], strict=True))
            if s != t],
        largest_difference={k: float(apart[i]) for k, i in AS.items()},
        losses=dict(trainer=x[:, 0].tolist(), package=y[:, 0].tolist()))


def compare(a):
    runs = [compared(a, t, s) for s in a.seeds for t in a.tasks]
    gap = np.array([r["accuracy"]["package"] - r["accuracy"]["trainer"] for r in runs])
    of_seeds = {s: float(np.mean([g for g, r in zip(gap, runs) if r["seed"] == s])) for s in a.seeds}
    digest = lambda p: hashlib.sha256(p.read_bytes()).hexdigest()
    found = dict(
        circumstances=circumstances("python bench/outside_ours.py compare", "cpu"),
        transformers=transformers.__version__, peft=peft.__version__,
        backbone=digest(a.model / "model.safetensors"),
        rows={t: {s: digest(a.data / t / f"{s}.jsonl") for s in ("train", "validation")}
              for t in a.tasks},
        lora=LORA, optimiser=OPTIMISER | dict(warmup=WARMUP, steps=a.steps, rows_of_a_step=BATCH),
        largest_difference={
            k: max(r["largest_difference"][k] for r in runs) for k in AS},
        answers=sum(r["answers"] for r in runs),
        answers_that_differ=sum(len(r["answers_that_differ"]) for r in runs),
        accuracy={k: float(np.mean([r["accuracy"][k] for r in runs])) for k in ("trainer", "package")},
        paired_difference=of_seeds, runs=runs)
    a.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print({k: found[k] for k in (
        "largest_difference", "answers", "answers_that_differ", "accuracy", "paired_difference")})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("order", "run", "compare"))
    options(parser)
    parser.add_argument("--out", type=Path, default=Path("records/bench/outside.json"))
    a = parser.parse_args()
    dict(order=order, run=run, compare=compare)[a.what](a)


if __name__ == "__main__": main()
