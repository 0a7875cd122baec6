"""What a training step of each method costs beside that of LoRA-8 on a real model and real rows.

Sites are the same, the model is held as `--dtype` says: by default as a run on this CPU holds it.

    OMP_NUM_THREADS=1 python bench/small_steps.py MODEL DATA # two folders; DATA/task/train.jsonl

Each method sits on modules of its own over the same weights, with its adapter in float32, has
learned one task of two steps through the hooks of a stream, and is inside its second: penalties and
projections of earlier tasks act. A round gives the same eight rows to
all methods in random order: copies, forward and backward, hooks, clipping and optimiser, process
time. Ratios are medians over rounds with the 95 % interval of a bootstrap over rounds. What a task
costs at its start and its end (`once`) is one measurement, over one batch where a run takes
several. "Same sites": lora-same is LoRA-8 on all seven projections, where HIMALAYA is, lora-o on o,
where the bank of rank 1 is. Rates are next to zero, so that all steps start alike.
"""
import argparse
import copy
import random
import tempfile
import time
import warnings

import torch
from accelerate import Accelerator

from himalaya_hest.adapters.registry import build_adapter
from himalaya_hest.ground.freed_memory import keep_memory
from himalaya_hest.ground.hooks import TaskContext
from himalaya_hest.running.backbone import load_backbone
from himalaya_hest.running.training import make_optimizer, train_step
from himalaya_hest.streams.batching import Collator, TaskLoader, as_asked
from himalaya_hest.streams.hub import get_source
from himalaya_hest.streams.stream import load_stream
from himalaya_hest.streams.tokenised import materialise
from himalaya_hest.workshop.measuring import (
    called, circumstances, ratio, spread, write_record)

QV, O, SAME = ["q_proj", "v_proj"], ["o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj"]
EWC = dict(n_examples=8) # of the first task: only its penalty is timed
METHODS = { # name → adapter, preset, fields, LoRA on the same sites
    "lora-qv": ("lora", "default", dict(target_modules=QV), None),
    "lora-o": ("lora", "default", dict(target_modules=O), None),
    "lora-same": ("lora", "default", dict(target_modules=SAME), None),
    "himalaya": ("himalaya", "default", {}, "lora-same"),
    "lora-bank-wide": ("lora-bank", "default", dict(r=8, target_modules=QV), "lora-qv"),
    "lora-bank": ("lora-bank", "default", {}, "lora-o"),
    "lora-masked+ewc": ("lora-masked+ewc", "default", {}, "lora-qv"),
    "olora": ("olora", "default", {}, "lora-qv"),
    "lora+ewc": ("lora+ewc", "default", {}, "lora-qv"),
}
TRAINING = dict(learning_rate=1e-9, weight_decay=0., adam_beta1=.9, adam_beta2=.999,
    max_grad_norm=1., bf16=False)


def timed(f, *args):
    "Process time of a call, in seconds."
    start = time.process_time()
    f(*args)
    return time.process_time() - start


class Contestant:
    "A method inside its second task."
    def __init__(self, name, base, tokenizer, tasks, accelerator):
        kind, preset, fields, self.beside = METHODS[name]
        # modules of its own, the same tensors
        model = copy.deepcopy(base, {id(p): p for p in base.parameters()})
        self.adapter = build_adapter(kind, model, tokenizer, preset, fields,
            EWC if kind.endswith("+ewc") else None)
        self.accelerator = accelerator
        for i, (task, batches) in enumerate(tasks.items()):
            started = timed(self.adapter.hooks.on_task_start,
                TaskContext(task, i, 50, batches[:1], ""))
            self.optimizer = make_optimizer(self.adapter, TRAINING)
            self.adapter.model.train()
            if i == len(tasks) - 1: break
            for batch in batches[:2]: self.step(batch)
            self.adapter.model.eval()
            ended = timed(self.adapter.hooks.on_task_end, batches[:1])
        self.once = dict(start_s=started, end_s=ended)
    def step(self, batch):
        return train_step(self.adapter, self.optimizer, [batch], TRAINING, self.accelerator)


def batches_of(task, source, tokenizer, n):
    "Its first batches of eight rows."
    with tempfile.TemporaryDirectory() as cache:
        rows = materialise(task, source, "train", tokenizer=tokenizer, max_length=512,
            cache_dir=cache, max_rows=8 * n)
        return list(TaskLoader(rows.to_list(), Collator(tokenizer), 8, seed=0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--stream", default="local25")
    parser.add_argument("--tasks", nargs=2, default=["trec", "sst2"], help="learned, and timed")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", default="records/bench/small_steps.json")
    args = parser.parse_args()
    keep_memory()
    warnings.simplefilter("ignore")
    base, tokenizer, digest = load_backbone(args.model, dtype=args.dtype)
    tokenizer, stream = as_asked(tokenizer, False), load_stream(args.stream)
    source = get_source("local", args.data, stream.world, None)
    known = {t.name: t for t in stream.tasks}
    tasks = {n: batches_of(known[n], source, tokenizer, args.rounds + 1) for n in args.tasks}
    beside = {METHODS[n][3] for n in args.methods}
    names = [n for n in METHODS if n in beside or n in args.methods]
    field = {n: Contestant(n, base, tokenizer, tasks, Accelerator(cpu=True)) for n in names}
    seconds, draw = {n: [] for n in names}, random.Random(0)
    for r, batch in enumerate(tasks[args.tasks[1]][:args.rounds + 1]):
        for name, one in draw.sample(list(field.items()), len(names)):
            spent = timed(one.step, batch)
            # the first round makes what every later one uses again
            if r: seconds[name].append(spent)
        print(f"round {r} of {args.rounds}, {tuple(batch['input_ids'].shape)}", flush=True)
    methods = {}
    for name, one in field.items():
        methods[name] = dict(step_s=spread(seconds[name]), once=one.once)
        if one.beside:
            other = seconds[one.beside]
            methods[name] |= dict(beside=one.beside, ratio=ratio(seconds[name], other))
        told = methods[name].get("ratio", {})
        print(f"{name:24} {methods[name]['step_s']['median']:6.2f} s", "".join(
            f" {v:.3f}" for v in told.values()), {k: round(v, 2) for k, v in one.once.items()})
    command = called(__file__).replace(args.model, "MODEL").replace(args.data, "DATA")
    write_record(args.out, circumstances(command, "cpu") | dict(
        backbone=digest, dtype=str(base.dtype), rounds=args.rounds, tasks=args.tasks, methods=methods))


if __name__ == "__main__": main()
