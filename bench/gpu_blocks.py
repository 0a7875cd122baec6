"""Gated blocks on a GPU: latency and Joules of 7B backbones with random weights, beside the bare
backbone, uniform int8, fixed masks and LoRA; what a state costs; and what was expected.

    python bench/gpu_blocks.py        # Llama-2-7B and Qwen2.5-7B shapes; writes records/bench/gpu_blocks_<device>.json
    python bench/gpu_blocks.py --backbones llama-2-7b --tokens 512 --batches 1 16 --joules-at 512x1
    python bench/gpu_blocks.py --device cpu --tiny --meter replay --out /tmp/gpu.json   # a trial

Needs the package and what it needs to run, and nvidia-ml-py for Joules. Weights are made on the
device, layer after layer, in bfloat16. Prefill is one pass over b prompts of n tokens, asked for
the last logits; decoding 32 passes after it. Variants and how their states are drawn: see
block_speed.py (`fp` is the bare backbone in bfloat16; all others hold the same weights); and `lora`
(PEFT, r = 8, q and v, not merged) and `directions` (HEST in scope directions, off/int8/fp 25/50/25,
up to 8,192 tokens). What does not fit into the device's memory is left out, and `left_out` says so.

Latency: all variants in turns, round after round, wall time between synchronisations, medians with
quartiles. Joules at the settings of --joules-at: windows of 5 s and more in turns, with cool-down,
gross and less the idle power (`measures.energy.measure_interleaved`). Costs of off, int8 and fp:
non-negative least squares over mixes in two blocks, in time and, with a counter, in Joules
(block_costs.py). `expected` holds what a roofline says of Llama-2-7B; `measured` beside it the
change from the bare backbone.

The record is written after each setting; a second start with the same --out goes on where the first
ended.
"""
import argparse
import gc
import json
import re
import time
from pathlib import Path

import numpy as np
import torch
from block_costs import MIXES, Stack, best_cost, measured, works
from block_parts import attached, chosen_products, shapes_of, twin
from block_speed import (
    HEST, LIGHT, LIGHTER, TABS, Decode, Prefill, Variant, depth_mask, depth_of, figures,
    in_turns, random_mask,
)
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, Qwen2Config

from himalaya_hest.adapters.masks import Int8Config
from himalaya_hest.ground.clock import clock_of
from himalaya_hest.hest.gate_costs import block_cost
from himalaya_hest.hest.tuner import HestConfig
from himalaya_hest.hest.int8 import calibrate as calibrate_int8
from himalaya_hest.measures.energy import ReplayMeter, calibrate, find_meter, measure_interleaved
from himalaya_hest.adapters.tabs import TabsConfig
from himalaya_hest.workshop.measuring import (
    called, circumstances, llama_config, random_backbone)

BACKBONES = {"llama-2-7b": lambda: LlamaConfig(max_position_embeddings=8192),
    "qwen2.5-7b": lambda: Qwen2Config(hidden_size=3584, intermediate_size=18944,
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
        max_position_embeddings=8192, use_sliding_window=False)}
TINY = {"tiny": lambda: llama_config(128, 3, 128)}
# change from the bare backbone, of HEST at 25/50/25
EXPECTED = [dict(setting="decode, batch 1", least=-0.45, most=-0.35),
    dict(setting="prefill", least=-0.34, most=-0.34),
    dict(setting="decode, batch above 1, a state each token", least=0.0, most=None)]
MOST_DIRECTIONS = 8192 # tokens at once


class MadeTrace(ReplayMeter):
    "A trace of 50 W, played at the pace of the machine: to try this script without a counter."
    source = "replay of a made trace of 50 W: not a measurement"
    def __init__(self):
        self.start = time.monotonic()
        super().__init__([[t, 50. * t] for t in np.arange(0, 36_000, .02)])
    now = property(lambda self: time.monotonic() - self.start, lambda self, value: None)
    def sleep(self, seconds): time.sleep(seconds)


def variants(model):
    """{name: function that makes the Variant}; what a variant needs is made when it is first asked
    for."""
    hest = lambda **kw: attached(
        model, HestConfig(task_type="CAUSAL_LM",
            **(dict(scope="blocks", e_max=1.0, hardening="argmax", states=["off", "int8", "fp"],
                first_block="fp") | kw)))
    light = lambda: hest(states=["off", "int8"], first_block="int8")
    return {"fp": lambda: Variant(model),
        "int8": lambda: Variant(model, attached(model, Int8Config(task_type="CAUSAL_LM"))),
        "hest": lambda: Variant(model, hest(), HEST), "hest + bucket": lambda: Variant(
            model, hest(hardening="bucket"), HEST, True), "hest 20/80": lambda: Variant(model,
                light(), LIGHT), "hest 40/60": lambda: Variant(model, light(), LIGHTER),
        "tabs": lambda: Variant(
            model, attached(model, TabsConfig(task_type="CAUSAL_LM", scope="blocks")), TABS),
        "random 20/80": lambda: Variant(model, random_mask(model, 0.8)),
        "depth": lambda: Variant(model, depth_mask(model, depth_of(len(model.model.layers)))),
        "directions": lambda: Variant(model, hest(scope="directions", first_block=None), HEST),
        "lora": lambda: Variant(get_peft_model(twin(model),
            LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj",
                "v_proj"])).eval().get_base_model())}


def is_out_of_memory(e): return isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e)


def cleaned(device):
    gc.collect()
    if str(device).startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def fitting(work, todo):
    "The variants that get through a first run, and why the others do not."
    fits, left_out = {}, {}
    for name, v in todo.items():
        if name == "directions" and work.b * work.n > MOST_DIRECTIONS:
            left_out[name] = (
                f"masks of directions of {work.b * work.n} tokens, more than " f"{MOST_DIRECTIONS}"
            )
            continue
        try:
            with torch.no_grad():
                work.prepare(v, np.random.default_rng(0))
                work.run(v)
            fits[name] = v
        except (torch.OutOfMemoryError, RuntimeError) as e:
            if not is_out_of_memory(e): raise
            for x in todo.values(): x.caches.pop(work, None) # a cache that broke off may be shared
            work.of_type = {}
            left_out[name] = "out of memory"
            cleaned(next(v.model.parameters()).device)
    return fits, left_out


def joules(meter, work, todo, rounds, min_s, cool_down_s):
    "Joules of each variant for one run, in turns; states are drawn once."
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for v in todo.values(): work.prepare(v, rng)
        found = measure_interleaved(meter, {n: (lambda v=v: work.run(v)) for n, v in todo.items()},
            rounds, min_s, cool_down_s)
    by = {m.name: m for m in found}
    return [dict(variant=m.name, gross_j_per_token=m.gross_j / work.tokens,
        net_j_per_token=m.net_j / work.tokens, gross_j_rounds=[j / work.tokens
            for j in m.gross_j_rounds], idle_w=m.idle_w, mean_w=m.gross_j / m.duration_s,
        n_repeats=m.n_repeats, n_ticks=m.n_ticks, source=m.source,
        **{f"of_{b}": dict(gross=m.gross_j / by[b].gross_j, net=m.net_j / by[b].net_j
            if by[b].net_j > 0 else None) for b in ("fp", "int8") if b in by}) for m in found]


def one_setting(work, todo, args, meter, with_joules):
    "A row of the record."
    device = args.device
    cleaned(device)
    row = dict(phase=work.phase, batch_size=work.b, n_tokens=work.n, new_tokens=work.passes
        if work.phase == "decode" else 0)
    fits, row["left_out"] = fitting(work, todo)
    if "fp" not in fits: return row | dict(variants=[])
    try: found, parts = in_turns(work, fits, args.rounds, args.latency_s, clock_of(device))
    except (torch.OutOfMemoryError, RuntimeError) as e:
        if not is_out_of_memory(e): raise
        for v in todo.values(): v.caches.pop(work, None)
        return row | dict(left_out=dict.fromkeys(todo, "out of memory in the midst of timing"),
            variants=[])
    row["variants"] = figures(work, fits, found, parts, len(fits["fp"].model.model.layers),
        ("fp", "int8"))
    if with_joules:
        row["joules"] = joules(meter, work, fits, args.joule_rounds, args.window_s,
            args.cool_down_s)
    if str(device).startswith("cuda"):
        row["peak_memory_mb"] = torch.cuda.max_memory_allocated() / 2 ** 20
    for v in todo.values(): v.caches.pop(work, None)
    work.of_type = {}
    return row


def joule_costs(stack, phase, b, n, steps, meter, args):
    "Costs of the states in Joules."
    todo = {m: f() for m, f in works(stack, phase, b, n, steps, np.random.default_rng(0)).items()
        if m in MIXES}
    with torch.no_grad():
        found = measure_interleaved(meter, {str(m): work for m, (work, *_) in todo.items()},
            args.joule_rounds, args.window_s, args.cool_down_s)
    shares, out = np.array([s for _, s, _ in todo.values()]), dict(source=found[0].source)
    keys = (n + 1) / 2 if phase == "prefill" else 257
    for kind in ("gross_j", "net_j"):
        j = np.array([getattr(m, kind) for m in found]) / (b * n * steps * len(stack.layers))
        if (j <= 0).any(): continue
        costs, residual = calibrate(shares, j)
        out[kind] = dict(costs_j=dict(zip(("off", "int8", "fp"), costs.tolist())),
            residual=residual, cost_int8=best_cost(block_cost(stack.layers[0]), shares, j / j[0],
                keys), mixes=[dict(shares=s.tolist(), token_j=x)
                    for s, x in zip(shares, j.tolist())])
    return out


def state_costs(model, args, meter):
    "What off, int8 and fp cost in two blocks of a backbone."
    rows, stack = [], Stack(model, 2)
    for phase, b, n, steps in [
        ("prefill", 1, args.tokens[len(args.tokens) // 2], 1),
        ("decode", 1, 1, 20),
        ("decode", args.batches[-1], 1, 10),
    ]:
        with torch.no_grad(): row = measured(stack, phase, b, n, steps, args.rounds, args.latency_s)
        if meter.source != "none":
            row["joules"] = joule_costs(stack, phase, b, n, steps, meter, args)
        rows.append(row)
    return rows


def compared(rows):
    "What a roofline expected of HEST beside what was measured."
    of = {"decode, batch 1": lambda r: r["phase"] == "decode" and r["batch_size"] == 1,
        "prefill": lambda r: r["phase"] == "prefill",
        "decode, batch above 1, a state each token": lambda r: r["phase"] == "decode"
        and r["batch_size"] > 1}
    out = []
    for e in EXPECTED:
        seen = []
        for r in filter(of[e["setting"]], rows):
            hest = next((v for v in r["variants"] if v["variant"] == "hest"), None)
            if hest is None: continue
            j = next((v for v in r.get("joules", []) if v["variant"] == "hest"), None)
            seen.append(dict(batch_size=r["batch_size"], n_tokens=r["n_tokens"],
                time=hest["of_fp"]["median"] - 1, gross_joules=j and j["of_fp"]["gross"] - 1,
                net_joules=j and j["of_fp"]["net"] and j["of_fp"]["net"] - 1))
        out.append(dict(setting=e["setting"], expected=dict(least=e["least"], most=e["most"]),
            measured=seen))
    return out


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true",
        help="a tiny backbone, few tokens and short windows")
    parser.add_argument("--meter", default="auto",
        help="auto, nvml, rapl, none, or replay, a made trace")
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 2048, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=32, help="new tokens")
    parser.add_argument("--rounds", type=int, default=7, help="of latencies")
    parser.add_argument("--latency-s", type=float, default=.3, help="of a variant in a round")
    parser.add_argument("--joules-at", nargs="*", default=["512x1", "2048x1", "512x16"],
        metavar="TOKENSxBATCH")
    parser.add_argument("--joule-rounds", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=5.)
    parser.add_argument("--cool-down-s", type=float, default=2.)
    parser.add_argument("--out", help="default: records/bench/gpu_blocks_<device>.json")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA device: --device cpu --tiny tries the script "
            "without " "one")
    if args.tiny:
        (args.backbones, args.tokens, args.batches, args.new, args.rounds, args.latency_s,
            args.joules_at, args.joule_rounds, args.window_s, args.cool_down_s) = (list(TINY),
                [16, 24], [1, 2], 8, 2, 0.01, ["16x1"], 1, 0.05, 0.01)
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "cpu"
    args.out = Path(args.out
        or f"records/bench/gpu_blocks_{re.sub('[^a-z0-9]+', '_', name.lower())}.json")
    return args


def main():
    args = parsed()
    meter = MadeTrace() if args.meter == "replay" else find_meter(args.meter, args.device)
    here = circumstances(called(__file__), args.device)
    record = (json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else here
        | dict(meter=meter.source, backbones={}))
    if record["machine"] != here["machine"] or record["meter"] != meter.source:
        raise SystemExit(f"{args.out} is of {record['machine']} with the meter {record['meter']}, "
            f"this " f"is {here['machine']} with {meter.source}: give another --out")
    record["commit"] = (record["commit"] if record["commit"] == here["commit"]
        else f"{record['commit']}, {here['commit']}")
    def write(): args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if meter.source == "none": print("no counter was found: Joules are left out")
    for name in args.backbones:
        part = record["backbones"].setdefault(name, dict(rows=[]))
        done = {(r["phase"], r["batch_size"], r["n_tokens"]) for r in part["rows"]}
        wanted = [(phase, b, n) for n in args.tokens for b in args.batches
            for phase in ("prefill", "decode") if (phase, b, n) not in done]
        if not wanted and "state_costs" in part: continue
        torch.manual_seed(0)
        model = random_backbone((TINY if args.tiny else BACKBONES)[name](), torch.bfloat16,
            args.device)
        part["int8_products"] = chosen_products(
            calibrate_int8(shapes_of(model.model.layers), args.device, file=None))
        part["parameters"], vocabulary = (sum(p.numel() for p in model.parameters()),
            model.config.vocab_size)
        if "state_costs" not in part:
            part["state_costs"] = state_costs(model, args, meter)
            for r in part["state_costs"]:
                print(f"{name}: {r['phase']} batch {r['batch_size']}: " + ", ".join(f"{k} {v:.2f}"
                    for k, v in r["costs_of_fp"].items())
                    + f" of fp (residual {r['residual']:.2f}); cost_int8 {r['cost_int8']:.2f}",
                    flush=True)
            write()
        todo = {n: f() for n, f in variants(model).items()} if wanted else {}
        for phase, b, n in wanted:
            work = (Prefill(b, n, vocabulary, args.device) if phase == "prefill" else Decode(
                b, n, vocabulary, args.device, args.new))
            row = one_setting(work, todo, args, meter, meter.source != "none"
                and f"{n}x{b}" in args.joules_at)
            part["rows"].append(row)
            if name in ("llama-2-7b", "tiny"): part["roofline"] = compared(part["rows"])
            write()
            print(f"{name}: {phase} {n}, batch {b}: "
                + ("; ".join(f"{v['variant']} {v['of_fp']['median']:.2f}" for v in row["variants"])
                    or "nothing was timed") + (f"; left out: {', '.join(row['left_out'])}"
                        if row["left_out"] else "") + (
                            "; Joules " + "; ".join(f"{v['variant']} {v['of_fp']['gross']:.2f}"
                                for v in row["joules"]) if "joules" in row else ""), flush=True)
        del todo, model
        cleaned(args.device)
    print(args.out)


if __name__ == "__main__": main()
