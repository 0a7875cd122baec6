"""HEST by plain `Trainer` on a model that people know and rows of real data: losses, answers right
and the share of energy under three budgets, and what of it binds.

    python bench/door_hest.py MODEL DATA [--task sst2] [--steps 40]

MODEL is a folder with a causal language model of the Llama family, such as SmolLM2-135M-Instruct;
DATA has TASK/train.jsonl and TASK/validation.jsonl. The default budgets were chosen on the first 40
held-back rows, which are therefore left out. Seconds are wall-clock, and of the processor
where the name says so: a busy machine changes the first and hardly the second.
"""
import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments)

from himalaya_hest import HestConfig, Table
from himalaya_hest.workshop.measuring import circumstances, write_record

ROOT = Path(__file__).resolve().parent.parent
TASKS = dict( # column, prompt, labels
    ag_news=("text", "{}\nTopic:", (" World", " Sports", " Business", " Technology")),
    sst2=("sentence", "{}\nSentiment:", (" negative", " positive")),
)
MOST = 64 # tokens of a text


def read(path: Path, n: int) -> list[dict]:
    "The first rows of a file."
    with open(path, encoding="utf-8") as f: return [json.loads(next(f)) for _ in range(n)]


def encode(tokenizer, task: str, row: dict) -> dict:
    "A prompt, of which no token is a target, and its label, of which all are."
    column, prompt, labels = TASKS[task]
    text = tokenizer.decode(tokenizer(row[column], truncation=True, max_length=MOST)["input_ids"])
    asked = tokenizer(prompt.format(text))["input_ids"]
    target = tokenizer(labels[row["label"]])["input_ids"] + [tokenizer.eos_token_id]
    return dict(input_ids=asked + target, labels=[-100] * len(asked) + target)


def train(model, tokenizer, rows: list[dict], steps: int, batch: int) -> list[float]: # losses
    "Nothing here knows of HEST but the groups of the optimiser."
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder, max_steps=steps, per_device_train_batch_size=batch, logging_steps=1,
                save_strategy="no", report_to=[], use_cpu=True, seed=0, disable_tqdm=True),
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            optimizers=(torch.optim.AdamW(model.base_model.optimizer_groups()), None),
        )
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def answer(model, tokenizer, task: str, rows: list[dict], budget: float, n: int = 8) -> dict:
    "Right answers, shares and whether the budget bound any of them."
    right, reports = 0, []
    for i in range(0, len(rows), n):
        some = [encode(tokenizer, task, r)["input_ids"] for r in rows[i:i + n]]
        labels = [TASKS[task][2][r["label"]] for r in rows[i:i + n]]
        asked = [ids[:-1 - len(tokenizer(w)["input_ids"])] for ids, w in zip(some, labels)]
        inputs = tokenizer.pad(dict(input_ids=asked), padding_side="left", return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=3, do_sample=False, energy_budget=budget)
        reports.append(out.energy)
        said = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1]:],
            skip_special_tokens=True)
        right += sum(a.strip() == b.strip() for a, b in zip(said, labels))
    shares = [s for r in reports for s in r.share]
    return dict(budget=budget, score=right / len(rows), share=round(sum(shares) / len(shares), 4),
        largest_share=round(max(shares), 4), binds=any(r.binds for r in reports))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("model", type=Path)
    p.add_argument("data", type=Path)
    p.add_argument("--name", help="of the model; else its folder's")
    p.add_argument("--task", choices=list(TASKS), default="ag_news")
    p.add_argument("--e_max", type=float, default=.37)
    p.add_argument("--budgets", type=float, nargs="+", default=[.5, .37, .36, .34])
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--held_back", type=int, default=40)
    p.add_argument("--skip", type=int, default=40, help="held-back rows before them")
    p.add_argument("--out", type=Path, default=ROOT/"records"/"bench"/"door_hest.json")
    args, start = p.parse_args(), time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    folder, n = args.data/args.task, args.steps * args.batch
    rows = [encode(tokenizer, args.task, r) for r in read(folder/"train.jsonl", n)]
    held = read(folder/"validation.jsonl", args.skip + args.held_back)[args.skip:]
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, use_safetensors=True, trust_remote_code=False)
    config = HestConfig(task_type="CAUSAL_LM", e_max=args.e_max)
    model = get_peft_model(backbone, config)
    answers = [dict(when="fresh") | answer(model.eval(), tokenizer, args.task, held, .5)]
    began, cpu = time.monotonic(), time.process_time()
    losses = train(model, tokenizer, rows, args.steps, args.batch)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    for budget in args.budgets:
        answers.append(
            dict(when="trained") | answer(model.eval(), tokenizer, args.task, held, budget))
    name, k = args.name or args.model.name, max(1, args.steps // 8)
    mean = lambda some: round(sum(some) / len(some), 3)
    options = f"--name {name} --task {args.task} --e_max {args.e_max:g} --steps {args.steps}"
    record = circumstances(f"python bench/door_hest.py MODEL DATA {options}", "cpu") | dict(
        model=name, task=args.task, rows=n, held_back=len(held), e_max=args.e_max,
        steps=args.steps, batch=args.batch,
        first_loss=mean(losses[:k]), last_loss=mean(losses[-k:]),
        energy={k: round(v, 4) for k, v in model.base_model.stream_hooks().told().items()},
        most_common=max(sum(r["label"] == c for r in held) for c in range(4)) / len(held),
        answers=answers, train_s=round(seconds, 1), train_cpu_s=round(cpu, 1),
        wall_s=round(time.monotonic() - start, 1), cpu_s=round(time.process_time(), 1))
    table = Table(
        f"{name}, {args.task}, {args.steps} steps in {seconds:.0f} s: loss {record['first_loss']} "
        f"to {record['last_loss']}, commonest label {record['most_common']:.3f}",
        ["", "budget", "right", "mean share", "largest share", "binds"],
        [[a["when"], a["budget"], a["score"], a["share"], a["largest_share"], str(a["binds"])]
            for a in answers])
    print(table)
    write_record(args.out, record)


if __name__ == "__main__": main()
