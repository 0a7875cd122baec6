"""What an adapter costs beside the bare backbone in PyTorch: forward, generation, training, in
turns; peak memory and FLOPs beside it.

    OMP_NUM_THREADS=1 python bench/torch_overhead.py   # all widths and methods; goes on where it was stopped
    OMP_NUM_THREADS=1 python bench/torch_overhead.py --widths 128 --methods himalaya lora-qv --pairs 30 --out trial.json
    python bench/torch_overhead.py --device cuda --widths 1024   # GPU: wall between synchronisations

Backbones are Llamas with random weights in fp32; that of width 128 has the mini backbone's shape.
Each method sits on a copy of its own of the same weights, and has learned --tasks tasks of random
rows, two optimiser steps each, through the hooks of a stream, so that it acts (asserted: logits
differ from bare; HIMALAYA and the bank have kept all tasks). It is measured in evaluation; then a further task starts, and training is measured inside
it.

`forward` is a call of the PEFT model without a cache, all prompt tokens through the blocks and the
last through the head, with routing. Generation is what `generate` runs, without its choosing of
tokens: `prefill` (the same with a cache), `decode_first` (the first token after it: what HIMALAYA
folds for the tokens to come is in it, its routing is not), `decode` (the mean of the other tokens).
`forward_backward` is the project's loss (head at targets alone) and its gradients, penalties of the
method included; bare has no parameter to train: its gradients go down to what q, k and v of the
first block give, which is the least that an adapter on these needs. `training_step` is the whole
step: copies of tracked parameters, forward and backward, hooks, clipping, optimiser (the learning
rate is next to zero, so all steps start alike); beside it stands bare's forward_backward.

Methods: lora-qv is PEFT's LoRA r 8 on q, v; lora-all on all linear maps (q, k, v, o, gate, up,
down: HIMALAYA's layers), measured beside HIMALAYA in the same rounds: `of_lora_all`;
himalaya-folded is one of its tasks added to the weights, for who asks for no other. A round visits
bare and the method (beside HIMALAYA this one as well) in random order on identical inputs;
collection of garbage is off. Ratios: `median_of_ratios` over rounds and `ratio_of_medians`, 95 %
interval of a bootstrap over rounds. Process time on a CPU, wall on a GPU; p50 and p99 of both clocks are told.
Peak memory is that of a process of its own for each method (VmHWM, without the size that a parent
leaves in ru_maxrss). FLOPs are those of matrix products that FlopCounterMode counts; int8 products
of gated blocks are not among them.
"""
import os

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import argparse
import contextlib
import copy
import gc
import hashlib
import json
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
# HEST starts from random directions there: decomposing all matrices takes longer than a benchmark
import block_parts
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from himalaya_hest.ground.freed_memory import keep_memory
from himalaya_hest.running.checkpoint import write_atomic
from himalaya_hest.ground.hooks import HookList, TaskContext
from himalaya_hest.adapters.registry import Adapter, build_adapter
from himalaya_hest.ground.loss import target_logits, target_loss
from himalaya_hest.himalaya.tuner import lora_factors
from himalaya_hest.running.record import peak_memory_mb
from himalaya_hest.running.training import make_optimizer, model_inputs
from himalaya_hest.workshop.measuring import (
    called, circumstances, llama_config, random_backbone)

LAYERS = {128: 4, 256: 4, 512: 4, 1024: 4} # 1 x 128 tokens stay far below half a second on one thread
VOCABULARY, INSTRUCTION, ANSWER, ROWS, MANY = 2048, 8, 8, 4, 10**6
BLOCKS, ALL = dict(scope="blocks"), ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
    "down_proj"]
# the bank that has HIMALAYA's bytes at rank 6 and its router, as bench/grids/main.yaml has it
UNILORA = dict(normalised=False, n_numbers=11200, bits=4, router="gaussian", r=2,
    target_modules="all-linear")
METHODS = {"lora-qv": ("lora", {}),
    "lora-all": ("lora", dict(target_modules=ALL)), "vera": ("vera", {}), "ia3": ("ia3", {}),
    "himalaya": ("himalaya", {}), "himalaya-folded": ("himalaya", {}),
    "lora-bank": ("lora-bank", {}),
    "unilora-bank": ("lora-bank", UNILORA),
    "reft": ("reft", {}), "lilac": ("lilac", dict(budget_mb=None)), "coltas": ("coltas", {}),
    "glodis": ("glodis", {}), "olora": ("olora", {}), "gpm-lora": ("gpm-lora", {}),
    "lora-masked": ("lora-masked", {}), "hest-blocks": ("hest", BLOCKS),
    "hest-directions": ("hest", dict(scope="directions")),
    "tabs": ("tabs", dict(scope="directions")), "bhsp": ("bhsp", dict(scope="directions"))}
BANKS = "lora-bank", "unilora-bank"
PLAIN = "bare", "himalaya-folded" # a backbone without an adapter, which nothing trains
BESIDE = {"himalaya": ["lora-all"]} # what is visited in the same rounds, beside bare
WORKLOADS = ("forward", "generation", "training")
FORWARD, GENERATION, TRAINING = ("forward",), ("prefill", "decode_first", "decode"), (
    "forward_backward", "training_step")


class Tokenizer:
    "Bytes as ids, for the statistics of generic text."
    pad_token_id, eos_token_id = 0, 2
    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [b * 7 % (VOCABULARY - 3) + 3 for b in text.encode()]}


def rows(task, n_rows, n_tokens, seed, device, answer=ANSWER):
    "Rows of a task: its instruction, random tokens out of its own 200, an answer."
    draw = torch.Generator().manual_seed(1000 * task + 1)
    head, own = torch.randint(3, VOCABULARY, (INSTRUCTION,), generator=draw), torch.randint(3,
        VOCABULARY, (200,), generator=draw)
    ids = torch.cat([head.expand(n_rows, -1),
        own[torch.randint(0, 200, (n_rows, n_tokens - INSTRUCTION),
            generator=torch.Generator().manual_seed(1000 * task + 2 + seed))]], 1)
    place = torch.arange(n_tokens).expand(n_rows, -1)
    out = dict(input_ids=ids, attention_mask=torch.ones_like(ids),
        prompt_mask=place < n_tokens - answer, instruction_mask=place < INSTRUCTION)
    if answer: out["labels"] = torch.where(out["prompt_mask"], -100, ids)
    return {k: v.to(device) for k, v in out.items()}


class Contestant:
    "A backbone with a method on it, or bare, in a state in which the method acts."
    def __init__(self, name, base, a):
        self.name, self.a = name, a
        model = copy.deepcopy(base)
        if name == "himalaya-folded":
            core = Contestant("himalaya", base, a).adapter.model.base_model.core()
            for module, (A, B) in lora_factors(core, 0).items():
                model.get_submodule(module).weight.data += B @ A
        if name in PLAIN:
            self.adapter, self.optimizer = Adapter(name, model, HookList([])), None
            for n in ("q_proj", "k_proj", "v_proj"):
                model.get_submodule(f"model.layers.0.self_attn.{n}").register_forward_hook(
                    lambda m, args, y: y.requires_grad_(True) if torch.is_grad_enabled() else None)
            return
        method, config = METHODS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.adapter = build_adapter(method, model, Tokenizer(), adapter_config=config)
            for task in range(a.tasks):
                self.start(task)
                self.adapter.model.eval()
                self.adapter.hooks.on_task_end(self.batches(task))
    def batches(self, task): return [rows(task, ROWS, self.a.train_tokens, i, self.a.device) for i in range(4)]
    def start(self, task):
        """Begin a task as a run does, hooks first, then a fresh optimiser, and train two steps;
        from then on the rate is next to zero."""
        self.adapter.model.train()
        if self.name in PLAIN: return
        self.adapter.hooks.on_task_start(TaskContext(f"task {task}", task, MANY, self.batches(task)))
        self.optimizer = make_optimizer(
            self.adapter, dict(learning_rate=1e-2, weight_decay=0., adam_beta1=.9, adam_beta2=.999))
        for batch in self.batches(task)[:2]: self.step(batch)
        for g in self.optimizer.param_groups: g["lr"] = 1e-9
    def inputs(self, batch): return model_inputs(batch, self.adapter.takes_masks, self.a.device)
    def forward(self, batch):
        with torch.no_grad():
            return self.adapter.model(**self.inputs(batch), use_cache=False, logits_to_keep=1).logits
    def forward_backward(self, batch):
        logits, targets = target_logits(self.adapter.model, batch["labels"], **self.inputs(batch),
            use_cache=False)
        loss = target_loss(logits, targets)
        terms = [] if self.name in PLAIN else [self.adapter.hooks.extra_loss(self.adapter.model,
            batch), self.adapter.hooks.micro_batch_loss(self.adapter.model, batch, 1.)]
        sum((t for t in terms if t is not None), loss).backward()
    def step(self, batch):
        "One step of training; the marks before, after the copies, after backward, at the end."
        hooks, marks = self.adapter.hooks, [mark(self.a)]
        old = {n: p.detach().clone() for n, p in hooks.tracked_parameters().items()}
        marks.append(mark(self.a))
        self.forward_backward(batch)
        marks.append(mark(self.a))
        if self.optimizer is not None:
            hooks.after_backward()
            nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.)
            self.optimizer.step()
            self.optimizer.zero_grad()
            hooks.after_optimizer_step(old)
        return [*marks, mark(self.a)]
    def generate(self, batch, n):
        "Prefill and n tokens as `generate` runs them, greedily the same for all: the marks between."
        model, given, ids = self.adapter.model, self.inputs(batch), batch["input_ids"]
        inner = model if self.name in PLAIN else model.get_base_model()
        kept = nn.functional.pad(batch["attention_mask"], (0, n), value=1)
        tokens, marks = batch["input_ids"][:, :n], [mark(self.a)]
        hooks = contextlib.nullcontext() if self.name in PLAIN else model._enable_peft_forward_hooks(**given)
        with torch.no_grad(), hooks:
            cache = inner(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=True,
                logits_to_keep=1).past_key_values
            marks.append(mark(self.a))
            for i in range(n):
                cache = inner(input_ids=tokens[:, i:i + 1],
                    attention_mask=kept[:, :ids.shape[1] + i + 1], past_key_values=cache,
                    use_cache=True, logits_to_keep=1).past_key_values
                marks.append(mark(self.a))
        return marks
    def turn(self, workload, batch):
        "{part: (process ms, wall ms)} of one visit."
        if workload == "training":
            t = self.step(batch)
            whole = between(t[1], t[2]) if self.name == "bare" else between(t[0], t[3])
            return dict(forward_backward=between(t[1], t[2]), training_step=whole)
        if workload == "generation":
            t = self.generate(batch, self.a.new_tokens)
            return dict(prefill=between(t[0], t[1]), decode_first=between(t[1], t[2]),
                decode=between(t[2], t[-1], self.a.new_tokens - 1))
        before = mark(self.a)
        self.forward(batch)
        return dict(forward=between(before, mark(self.a)))


def mark(a):
    "Nanoseconds of both clocks."
    if a.device.startswith("cuda"): torch.cuda.synchronize()
    return time.process_time_ns(), time.perf_counter_ns()


def between(t0, t1, n=1): return tuple((y - x) / 1e6 / n for x, y in zip(t0, t1))


def acting_rank(contestant, batch):
    "Rank of what acts on a batch; None for methods that route nothing."
    tuner = contestant.adapter.model.base_model
    core = tuner.core() if contestant.name in ("himalaya", *BANKS) else None
    if core is None: return None
    from himalaya_hest.bridge.routed import batch_contexts
    update = core.route(*batch_contexts(tuner, tuner.active_adapters[0], batch))
    return 0 if update is None else len(update.read[0])


def check_acts(contestant, bare, batch, training=False):
    """`AssertionError` unless the method changes what the backbone says, and has kept all tasks.
    How much it changes, and the rank of what acts."""
    with torch.set_grad_enabled(training):
        said = [target_logits(c.adapter.model, batch["labels"], **c.inputs(batch),
            use_cache=False)[0].detach() if training else c.forward(batch) for c in (contestant, bare)]
        rank = acting_rank(contestant, batch)
    contestant.adapter.hooks.after_backward()
    differ = float((said[0] - said[1]).abs().max() / said[1].abs().max())
    assert differ > 1e-5, f"{contestant.name} does not act: its logits are those of bare"
    if contestant.name == "himalaya":
        assert len(contestant.adapter.model.base_model.core().tasks.finished) >= contestant.a.tasks
    if contestant.name in BANKS:
        assert int(contestant.adapter.model.base_model.core().used) >= contestant.a.tasks
    return dict(relative_change_of_logits=differ, acting_rank=rank)


def in_turns(contestants, workload, batch, pairs, rng):
    "{part: {contestant: (rounds, 2) process and wall ms}}, all contestants in random order each round."
    found = {}
    for c in contestants:
        for _ in range(3): c.turn(workload, batch)
    gc.collect(); gc.disable()
    try:
        for i in range(pairs):
            for j in rng.permutation(len(contestants)):
                for part, ms in contestants[j].turn(workload, batch).items():
                    found.setdefault(part, {}).setdefault(contestants[j].name, []).append(ms)
            if i % 50 == 49: gc.collect()
    finally: gc.enable()
    return {part: {n: np.array(x) for n, x in of.items()} for part, of in found.items()}


def compared(x, y, seed=0, draws=4000):
    "Ratios of paired times with the 95 % interval of a bootstrap over pairs."
    at = np.random.default_rng(seed).integers(0, len(x), (draws, len(x)))
    def told(value, again):
        return dict(zip(("value", "low", "high"),
            (float(v) for v in (value, *np.percentile(again, [2.5, 97.5])))))
    return dict(median_of_ratios=told(np.median(x / y), np.median((x / y)[at], 1)),
        ratio_of_medians=told(np.median(x) / np.median(y), np.median(x[at], 1) / np.median(y[at], 1)))


def told_of(times, name, clock):
    "What a row says of one part of a workload."
    def ms(x):
        return {f"{c}_p{q}_ms": float(np.percentile(x[:, i], q))
            for i, c in enumerate(("process", "wall")) for q in (50, 99)}
    out = {n: ms(x) for n, x in times.items()}
    for other in times:
        if other != name:
            out["of_" + other.replace("-", "_")] = compared(times[name][:, clock], times[other][:, clock])
    return out


def flops(contestant, workload, batch):
    "FLOPs of matrix products."
    with FlopCounterMode(display=False) as counter:
        if workload == "forward": contestant.forward(batch)
        else: contestant.forward_backward(batch)
    if contestant.optimizer is not None:
        contestant.optimizer.zero_grad(); contestant.adapter.hooks.after_backward()
    return counter.get_total_flops()


def measured(name, width, a):
    "The row of a method at a width."
    base = backbone(width, a)
    contestants = [Contestant(n, base, a) for n in ("bare", name, *([] if a.alone else BESIDE.get(name, [])))]
    prompt, train = rows(1, a.prompt_rows, a.tokens, 100, a.device, answer=0), rows(
        a.tasks, a.train_rows, a.train_tokens, 100, a.device)
    rng, times, clock = np.random.default_rng(0), {}, int(a.device.startswith("cuda"))
    for c in contestants: c.adapter.model.eval()
    acts = dict(evaluation=check_acts(contestants[1], contestants[0], prompt))
    count = dict(forward={c.name: flops(c, "forward", prompt) for c in contestants})
    for workload in a.workloads:
        if workload != "training": times |= in_turns(contestants, workload, prompt, a.pairs, rng)
    for c in contestants: c.start(a.tasks)
    acts["training"] = check_acts(contestants[1], contestants[0], train, training=True)
    count["forward_backward"] = {c.name: flops(c, "training", train) for c in contestants}
    if "training" in a.workloads and name not in PLAIN: times |= in_turns(contestants, "training", train, a.pairs, rng)
    share = {w: {n: f / of["bare"] - 1 for n, f in of.items() if n != "bare"} for w, of in count.items()}
    p = [q for q in contestants[1].adapter.model.parameters() if q.requires_grad]
    return dict(acts=acts, trainable_parameters=sum(q.numel() for q in p),
        workloads={part: told_of(of, name, clock) for part, of in times.items()}, flops=count,
        extra_flops_share=share)


def backbone(width, a):
    return random_backbone(
        llama_config(width, a.layers or LAYERS[width], VOCABULARY, max_position_embeddings=512,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2), device=a.device)


def peak_mb(a):
    "Largest memory of this process, or of its GPU, since the last call, in 10⁶ bytes."
    if a.device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated() / 1e6
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = peak_memory_mb()
    with contextlib.suppress(OSError): Path("/proc/self/clear_refs").write_text("5")
    return peak


def memory_here(name, width, a):
    "Peaks of building and learning, of answering, of training, in this process."
    base = backbone(width, a)
    c = Contestant(name, base, a)
    del base
    gc.collect()
    out = dict(building_mb=peak_mb(a))
    prompt, train = rows(1, a.prompt_rows, a.tokens, 100, a.device, answer=0), rows(
        a.tasks, a.train_rows, a.train_tokens, 100, a.device)
    c.adapter.model.eval()
    for _ in range(3): c.forward(prompt); c.generate(prompt, a.new_tokens)
    out["answering_mb"] = peak_mb(a)
    c.start(a.tasks)
    for _ in range(3): c.step(train)
    return out | dict(training_mb=peak_mb(a))


def memory_of(name, width, a):
    "The same in a process of its own."
    sizes = [f"--{k.replace('_', '-')}={getattr(a, k)}" for k in ("device", "prompt_rows", "tokens",
        "new_tokens", "train_rows", "train_tokens", "tasks", "layers")]
    done = subprocess.run(
        [sys.executable, __file__, f"--memory={name}", "--widths", str(width), *sizes],
        capture_output=True, text=True)
    if done.returncode: raise SystemExit(f"measuring the memory of {name} failed:\n{done.stderr[-3000:]}")
    return json.loads(next(l for l in done.stdout.splitlines() if l.startswith("MEMORY"))[6:])


def code_digest():
    "Of this script and all modules of the package that it runs."
    files = [__file__, *(m.__file__ for n, m in sys.modules.items() if n.startswith("himalaya_hest")
        and getattr(m, "__file__", None))]
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in sorted(
        files, key=os.path.basename))).hexdigest()[:16]


def line(row):
    "A row in a line of print."
    def of(part, other="of_bare"):
        r = row["workloads"].get(part, {}).get(other)
        return "" if r is None else "{value:.3f} [{low:.3f}, {high:.3f}]".format(**r["median_of_ratios"])
    text = ", ".join(f"{part} {of(part)}" for part in (*FORWARD, *GENERATION, *TRAINING))
    for other in BESIDE.get(row["method"], []):
        text += f"; of {other} " + ", ".join(f"{part} {of(part, 'of_' + other.replace('-', '_'))}"
            for part in (*FORWARD, "decode", *TRAINING))
    return f"{row['width']:5} × {row['prompt_rows']} {row['method']:15} {text}"


def write(path, record):
    "Five digits of each figure; a run that is stopped leaves a whole record."
    rounded = json.loads(json.dumps(record), parse_float=lambda x: float(f"{float(x):.5g}"))
    write_atomic(path, json.dumps(rounded, indent=1) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    some = lambda kind: lambda text: [kind(x) for x in text.replace(",", " ").split()]
    p.add_argument("--widths", nargs="+", type=some(int), default=[list(LAYERS)])
    p.add_argument("--methods", nargs="+", type=some(str), default=[list(METHODS)])
    p.add_argument("--pairs", type=int, default=200)
    p.add_argument("--tokens", type=int, default=128, help="of a prompt")
    p.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    p.add_argument("--alone", action="store_true", help="without the LoRAs on the same layers beside HIMALAYA")
    p.add_argument("--prompt-rows", type=int, default=1, help="prompts answered at once")
    p.add_argument("--new-tokens", type=int, default=8)
    p.add_argument("--train-rows", type=int, default=4)
    p.add_argument("--train-tokens", type=int, default=64)
    p.add_argument("--tasks", type=int, default=3, help="learned before anything is measured")
    p.add_argument("--layers", type=int, default=0, help="0: by width")
    p.add_argument("--device", default="cpu")
    p.add_argument("--no-memory", action="store_true")
    p.add_argument("--again", action="store_true", help="measure rows anew that the record has")
    p.add_argument("--out", type=Path, default=Path("records/bench/torch_overhead.json"))
    p.add_argument("--memory", help=argparse.SUPPRESS)
    a = p.parse_args()
    a.widths, a.methods = sum(a.widths, []), sum(a.methods, [])
    if unknown := [m for m in a.methods if m not in METHODS]:
        p.error(f"unknown methods {', '.join(unknown)}; there are {', '.join(METHODS)}")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.logging.set_verbosity_error()
    if a.memory:
        print("MEMORY" + json.dumps(memory_here(a.memory, a.widths[0], a)))
        return
    kept, digest = keep_memory(), code_digest()
    settings = dict(workloads=a.workloads, pairs=a.pairs, tokens=a.tokens, new_tokens=a.new_tokens,
        train_rows=a.train_rows, train_tokens=a.train_tokens, tasks=a.tasks, threads=torch.get_num_threads())
    told = circumstances(
        called(__file__, ("--again",)), a.device)
    known = json.loads(a.out.read_text(encoding="utf-8"))["rows"] if a.out.exists() else []
    known = [r for r in known if r["method"] in METHODS]
    todo = [(w, m) for w in a.widths for m in a.methods]
    for i, (width, method) in enumerate(todo, 1):
        key = dict(width=width, layers=a.layers or LAYERS[width], prompt_rows=a.prompt_rows,
            method=method, device=told["device"])
        same = lambda r, of: all(r.get(k) == v for k, v in of.items())
        if not a.again and any(same(r, key | settings | dict(code=digest)) for r in known):
            print(f"{i}/{len(todo)} {width:5} {method}: in the record", flush=True); continue
        began = time.perf_counter()
        row = key | settings | dict(code=digest) | {
            k: told[k] for k in ("command", "machine", "commit")} | measured(method, width, a)
        if not a.no_memory:
            row["peak_memory_mb"] = dict(method=memory_of(method, width, a),
                bare=next((r["peak_memory_mb"]["bare"] for r in known if r["width"] == width
                    and r["device"] == key["device"] and r["code"] == digest
                    and r["layers"] == key["layers"] and r["prompt_rows"] == a.prompt_rows
                    and same(r, {k: v for k, v in settings.items() if k != "pairs"})
                    and "peak_memory_mb" in r), None) or memory_of("bare", width, a))
        known = sorted([r for r in known if not same(r, key)] + [row], key=lambda r: (
            r["device"], r["width"], r["layers"], r["prompt_rows"], list(METHODS).index(r["method"])))
        write(a.out, told | dict(
            versions=dict(python=platform.python_version(), torch=torch.__version__,
                transformers=transformers.__version__, peft=peft.__version__, numpy=np.__version__),
            dtype="float32", freed_memory_kept=kept, rows=known))
        print(f"{i}/{len(todo)} {line(row)} ({time.perf_counter() - began:.0f} s)", flush=True)
    print(a.out)


if __name__ == "__main__": main()
