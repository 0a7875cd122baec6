"""Whole forward passes of backbones whose blocks are off, in int8 or in fp: process time beside
fp32, bf16 and uniform int8.

    OMP_NUM_THREADS=1 python bench/block_speed.py               # 20 minutes of process time; --rounds 3: 9
    OMP_NUM_THREADS=1 python bench/block_speed.py --quick --out /tmp/block_speed.json

Llamas with random weights and a vocabulary of 2,048, and the package's mini backbone. Prefill is
one pass over a prompt with an empty cache, asked for the last logits; decoding is one pass a new
token after a prompt of 128, as `generate` makes it, with fixed tokens in place of chosen ones
(fewer new tokens at greater widths: `new_tokens`). Variants:

fp32, bf16        the bare backbone
int8              PEFT method `int8`: every block in int8
hest              HEST in scope blocks, off/int8/fp in shares 25/50/25, block 0 in fp; `+ bucket`:
                  under a token bucket
hest 20/80, 40/60 HEST with the states off and int8 in those shares, block 0 in int8
tabs              TABS in scope blocks, off/fp 44/56, block 0 in fp
random 20/80      PEFT method `random_mask`: off/int8 by a fixed mask, without a controller, block 0
                  in int8
depth             PEFT method `depth_mask`: whole blocks off, the others in int8; `depth 20/80,
                  40/60` interpolated between this and int8, in which the cost is linear
no adapter        without the adapter's directions, as if they were merged into both copies of the
                  weights
bf16 + ...        the same beside a backbone in bfloat16

PEFT methods are the package's; directions start at random ones. Gates, controllers, thresholds and
buckets are those of the package and run in every pass; what they decide is then replaced by states
drawn at random for each token and block in exact shares, anew each round. A bucket has the mean
cost of these states for a budget and a capacity of 4, and works on them, but has no say, so that
all do equal work (`lowered` is the share of tokens whose states it would have lowered). Adapters
have 16 directions on q, v, o and down of each block.

Int8 products are calibrated, weights rounded and packed, and states drawn before the time is taken;
freed memory stays with the process (ground.freed_memory), else new pages for growing caches
take more time than products, and by chance. All variants are visited in turns, round after round;
passes of less than .3 s follow one that is not timed. Time is process time; figures are medians
over rounds with quartiles, ratios are medians of the ratios of each round with the 95 % interval of
a bootstrap over rounds. `controller_share` and `bucket_share` are taken in passes of their own;
`head_share` is the head's part of a pass in fp32.
"""
import argparse
import copy
import time

import numpy as np
import torch
from block_parts import (
    Given, Parts, attached, chosen_products, scope_share, shapes_of, without_adapter)
from transformers import AutoModelForCausalLM, DynamicCache

from himalaya_hest.ground.clock import clock_of
from himalaya_hest.ground.freed_memory import keep_memory
from himalaya_hest.hest.bucket_cache import BudgetedCache
from himalaya_hest.adapters.masks import DepthMaskConfig, Int8Config, RandomMaskConfig
from himalaya_hest.hest.tuner import HestConfig
from himalaya_hest.hest.int8 import calibrate
from himalaya_hest.streams.backbone import mini_backbone_dir
from himalaya_hest.adapters.tabs import TabsConfig
from himalaya_hest.workshop.measuring import (
    called, circumstances, llama_config, random_backbone, ratio, spread, write_record)

PROMPT = 128 # before decoding
# new tokens at batch 1 and 8
SIZES = {"mini": dict(layers=4, prefill=(256, 1024), new=(64, 64), rounds=9),
    256: dict(layers=6, prefill=(256, 1024), new=(64, 32), rounds=7),
    1024: dict(layers=6, prefill=(256, 1024), new=(20, 10), rounds=5),
    2048: dict(layers=4, prefill=(256, 512), new=(20, 10), rounds=5)}
HEST, TABS, LIGHT, LIGHTER = (.25, .5, .25), (.44, 0, .56), (.2, .8, 0), (.4, .6, 0)


class Variant:
    "A backbone with or without an adapter, and the states that it is given."
    def __init__(self, model, peft=None, shares=None, bucket=False):
        self.model, self.peft, self.shares, self.bucket = (model if peft is None
            else peft.get_base_model(), peft, shares, bucket)
        self.core = None if peft is None else peft.base_model.core()
        self.given = Given(self.core) if shares else None
        self.caches, self.budgets = {}, {} # of each piece of work
    # tokens of each pass, and how many keys there are before
    def load(self, work, lengths, start, rng):
        if not self.given: return
        self.given.load(self.shares, work.b, lengths, rng)
        if self.bucket:
            self.peft.peft_config["default"].e_max = self.budgets.setdefault(work,
                scope_share(self.core, self.given.states,
                    start + torch.arange(1, sum(lengths) + 1)))
    def step(self, i):
        if self.given: self.given.step = i
    def cache(self):
        return (BudgetedCache if self.bucket else DynamicCache)(config=self.model.config)
    def run(self, ids, cache):
        self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1, use_cache=True)


def depth_mask(model, k):
    "The last k blocks off."
    peft = attached(model, DepthMaskConfig(task_type="CAUSAL_LM", e_max=1.))
    n = len(model.model.layers) - 1
    peft.base_model.core().controller.shares = [1.] * (n - k) + [0.] * k
    return peft


def random_mask(model, share): # of int8
    peft = attached(model, RandomMaskConfig(task_type="CAUSAL_LM", e_max=1.))
    peft.base_model.core().controller.shares = [share] * (len(model.model.layers) - 1)
    return peft


def depth_of(n_layers): return max(1, round(.4 * (n_layers - 1))) # blocks that are off


def variants(model):
    "{name: Variant}"
    hest = lambda m, hardening="argmax", **kw: attached(
        m, HestConfig(task_type="CAUSAL_LM", scope="blocks", hardening=hardening,
            **(dict(e_max=1.0, states=["off", "int8", "fp"], first_block="fp") | kw)))
    light = lambda: hest(model, states=["off", "int8"], first_block="int8")
    int8 = lambda m: attached(m, Int8Config(task_type="CAUSAL_LM"))
    half = copy.deepcopy(model).to(torch.bfloat16)
    out = {"fp32": Variant(model), "int8": Variant(model, int8(model)),
        "hest": Variant(model, hest(model), HEST), "hest + bucket": Variant(
            model, hest(model, "bucket"), HEST, True), "hest 20/80": Variant(model, light(), LIGHT),
        "hest 40/60": Variant(model, light(), LIGHTER), "tabs": Variant(model,
            attached(model, TabsConfig(task_type="CAUSAL_LM", scope="blocks")), TABS),
        "random 20/80": Variant(model, random_mask(model, 0.8)),
        "depth": Variant(model, depth_mask(model, depth_of(len(model.model.layers)))),
        "int8, no adapter": Variant(model, without_adapter(int8(model))),
        "hest, no adapter": Variant(model, without_adapter(hest(model)), HEST),
        "hest 20/80, no adapter": Variant(model, without_adapter(light()), LIGHT),
        "bf16": Variant(half), "bf16 + int8": Variant(half, int8(half)),
        "bf16 + hest": Variant(half, hest(half), HEST)}
    return out


class Prefill:
    "One pass over a prompt."
    phase = "prefill"
    def __init__(self, b, n, vocabulary, device="cpu"):
        self.b, self.n, self.tokens, self.passes = b, n, b * n, 1
        self.ids = torch.randint(3, vocabulary, (b, n), device=device)
    def prepare(self, v, rng): v.load(self, [self.n], 0, rng)
    def run(self, v): v.run(self.ids, v.cache())


class Decode:
    "New tokens after a prompt, one pass each."
    phase = "decode"
    def __init__(self, b, n, vocabulary, device="cpu", n_new=64):
        self.b, self.n, self.tokens, self.passes = b, n, b * n_new, n_new
        self.ids, self.new, self.of_type = (torch.randint(3, vocabulary, (b, n), device=device),
            torch.randint(3, vocabulary, (n_new, b, 1), device=device), {})
    def prepare(self, v, rng):
        v.load(self, [1] * len(self.new), self.n, rng)
        if self in v.caches: return
        v.caches[self] = self._begun(v)
        v.load(self, [1] * len(self.new), self.n, rng)
    def _begun(self, v):
        """Keys and values of the prompt; those of one pass serve all variants of a type without a
        bucket, since time does not hang on them."""
        if not v.bucket and v.model.dtype in self.of_type: return self.of_type[v.model.dtype]
        v.load(self, [self.n], 0, np.random.default_rng(0))
        cache = v.cache()
        v.run(self.ids, cache)
        return cache if v.bucket else self.of_type.setdefault(v.model.dtype, cache)
    def run(self, v):
        cache = v.caches[self]
        for i, ids in enumerate(self.new):
            v.step(i)
            v.run(ids, cache)
        cache.crop(-len(self.new))


def timed(work, v, rng, clock, min_s, before): # before: s of an earlier round, or None
    "Seconds of one run, draws and the first run aside."
    with torch.no_grad(), Parts():
        work.prepare(v, rng)
        if before is None or before < .3: work.run(v)
        start, repeats = clock(), 0
        while repeats == 0 or (clock() - start < min_s and repeats < 20): work.run(v); repeats += 1
        return (clock() - start) / repeats


def parts_of(work, v, clock):
    """Shares of the controller and of the bucket in a run, and of the tokens that the bucket would
    have lowered."""
    with torch.no_grad(), Parts(clock) as parts:
        start = clock(); work.run(v); whole = clock() - start
    return dict(controller_share=parts.s["controller"] / whole,
        bucket_share=parts.s["bucket"] / whole, lowered=float(np.mean(parts.lowered))
        if parts.lowered else None)


def head_s(work, v, clock, repeats=20):
    "Seconds of the head in a run."
    h = torch.randn(work.b, 1, v.model.config.hidden_size).to(v.model.dtype).to(v.model.device)
    with torch.no_grad():
        v.model.lm_head(h); start = clock()
        for _ in range(repeats): v.model.lm_head(h)
        return (clock() - start) / repeats * work.passes


def in_turns(work, todo, rounds, min_s, clock, seed=0):
    "{variant: seconds of each round}, and {variant: parts}"
    found, parts, names, rng = {n: [] for n in todo}, {}, list(todo), np.random.default_rng(seed)
    for r in range(rounds):
        for name in names[r % len(names):] + names[:r % len(names)]:
            found[name].append(timed(work, todo[name], rng, clock, min_s,
                min(found[name], default=None)))
    for name, v in todo.items():
        if v.peft is None: continue
        seen = [parts_of(work, v, clock) for _ in range(3)]
        parts[name] = {k: float(np.median([s[k] for s in seen])) if seen[0][k] is not None
            else None for k in seen[0]}
    return found, parts


def figures(work, todo, found, parts, n_layers, beside=("fp32", "bf16", "int8")):
    "Rows of the record; the masks by depth at the shares of the mixes are interpolated."
    gated, k, found = n_layers - 1, depth_of(n_layers), dict(found)
    for share in (.2, .4) if {"int8", "depth"} <= set(found) else ():
        found[f"depth {round(100 * share)}/{round(100 - 100 * share)}"] = [i + (d - i) * share
            * gated / k for i, d in zip(found["int8"], found["depth"])]
    rows = []
    for name, s in found.items():
        v = todo.get(name)
        rows.append(dict(variant=name, token_ms=spread(1e3 * np.array(s) / work.tokens),
            interpolated=v is None, **{f"of_{b}": ratio(s, found[b]) for b in beside
                if b in found}) | parts.get(name, {}))
    return rows


def load_backbone(size, layers):
    if size == "mini":
        return (AutoModelForCausalLM.from_pretrained(mini_backbone_dir(),
            dtype=torch.float32).eval().requires_grad_(False))
    return random_backbone(llama_config(size, layers))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", default=[str(s) for s in SIZES],
        help="mini, or widths")
    parser.add_argument("--rounds", type=int, help="default: 9 to 5, by width")
    parser.add_argument("--min-s", type=float, default=.15, help="of a variant in a round")
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds")
    parser.add_argument("--out", default="records/bench/block_speed.json")
    args = parser.parse_args()
    kept, clock, rows, products, began = keep_memory(), clock_of("cpu"), [], {}, time.process_time()
    for size in args.sizes:
        size = size if size == "mini" else int(size)
        how = (SIZES[size] | (dict(prefill=(64,), new=(8, 4), rounds=2) if args.quick else {})
            | (dict(rounds=args.rounds) if args.rounds else {}))
        torch.manual_seed(0)
        model = load_backbone(size, how["layers"])
        products |= chosen_products(calibrate(shapes_of(model.model.layers), file=None))
        todo, vocabulary = variants(model), model.config.vocab_size
        for work in [Prefill(1, n, vocabulary) for n in how["prefill"]] + [
            Decode(b, PROMPT, vocabulary, n_new=n) for b, n in zip((1, 8), how["new"])
        ]:
            found, parts = in_turns(work, todo, how["rounds"], 0.01 if args.quick else args.min_s,
                clock)
            for v in todo.values(): v.caches.pop(work, None)
            row = dict(backbone=size, width=model.config.hidden_size,
                intermediate=model.config.intermediate_size, layers=how["layers"], phase=work.phase,
                batch_size=work.b, n_tokens=work.n, new_tokens=work.passes
                if work.phase == "decode" else 0, rounds=how["rounds"],
                head_share=head_s(work, todo["fp32"], clock) / float(np.median(found["fp32"])),
                depth_off=depth_of(how["layers"]) / (how["layers"] - 1),
                variants=figures(work, todo, found, parts, how["layers"]))
            rows.append(row)
            print(
                f"{time.process_time() - began:5.0f} s  {size}, {work.phase} {work.n}, "
                f"batch {work.b}; head {row['head_share']:.1%}",
                flush=True,
            )
            for v in row["variants"]:
                print(
                    f"        {v['variant']:24} {v['token_ms']['median']:8.4f} ms a token, "
                    f"{v['of_fp32']['median']:.2f} of fp32, {v['of_int8']['median']:.2f} "
                    f"[{v['of_int8']['low']:.2f}, {v['of_int8']['high']:.2f}] of int8"
                    + (
                        f"; controller {v['controller_share']:.1%}, bucket "
                        f"{v['bucket_share']:.1%}"
                        if "bucket_share" in v
                        else ""
                    ),
                    flush=True,
                )
        del todo, model
    record = circumstances(called(__file__), "cpu") | dict(prompt=PROMPT, freed_memory_kept=kept,
        rows=rows, int8_products=products)
    write_record(args.out, record)


if __name__ == "__main__": main()
