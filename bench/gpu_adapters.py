"""The adapters of the continual study on a GPU, on a Llama-2-7B shape with random weights: a
training step, prefill, decoding, what launches cost, and the share of an adapter's own operations.

    python bench/gpu_adapters.py --only training
    python bench/gpu_adapters.py --only prefill
    python bench/gpu_adapters.py --only decode
    python bench/gpu_adapters.py --only launch profile
    python bench/gpu_adapters.py --only training --batches 4 --tokens 512 1024       # other sizes
    OMP_NUM_THREADS=1 python bench/gpu_adapters.py --device cpu --tiny --meter replay --out /tmp/gpu.json   # a trial

Each is meant to end within ten minutes: after seven (--limit-s) it begins no further setting, and a
second start of the same command goes on where the first ended. All write
records/bench/gpu_adapters_<device>.json.

Needs the package and what it needs to run, and nvidia-ml-py for Joules. Weights are made on the
device in bfloat16; where bitsandbytes can be imported, all is measured again with the blocks in
NF4. Adapters are attached as a run attaches them (`adapters.registry.build_adapter`, statistics
from bytes taken for token ids), share the backbone's weights, and have 25 tasks' worth of state,
made here: himalaya and the bank have learned the prompts of 25 tasks, with drawn numbers; lora (r = 8, q and v, not
merged) and lilac have drawn factors. All prompts are of the last task, which himalaya
finds (asserted), and each adapter changes the logits (asserted). `lora-bf16` is the same LoRA with its
factors in bfloat16, since PEFT keeps them, and multiplies, in float32; `bare-again` is the bare
backbone once more: what a ratio must exceed to mean anything.

training  `running.training.train_step` with autocast to bfloat16 and gradient checkpointing, as
          runs at this scale train: forward, backward, clipping, AdamW, hooks. The task is begun as
          a run begins it; its start and end are timed once. The learning rate is next to zero, so all steps start alike. Targets for
          labels: the last quarter of each row.
prefill   One pass over b prompts of n tokens with a new cache, routing included, asked for the last
          logits. decode: 64 passes after it with fixed tokens, a DynamicCache (what `generate`
          uses), the routing of the prefill.
launch    Passes of decoding on a StaticCache, eager and as a CUDA graph (or, where that fails,
          under torch.compile(mode="reduce-overhead")): equal kernels without their launches.
          `host_ms` is when the host has sent a pass, `launches` what the profiler counted in one
          pass; `launch_part` is the part of the overhead that goes with the launches.
profile   Medians of three profiles. `device_share`: kernels of an adapter's update (Update.apply,
          PairCore.act), of its routing and of its hooks after a step, backward passes and what
          checkpoints run again included, of the time of all kernels; `host_share`: the host's time
          in them, of all of it, waiting apart. `step_share` is the update's share of what binds:
          the device where it is busy for 80 % of the time or more, else the host. A fused step is
          wanted where it is above 5 %.

All variants in turns, round after round, wall time between synchronisations; medians with
quartiles; ratios are medians over rounds with the 95 % interval of a bootstrap over rounds. A
target holds where the upper end of the interval does not exceed its bound. Peak memory is that of
the device while the variant runs, backbone and all adapters included. Joules: windows of 5 s and
more in turns, with cool-down, gross and less the idle power
(`measures.energy.measure_interleaved`). What does not fit, fails or was not begun is in `left_out`
with its message; the record is written after each setting.
"""
import argparse
import contextlib
import contextvars
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from block_parts import twin
from block_speed import in_turns
from gpu_blocks import BACKBONES, MadeTrace, cleaned, is_out_of_memory
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch_overhead import MANY, Tokenizer, rows
from transformers import StaticCache
from transformers.models.llama import modeling_llama

from himalaya_hest.bridge import routed
from himalaya_hest.ground.clock import clock_of
from himalaya_hest.running.checkpoint import write_atomic
from himalaya_hest.bridge.update import Update
from himalaya_hest.ground.hooks import HookList, TaskContext
from himalaya_hest.measures.energy import find_meter, measure_interleaved
from himalaya_hest.bridge.register import prepare_quantised
from himalaya_hest.adapters.defaults import training_defaults
from himalaya_hest.adapters.registry import build_adapter
from himalaya_hest.himalaya.tuner import nearest_tasks
from himalaya_hest.running.training import make_optimizer, model_inputs, train_step
from himalaya_hest.bridge.shell import PairCore
from himalaya_hest.workshop.measuring import (
    called, circumstances, llama_config, random_backbone, ratio, spread)

TASKS = 25
# adapter_config; LILAC's budget counts EWC, which is not here
ADAPTERS = dict(himalaya={}, lora={}, **{"lora-bank": {}}, lilac=dict(budget_mb=None))
KEEP = "himalaya", "lora-bank" # what keeps something of each task
VARIANTS = ("bare", "himalaya", "lora-bank", "lora", "lora-bf16", "lilac", "bare-again")
# batch, tokens; the most telling first
SETTINGS = dict(training=[(8, 1024)], prefill=[(1, 512), (1, 2048), (8, 512), (8, 2048), (1, 4096),
    (8, 4096)], decode=[(1, 512), (8, 512), (32, 512)], launch=[(1, 512)],
    profile=[("training", 8, 1024), ("prefill", 1, 2048), ("decode", 1, 512)])
TINY = dict(training=[(2, 64)], prefill=[(1, 64), (2, 64)], decode=[(1, 64)], launch=[(1, 64)],
    profile=[("training", 2, 64), ("prefill", 1, 64), ("decode", 1, 64)])
JOULES = dict(prefill=[(1, 2048), (8, 2048), (1, 64)], decode=[(1, 512), (32, 512), (1, 64)]) # and training
ROUNDS = dict(training=11, prefill=9, decode=7, launch=11)
TARGETS = [dict(target="prefill at most 2 % over bare", phase="prefill", of="of_bare", bound=1.02),
    dict(target="decoding at most 3 % over bare", phase="decode", of="of_bare", bound=1.03),
           dict(target="decoding without launches at most 3 % over bare", phase="launch",
               of="graph_of_bare", bound=1.03), dict(target="a training step no slower than LoRA's",
                   phase="training", of="of_lora", bound=1.)]
WANTED = .05 # of a step, above which a fused kernel would be worth writing
UPDATE, ROUTING, HOOKS = ADAPTER = "adapter: update", "adapter: routing", "adapter: hooks" # names in a profile
LAYER = "a layer"
RANGES = *ADAPTER, LAYER
# what the host does, and where it waits
LAUNCHES, WAITS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel",
    "cuLaunchKernelEx"), ("Synchronize", "Memcpy")
FAULTS = [] # messages of what failed for another reason than memory


def message(e): return f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:300]}"


@contextlib.contextmanager
def noted(left, what):
    "What fails within is told in `left`, and loses nothing else."
    try: yield
    except Exception as e:
        left[what] = "out of memory" if is_out_of_memory(e) else message(e)
        if not is_out_of_memory(e): traceback.print_exc(); FAULTS.append(left[what])


# ---- adapters with the state of 25 tasks

@torch.no_grad()
def fill(name, adapter, tasks, a):
    "Train nothing, and keep tasks of drawn numbers as a task's end does."
    core = adapter.tuner.core()
    for task in tasks:
        adapter.hooks.on_task_start(TaskContext(f"task {task}", task, MANY,
            [rows(task, a.task_rows, a.task_tokens, 0, a.device, answer=0)]))
        drawn(name, core)
        adapter.hooks.on_task_end([])


@torch.no_grad()
def drawn(name, core):
    "A task in training that acts, before its first step."
    if name == "himalaya": nn.init.normal_(core.tasks.core, 0, .1)
    if name == "lora-bank":
        for g in core.dictionary.gain.values(): nn.init.constant_(g, .5)


def built(name, model, a, tasks=TASKS):
    "An adapter on modules of its own with the weights of `model`, in a state in which it acts."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = build_adapter(name, twin(model), Tokenizer(), adapter_config=ADAPTERS[name])
    if name in KEEP: fill(name, adapter, range(tasks), a)
    draw = torch.Generator(device=a.device).manual_seed(0)
    for n, p in adapter.model.named_parameters():
        if name == "lora" and "lora_B" in n: nn.init.normal_(p, 0, .02, generator=draw)
    if name == "lilac": nn.init.normal_(adapter.tuner.core().b, 0, .02, generator=draw)
    adapter.model.eval()
    return adapter


def nf4(model):
    "The same with its blocks in four bits, matrix after matrix."
    import bitsandbytes as bnb
    for parent in list(model.model.layers.modules()):
        for name, m in parent.named_children():
            if not isinstance(m, nn.Linear): continue
            with torch.device("meta"):
                q = bnb.nn.Linear4bit(m.in_features, m.out_features, bias=False,
                    compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4")
            q.weight = bnb.nn.Params4bit(m.weight.data, requires_grad=False, compress_statistics=True,
                quant_type="nf4", module=q).to(m.weight.device)
            setattr(parent, name, q)
    model.is_loaded_in_4bit = True # where PEFT looks
    prepare_quantised(model)
    return model


def backbone(form, a):
    model = random_backbone(llama_config(128, 2) if a.tiny else BACKBONES["llama-2-7b"](),
        torch.bfloat16, a.device)
    return model if form == "bf16" else nf4(model)


# ---- answering

class Contestant:
    "A backbone with or without an adapter, answering."
    peft = None # in_turns takes a controller's parts where there is one
    def __init__(self, name, model, a):
        self.name, self.caches = name, {} # of each piece of work, what was routed
        self.adapter = None if name.startswith("bare") else built("lora" if name == "lora-bf16"
            else name, model, a)
        self.model = twin(model) if self.adapter is None else self.adapter.model.get_base_model()
        if name == "lora-bf16":
            for n, p in self.adapter.model.named_parameters():
                p.data = p.data.to(torch.bfloat16) if "lora_" in n else p.data
    def calling(self, batch):
        "What a call of the PEFT model says about its prompt."
        return (contextlib.nullcontext() if self.adapter is None
            else self.adapter.model._enable_peft_forward_hooks(
                **model_inputs(batch, self.adapter.takes_masks, self.model.device)))
    def read(self, batch, **kw):
        with self.calling(batch):
            return self.model(input_ids=batch["input_ids"], use_cache=True, logits_to_keep=1, **kw)
    def step(self, ids, cache):
        return self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


class Prefill:
    "One pass over prompts of the last task."
    phase, passes = "prefill", 1
    def __init__(self, b, n, a):
        self.b, self.n, self.tokens, self.of_type = b, n, b * n, {}
        self.batch = rows(TASKS - 1, b, n, 100, a.device, answer=0)
    def prepare(self, v, rng): pass
    def run(self, v): v.read(self.batch)


class Decode(Prefill):
    """New tokens after prompts, one pass each. Keys and values are of one variant for all, since
    time does not hang on them; what was routed is each variant's own."""
    phase = "decode"
    def __init__(self, b, n, a):
        super().__init__(b, n, a)
        self.new, self.tokens, self.passes = rows(TASKS - 1, a.new, n, 101, a.device,
            answer=0)["input_ids"][:, -1:, None].expand(-1, b, 1).contiguous(), b * a.new, a.new
    def prepare(self, v, rng):
        if self in v.caches and self.of_type: return
        cache = v.read(self.batch).past_key_values
        v.caches[self] = getattr(cache, "himalaya_routing", None)
        self.of_type.setdefault("cache", cache)
    def run(self, v):
        cache = self.of_type["cache"]
        cache.himalaya_routing = v.caches[self]
        for ids in self.new: v.step(ids, cache)
        cache.crop(-len(self.new))


def contestants(model, a):
    "Those that can be built on a backbone, once, and why others cannot."
    if not a.made:
        a.made.update(able={}, unbuilt={})
        for name in VARIANTS:
            with noted(a.made["unbuilt"], name): a.made["able"][name] = Contestant(name, model, a)
    return a.made["able"], a.made["unbuilt"]


@torch.no_grad()
def check_acts(todo, batch):
    """{variant: largest change of the last logits over the largest of bare's}; `AssertionError`
    where one is none, or himalaya finds another task than the last."""
    said = {n: v.read({k: t[:1] for k, t in batch.items()}).logits.float() for n, v in todo.items()}
    out = {n: float((x - said["bare"]).abs().max() / said["bare"].abs().max())
        for n, x in said.items() if todo[n].adapter is not None}
    if silent := [n for n, x in out.items() if not x > 0]:
        raise AssertionError(f"{', '.join(silent)}: the logits are those of bare, so nothing of the "
            f"adapter was measured")
    if "himalaya" in todo:
        tuner = todo["himalaya"].adapter.tuner
        found = set(nearest_tasks(tuner.core(), *routed.batch_contexts(tuner, "default", batch)).tolist())
        if found != {TASKS - 1}:
            raise AssertionError(f"the prompts find the tasks {sorted(found)}, expected {TASKS - 1} alone")
    return out


def fitting(work, todo):
    "The variants that get through a first run, and why others do not."
    fits, left = {}, {}
    with torch.no_grad():
        for name, v in todo.items():
            with noted(left, name): work.prepare(v, None); work.run(v); fits[name] = v
            if name in fits: continue
            for x in todo.values(): x.caches.pop(work, None) # a cache that broke off is shared
            work.of_type = {}
            cleaned(v.model.device)
    return fits, left


def peak_mb(work, device):
    "10⁶ bytes of the device while something runs; None on a CPU."
    if not device.startswith("cuda"): work(); return None
    torch.cuda.reset_peak_memory_stats(); work(); torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e6


def joules(meter, works, n_tokens, a):
    "{name: Joules of one run and of a token}, all in turns."
    found = measure_interleaved(meter, works, a.joule_rounds, a.window_s, a.cool_down_s)
    return {m.name: dict(gross_j=m.gross_j, net_j=m.net_j, gross_j_per_token=m.gross_j / n_tokens,
        net_j_per_token=m.net_j / n_tokens, gross_j_rounds=m.gross_j_rounds,
        mean_w=m.gross_j / m.duration_s, idle_w=m.idle_w, n_repeats=m.n_repeats, n_ticks=m.n_ticks,
        source=m.source) for m in found}


def answering(phase, model, a, b, n):
    "A row of prefill or of decode."
    work, (todo, unbuilt) = (Prefill if phase == "prefill" else Decode)(b, n, a), contestants(model, a)
    try:
        fits, left = fitting(work, todo)
        row = dict(passes=work.passes, left_out=unbuilt | left, variants=[])
        if "bare" not in fits: return row
        row["relative_change_of_logits"] = check_acts(fits, work.batch)
        found, _ = in_turns(work, fits, a.rounds[phase], a.latency_s, clock_of(a.device))
        for name, s in found.items():
            with torch.no_grad(): peak = peak_mb(lambda: work.run(fits[name]), a.device)
            row["variants"].append(
                dict(variant=name, ms=spread(1e3 * np.array(s) / work.passes),
                    tokens_per_s=work.tokens / float(np.median(s)), peak_memory_mb=peak,
                    of_bare=ratio(s, found["bare"])))
        return row
    finally:
        for v in todo.values(): v.caches.pop(work, None)


@torch.no_grad()
def answering_joules(phase, model, a, meter, b, n):
    work, todo = (Prefill if phase == "prefill" else Decode)(b, n, a), {
        k: v for k, v in contestants(model, a)[0].items() if k not in ("bare-again", "lora-bf16")}
    try:
        fits, _ = fitting(work, todo)
        return joules(meter, {name: (lambda v=v: work.run(v)) for name, v in fits.items()}, work.tokens, a)
    finally:
        for v in todo.values(): v.caches.pop(work, None)


# ---- training

class Learner:
    "An adapter in the midst of its 25th task."
    def __init__(self, name, model, a, b, n):
        self.name, self.a, self.b, self.last = name, a, b, TASKS - 1
        self.adapter, self.clock, self.begun = built(name, model, a, self.last), clock_of(a.device), {}
        self.batches = [rows(self.last, b, n, i, "cpu", answer=n // 4) for i in range(a.context_batches)]
        self.training = training_defaults(name, scale="full") | dict(
            bf16=True, max_grad_norm=1., learning_rate=1e-9)
        self.accelerator = Accelerator(cpu=a.device == "cpu")
        self.adapter.model.gradient_checkpointing_enable({"use_reentrant": False})
    def seconds(self, work):
        start = self.clock(); work()
        return self.clock() - start
    def begin(self):
        "Start the task as a run does, then its optimiser."
        if self.name in KEEP:
            self.begun = dict(start_s=self.seconds(lambda: self.adapter.hooks.on_task_start(
                TaskContext("last", self.last, MANY, self.batches))))
            drawn(self.name, self.adapter.tuner.core())
        self.adapter.model.train()
        self.optimizer = make_optimizer(self.adapter, self.training)
        return self
    def step(self):
        _, wrong = train_step(self.adapter, self.optimizer, self.batches[:1], self.training, self.accelerator)
        if wrong: raise FloatingPointError(f"the {wrong} of {self.name} was not finite")
    def end(self):
        "The task's end; seconds."
        self.adapter.model.eval()
        return self.begun | dict(end_s=self.seconds(lambda: self.adapter.hooks.on_task_end(self.batches)))


def learners(model, a, b, n, names=tuple(ADAPTERS)):
    "{adapter: Learner} of those that get through two steps, and why others do not."
    out, left = {}, {}
    for name in names:
        with noted(left, name):
            learner = Learner(name, model, a, b, n).begin()
            learner.step(); learner.step()
            out[name] = learner
        learner = None
        cleaned(a.device)
    return out, left


def training(model, a, meter, b, n):
    "A row of training."
    todo, left = learners(model, a, b, n)
    found, row = {name: [] for name in todo}, dict(left_out=left, variants=[], tasks={})
    for r, (i, _) in itertools.product(range(a.rounds["training"]), enumerate(todo)):
        name = list(todo)[(r + i) % len(todo)]
        found[name].append(todo[name].seconds(todo[name].step))
    for name, s in found.items():
        peak, trained = peak_mb(todo[name].step, a.device), sum(p.numel()
            for g in todo[name].optimizer.param_groups for p in g["params"])
        row["variants"].append(
            dict(variant=name, ms=spread(1e3 * np.array(s)), tokens_per_s=b * n / float(np.median(s)),
                peak_memory_mb=peak, trained_parameters=trained)
            | (dict(of_lora=ratio(s, found["lora"])) if "lora" in found else {}))
    if meter.source != "none":
        with noted(left, "joules"):
            row["joules"] = joules(meter, {name: x.step for name, x in todo.items()}, b * n, a)
    for name, x in todo.items():
        if not x.begun: continue # without tasks of its own
        row["tasks"][name] = x.begun
        with noted(left, f"{name}: end of a task"): row["tasks"][name] = x.end()
    return row


# ---- launches

class Static:
    "Passes of decoding on a static cache, within one call (whose routing is kept) in a context of its own."
    def __init__(self, v, work, a):
        self.v, self.new, self.n, self.context = v, a.new, work.n, contextvars.copy_context()
        self.ids, self.cache = work.new[0], StaticCache(config=v.model.config, max_cache_len=work.n + a.new + 8)
        self.context.run(self.begin, work.batch)
    def begin(self, batch):
        self.call = self.v.calling(batch)
        self.call.__enter__() # until `close`
        self.v.model(input_ids=batch["input_ids"], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
    def close(self): self.context.run(self.call.__exit__, None, None, None)
    def reset(self):
        for layer in self.cache.layers: layer.cumulative_length.fill_(self.n)
    def step(self): return self.context.run(self.v.step, self.ids, self.cache)
    def first(self, step):
        self.reset()
        return step().float().clone()
    def times(self, step, clock):
        "Milliseconds of a pass, and those until the host has sent it."
        self.reset(); start = clock()
        for _ in range(self.new): step()
        sent = time.perf_counter() if clock is not time.process_time else clock()
        return 1e3 * (clock() - start) / self.new, 1e3 * (sent - start) / self.new


def captured(s):
    "A pass as a CUDA graph."
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        s.reset()
        for _ in range(3): s.step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph): out = s.step()
    def replay(): graph.replay(); return out
    return replay


def compiled(s):
    "A pass under torch.compile with graphs."
    step = torch.compile(s.step, mode="reduce-overhead")
    s.reset()
    for _ in range(3): step()
    def marked(): torch.compiler.cudagraph_mark_step_begin(); return step()
    return marked


WAYS = {"cuda graph": captured, "torch.compile": compiled}


def graph_of(s, a, left):
    """The first way without launches that works and says what eager says, and its name; None and
    None where none does."""
    if not a.device.startswith("cuda"):
        left[f"{s.v.name}: cuda graph"] = "needs a CUDA device"; return None, None
    want = s.first(s.step)
    for way, make in WAYS.items():
        try:
            step = make(s)
            far = float((s.first(step) - want).abs().max() / want.abs().max())
            if far <= .02: return step, way
            left[f"{s.v.name}: {way}"] = f"its logits differ from eager's by {far:.3g} of the largest"
        except Exception as e: left[f"{s.v.name}: {way}"] = message(e) # whatever a compiler raises
        with contextlib.suppress(RuntimeError): torch.cuda.synchronize()
    return None, None


def launch_variant(name, found, seen, ways):
    "A variant's part of the row; graphs are compared where both are of one way."
    way = ways[name]
    out = dict(variant=name, way=way, eager_ms=spread(found[name, "eager"]),
        host_ms=spread(found[name, "host"]), of_bare=ratio(found[name, "eager"], found["bare", "eager"])) | seen
    if way: out["graph_ms"] = spread(found[name, "graph"])
    if way and way == ways.get("bare"):
        out["graph_of_bare"] = ratio(found[name, "graph"], found["bare", "graph"])
        eager, graph = (float(np.median(found[name, k]) - np.median(found["bare", k]))
            for k in ("eager", "graph"))
        out |= dict(eager_overhead_ms=eager, graph_overhead_ms=graph, launch_part=1 - graph / eager
            if name != "bare" and eager > 0 else None)
    return out


@torch.no_grad()
def launch(model, a, meter, b, n):
    "A row of launch costs."
    work, (able, unbuilt), found, seen, ways, todo = Decode(b, n, a), contestants(model, a), {}, {}, {}, {}
    left = dict(unbuilt)
    for name, v in able.items():
        if name in ("bare-again", "lora-bf16"): continue
        with noted(left, name):
            s = Static(v, work, a)
            s.first(s.step)
            todo[name], ways[name] = s, graph_of(s, a, left)
    # the first round is not counted
    for r, (i, _) in itertools.product(range(a.rounds["launch"] + 1), enumerate(todo)):
        name = list(todo)[(r + i) % len(todo)]
        for way, step in dict(eager=todo[name].step, graph=ways[name][0]).items():
            if step is None: continue
            ms, host = todo[name].times(step, clock_of(a.device))
            if r: found.setdefault((name, way), []).append(ms)
            if r and way == "eager": found.setdefault((name, "host"), []).append(host)
    for name, s in todo.items():
        s.reset()
        with noted(left, f"{name}: launches"): seen[name] = counted(events_of(s.step, a.device), a.device)
        if seen.get(name, {}).get("launches", 1) is None: left[f"{name}: launches"] = "the profiler saw none"
        s.close()
    return dict(passes=1, left_out=left,
        variants=[launch_variant(name, found, seen.get(name, {}),
            {n: w for n, (_, w) in ways.items()}) for name in todo])


# ---- profiles

@contextlib.contextmanager
def named_ranges():
    "Within, an adapter's own operations and each layer stand in a profile under names of their own."
    places = [(Update, "apply", UPDATE), (PairCore, "act", UPDATE), (routed, "routed_now", ROUTING),
        (HookList, "after_optimizer_step", HOOKS), (modeling_llama.LlamaDecoderLayer, "forward", LAYER)]
    kept = [getattr(*at[:2]) for at in places]
    def told(f, name):
        def run(*args, **kw):
            with record_function(name): return f(*args, **kw)
        return run
    for (owner, attribute, name), f in zip(places, kept): setattr(owner, attribute, told(f, name))
    try: yield
    finally:
        for (owner, attribute, _), f in zip(places, kept): setattr(owner, attribute, f)


def events_of(work, device):
    "What the profiler saw of one run."
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * device.startswith("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=kinds) as seen:
            work()
            if device.startswith("cuda"): torch.cuda.synchronize()
        return [e for e in seen.events() if e.device_type == DeviceType.CPU and not e.is_async]


def counted(events, device):
    "Operations of the lowest level, and on a GPU launches."
    return dict(operations=sum(e.name.startswith("aten::") and not any(
        c.name.startswith("aten::") for c in e.cpu_children) for e in events)) | (
            dict(launches=sum(e.name in LAUNCHES for e in events) or None) if device.startswith("cuda") else {})


def below(event, stop=LAYER):
    "An event and all that it called, but no layer that a checkpoint runs again."
    yield event
    for child in event.cpu_children:
        if child.name != stop: yield from below(child, stop)


def attributed(events):
    "{id of an event: the range it belongs to}; a backward operation belongs where its forward operation was."
    of = {}
    for e in events:
        if e.name in ADAPTER:
            for x in below(e): of.setdefault(id(x), e.name)
    forward = {(e.thread, e.sequence_nr): of[id(e)] for e in events if id(e) in of and e.sequence_nr >= 0}
    for e in events:
        name = forward.get((e.fwd_thread, e.sequence_nr)) if e.name.startswith(
            "autograd::engine::evaluate_function") else None
        if name:
            for x in below(e): of.setdefault(id(x), name)
    return of


def waits(e): return any(w in e.name for w in WAITS)


def spent(e):
    """Microseconds of an event, less waiting, and less layers that a checkpoint runs again and what
    it takes to call them."""
    calls = any(c.name == LAYER for c in e.cpu_children)
    return (0 if calls else e.self_cpu_time_total) + sum(spent(c) for c in e.cpu_children
        if c.name != LAYER and not waits(c))


def shares(events):
    """{range: its share} of the host's time, waiting apart, and, where kernels were seen, of the
    device's; and the device's seconds."""
    of, on_device = attributed(events), {id(e): sum(k.duration for k in e.kernels) for e in events
        if e.name not in RANGES}
    tops = [(of[id(e)], spent(e)) for e in events if id(e) in of and id(e.cpu_parent) not in of]
    host = max(e.time_range.end for e in events) - min(e.time_range.start for e in events) - sum(
        e.cpu_time_total for e in events if waits(e) and not (e.cpu_parent and waits(e.cpu_parent)))
    out, device = dict(host_share={name.split()[1]: sum(x for n, x in tops if n == name) / host
        for name in ADAPTER}), sum(on_device.values())
    if device:
        out["device_share"] = {name.split()[1]: sum(x for i, x in on_device.items()
            if of.get(i) == name) / device for name in ADAPTER}
    return out, device / 1e6


def profiled(name, work, clock, device, runs=3):
    "A variant's part of the row: medians over some profiles."
    work(); start = clock(); work(); wall = clock() - start
    with named_ranges(): seen = [events_of(work, device) for _ in range(runs)]
    found, busy_s = zip(*map(shares, seen))
    found, busy_s = {k: {r: float(np.median([f[k][r] for f in found])) for r in x}
        for k, x in found[0].items()}, float(np.median(busy_s))
    binds = "device" if "device_share" in found and busy_s >= .8 * wall else "host"
    share = found[f"{binds}_share"]["update"]
    return dict(variant=name, binds=binds, step_share=share, fused_step_wanted=share > WANTED,
        wall_ms=1e3 * wall, device_busy=busy_s / wall if "device_share" in found
        else None) | found | counted(seen[0], device)


def profiles(kind, model, a, b, n):
    "A row of profiles of one kind of work."
    names, left, clock = ("himalaya", "lora-bank", "lilac"), {}, clock_of(a.device)
    if kind == "training":
        todo, left = learners(model, a, b, n, names=names)
        works, passes = {name: x.step for name, x in todo.items()}, 1
    else:
        work, (able, unbuilt) = (Prefill if kind == "prefill" else Decode)(b, n, a), contestants(model, a)
        if kind == "decode": work.new, work.passes = work.new[:4], 4
        fits, left = fitting(work, {k: v for k, v in able.items() if k in names})
        left, passes, works = (unbuilt | left, work.passes,
            {name: torch.no_grad()(lambda v=v: work.run(v)) for name, v in fits.items()})
    row = dict(passes=passes, left_out=left, variants=[])
    for name, f in works.items():
        with noted(left, name): row["variants"].append(profiled(name, f, clock, a.device))
    if a.device.startswith("cuda") and not any("device_share" in v for v in row["variants"]):
        row["left_out"]["device_share"] = "the profiler saw no kernels"
    return row


# ---- the record

def targets(rows):
    "Each target beside what was measured of it."
    return [dict(target=t["target"], form=r["form"], batch_size=r["batch_size"],
        n_tokens=r["n_tokens"], bound=t["bound"], measured=v[t["of"]], held=v[t["of"]]["high"] <= t["bound"])
            for t in TARGETS for r in rows if r["phase"] == t["phase"] for v in r["variants"]
        if v["variant"] == "himalaya" and t["of"] in v]


def key_of(row): return row["form"], row["phase"], row.get("of"), row["batch_size"], row["n_tokens"]


def wanted(a):
    "(phase, what of it, batch, tokens, whether Joules alone) of all that is asked for."
    out = []
    for phase in a.only:
        sizes = [s if len(s) == 3 else (None, *s) for s in a.settings[phase]]
        if a.batches or a.tokens:
            sizes = [(kind, b, n) for kind in dict.fromkeys(s[0] for s in sizes) for n in a.tokens
                or dict.fromkeys(s[2] for s in sizes) for b in a.batches or dict.fromkeys(s[1] for s in sizes)]
        out += [(phase, *s, False) for s in sizes] + [(phase, *s, True) for s in sizes
            if phase in ("prefill", "decode") and (a.batches or a.tokens or s[1:] in JOULES[phase])]
    return out


def measured(phase, of, model, a, meter, b, n):
    if phase == "profile": return profiles(of, model, a, b, n)
    return answering(phase, model, a, b, n) if phase in ("prefill", "decode") else dict(
        training=training, launch=launch)[phase](model, a, meter, b, n)


def parsed():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--tiny", action="store_true", help="a tiny backbone, few tokens, rounds and short windows")
    p.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    p.add_argument("--forms", nargs="+", choices=["bf16", "nf4"], default=["bf16", "nf4"])
    p.add_argument("--batches", nargs="+", type=int, help="in place of the settings' own")
    p.add_argument("--tokens", nargs="+", type=int, help="in place of the settings' own")
    p.add_argument("--new", type=int, default=64, help="passes of decoding")
    p.add_argument("--rounds", type=int, help=f"default: {', '.join(f'{v} of {k}' for k, v in ROUNDS.items())}")
    p.add_argument("--latency-s", type=float, default=.2, help="of a variant in a round of prefill or decode")
    p.add_argument("--meter", default="auto", help="auto, nvml, rapl, none, or replay, a made trace")
    p.add_argument("--joule-rounds", type=int, default=2)
    p.add_argument("--window-s", type=float, default=5.)
    p.add_argument("--cool-down-s", type=float, default=2.)
    p.add_argument("--again", action="store_true", help="measure settings anew that the record has")
    p.add_argument("--limit-s", type=float, default=420., help="after which no further setting is begun")
    p.add_argument("--out", help="default on a GPU: records/bench/gpu_adapters_<device>.json")
    a = p.parse_args()
    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA device: --device cpu --tiny --out FILE tries the "
            "script without one")
    if (a.device == "cpu" or a.tiny) and not a.out:
        raise SystemExit("a run on a CPU, or of the tiny shape, only tries the script and belongs "
            "into no record of the project: give --out")
    name = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
    a.out = Path(a.out or f"records/bench/gpu_adapters_{re.sub('[^a-z0-9]+', '_', name.lower())}.json")
    if a.tiny: a.new, a.latency_s, a.joule_rounds, a.window_s, a.cool_down_s = 4, .01, 1, .05, .01
    a.settings = TINY if a.tiny else SETTINGS
    a.rounds = {k: a.rounds or (3 if a.tiny else v) for k, v in ROUNDS.items()}
    a.task_rows, a.task_tokens, a.context_batches = (4, 64, 8) if a.tiny else (8, 256, 64)
    a.made = {} # of one backbone
    return a


def versions():
    found = {n: importlib.metadata.version(n) for n in ("torch", "triton", "transformers", "peft",
        "accelerate", "numpy", "bitsandbytes") if importlib.util.find_spec(n)}
    return dict(python=platform.python_version(), cuda=torch.version.cuda) | found


def begun(a, meter):
    "The record, a new one or one to go on with."
    here = circumstances(
        called(__file__, ("--again",)), a.device)
    settings = dict(backbone="tiny" if a.tiny else "llama-2-7b", weights="random", tasks=TASKS,
        prompts="of one task", new_tokens=a.new, rounds=a.rounds,
        latency_s=a.latency_s, joule_rounds=a.joule_rounds, window_s=a.window_s, cool_down_s=a.cool_down_s)
    record = (json.loads(a.out.read_text(encoding="utf-8")) if a.out.exists() else here
        | dict(versions=versions(), settings=settings, meter=meter.source, rows=[], targets=[], left_out=[]))
    for what, old, new in (("machine", record["machine"], here["machine"]),
        ("meter", record["meter"], meter.source), ("settings", record["settings"],
            json.loads(json.dumps(settings)))):
        if old != new: raise SystemExit(f"{a.out} has the {what} {old}, this run {new}: give another --out")
    if here["commit"] not in record["commit"].split(", "): record["commit"] += f", {here['commit']}"
    return record, here["command"], here["commit"]


def line(row):
    if row["phase"] == "profile":
        told = [f"{v['variant']} {v['step_share']:.1%} of the {v['binds']}" for v in row["variants"]]
    else:
        told = [f"{v['variant']} {v.get('ms', v.get('eager_ms'))['median']:.2f} ms"
            + "".join(f", {v[k]['median']:.3f} {k}" for k in ("of_bare", "of_lora", "graph_of_bare")
                if k in v) for v in row["variants"]]
    return "; ".join(told or ["nothing was measured"]) + (f"; left out: {row['left_out']}"
        if row["left_out"] else "")


def main():
    a, began = parsed(), time.monotonic()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.*")
    meter = MadeTrace() if a.meter == "replay" else find_meter(a.meter, a.device)
    record, command, here = begun(a, meter)
    if a.again:
        record["rows"] = [r for r in record["rows"] if key_of(r)[1:] not in {w[:4]
            for w in wanted(a)} or r["form"] not in a.forms]
    def write():
        record["targets"] = targets(record["rows"])
        write_atomic(a.out, json.dumps(record, indent=1, allow_nan=False) + "\n")
    def leave(why, **where):
        record["left_out"].append(where | dict(why=why))
        print(", ".join(map(str, where.values())), "left out:", why, flush=True); write()
    for form in a.forms:
        record["left_out"] = [x for x in record["left_out"] if x["form"] != form
            or x.get("phase") not in (None, "joules", *a.only)]
        if form == "nf4" and not importlib.util.find_spec("bitsandbytes"):
            leave("bitsandbytes is not there", form=form); continue
        if meter.source == "none": leave("no counter of energy was found", form=form, phase="joules")
        model = None
        for phase, of, b, n, only_joules in wanted(a):
            where = dict(form=form, phase=phase, **(dict(of=of) if of else {}), batch_size=b,
                n_tokens=n, **(dict(joules=True) if only_joules else {}))
            row = next((r for r in record["rows"] if key_of(r) == (form, phase, of, b, n)), None)
            if only_joules and (meter.source == "none" or row is None
                or "joules" in row) or row is not None and not only_joules:
                continue
            if time.monotonic() - began > a.limit_s:
                leave("not begun, the limit of time: start the command again", **where); continue
            left, start = {}, time.monotonic()
            with noted(left, "why"):
                cleaned(a.device)
                if model is None: model = backbone(form, a)
                if only_joules: row["joules"] = answering_joules(phase, model, a, meter, b, n)
                else:
                    row = where | dict(command=command, commit=here) | measured(
                        phase, of, model, a, meter, b, n) | dict(took_s=time.monotonic() - start)
                    if row["variants"]: record["rows"].append(row)
                    else: left["why"] = "; ".join(f"{what}: {why}" for what, why in row["left_out"].items())
                write()
                print(f"{time.monotonic() - began:4.0f} s  "
                    f"{' '.join(str(x) for k, x in where.items() if k != 'joules')}: " + (
                        "Joules of a token, gross: " + "; ".join(f"{k} {j['gross_j_per_token']:.3g}"
                            for k, j in row["joules"].items()) if only_joules else line(row)), flush=True)
            if left: leave(**left, **where)
        model = None; a.made.clear(); cleaned(a.device)
    write()
    for t in record["targets"]:
        print(f"{t['target']}, {t['form']}, {t['batch_size']} × {t['n_tokens']}: "
            f"{t['measured']['median']:.3f} [{t['measured']['low']:.3f}, "
            f"{t['measured']['high']:.3f}], {'held' if t['held'] else 'not held'}")
    print(a.out)
    return int(bool(FAULTS))


if __name__ == "__main__": sys.exit(main())
