"""The package's side of `bench/outside.py`: the order of the rows, the same trainings through
`run_continual`, and the comparison.

    OMP_NUM_THREADS=1 python bench/outside_ours.py order --model M --data D --runs R
    OMP_NUM_THREADS=1 python bench/outside.py --model M --data D --runs R
    OMP_NUM_THREADS=1 python bench/outside_ours.py run --model M --data D --runs R
    OMP_NUM_THREADS=1 python bench/outside_ours.py compare --model M --data D --runs R

`run`: adapter `lora`, protocol `single` over the three tasks, source `local`, prompts through the
chat template, in RUNS/package; whatever was cut off goes on. Loss, norm of the gradient and rate of
each step go to RUNS/package-<seed>.jsonl as they come. `compare` takes what both sides have
finished and writes records/bench/outside.json: rows whose tokens or labels differ, the largest
differences of losses, norms and rates over the steps, answers that differ, accuracies by each
side's own score, and the paired difference of each seed.
"""
import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import peft
import transformers
from outside import BATCH, LORA, OPTIMISER, ROWS, WARMUP, options, read, training_row
from transformers import AutoTokenizer

from himalaya_hest.jobs.run import run_continual
from himalaya_hest.running import loop, training
from himalaya_hest.streams.batching import as_asked, encode_all
from himalaya_hest.streams.order import row_order
from himalaya_hest.streams.sources import examples_of, LocalSource
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
        self.norm, self.step = training.gradient_norm, training.train_step
        self.note = loop._note_step
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
    apart, both = np.abs(x - y).max(0), zip(theirs["answers"], mine["answers"], strict=True)
    return dict(
        task=task, seed=seed, steps=len(x),
        accuracy=dict(trainer=theirs["accuracy"], package=mine["accuracy"]),
        answers=len(theirs["answers"]),
        answers_that_differ=[[i, s, t] for i, (s, t) in enumerate(both) if s != t],
        largest_difference={k: float(apart[i]) for k, i in AS.items()},
        losses=dict(trainer=x[:, 0].tolist(), package=y[:, 0].tolist()))


def rows_apart(a):
    "Rows of all splits, and those whose tokens or labels the two sides make differently."
    tokenizer, source, n, apart = AutoTokenizer.from_pretrained(a.model), LocalSource(a.data), 0, 0
    for task in load_stream("local25").tasks:
        if task.name not in a.tasks: continue
        for split in ("train", "validation"):
            numbered = list(source.numbered_rows(task, split))
            examples = [e for _, e in examples_of(task, source, split, numbered)]
            mine = encode_all(examples, as_asked(tokenizer, True), 1024, task.max_new_tokens)
            for x, (talk, label) in zip(mine, read(a.data, task.name, split), strict=True):
                theirs = training_row(tokenizer, talk, label)
                n, apart = n + 1, apart + any(x[k] != theirs[k] for k in ("input_ids", "labels"))
    return dict(rows=n, differ=apart)


def finished(a, task, seed):
    "Have both sides made this one?"
    return (a.runs / f"trainer-{task}-{seed}.json").exists() and (
        a.runs / "package" / f"outside-{seed}" / "record.json").exists()


def settings(a):
    "What was trained on what, and what the figures hang on."
    digest = lambda p: hashlib.sha256(p.read_bytes()).hexdigest()
    more = "".join(f" --{k} {getattr(a, k)}" for k in ("steps", "accumulation"))
    return dict(
        circumstances=circumstances(
            f"python bench/outside_ours.py compare --model M --data D --runs R{more}", "cpu"),
        transformers=transformers.__version__, peft=peft.__version__,
        backbone=digest(a.model / "model.safetensors"),
        files={f"{t}/{s}": digest(a.data / t / f"{s}.jsonl")
               for t in a.tasks for s in ("train", "validation")},
        lora=LORA, optimiser=OPTIMISER | dict(
            warmup_ratio=WARMUP, steps=a.steps, rows_of_a_step=BATCH, micro_batches=a.accumulation))


def compare(a):
    runs = [compared(a, t, s) for s in a.seeds for t in a.tasks if finished(a, t, s)]
    if not runs:
        raise SystemExit(f"{a.runs}: no task and seed is finished by both sides; run both first")
    gaps = {s: [r["accuracy"]["package"] - r["accuracy"]["trainer"]
                for r in runs if r["seed"] == s] for s in a.seeds}
    told = dict(
        encoded=rows_apart(a), runs=len(runs), steps=sum(r["steps"] for r in runs),
        largest_difference={k: max(r["largest_difference"][k] for r in runs) for k in AS},
        answers=sum(r["answers"] for r in runs),
        answers_that_differ=sum(len(r["answers_that_differ"]) for r in runs),
        accuracy={k: float(np.mean([r["accuracy"][k] for r in runs]))
                  for k in ("trainer", "package")},
        paired_difference={s: float(np.mean(g)) for s, g in gaps.items() if g})
    a.out.write_text(json.dumps(settings(a) | told | dict(of_runs=runs), indent=1) + "\n",
                     encoding="utf-8")
    print(json.dumps(told, indent=1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("order", "run", "compare"))
    options(parser)
    parser.add_argument("--out", type=Path, default=Path("records/bench/outside.json"))
    a = parser.parse_args()
    dict(order=order, run=run, compare=compare)[a.what](a)


if __name__ == "__main__": main()
