"""Calibrate a world of the mini study with LoRA alone: zero-shot scores, LoRA-8 on each task by
itself over a grid of learning rates, and LoRA-8 on all tasks in sequence.

    python bench/calibrate_world.py --world main --workers 2 --out records/bench/world_calibration_main.json

Needs torch, transformers, peft and this package. One pass over the 400 rows of a task in batches of
8 is 50 steps."""
import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup
from transformers.utils import logging

from himalaya_hest.streams.batching import Collator, encode_all, prompt_row
from himalaya_hest.streams.backbone import mini_backbone_dir
from himalaya_hest.streams.mini_world import Dice, mini_rows
from himalaya_hest.streams.stream import load_stream
from himalaya_hest.measures.text import score
from himalaya_hest.workshop.measuring import called

RATES = (2e-3, 5e-3, 1e-2, 2e-2, 4e-2)
STREAMS = {"main": "mini25", "dev": "mini25_dev"}


def start():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    torch.manual_seed(0)
    folder = str(mini_backbone_dir())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, model


def with_lora(model, seed):
    torch.manual_seed(seed)
    return get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM"))


def encoded(task, world, split, tokenizer):
    examples = [task.format(row, i) for i, row in enumerate(mini_rows(task.name, world, split))]
    return examples, encode_all(examples, tokenizer, 256, task.max_new_tokens)


def train(model, task, world, tokenizer, rate, seed, batch_size=8):
    rows = encoded(task, world, "train", tokenizer)[1]
    rows = Dice("order", seed, task.name).some(rows, len(rows))
    collate, steps = Collator(tokenizer), len(rows) // batch_size
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    for i in range(steps):
        batch = collate(rows[i * batch_size:(i + 1) * batch_size])
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
            labels=batch["labels"]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.)
        optimizer.step()
        schedule.step()


def prompt_batches(rows, tokenizer, batch_size):
    "Left-padded prompts of all rows, longest first, each batch with the places of its rows."
    collate, prompts = Collator(tokenizer, "left"), [prompt_row(r) for r in rows]
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]["input_ids"]), i))
    for k in range(0, len(order), batch_size):
        places = order[k:k + batch_size]
        yield collate([prompts[i] for i in places]) | {"index": places}


@torch.no_grad()
def evaluate(model, task, world, tokenizer):
    model.eval()
    examples, rows = encoded(task, world, "validation", tokenizer)
    said = [None] * len(rows)
    for batch in prompt_batches(rows, tokenizer, 50):
        out = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
            max_new_tokens=task.max_new_tokens, do_sample=False,
            pad_token_id=tokenizer.pad_token_id)
        for i, ids in zip(batch["index"], out[:, batch["input_ids"].shape[1]:]):
            said[i] = tokenizer.decode(ids, skip_special_tokens=True)
    labels = (task.labels if task.metric == "label_accuracy" else (task.no_answer,)
        if task.no_answer else None)
    return score(task.metric, said, [e.references for e in examples], labels)["score"]


def one(job):
    "Zero-shot (rate None) or LoRA-8 on one task alone."
    world, name, rate, seed = job
    tokenizer, model = start()
    task = next(t for t in load_stream(STREAMS[world]).tasks if t.name == name)
    if rate is not None:
        model = with_lora(model, seed)
        train(model, task, world, tokenizer, rate, seed)
    return name, rate, evaluate(model, task, world, tokenizer)


def sequence(job):
    "LoRA-8 on these tasks in order; the matrix of scores."
    world, names, rate, seed = job
    tokenizer, model = start()
    model, matrix = with_lora(model, seed), []
    tasks = [t for t in load_stream(STREAMS[world]).tasks if t.name in names]
    for i, task in enumerate(tasks):
        train(model, task, world, tokenizer, rate, seed)
        matrix.append([evaluate(model, t, world, tokenizer) for t in tasks[:i + 1]])
    return matrix


def forgetting(matrix):
    "Mean over all but the last task of best earlier − last."
    n = len(matrix)
    return sum(max(matrix[i][j] for i in range(j, n - 1)) - matrix[-1][j]
        for j in range(n - 1)) / max(n - 1, 1)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--world", choices=list(STREAMS), default="main")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--rates", type=float, nargs="+", default=RATES)
    p.add_argument("--tasks", nargs="*", help="only these")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out")
    a = p.parse_args()
    begun = time.time()
    there = [t.name for t in load_stream(STREAMS[a.world]).tasks]
    if unknown := [n for n in a.tasks or () if n not in there]:
        p.error(f"--tasks {' '.join(unknown)}: not in {STREAMS[a.world]}, which has {', '.join(there)}")
    names = a.tasks or there
    jobs = [(a.world, n, r, a.seed) for r in (None, *a.rates) for n in names]
    table = {n: {} for n in names}
    with ProcessPoolExecutor(a.workers, mp_context=get_context("spawn")) as pool:
        for name, rate, value in pool.map(one, jobs):
            table[name]["zero_shot" if rate is None else f"{rate:g}"] = round(value, 4)
            print(name, rate, round(value, 3), flush=True)
        mean = {k: sum(table[n][k] for n in names) / len(names) for k in table[names[0]]}
        rates = [k for k in mean if k != "zero_shot"]
        single = max(rates, key=mean.get)
        best = {n: max(table[n][k] for k in rates) for n in names}
        matrix, = pool.map(sequence, [(a.world, names, float(single), a.seed)])
    result = dict(world=a.world, seed=a.seed, rates=list(a.rates),
        zero_shot_mean=mean["zero_shot"], single_task=table, mean=mean, single_rate=single,
        at_least_80_single_rate=sum(table[n][single] >= .8 for n in names),
        at_least_80_best_rate=sum(v >= .8 for v in best.values()),
        best_rate_mean=sum(best.values()) / len(best),
        sequence_rate=float(single), sequence_forgetting=forgetting(matrix),
        sequence_average_last=sum(matrix[-1]) / len(matrix),
        sequence_just_learned=sum(r[-1] for r in matrix) / len(matrix),
        sequence_matrix=[[round(v, 4) for v in r] for r in matrix],
        wall_s=round(time.time() - begun), command=called(__file__))
    for n in names: print(f"{n:14}", *(f"{k}={v:.2f}" for k, v in table[n].items()))
    print({k: v for k, v in result.items() if k not in ("single_task", "sequence_matrix")})
    if a.out:
        with open(a.out, "w", encoding="utf-8") as f: json.dump(result, f, indent=1)


if __name__ == "__main__": main()
