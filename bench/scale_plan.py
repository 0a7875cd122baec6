"""The plan at scale: the formula of himalaya_hest.running.plan at measured points, the full studies
on cards of 24, 80 and 141 GB, at 70 B parameters and at 1 000 tasks, and what a task more costs.

    python bench/scale_plan.py                  # all three -> records/bench/scale_plan.json
    python bench/scale_plan.py check            # bytes by the formula and bytes counted, on small random models
    python bench/scale_plan.py scale            # the studies on each card, 7 B and 70 B; 10 to 1 000 tasks
    python bench/scale_plan.py tasks            # HIMALAYA of 25, 100 and 1 000 tasks at d = 4096: bytes and time

One part alone replaces that part of the record. `check` counts on this CPU what a pass really
holds: the storages that autograd saves, and by a dispatch mode the bytes of all tensors alive at
once. Nothing runs on a GPU: hours on cards are the formula's. Times of `tasks` are processor
seconds of one thread (OMP_NUM_THREADS=1).
"""
import os

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import argparse
import itertools
import json
import platform
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT/"records"/"bench"/"scale_plan.json"
COMMAND = "OMP_NUM_THREADS=1 python bench/scale_plan.py"
# architecture, width, layers, heads, heads of keys, inner width, vocabulary; rows and tokens of a
# batch
SMALL = {"narrow, 4 layers": (("llama", 128, 4, 4, 4, 344, 2048), 8, 128),
    "grouped keys, narrow MLP": (("llama", 512, 4, 8, 2, 1024, 2048), 4, 256),
    "8 layers, wide MLP": (("llama", 256, 8, 4, 4, 1376, 2048), 4, 256),
    "Qwen2, grouped keys": (("qwen2", 384, 6, 6, 2, 1536, 2048), 8, 64),
    "wide, one long row": (("llama", 1024, 3, 16, 4, 2816, 2048), 1, 512)}
PEFT = ("lora", "himalaya", "lora-bank", "lilac")
GATED = {"hest, blocks": dict(adapter="hest", adapter_config=dict(scope="blocks")),
    "hest, directions": dict(adapter="hest", adapter_config=dict(scope="directions")),
         "tabs, blocks": dict(adapter="tabs", adapter_config=dict(scope="blocks")),
    "tabs, directions": dict(adapter="tabs", adapter_config=dict(scope="directions"))}
SEVEN, SEVENTY = "NousResearch/Llama-2-7b-hf", "NousResearch/Llama-2-70b-hf"
BUDGET_MB = 2.5
TASKS = (10, 25, 50, 100, 250, 500, 1000)


class Live(TorchDispatchMode):
    "Bytes of all storages that operations make and that are alive, those of a model apart."
    def __init__(self, model):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in own_tensors(model)}
        self.live, self.peak = {}, 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or t.is_mkldnn: continue
            if (s := t.untyped_storage())._cdata not in self.known and s._cdata not in self.live:
                self.live[s._cdata] = s._weak_ref(), s.nbytes()
        for k in [k for k, (weak, _) in self.live.items() if torch.UntypedStorage._expired(weak)]:
            torch.UntypedStorage._free_weak_ref(self.live.pop(k)[0])
        self.peak = max(self.peak, sum(n for _, n in self.live.values()))
        return out


def own_tensors(model):
    "Parameters, buffers, gradients, and the int8 copies of matrices that gated blocks make beside them."
    from himalaya_hest.hest.int8 import Int8Matrix
    out = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters() if p.grad is not None]]
    for block in model.modules():
        matrices = getattr(getattr(block.__dict__.get("forward"), "matrices", None), "int8", {})
        for m in matrices.values():
            kept = m.weight() if isinstance(m, Int8Matrix) else None
            out += [t for t in vars(kept).values() if torch.is_tensor(t)] if kept is not None else []
    return [t for t in out if not t.is_mkldnn] # packed ones have no storage to be seen


def saved_bytes(model, run):
    "Bytes of the distinct storages that autograd keeps, without parameters and buffers."
    known, kept = {t.untyped_storage().data_ptr() for t in own_tensors(model)}, {}
    def pack(t):
        # held, so that no address is used twice
        if (at := t.untyped_storage().data_ptr()) not in known: kept[at] = t.untyped_storage().nbytes(), t
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): out = run()
    return sum(n for n, _ in kept.values()), out


def model_config(kind, width, layers, heads, keys, mlp, vocabulary):
    from transformers import AutoConfig
    return AutoConfig.for_model(kind, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, intermediate_size=mlp, vocab_size=vocabulary,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def batch_of(b, n, m, first=0):
    "Random rows, the first of them half padding if there are more; m targets each."
    gen = torch.Generator().manual_seed(first)
    ids, mask, labels = torch.randint(3, 2048, (b, n), generator=gen), torch.ones(b, n,
        dtype=torch.long), torch.full((b, n), -100)
    if b > 1: mask[0, n // 2:] = 0
    labels[:, n // 4:n // 4 + m] = 5
    prompt = (torch.arange(n) < n // 4).expand(b, n).clone()
    return dict(input_ids=ids * mask, attention_mask=mask, labels=labels, prompt_mask=prompt,
        instruction_mask=prompt.clone())


def built(given, shape, dtype, again, b):
    "An adapter on a random backbone, with the first task begun, and what the formula knows of it."
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.ground.hooks import TaskContext
    from himalaya_hest.streams.backbone import mini_backbone_dir
    from himalaya_hest.running.costs import Backbone
    from himalaya_hest.running.shapes import adapter_size, shape_of
    from himalaya_hest.adapters.registry import build_adapter
    gated = dict(study="cnndm",
        e_max=.9) if given["adapter"] == "hest" else dict(study="cnndm") if given["adapter"] == "tabs" else {}
    config = resolve(given | gated
        | dict(dtype=dtype, training=dict(bf16=dtype == "bfloat16", gradient_checkpointing=again,
            per_device_train_batch_size=b)))
    cfg = model_config(*shape)
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_config(cfg).to(getattr(torch, dtype)).requires_grad_(False)
    adapter = build_adapter(config.adapter.partition("+")[0], backbone,
        AutoTokenizer.from_pretrained(mini_backbone_dir()), config.preset, config.adapter_config, None, 0)
    if again: adapter.model.gradient_checkpointing_enable({"use_reentrant": False})
    adapter.model.train()
    adapter.hooks.on_task_start(TaskContext("first", 0, 10, [batch_of(b, 64, 1)]))
    return adapter, Backbone(shape_of(cfg), adapter_size(config, cfg, 1), config, dtype == "float32")


def passes(adapter, batch, dtype):
    "What a training forward saves, and what a step holds at most."
    from himalaya_hest.ground.loss import target_logits, target_loss
    from himalaya_hest.running.training import model_inputs
    cast = lambda: torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()
    def forward():
        with cast():
            return target_logits(adapter.model, batch["labels"], **model_inputs(batch, adapter.takes_masks))
    def step():
        logits, targets = forward()
        terms = [target_loss(logits, targets), adapter.hooks.micro_batch_loss(adapter.model, batch, 1.)]
        sum(t for t in terms if t is not None).backward()
        adapter.hooks.after_backward()
    saved, out = saved_bytes(adapter.model, forward)
    del out
    step() # gradients are there from now on
    with Live(adapter.model) as live: step()
    return saved, live.peak


def activation_points():
    "Saved storages and the largest moment of a step, beside the formula's."
    from himalaya_hest.running.memory import held_bytes, training_bytes
    points = []
    cases = [(name, dict(adapter=name), s, d) for name in PEFT for s in SMALL for d in ("float32", "bfloat16")]
    cases += [(name, given, s, "bfloat16") for name, given in GATED.items()
        for s in ("grouped keys, narrow MLP", "8 layers, wide MLP", "wide, one long row")]
    for (name, given, at, dtype), again in itertools.product(cases, (False, True)):
        shape, b, n = SMALL[at]
        adapter, of = built(given, shape, dtype, again, b)
        saved, peak = passes(adapter, batch_of(b, n, 4), dtype)
        points.append(dict(adapter=name, shape=at, rows=b, tokens=n, padded=b > 1, dtype=dtype,
            checkpointing=again, saved=ratio(held_bytes(of, b, n), saved),
            peak=ratio(sum(training_bytes(of, b, n, 4).values()), peak)))
        print(points[-1], flush=True)
    return points


def ratio(predicted, measured):
    return dict(predicted=round(predicted), measured=round(measured), ratio=round(predicted / measured, 3))


def logits_points():
    "Where the logits are the largest moment: many targets, a vocabulary of 32 000."
    from himalaya_hest.running.memory import training_bytes
    out = []
    for dtype, m in itertools.product(("float32", "bfloat16"), (32, 96)):
        adapter, of = built(dict(adapter="lora"), ("llama", 128, 2, 4, 4, 344, 32000), dtype, True, 4)
        predicted = training_bytes(of, 4, 256, m)
        assert "logits" in predicted
        out.append(dict(dtype=dtype, rows=4, targets=4 * m, vocabulary=32000,
            **ratio(sum(predicted.values()), passes(adapter, batch_of(4, 256, m), dtype)[1])))
    return out


def weight_points():
    "Bytes of loaded weights, in 4 bits with their scales and tables."
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.running.shapes import shape_of, weight_bytes
    out = []
    for (at, (shape, *_)), kind in itertools.product(SMALL.items(), ("float32", "bfloat16", "nf4")):
        config = resolve(dict(adapter="lora", dtype="bfloat16" if kind == "nf4" else kind,
            quantisation="nf4" if kind == "nf4" else "none"))
        model = AutoModelForCausalLM.from_config(model_config(*shape)).to(getattr(torch, config.dtype))
        if kind == "nf4":
            with tempfile.TemporaryDirectory() as d:
                model.save_pretrained(d)
                model = AutoModelForCausalLM.from_pretrained(d, dtype=torch.bfloat16,
                    quantization_config=BitsAndBytesConfig(load_in_4bit=True,
                        bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
        held = sum(p.nbytes for p in model.parameters())
        for m in model.modules():
            if (q := getattr(getattr(m, "weight", None), "quant_state", None)) is not None:
                held += sum(t.nbytes for t in
                    (q.absmax, q.code, q.offset, q.state2.absmax, q.state2.code))
        out.append(dict(shape=at, weights=kind,
            **ratio(weight_bytes(shape_of(model_config(*shape)), config), held)))
    return out


def state_points():
    """Bytes of the state between tasks, written to a file after real tasks began and ended, beside
    the count on meta tensors."""
    from peft import get_peft_model_state_dict
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.ground.hooks import TaskContext
    from himalaya_hest.running.shapes import adapter_size
    from himalaya_hest.bridge.shell import pack
    out = []
    for (at, (shape, *_)), (name, tasks) in itertools.product(SMALL.items(),
        (("himalaya", 12), ("lora-bank", 5), ("lora-bank", 12), ("lilac", 3), ("lora", 3))):
        adapter, of = built(dict(adapter=name), shape, "float32", False, 2)
        for i in range(tasks):
            loader = [batch_of(2, 64, 1, first=i)]
            if i: adapter.hooks.on_task_start(TaskContext(f"task {i}", i, 10, loader))
            adapter.hooks.on_task_end(loader)
        size = adapter_size(of.config, model_config(*shape), tasks).state
        state = pack(adapter.tuner.core()) if name == "lilac" else get_peft_model_state_dict(
            adapter.model, save_embedding_layers=False)
        out.append(dict(adapter=name, shape=at, tasks=tasks, **ratio(size, sum(t.nbytes for t in state.values()))))
    return out


def learned_rows(adapter, batch):
    "Begin and end a task with each row's prompt, and see that it is found; number of these tasks."
    from himalaya_hest.ground.hooks import TaskContext
    names = [f"row {i}" for i in range(len(batch["input_ids"]))]
    for i, name in enumerate(names):
        own = [{k: v[i:i + 1] for k, v in batch.items()}]
        adapter.hooks.on_task_start(TaskContext(name, i + 1, 10, own))
        adapter.hooks.on_task_end(own)
    adapter.model.eval()
    assert adapter.tuner.find_tasks(batch) == names
    return len(names)


def cache_points():
    "Bytes of a cache after generation, and what a batch of evaluation holds at most."
    from himalaya_hest.running.memory import evaluation_bytes
    from himalaya_hest.running.training import model_inputs
    out = []
    # tasks: one, or as many as rows, each of which finds its own
    cases = [("lora", dict(adapter="lora"), at, beams, dtype, 1) for at in SMALL for beams in (1, 3)
        for dtype in ("float32", "bfloat16")]
    himalaya, two = dict(adapter="himalaya"), ("grouped keys, narrow MLP", "8 layers, wide MLP")
    cases += [(name, given, at, 1, "bfloat16", 1) for name, given in (GATED
        | dict(himalaya=himalaya)).items() for at in two]
    cases += [("himalaya", himalaya, at, 1, "bfloat16", SMALL[at][1]) for at in two]
    for name, given, at, beams, dtype, tasks in cases:
        shape, b, n = SMALL[at]
        adapter, of = built(given, shape, dtype, False, b)
        new, batch = 8, batch_of(b, n, 1)
        adapter.hooks.on_task_end([batch_of(b, 64, 1)])
        if tasks > 1: of = replace(of, adapter=replace(of.adapter, tasks=learned_rows(adapter, batch)))
        # padding on the left; HIMALAYA's prompts begin on it
        if name != "himalaya": batch["attention_mask"] = batch["attention_mask"].flip(1)
        of = replace(of, config=replace(of.config, evaluation=of.config.evaluation
            | dict(per_device_eval_batch_size=b, num_beams=beams), energy={}))
        adapter.model.eval()
        with torch.no_grad(), Live(adapter.model) as live:
            made = adapter.model.generate(**model_inputs(batch, adapter.takes_masks),
                max_new_tokens=new, min_new_tokens=new, do_sample=False, num_beams=beams,
                return_dict_in_generate=True)
        keys, work = evaluation_bytes(of, n, new - 1) # the last token that is written needs no keys
        out.append(dict(adapter=name, shape=at, rows=b, tokens=n, beams=beams, tasks=tasks, dtype=dtype,
            cache=ratio(keys, sum(t.nbytes for l in made.past_key_values.layers
                for t in (l.keys, l.values))), peak=ratio(keys + work, live.peak)))
    return out


def optimiser_points():
    "Bytes of parameters, gradients and moments, after a step."
    from himalaya_hest.running.training import make_optimizer, model_inputs
    from himalaya_hest.ground.loss import target_logits, target_loss
    out = []
    for (at, (shape, *_)), name in itertools.product(SMALL.items(), PEFT):
        adapter, of = built(dict(adapter=name), shape, "float32", False, 2)
        batch, optimizer = batch_of(2, 64, 1), make_optimizer(adapter, of.config.training)
        target_loss(*target_logits(adapter.model, batch["labels"],
            **model_inputs(batch, adapter.takes_masks))).backward()
        optimizer.step()
        held = [p for g in optimizer.param_groups for p in g["params"]]
        moments = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
        out.append(dict(adapter=name, shape=at,
            **ratio(of.adapter.trained * 16,
                sum(t.nbytes for t in [*held, *[p.grad for p in held if p.grad is not None], *moments]))))
    return out


def time_points():
    "The whole runs of plan.json: what was measured there, what was predicted, and what the formula says today."
    from himalaya_hest.running.costs import cpu_device, evaluation_seconds, seconds
    from himalaya_hest.running.loads import evaluations
    from himalaya_hest.running.plan import make_plan
    from plan import parameters, random_model
    known, out = json.loads((ROOT/"records"/"bench"/"plan.json").read_text(encoding="utf-8")), []
    with tempfile.TemporaryDirectory() as d:
        wide = random_model(d, 512, 4)
        for p in known["points"]:
            given = parameters(d, adapter=p["adapter"], model="mini" if p["model"] == "mini"
                else wide, n_tasks=p["tasks"], training=dict(max_train_rows=p["rows"]),
                evaluation=dict(max_eval_rows=p["eval_rows"], latency_pairs=0))
            device, plan = cpu_device(p["adapter"]), make_plan(
                {k: v for k, v in given.items() if k != "overwrite"}, on=[cpu_device(p["adapter"])])
            said = seconds(plan.of, plan.loads, device)
            # a random model writes until its cap
            if p["model"] != "mini":
                said |= dict(evaluation=evaluation_seconds(
                    plan.of, evaluations(plan.config, plan.loads, plan.of.adapter.keeps_answers), device, True))
            out.append({k: p[k] for k in ("adapter", "model", "tasks", "rows", "measured_s",
                "predicted_s", "ratio")} | dict(predicted_today_s=round(sum(said.values()), 2),
                    ratio_today=round(sum(said.values()) / p["measured_s"], 3)))
    return dict(measured_by=known["command"], unit=known["unit"], points=out,
        worst_ratio=known["worst_ratio"], worst_ratio_today=span(p["ratio_today"] for p in out))


def span(values): return [min(v := list(values)), max(v)]


def check():
    import himalaya_hest.hest.int8
    # a GPU's product; which is the fastest on a CPU may change from run to run
    himalaya_hest.hest.int8.fastest = lambda *given: "int_mm"
    out = dict(kind="measured on a CPU", unit="bytes, predicted over measured",
        activations=activation_points(), logits=logits_points(), weights=weight_points(),
        state=state_points(), cache=cache_points(), optimiser=optimiser_points(), time=time_points())
    of = lambda rows, key=None: dict(points=len(rows), ratio=span((p[key] if key else p)["ratio"]
        for p in rows))
    worst = {}
    for who, inside in (("", True), (", gated adapters", False)):
        for what, chosen in ((", one row without padding", lambda p: not p["padded"]),
            ("", lambda p: p["padded"] and not p["checkpointing"]),
            (", checkpointed", lambda p: p["padded"] and p["checkpointing"])):
            rows = [p for p in out["activations"] if (p["adapter"] in PEFT) is inside and chosen(p)]
            worst |= {f"saved for the pass back{what}{who}": of(rows, "saved"),
                f"largest moment of a step{what}{who}": of(rows, "peak")}
    worst |= {"logits": of(out["logits"]),
        "weights": of([p for p in out["weights"] if p["weights"] != "nf4"]),
        "weights in NF4": of([p for p in out["weights"] if p["weights"] == "nf4"]),
        "state between tasks": of(out["state"]), "keys and values": of(out["cache"], "cache"),
        "largest moment of an evaluation": of([p for p in out["cache"] if p["adapter"] in PEFT],
            "peak"), "largest moment of an evaluation, gated adapters": of([p for p in out["cache"]
                if p["adapter"] not in PEFT], "peak"),
        "parameters, gradients, moments": of(out["optimiser"])}
    return out | dict(worst_ratio=worst)


# --- the studies on cards

def studies(size):
    "Name → parameters of the runs of both studies."
    big = dict(model=SEVENTY, quantisation="nf4") if size == "70 B" else {}
    free = dict(adapter_config=dict(budget_mb=None)) if size == "70 B" else {}
    one = {a: dict(scale="full", adapter=a) | (free if a == "lilac+ewc" else {}) | big for a in ("himalaya", "lora-bank", "lora", "lora+ewc", "lilac+ewc")}
    two = {name: given | dict(study="cnndm", scale="full") | big for name, given in (
        GATED | dict(lora=dict(adapter="lora"))).items()}
    return {("continual25", n): p for n, p in one.items()} | {("cnndm", n): p for n, p in two.items()}


def settings(config):
    "Changes that lower memory, the smallest first: what is named, and the run with it."
    t, e, timed = config.training, config.evaluation, config.energy.get("latency_batch_sizes", [])
    halves = lambda n: [n >> k for k in range(n.bit_length()) if n >> k]
    out = []
    for nf4, again, b, B in itertools.product(*[(False, True)] * 2,
        halves(t["per_device_train_batch_size"]), halves(e["per_device_eval_batch_size"])):
        if nf4 and config.quantisation == "nf4" or again and t["gradient_checkpointing"]: continue
        for most in sorted({*timed, 1} if timed else {1}, reverse=True):
            times = t["per_device_train_batch_size"] // b
            said = dict(quantisation="nf4") if nf4 else {}
            said |= {"training.gradient_checkpointing": True} if again else {}
            said |= {"training.per_device_train_batch_size": b,
                "training.gradient_accumulation_steps": times
                * t["gradient_accumulation_steps"]} if times > 1 else {}
            said |= {"evaluation.per_device_eval_batch_size": B} if B < e["per_device_eval_batch_size"] else {}
            said |= {"energy.latency_batch_sizes": (
                fewer := [x for x in timed if x <= most])} if timed and most < max(timed) else {}
            run = replace(config, quantisation="nf4" if nf4 else config.quantisation,
                training=t | dict(gradient_checkpointing=again or t["gradient_checkpointing"],
                    per_device_train_batch_size=b,
                    gradient_accumulation_steps=times * t["gradient_accumulation_steps"]),
                evaluation=e | dict(per_device_eval_batch_size=B), energy=config.energy
                | (dict(latency_batch_sizes=[x for x in timed if x <= most]) if timed else {}))
            lost = (t["per_device_train_batch_size"] // b).bit_length() + (
                e["per_device_eval_batch_size"] // B).bit_length() + (sum(x > most for x in timed))
            out.append(((nf4, again, lost), said, run))
    return [(said, run) for _, said, run in sorted(out, key=lambda x: x[0])]


def on_card(plan, device, max_length):
    "Whether a run fits, with which settings, in how many hours."
    from himalaya_hest.running.costs import seconds
    from himalaya_hest.running.memory import memory_parts
    for said, run in settings(plan.config):
        of = replace(plan.of, config=run)
        parts = memory_parts(of, plan.loads, max_length)
        if sum(parts.values()) < device.memory:
            hours = [round(sum(seconds(of, plan.loads, device, n).values()) / 3600, 2)
                for n in (None, max_length)]
            return dict(fits=not said, settings=said, memory_gb=round(sum(parts.values()) / 1e9, 2),
                hours=hours)
    # with everything lowered
    return dict(fits=False, settings=None, memory_gb=round(sum(parts.values()) / 1e9, 2),
        weights_gb=round(parts["weights"] / 1e9, 2))


def study_points():
    from himalaya_hest.running.costs import devices
    from himalaya_hest.running.memory import training_bytes
    from himalaya_hest.running.plan import make_plan
    out = []
    for size in ("7 B", "70 B"):
        for (study, name), given in studies(size).items():
            plan = make_plan(given)
            c, n = plan.config, min(plan.config.training["max_length"] or 1024, plan.of.shape.context)
            memory = {k: round(v / 1e9, 2) for k, v in plan.memory.items()}
            step = training_bytes(plan.of, c.training["per_device_train_batch_size"], n,
                max(t.cap for t in plan.loads))
            out.append(dict(study=study, size=size, adapter=name, weights=c.quantisation
                if c.quantisation != "none" else c.dtype, steps=plan.steps,
                generations=plan.generations, trained=plan.of.adapter.trained,
                state_bytes=plan.of.adapter.state,
                memory_gb=memory, total_gb=round(sum(plan.memory.values()) / 1e9, 2),
                step_gb=round(sum(step.values()) / 1e9, 2),
                cards={d.name: on_card(plan, d, n) for d in devices()}))
            print(size, study, name, out[-1]["total_gb"],
                {k: (v["fits"], v.get("settings"), v.get("hours"))
                    for k, v in out[-1]["cards"].items()}, flush=True)
    return out


def large_sites():
    "The seven projections of Llama-2-7B."
    from himalaya_hest.bridge.shell import Place
    widths = dict(q_proj=(4096, 4096), k_proj=(4096, 4096), v_proj=(4096, 4096), o_proj=(4096, 4096),
        gate_proj=(4096, 11008), up_proj=(4096, 11008), down_proj=(11008, 4096))
    return [Place(f"layers.{i}.{name}", *w) for i in range(32) for name, w in widths.items()]


def stream_points():
    "Streams of many tasks: continual25 repeated."
    from himalaya_hest.compare.large import given_form
    from himalaya_hest.running.costs import Backbone, devices, evaluation_seconds, seconds
    from himalaya_hest.running.loads import evaluations, replay_bytes, steps_of, trained_loads
    from himalaya_hest.running.plan import make_plan
    from himalaya_hest.running.shapes import adapter_size
    from himalaya_hest.running.shapes import model_config as known_config
    known, cards, out = known_config(SEVEN), [d for d in devices() if d.name in (
        "A100 80 GB", "H200 141 GB")], []
    plans = {name: make_plan(dict(scale="full") | given)
        for name, given in {"himalaya": {}, "lora-bank": dict(adapter="lora-bank"),
            "lora": dict(adapter="lora"), "lora, 1 % replay": dict(adapter="lora", protocol="replay")}.items()}
    for T, (name, plan) in itertools.product(TASKS, plans.items()):
        loads = [replace(t, name=f"{t.name} {i}") for i, t in enumerate(
            (plan.loads * -(-T // len(plan.loads)))[:T])]
        config = plan.config
        sized = lambda **changed: adapter_size(
            replace(config, adapter_config=config.adapter_config | changed), known, T)
        # each expects its tasks: HIMALAYA takes the rank whose adapter stays within its budget
        size = sized(n_tasks=T) if name == "himalaya" else sized(n_tasks=max(128,
            T)) if name == "lora-bank" else plan.of.adapter
        of = Backbone(plan.of.shape, size, config)
        always = replace(config, evaluation=config.evaluation | dict(after_tasks=list(range(1, T + 1))))
        row = dict(tasks=T, adapter=name, rows=sum(t.rows for t in loads), state_bytes=size.state,
            kept_rows_bytes=replay_bytes(config, loads), trained=size.trained,
            steps=sum(steps_of(config, t) for t in trained_loads(config, loads)))
        if name == "himalaya":
            row |= dict(rank=given_form(T, BUDGET_MB).r, state_bytes_rank_16=sized(r=16).state)
        generations = {k: sum(r for e in evaluations(c, loads, size.keeps_answers) for _, r in e)
            for k, c in (("default", config), ("after each task", always))}
        asked = {k: sum(r for e in evaluations(c, loads) for _, r in e)
            for k, c in (("default", config), ("after each task", always))}
        row |= dict(generations=generations, answers_asked_for=asked, hours={})
        for d in cards:
            train = sum(v for k, v in seconds(of, loads, d).items() if k != "evaluation")
            row["hours"][d.name] = dict(training=round(train / 3600, 1)) | {f"evaluation, {k}": round(
                evaluation_seconds(of, evaluations(c, loads, size.keeps_answers), d) / 3600, 1)
                for k, c in (("default", config), ("after each task", always))}
        out.append(row)
        print(T, name, size.state, row["hours"], flush=True)
    return out


def scale():
    from himalaya_hest.running.costs import READING_SHARE, TRAINING_SHARE
    from himalaya_hest.running.memory import CARD_BYTES
    return dict(kind="computed", assumed=dict(training_share=TRAINING_SHARE,
        reading_share=READING_SHARE, card_gb=CARD_BYTES / 1e9), budget_mb=BUDGET_MB, studies=study_points(),
        streams=stream_points())


# --- what a task more costs

def clocked(run, least=1., most=100):
    "Least processor seconds of a call: neighbours on a machine only add to it."
    times = []
    while not times or sum(times) < least and len(times) < most:
        start = time.process_time(); run(); times.append(time.process_time() - start)
    return min(times)


def filled_core(n, rows=64):
    "A core at the shapes of Llama-2-7B after n drawn tasks, and prompts of the next: (64, d) each."
    from himalaya_hest.himalaya.tuner import HimalayaCore, HimalayaSettings, name_row
    core, gen = HimalayaCore(large_sites(), 4096, HimalayaSettings(n_tasks=n)), torch.Generator().manual_seed(0)
    for x in "et": getattr(core.router, f"{x}_scale").fill_(1.)
    def prompts(): # half of a row's variance is the task's
        return [torch.randn(4096, generator=gen) + torch.randn(rows, 4096, generator=gen) for _ in range(2)]
    for i in range(n):
        core.router.add(*prompts()); core.tasks.begin(i)
        with torch.no_grad(): core.tasks.core.normal_(generator=gen)
        core.tasks.keep(); core.names.add(name_row(f"task {i}"))
    return core, prompts()


def step_of(core):
    "A step's own work: the update of all sites, its gradient, AdamW, unit directions."
    from himalaya_hest.himalaya.tuner import HimalayaHooks
    hooks, one = HimalayaHooks(core, None), torch.zeros(1, 4096)
    optimizer = torch.optim.AdamW(core.parameters(), lr=1e-3, fused=True)
    def step():
        update = core.route(one, one)
        sum(x.sum() for x in (*update.read, *update.write)).backward()
        optimizer.step(); optimizer.zero_grad(); hooks.after_optimizer_step({})
    return step


def task_point(n, rows=8):
    "Bytes, and processor seconds of what may grow with the tasks."
    from himalaya_hest.himalaya.router import solved, task_scores
    from himalaya_hest.himalaya.tuner import kept_bytes
    core, (e, tau) = filled_core(n)
    kept = kept_bytes(len(core.sites), core.router, core.form, n)
    def roots(): # as after a task's start, when nothing is known of the new covariance
        for view in (core.router.content, core.router.instruction): view._solved = None; solved(view)
    def anew(): # as for a prompt whose task is another than that of the one before
        core.tasks._widened = None; core.route(e[:1], tau[:1])
    with torch.no_grad():
        core.eval()
        out = dict(root_s=clocked(roots), scores_s=clocked(lambda: task_scores(core.router, e[:rows], tau[:rows])),
            route_s=clocked(anew))
    start = time.process_time(); core.router.add(e, tau); core.tasks.begin(n); out["start_s"] = time.process_time() - start
    core.train(); core.current.fill_(0)
    out["step_s"] = clocked(step_of(core))
    start = time.process_time(); core.tasks.keep(); out["end_s"] = time.process_time() - start
    return dict(tasks=n, rank=core.tasks.r, bytes=kept, mb=round(sum(kept.values()) / 1e6, 3),
        **{k: round(v, 6) for k, v in out.items()})


def tasks():
    points = []
    for n in (25, 100, 1000): points.append(task_point(n)); print(points[-1], flush=True)
    return dict(kind="measured on a CPU", unit="processor seconds of one thread", width=4096, layers=32, rows=8,
        points=points)


def first(record):
    "What breaks first: after how many tasks, with the part of the record that says so."
    streams, of = record["scale"]["streams"], {}
    for r in streams: of.setdefault(r["adapter"], {})[r["tasks"]] = r
    when = lambda name, holds: next((t for t, r in of[name].items() if holds(r, of["lora"][t])), None)
    hours = lambda r: r["hours"]["A100 80 GB"]
    larger = lambda r, lora: r["state_bytes"] > lora["state_bytes"]
    rows = [(when("lora-bank", larger), "a bank takes more bytes than LoRA of rank 8"),
        (when("himalaya", larger), "HIMALAYA takes more bytes than LoRA of rank 8"),
        (when("lora-bank", lambda r, _: r["state_bytes"] > BUDGET_MB * 1e6), f"a bank is over {BUDGET_MB} MB"),
        (when("himalaya", lambda r, _: r["rank"] < 16), "HIMALAYA keeps to its budget with a rank below 16"),
        (when("lora", lambda r, _: hours(r)["evaluation, after each task"] > hours(r)["training"]),
            "evaluating LoRA after each task takes longer than training"),
        (when("lora, 1 % replay", lambda r, lora: hours(r)["training"] > 2 * hours(lora)["training"]),
            "replay of 1 % takes more than twice the training")]
    return [dict(tasks=t, what=what, kind="computed", part="scale.streams") for t, what in
        sorted(rows, key=lambda r: (r[0] is None, r[0]))]


def written(x, depth=0):
    "JSON with one line for each entry of a list."
    pad = " " * (depth + 1)
    if isinstance(x, dict) and depth < 3:
        return "{\n" + ",\n".join(f"{pad}{json.dumps(k)}: {written(v, depth + 1)}"
            for k, v in x.items()) + "\n" + pad[1:] + "}"
    if isinstance(x, list) and x and isinstance(x[0], dict):
        return "[\n" + ",\n".join(pad + json.dumps(v, ensure_ascii=False) for v in x) + "\n" + pad[1:] + "]"
    return json.dumps(x, ensure_ascii=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["check", "scale", "tasks"],
        help="one part alone; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import bitsandbytes, peft, transformers
    from transformers.utils import logging
    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error(); logging.disable_progress_bar()
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    record |= dict(command=COMMAND, versions=dict(python=platform.python_version(),
        torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__,
        bitsandbytes=bitsandbytes.__version__), machine=platform.machine())
    for part in [args.part] if args.part else ["check", "scale", "tasks"]:
        start = sum(os.times()[:4]) # with that of processes that have ended
        made = dict(check=check, scale=scale, tasks=tasks)[part]()
        record[part] = dict(command=f"{COMMAND} {part}", processor_s=round(sum(os.times()[:4]) - start)) | made
        if "scale" in record: record["first"] = first(record)
        RECORD.write_text(written(record) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
