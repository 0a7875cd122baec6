r"""Fewer passes over the weights on a GPU: what a pass over a few tokens costs at two shapes with
random weights, and what generation then takes, with text of a real model.

    python bench/gpu_passes.py        # writes records/bench/gpu_passes_<device>.json
    python bench/gpu_passes.py --model FOLDER --data FOLDER    # and answers of a real model
    python bench/gpu_passes.py --device cpu --tiny --meter replay --out /tmp/gpu.json   # a trial

At the shapes of Qwen2.5-0.5B and 7B: passes over 1 to 8 tokens behind --contexts tokens, in
bfloat16, in random order in every round, wall time between synchronisations (process time on a
CPU), medians, and the median of ratios to a pass over one token with the 95 % interval of a
bootstrap over rounds. Where there is a counter of energy, Joules of passes over 1 and over 5
tokens, in windows of 5 s and more in turns.

Answers are those of passes.py to the first --prompts validation articles of cnn_dailymail in the
folder, on the bare backbone and at one seed, with costs, rules and a controller that are found on
this device. Of its arms those in eight bits are left out, whose products are a CPU's, the mask of
blocks and HEST, which are trained there, and the fixed rule with another task's table, since there
is one task; all others answer all prompts. Joules are of plain generation, lookup, the rule and the
controller, all prompts a window.
"""
import argparse
import random
import re
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from acceptance import begun
from gpu_blocks import BACKBONES, MadeTrace, TINY
from passes import (
    asked_of, fitted, IN_INT8, LOOKUP, measured, PASSES, PLAIN, RULE, summary, table_of, timed,
    ways_of)
from transformers import Qwen2Config

from himalaya_hest.ground.clock import clock_of
from himalaya_hest.hest.pass_budget import pass_costs
from himalaya_hest.measures.energy import find_meter, measure_interleaved
from himalaya_hest.workshop.measuring import (
    called, circumstances, random_backbone, ratio, write_record)

SHAPES = {"qwen2.5-0.5b": lambda: Qwen2Config(hidden_size=896, intermediate_size=4864,
        num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
        tie_word_embeddings=True), "qwen2.5-7b": BACKBONES["qwen2.5-7b"]}
WIDEST = 8 # tokens of a pass
TASK = "cnn_dailymail"


def told_joules(meter, works, a):
    "Gross and net Joules of a piece of work; nothing without a counter."
    if meter.source == "none": return {}
    found = measure_interleaved(meter, works, a.joule_rounds, a.window_s, a.cool_down_s)
    return {m.name: dict(gross_j=m.gross_j, net_j=m.net_j) for m in found}


@torch.no_grad()
def passes(model, context, meter, a):
    "Times of passes behind so many tokens, and Joules of two of them."
    clock, dice = clock_of(a.device), random.Random(0)
    ids = torch.ones(1, context, dtype=torch.long, device=a.device)
    cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    def work(n):
        model(input_ids=ids[:, :1].expand(1, n), past_key_values=cache, use_cache=True)
        cache.crop(-n)
    widths, times = range(1, WIDEST + 1), {n: [] for n in range(1, WIDEST + 1)}
    for r in range(a.rounds + 1):
        for n in dice.sample(widths, WIDEST):
            start = clock()
            work(n)
            # nothing is counted in the first round
            if r: times[n].append(clock() - start)
    return dict(
        context=context, ms={n: 1e3 * float(np.median(t)) for n, t in times.items()},
        of_one={n: ratio(t, times[1]) for n, t in times.items()},
        joules=told_joules(meter, {str(n): lambda n=n: work(n) for n in (1, 5)}, a))


def answers(meter, a):
    "The study's arms on articles, and Joules of those that are measured on all rows there."
    given = [f"model={a.model}", "source=local", f"data_dir={a.data}", "dtype=bfloat16",
        "training.max_length=928"]
    asked = argparse.Namespace(stream="local25", tasks=[TASK], parameters=given, seeds=1, steps=0,
        batch=4, answers=24, prompts=a.prompts, few=a.prompts, new_tokens=a.new_tokens)
    run, model = begun(asked)
    with tempfile.TemporaryDirectory() as folder:
        model, place = model.to(a.device), Path(folder)/f"{TASK}-s0"
        place.mkdir()
        costs, table = pass_costs(model), table_of(asked, run, TASK)
        kept = fitted(asked, run, model, TASK, 0, table, costs, place)
        ways = {w: way for w, way in ways_of(table, None, costs, costs, kept).items()
                if w not in IN_INT8} # their products are a CPU's
        measured(asked, run, model, (TASK, 0), ways, (None, None), place/"rows.jsonl")
        of = summary(asked, run, Path(folder))
        task = asked_of(run, TASK)
        n = min(a.new_tokens, task.max_new_tokens)
        prompts = [torch.tensor([row["input_ids"]], device=a.device)
                   for row in task.prompts[:a.prompts]]
        def all_by(way):
            for ids in prompts: timed(model, ids, n, run.tokenizer, task.stop, way)
        works = {w: partial(all_by, ways[w]) for w in (PLAIN, LOOKUP, RULE, PASSES)}
        joules = told_joules(meter, works, a)
    return dict(model=Path(a.model).name, dtype="bfloat16", pass_costs=asdict(costs), tasks=of,
                joules=joules)


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda")
    p.add_argument("--tiny", action="store_true", help="a tiny backbone, few rounds, short windows")
    p.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    p.add_argument("--rounds", type=int, default=60)
    p.add_argument("--model", help="a folder or GGUF file of a real model")
    p.add_argument("--data", help="a folder with cnn_dailymail/validation.jsonl")
    p.add_argument("--prompts", type=int, default=30)
    p.add_argument("--new-tokens", type=int, default=48)
    p.add_argument("--meter", default="auto", help="auto, nvml, rapl, none, or replay, a made trace")
    p.add_argument("--joule-rounds", type=int, default=3)
    p.add_argument("--window-s", type=float, default=5.)
    p.add_argument("--cool-down-s", type=float, default=2.)
    p.add_argument("--out", type=Path, help="default: records/bench/gpu_passes_<device>.json")
    a = p.parse_args()
    if a.tiny: a.rounds, a.window_s, a.cool_down_s, a.joule_rounds, a.contexts = 3, .05, 0., 1, [16]
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        p.error("this machine has no CUDA device: --device cpu --tiny --out FILE tries the script")
    if not a.device.startswith("cuda") and not a.out:
        p.error("a trial on a CPU is no record of a GPU: give it another --out")
    if bool(a.model) != bool(a.data): p.error("answers need both --model and --data")
    return a


def main():
    a = arguments()
    name = torch.cuda.get_device_name(a.device) if a.device.startswith("cuda") else a.device
    out = a.out or Path(f"records/bench/gpu_passes_{re.sub('[^a-z0-9]+', '_', name.lower())}.json")
    meter = MadeTrace() if a.meter == "replay" else find_meter(a.meter, a.device)
    record = circumstances(called(__file__), a.device) | dict(
        device=name, meter=meter.source, rounds=a.rounds, shapes={}, answers=None)
    for shape, config in (TINY if a.tiny else SHAPES).items():
        model = random_backbone(config(), torch.bfloat16, a.device)
        record["shapes"][shape] = [passes(model, c, meter, a) for c in a.contexts]
        del model
        print(shape, [r["ms"] for r in record["shapes"][shape]], flush=True)
        write_record(out, record)
    if a.model:
        record["answers"] = answers(meter, a)
        write_record(out, record)


if __name__ == "__main__": main()
