"""The plan at scale: the formula of himalaya_hest.running.plan at measured points, the full studies
on cards of 24, 80 and 141 GB, at 70 B parameters and at 1 000 tasks, and what breaks first.

    python bench/scale_plan.py                  # all three -> records/bench/scale_plan.json
    python bench/scale_plan.py check            # bytes by the formula and bytes counted, on small random models
    python bench/scale_plan.py scale            # the studies on each card, 7 B and 70 B; 10 to 1 000 tasks
    python bench/scale_plan.py limits           # what refuses, what fills up, what slows down, found by trying

One part alone replaces that part of the record. `check` counts on this CPU what a pass really
holds: the storages that autograd saves, and by a dispatch mode the bytes of all tensors alive at
once. Nothing runs on a GPU: hours on cards are the formula's. Times of `limits` are processor
seconds of one thread (OMP_NUM_THREADS=1).
"""
import os

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
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
    from himalaya_hest.running.costs import held_bytes, training_bytes
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
    from himalaya_hest.running.costs import training_bytes
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
        held = sum(nbytes(p) for p in model.parameters())
        for m in model.modules():
            if (q := getattr(getattr(m, "weight", None), "quant_state", None)) is not None:
                held += sum(map(nbytes, (q.absmax, q.code, q.offset, q.state2.absmax, q.state2.code)))
        out.append(dict(shape=at, weights=kind,
            **ratio(weight_bytes(shape_of(model_config(*shape)), config), held)))
    return out


def nbytes(t): return t.numel() * t.element_size()


def state_points():
    """Bytes of the state between tasks, written to a file after real tasks began and ended, beside
    the count on meta tensors."""
    from peft import get_peft_model_state_dict
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.ground.hooks import TaskContext
    from himalaya_hest.running.shapes import adapter_size
    from himalaya_hest.himalaya.packed_file import read_packed, write_packed
    from himalaya_hest.himalaya.packing import Fill, packed_bytes
    from himalaya_hest.bridge.shell import pack
    out = []
    for (at, (shape, *_)), (name, tasks) in itertools.product(SMALL.items(),
        (("himalaya", 12), ("lora-bank", 5), ("lora-bank", 12), ("lilac", 3), ("lora", 3))):
        given = dict(adapter=name) | (
            dict(adapter_config=dict(n_slots=12, n_features=128, slots_per_task=1))
            if name == "himalaya" else {})
        adapter, of = built(given, shape, "float32", False, 2)
        for i in range(tasks):
            loader = [batch_of(2, 64, 1, first=i)]
            if i: adapter.hooks.on_task_start(TaskContext(f"task {i}", i, 10, loader))
            adapter.hooks.on_task_end(loader)
        size = adapter_size(of.config, model_config(*shape), tasks).state
        if name == "himalaya":
            core = adapter.tuner.core()
            with tempfile.TemporaryDirectory() as d:
                write_packed(core, Path(d)/"state.safetensors")
                state = read_packed(Path(d)/"state.safetensors")[0]
            # the tokenizer has 2 048, the formula counts all 4 096 places
            tokens = int((core.router.counted >= 0).sum())
            size -= sum(packed_bytes(core, filled=Fill(12, 12, 4096)).values()) - sum(
                packed_bytes(core, filled=Fill(12, 12, tokens)).values())
        else:
            state = pack(adapter.tuner.core()) if name == "lilac" else get_peft_model_state_dict(
                adapter.model, save_embedding_layers=False)
        out.append(dict(adapter=name, shape=at, tasks=tasks, **ratio(size, sum(map(nbytes, state.values())))))
    return out


def cache_points():
    "Bytes of a cache after generation, and what a batch of evaluation holds at most."
    from himalaya_hest.running.costs import evaluation_bytes
    from himalaya_hest.running.training import model_inputs
    out = []
    cases = [("lora", dict(adapter="lora"), at, beams, dtype) for at in SMALL for beams in (1, 3)
        for dtype in ("float32", "bfloat16")]
    cases += [(name, given, at, 1, "bfloat16") for name, given in (GATED
        | dict(himalaya=dict(adapter="himalaya"))).items() for at in (
            "grouped keys, narrow MLP", "8 layers, wide MLP")]
    for name, given, at, beams, dtype in cases:
        shape, b, n = SMALL[at]
        adapter, of = built(given, shape, dtype, False, b)
        adapter.hooks.on_task_end([batch_of(b, 64, 1)])
        new, batch = 8, batch_of(b, n, 1)
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
        out.append(dict(adapter=name, shape=at, rows=b, tokens=n, beams=beams, dtype=dtype,
            cache=ratio(keys, sum(nbytes(t) for l in made.past_key_values.layers
                for t in (l.keys, l.values))), peak=ratio(keys + work, live.peak)))
    return out


def optimiser_points():
    "Bytes of parameters, gradients, moments and the copies that hooks ask for, after a step."
    from himalaya_hest.running.training import make_optimizer, model_inputs
    from himalaya_hest.ground.loss import target_logits, target_loss
    out = []
    for (at, (shape, *_)), name in itertools.product(SMALL.items(), PEFT):
        adapter, of = built(dict(adapter=name), shape, "float32", False, 2)
        batch, optimizer = batch_of(2, 64, 1), make_optimizer(adapter, of.config.training)
        old = [p.detach().clone() for p in adapter.hooks.tracked_parameters().values()]
        target_loss(*target_logits(adapter.model, batch["labels"],
            **model_inputs(batch, adapter.takes_masks))).backward()
        optimizer.step()
        held = [p for g in optimizer.param_groups for p in g["params"]]
        moments = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
        out.append(dict(adapter=name, shape=at,
            **ratio(of.adapter.trained * 16 + of.adapter.copied * 4,
                sum(map(nbytes, [*held, *[p.grad for p in held if p.grad is not None], *moments, *old])))))
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
        "parameters, gradients, moments, copies": of(out["optimiser"])}
    return out | dict(worst_ratio=worst)


# --- the studies on cards

def studies(size):
    "Name → parameters of the runs of both studies."
    big = dict(model=SEVENTY, quantisation="nf4") if size == "70 B" else {}
    # whether the budget lets them is asked for in `limits`
    free = dict(adapter_config=dict(budget_mb=None)) if size == "70 B" else {}
    one = {a: dict(scale="full", adapter=a) | (free if a.partition("+")[0] in ("himalaya", "lilac")
        else {}) | big for a in ("himalaya", "lora-bank", "lora", "lora+ewc", "lilac+ewc")}
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
    from himalaya_hest.running.costs import memory_parts, seconds
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
    from himalaya_hest.running.costs import devices, training_bytes
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


def kept_slots():
    "Slots that finished tasks kept in the recorded runs of a hundred tasks, and when all were spent."
    from himalaya_hest.measures.records import read_grid
    out = []
    for record in read_grid(ROOT/"records"/"tasks_main.parquet"):
        if record["config"]["adapter"] != "himalaya": continue
        life = record["dictionary"]
        full = next((i for i, row in enumerate(life, 1) if not row["free"]), None)
        out.append(dict(record=f"records/tasks_main.parquet {record['run_id']}",
            n_slots=record["config"]["adapter_config"]["n_slots"], full_after_tasks=full,
            kept_a_task=round(statistics.mean(r["kept"] for r in life[:full]), 2),
            tasks=len(life), tasks_without_slots=sum(not r["grown"] for r in life),
            retained_accuracy_auc=record["summary"]["retained_accuracy_auc"]))
    return out


def stream_points():
    "Streams of many tasks: continual25 repeated."
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
    most = max(r["kept_a_task"] for r in kept_slots())
    for T, (name, plan) in itertools.product(TASKS, plans.items()):
        loads = [replace(t, name=f"{t.name} {i}") for i, t in enumerate(
            (plan.loads * -(-T // len(plan.loads)))[:T])]
        config = plan.config
        sized = lambda **changed: adapter_size(
            replace(config, adapter_config=config.adapter_config | changed), known, T)
        size = sized(n_slots=2 * T, budget_mb=None) if name == "himalaya" else sized(n_tasks=max(128,
            T)) if name == "lora-bank" else plan.of.adapter
        of = Backbone(plan.of.shape, size, config)
        always = replace(config, evaluation=config.evaluation | dict(after_tasks=list(range(1, T + 1))))
        row = dict(tasks=T, adapter=name, rows=sum(t.rows for t in loads), state_bytes=size.state,
            kept_rows_bytes=replay_bytes(config, loads), trained=size.trained,
            steps=sum(steps_of(config, t) for t in trained_loads(config, loads)))
        if name == "himalaya":
            row |= dict(n_slots=2 * T, n_slots_measured=round(most * T),
                state_bytes_measured=sized(n_slots=round(most * T), budget_mb=None).state)
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
    from himalaya_hest.running.costs import CARD_BYTES, READING_SHARE, TRAINING_SHARE
    return dict(kind="computed", assumed=dict(training_share=TRAINING_SHARE,
        reading_share=READING_SHARE, card_gb=CARD_BYTES / 1e9), slots_a_task=2,
        slots_a_task_measured=kept_slots(), budget_mb=BUDGET_MB, studies=study_points(),
        streams=stream_points())


# --- what breaks first

def refusal(**given):
    "The message of what cannot be built on meta tensors, empty where it can."
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.running.shapes import adapter_size
    from himalaya_hest.running.shapes import model_config as known_config
    try:
        adapter_size(resolve(dict(scale="full", quantisation="nf4") | given),
            known_config(given.get("model", SEVEN)), 25)
    except ValueError as e: return str(e)
    return ""


def largest(ask, low, high):
    "The largest whole number from low to high that ask accepts, low being accepted."
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    return low


def budgets():
    "Which sizes the budget of 2.5 MB refuses, tried on meta tensors."
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.running.shapes import adapter_size
    from himalaya_hest.running.shapes import model_config as known_config
    out = {}
    for size, model in (("7 B", SEVEN), ("70 B", SEVENTY)):
        state = lambda **a: adapter_size(
            resolve(dict(scale="full", model=model, quantisation="nf4",
                adapter_config=dict(budget_mb=None) | a)), known_config(model), 25).state
        allowed = lambda **a: not refusal(model=model, adapter_config=a)
        row = dict(default_state_bytes=state(), default_refused=refusal(model=model),
            state_bytes={str(k): state(n_slots=k) for k in (8, 16, 32, 64, 128, 256, 1024, 2048)},
            state_bytes_by_features={str(n): state(n_features=n) for n in (128, 256, 512, 1024)},
                   largest_n_slots=largest(lambda k: allowed(n_slots=k), 1, 4096)
            if allowed(n_slots=1) else 0, largest_n_features=largest(lambda n: allowed(n_features=n),
                8, 8192) if allowed(n_features=8) else 0)
        row["refused_n_slots"] = refusal(model=model, adapter_config=dict(n_slots=row["largest_n_slots"] + 1))
        row["refused_n_features"] = refusal(model=model,
            adapter_config=dict(n_features=max(8, row["largest_n_features"] + 1)))
        row["others_refused"] = {
            a: m for a in ("lora-bank", "lora", "lilac+ewc", "coltas", "glodis", "reft")
            if (m := refusal(model=model, adapter=a))}
        bank = lambda n: adapter_size(
            resolve(dict(scale="full", model=model, quantisation="nf4", adapter="lora-bank",
                adapter_config=dict(n_tasks=1024))), known_config(model), n).state
        row["bank_bytes"] = {str(n): bank(n) for n in (0, 1, 25, 100, 1000)}
        row["bank_tasks_in_budget"] = largest(lambda n: row["bank_bytes"]["0"]
            + n * (row["bank_bytes"]["1"] - row["bank_bytes"]["0"]) <= BUDGET_MB * 1e6, 0, 4096)
        out[size] = row
        print(size, {k: v for k, v in row.items() if "refused" not in k}, flush=True)
    return dict(kind="computed") | out


def fills_up():
    """Streams of tasks whose slots are all kept, on a small backbone: after how many tasks nothing
    is free, and what then happens."""
    from himalaya_hest.ground.hooks import TaskContext
    out, shape = [], ("llama", 128, 2, 4, 4, 344, 2048)
    for each, policy, tasks in ((3, "refuse", 26), (2, "refuse", 36), (1, "refuse", 68),
        (2, "evict", 36), (2, "overwrite", 36), (2, "merge", 36)):
        adapter, _ = built(dict(adapter="himalaya", adapter_config=dict(
            slots_per_task=each, parts=dict(when_full=policy))), shape, "float32", False, 2)
        core, said, full = adapter.tuner.core(), set(), None
        for i in range(tasks):
            loader = [batch_of(2, 64, 1, first=i)]
            with warnings.catch_warnings(record=True) as told, torch.no_grad():
                warnings.simplefilter("always")
                if i: adapter.hooks.on_task_start(TaskContext(f"task {i}", i, 10, loader))
                # as if it had learned: a slot of strength 0 has nothing to lose
                core.dictionary.gain[:, core.own] = .1
                adapter.hooks.on_task_end(loader)
            said |= {str(w.message).replace(f"task 'task {i}'",
                "a task").split(":")[0].split("; ")[0] for w in told if "full" in str(w.message)
                or "no place" in str(w.message) or "make room" in str(w.message)}
            if full is None and not len(core.free_slots()): full = i + 1
        life = adapter.hooks.hooks[0].life
        out.append(dict(n_slots=len(core.owner), slots_a_task=each, when_full=policy, tasks=tasks,
            full_after_tasks=full, tasks_without_slots=sum(not r["grown"] for r in life),
            slots_taken_from_others=sum(r["freed"] for r in life),
            tasks_left=len(core.owner.unique()), said=sorted(said)))
        print(out[-1], flush=True)
    return dict(kind="measured on a CPU", streams=out, recorded=kept_slots(), bank=bank_fills(shape))


def bank_fills(shape):
    "Tasks on a bank until it says that it is full."
    from himalaya_hest.ground.hooks import TaskContext
    adapter, _ = built(dict(adapter="lora-bank"), shape, "float32", False, 2)
    for i in range(1, 1000):
        loader = [batch_of(2, 64, 1, first=i)]
        adapter.hooks.on_task_end(loader)
        try: adapter.hooks.on_task_start(TaskContext(f"task {i}", i, 10, loader))
        except ValueError as e: return dict(tasks=i, said=str(e))


def projector_room(n_features, width=1024, rows=64, sampled=40):
    """Tasks with instructions and prompts drawn at random, two closed-form keys each, protected one
    after another: what is left of the feature space, and who answers."""
    from himalaya_hest.himalaya.dictionary import Site
    from himalaya_hest.himalaya.config import Settings
    from himalaya_hest.himalaya.growth import set_key
    from himalaya_hest.himalaya.method import HimalayaCore, gates_of, set_projector
    from himalaya_hest.ground.linalg import owm_update
    from himalaya_hest.himalaya.router import add_prototype
    core, gen = HimalayaCore([Site("o_proj", 8, 8)], width,
        Settings(n_slots=2 * max(TASKS), n_features=n_features)), torch.Generator().manual_seed(0)
    for n in ("mean", "scale"): [getattr(core.router, f"{x}_{n}").fill_(float(n == "scale")) for x in "et"]
    centres, taus = (torch.randn(max(TASKS) + 20, width, generator=gen) for _ in range(2))
    # half of a row's variance is the task's
    draw = lambda t: core.router.features(centres[t] + torch.randn(rows, width, generator=gen),
        taus[t].expand(rows, -1))
    survive = lambda phi: float((phi @ core.projector).square().sum() / phi.square().sum())
    def opens(t):
        opened = gates_of(core, core.router(draw(t))[0], False)[0]
        return float((opened & (core.owner == t)).any(1).float().mean()), float(
            (opened & (core.owner != t)).any(1).float().mean())
    out = []
    with torch.no_grad():
        for t in range(max(TASKS)):
            add_prototype(core.router, taus[t])
            phi, slots = draw(t), core.free_slots()[:2]
            core.owner[slots] = t
            set_key(core, slots, phi, 3.)
            set_projector(core, owm_update(core.projector, phi, .1))
            if t + 1 not in TASKS: continue
            fresh, stored = [], (core.router.prototype_scale.clone(), core.router.prototypes.clone())
            # tasks still to come, with their instruction stored as at a task's start
            for new in range(max(TASKS), max(TASKS) + 20):
                add_prototype(core.router, taus[new])
                fresh.append(survive(draw(new)))
                core.router.prototype_scale.copy_(stored[0]); core.router.prototypes.copy_(stored[1])
            old = torch.linspace(0, t, min(t + 1, sampled)).round().long().tolist()
            answered = [opens(i) for i in old]
            out.append(dict(tasks=t + 1, room=digits(float(core.projector.trace()) / n_features),
                new_task_survives=digits(statistics.mean(fresh)),
                last_tasks_open=round(statistics.mean(opens(i)[0] for i in range(max(0, t - 9), t + 1)), 3),
                own_slots_open=round(statistics.mean(a for a, _ in answered), 3),
                foreign_slots_open=round(statistics.mean(b for _, b in answered), 3)))
            print(n_features, out[-1], flush=True)
    return out


def projector():
    return dict(kind="measured on a CPU", alpha=.1, mask_fraction=.1, key_logit=3.,
        logit_threshold=1.5, rows_a_task=64,
        note="synthetic: instructions and prompts are independent normal vectors, keys in closed "
        "form, nothing trained",
                points={str(n): projector_room(n) for n in (512, 1024)})


def digits(x): return float(f"{x:.3g}")


def clocked(run, least=1., most=100):
    "Least processor seconds of a call: neighbours on a machine only add to it."
    times = []
    while not times or sum(times) < least and len(times) < most:
        start = time.process_time(); run(); times.append(time.process_time() - start)
    return min(times)


def growing_parts(K, width=4096, n_sites=2, rows=8):
    "Processor seconds of what grows with the number of slots."
    from himalaya_hest.himalaya.dictionary import Site
    from himalaya_hest.himalaya.config import Settings
    from himalaya_hest.himalaya.growth import grow, reopen
    from himalaya_hest.himalaya.life import HimalayaHooks, finish_step, protect
    from himalaya_hest.himalaya.method import HimalayaCore
    from himalaya_hest.himalaya.packing import snap_slots_
    from himalaya_hest.himalaya.router import add_prototype
    torch.set_num_threads(1)
    core, gen = HimalayaCore([Site(f"layers.{i}.self_attn.o_proj", width, width)
        for i in range(n_sites)], width, Settings(n_slots=K)), torch.Generator().manual_seed(0)
    for n in ("mean", "scale"): [getattr(core.router, f"{x}_{n}").fill_(float(n == "scale")) for x in "et"]
    e, tau = (torch.randn(64, width, generator=gen) for _ in range(2))
    with torch.no_grad():
        core.owner[:K - 3] = torch.arange(K - 3) // 2
        core.router.w2.normal_(std=.01, generator=gen); core.dictionary.gain[:, :K - 3] = .1
        core.router.w2[:, [K - 3, K - 2, K - 1]] = 0
        for x in torch.randn(K - 1, width, generator=gen): add_prototype(core.router, x)
    core.current.fill_((K - 3) // 2 + 1)
    gradients = {core.dictionary.sites[0].spaces: torch.randn(width, width, generator=gen)}
    out = dict(features_s=clocked(lambda: core.router.features(e[:rows], tau[:rows])))
    phi = core.router.features(e, tau)
    with torch.no_grad():
        out["route_inference_s"] = (core.eval(), clocked(lambda: core.route(e[:rows], tau[:rows])))[1]
    start = time.process_time()
    slots = grow(core, gradients, phi, 3, 3.); out["start_s"] = time.process_time() - start
    core.train()
    out["route_training_s"] = clocked(lambda: core.route(e[:rows], tau[:rows]))
    hooks = HimalayaHooks(core, None, None)
    hooks.n_steps, hooks.position = 10**6, 10 # neither restart nor pruning
    optimizer = torch.optim.AdamW(core.parameters(), lr=1e-3, fused=True)
    for p in core.parameters(): p.grad = torch.zeros_like(p)
    def step():
        old = {n: p.detach().clone() for n, p in core.named_parameters()}
        optimizer.step(); finish_step(hooks, old)
    step(); out["step_s"] = clocked(step)
    def end():
        with torch.no_grad(): reopen(core, phi, 3.); snap_slots_(core, slots); protect(hooks, phi, [])
    out["end_s"] = clocked(end, most=3)
    return dict(n_slots=K, **{k: round(v, 5) for k, v in out.items()},
        trained=sum(p.numel() for p in core.parameters()))


def spaces():
    "Spaces that the default's slots read and write at 7 B: each has vectors of its own."
    from himalaya_hest.running.shapes import meta_model
    from himalaya_hest.running.shapes import model_config as known_config
    from himalaya_hest.adapters.registry import build_adapter
    with torch.device("meta"):
        book = build_adapter("himalaya", meta_model(known_config(SEVEN))).tuner.core().dictionary
    return len(book.read) + len(book.write)


def growing(processes=3):
    "The same in processes of their own, since where an allocator puts large tensors is another matter in each."
    points = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for K in (64, 256, 1024, 2048):
            runs = list(pool.map(growing_parts, [K] * processes))
            points.append({k: span(r[k] for r in runs) if k.endswith("_s") else v for k, v in runs[0].items()})
            print(points[-1], flush=True)
    times = {k: [[round(t / points[0][k][0], 2) for t in p[k]] for p in points] for k in points[0]
        if k.endswith("_s")}
    return dict(kind="measured on a CPU", unit="processor seconds of one thread", processes=processes,
        width=4096, sites=2, spaces=2, spaces_of_default=spaces(), rows=8, points=points, ratio_to_64=times)


def limits():
    return dict(budgets=budgets(), fills_up=fills_up(), projector=projector(), growing=growing())


def first(record):
    "What breaks first: after how many tasks, or at once, with the part of the record that says so."
    budget, fills, streams, room = (record["limits"]["budgets"], record["limits"]["fills_up"],
        record["scale"]["streams"], record["limits"]["projector"]["points"]["512"])
    computed, measured = "computed", "measured on a CPU"
    slots, kept = budget["7 B"]["largest_n_slots"], next(r for r in fills["recorded"] if r["n_slots"] == 64)
    tried = next(r for r in fills["streams"] if r["slots_a_task"] == 2 and r["when_full"] == "refuse")
    when = lambda rows, holds: next((r["tasks"] for r in rows if holds(r)), None)
    lora = {r["tasks"]: r["hours"]["A100 80 GB"] for r in streams if r["adapter"] == "lora"}
    replay = [r for r in streams if r["adapter"] == "lora, 1 % replay"]
    plain = {r["tasks"]: r["state_bytes"] for r in streams if r["adapter"] == "lora"}
    rows = [dict(size="7 B", tasks=when([r for r in streams if r["adapter"] == a],
        lambda r: r["state_bytes"] > plain[r["tasks"]]),
        what=f"{name} takes more bytes than LoRA of rank 8", kind=computed, part="scale.streams")
        for a, name in (("himalaya", "HIMALAYA with two slots a task"), ("lora-bank", "a bank"))]
    rows += [dict(size="7 B", tasks=budget["7 B"]["bank_tasks_in_budget"] + 1,
        what=f"a bank is over {BUDGET_MB} MB", kind=computed, part="limits.budgets"),
            dict(size="mini", tasks=kept["full_after_tasks"] + 1,
                what=f"all {kept['n_slots']} slots of the default are spent in the recorded run, "
                f"{kept['kept_a_task']} kept a task: later tasks get none", kind=measured,
                part="limits.fills_up"),
            dict(size="any", tasks=tried["full_after_tasks"] + 1,
                what=f"all {tried['n_slots']} slots of the default are spent where each task keeps "
                f"two", kind=measured, part="limits.fills_up"),
            dict(size="7 B", tasks=slots // 2 + 1,
                what=f"the budget of {BUDGET_MB} MB refuses as many slots as tasks of two need: at "
                f"most {slots} at N = 512", kind=computed, part="limits.budgets"),
            dict(size="7 B", tasks=int(slots / kept["kept_a_task"]) + 1,
                what=f"as many slots as {BUDGET_MB} MB allow, {slots}, are spent at the "
                f"{kept['kept_a_task']} a task of that run", kind=computed, part="limits.budgets"),
            dict(size="any", tasks=when(room, lambda r: r["new_task_survives"] < .1),
                what="less than a tenth of a new task's features survives the projection, N = 512",
                kind=measured, part="limits.projector"),
            dict(size="any", tasks=when(room, lambda r: r["last_tasks_open"] < .5),
                what="the last tasks' slots no longer open on half of their rows, N = 512",
                kind=measured, part="limits.projector"),
            dict(size="any", tasks=fills["bank"]["tasks"] + 1,
                what="a bank's places are taken and the next task is refused: raise n_tasks",
                kind=measured, part="limits.fills_up"),
            dict(size="7 B", tasks=when([dict(tasks=t, **h) for t, h in lora.items()],
                lambda h: h["evaluation, after each task"] > h["training"]),
                what="evaluating LoRA after each task takes longer than training", kind=computed,
                part="scale.streams"),
            dict(size="7 B", tasks=when(
                replay, lambda r: r["hours"]["A100 80 GB"]["training"] > 2
                * lora[r["tasks"]]["training"]),
                what="replay of 1 % takes more than twice the training", kind=computed, part="scale.streams"),
            dict(size="70 B", tasks=budget["70 B"]["bank_tasks_in_budget"] + 1,
                what=f"a bank is over {BUDGET_MB} MB", kind=computed, part="limits.budgets")]
    at_once = [dict(size=size, what=f"{name} is refused: {said}", kind=computed,
        part="limits.budgets") for size in ("7 B", "70 B")
        for name, said in [("HIMALAYA's default", budget[size]["default_refused"]),
            *budget[size]["others_refused"].items()] if said]
    nothing = [s for s in record["scale"]["studies"] if s["size"] == "70 B"
        and s["cards"]["RTX 4090 24 GB"]["settings"] is None]
    at_once += [dict(size="70 B",
        what=f"no card of 24 GB holds a run: not one of {len(nothing)} with any settings, the "
        f"weights alone take {nothing[0]['cards']['RTX 4090 24 GB']['weights_gb']} GB in NF4",
        kind=computed, part="scale.studies")] if len(nothing) == sum(s["size"] == "70 B"
            for s in record["scale"]["studies"]) else []
    return dict(at_once=at_once, after_tasks=sorted(rows, key=lambda r: (r["tasks"] is None, r["tasks"])))


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
    parser.add_argument("part", nargs="?", choices=["check", "scale", "limits"],
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
    for part in [args.part] if args.part else ["check", "scale", "limits"]:
        start = sum(os.times()[:4]) # with that of processes that have ended
        made = dict(check=check, scale=scale, limits=limits)[part]()
        record[part] = dict(command=f"{COMMAND} {part}", processor_s=round(sum(os.times()[:4]) - start)) | made
        if {"scale", "limits"} <= record.keys(): record["first"] = first(record)
        RECORD.write_text(written(record) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
