"""What a state of a block costs: times of mixes of states in decoder layers, and the cost of each
state from them.

    OMP_NUM_THREADS=1 python bench/block_costs.py
    OMP_NUM_THREADS=1 python bench/block_costs.py --quick --out /tmp/block_costs.json

Stacks of decoder layers of Llama with random weights (as many layers as leave no weights in the
processor's cache where a backbone of that width would not), without adapters: `run_block` of
hest/09_blocks, with a state for each token drawn at random in exact shares, another draw for each
layer and round. Prefill writes an empty cache; decoding is one token a row that sees 256 keys of a
cache and itself. Int8 products are calibrated before, and weights are rounded and packed before.
All mixes are visited in turns, round after round; draws, copies of caches and the first pass of
each are not timed; time is process time, the figure of a mix its median over rounds. Freed memory
stays with the process (ground.freed_memory), else new pages for growing caches take more time
than products, and by chance. "plain" is the layer's own forward, which is what runs where all
tokens are in fp.

Costs of off, int8 and fp are non-negative least squares over the mixes
(`measures.energy.calibrate`), in ms for a token and a layer and as shares of fp; `residual` is the
largest deviation as a share of the dearest mix. `cost_int8` is the one number of
`hest/03_gate_costs` that fits best: modelled cost of each mix, over that of fp, against its
measured time over that of fp, least squares. `model_residual` is what remains, the largest
deviation as a share of fp.
"""
import argparse
import copy
import time

import numpy as np
import torch
from block_parts import chosen_products, drawn, shapes_of
from transformers import DynamicCache

from himalaya_hest.ground.clock import clock_of
from himalaya_hest.ground.freed_memory import keep_memory
from himalaya_hest.hest.blocks import BlockMatrices, run_block
from himalaya_hest.hest.gate_costs import CPU_COST_INT8, block_cost
from himalaya_hest.hest.int8 import calibrate as calibrate_int8
from himalaya_hest.measures.energy import calibrate
from himalaya_hest.workshop.measuring import (
    called, circumstances, llama_config, random_backbone, spread, write_record)

# off, int8, fp
MIXES = ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0.25, 0.5, 0.25), (0.2, 0.8, 0), (0.4, 0.6, 0),
    (0.44, 0, 0.56), (0.5, 0, 0.5), (0, 0.5, 0.5), (0.5, 0.25, 0.25))
LAYERS = {128: 4, 256: 6, 1024: 6, 2048: 3} # in decoding
PREFILL = {128: (256, 1024), 256: (256, 1024), 1024: (256, 1024), 2048: (256, 512)} # two layers
KEYS = 256 # of the cache in decoding


class Stack:
    "Decoder layers, run one after the other in given states."
    def __init__(self, model, n_layers=None):
        self.model, self.layers = model, list(model.model.layers)[:n_layers]
        self.matrices = [BlockMatrices(l) for l in self.layers]
        for m in self.matrices:
            for matrix in m.int8.values(): matrix.weight()
        self.dtype, self.device = model.dtype, model.device
    def hidden(self, b, n):
        return torch.randn(b, n, self.model.config.hidden_size, device=self.device).to(self.dtype)
    def positions(self, h, start):
        return self.model.model.rotary_emb(
            h, torch.arange(start, start + h.shape[1], device=self.device)[None])
    def run(self, h, states, positions, cache): # states (layers, b, n)
        for i, layer in enumerate(self.layers):
            h = run_block(layer, i, self.matrices[i], None, h, states[i], positions, None, cache)
        return h
    def plain(self, h, states, positions, cache):
        for layer in self.layers:
            h = layer(h, attention_mask=None, position_embeddings=positions, past_key_values=cache)
        return h
    def filled(self, b): # a cache of KEYS keys
        cache = DynamicCache()
        h = self.hidden(b, KEYS)
        self.plain(h, None, self.positions(h, 0), cache)
        return cache


def works(stack, phase, b, n, steps, rng):
    """{mix or 'plain': a function that draws anew and gives (the work, which is timed, the shares
    of its draw, and how often a layer runs at all, in int8, in fp)}."""
    tokens = b * n * steps
    h, L = [stack.hidden(b, n) for _ in range(min(steps, 8))], len(stack.layers)
    at = stack.positions(h[0], 0 if phase == "prefill" else KEYS)
    cache = None if phase == "prefill" else stack.filled(b)
    def make(mix):
        def draw():
            states = torch.stack([drawn((0, 0, 1) if mix == "plain" else mix, tokens,
                rng).view(steps, b, n) for _ in range(L)], 1).to(stack.device)
            run, parts = stack.plain if mix == "plain" else stack.run, list(states)
            def work():
                for i, s in enumerate(parts):
                    here = DynamicCache() if cache is None else cache
                    run(h[i % len(h)], s, at, here)
                    if cache is not None: cache.crop(-1)
            return (work, [float((states == k).float().mean()) for k in range(3)],
                [1.0, *(float((states == k).flatten(2).any(2).float().mean()) for k in (1, 2))])
        return draw
    return {m: make(m) for m in ("plain", *MIXES)}


def modelled(block, shares, keys, c):
    "What hest/03_gate_costs says of mixes, over all in fp."
    cost = [block.in_state(s, c) @ [1., keys] for s in range(3)]
    return np.asarray(shares) @ cost / cost[2]


def best_cost(block, shares, of_fp, keys):
    "The cost_int8 that fits, least squares; the model is linear in it."
    at_0 = modelled(block, shares, keys, 0.)
    slope = modelled(block, shares, keys, 1.) - at_0
    return float(np.clip(slope @ (of_fp - at_0) / (slope @ slope), 1e-3, 1.))


def measured(stack, phase, b, n, steps, rounds, min_s, seed=0):
    "One row of the record."
    rng, clock = np.random.default_rng(seed), clock_of(stack.device)
    torch.manual_seed(seed)
    todo, found = works(stack, phase, b, n, steps, rng), {}
    for r in range(rounds):
        names = list(todo)
        for m in names[r % len(names):] + names[:r % len(names)]:
            work, *drawn_ = todo[m]()
            if m not in found or min(found[m][1]) * steps * b * n * len(stack.layers) < .3:
                # what ran before has filled the caches
                work()
            start, repeats = clock(), 0
            while repeats == 0 or (clock() - start < min_s and repeats < 20): work(); repeats += 1
            found.setdefault(m, (drawn_, []))[1].append((clock() - start) / repeats / (
                steps * b * n * len(stack.layers)))
    (shares, passes), ms = (np.array([found[m][0][i] for m in MIXES]) for i in (0, 1)), {
        m: spread(1e3 * np.array(t)) for m, (_, t) in found.items()}
    figures = np.array([ms[m]["median"] for m in MIXES])
    costs, residual = calibrate(shares, figures)
    keys, block, of_fp = ((n + 1) / 2 if phase == "prefill" else KEYS + 1,
        block_cost(stack.layers[0]), figures / figures[0])
    per_pass = calibrate(passes, figures * b * n) if phase == "decode" else None
    c, states = best_cost(block, shares, of_fp, keys), ("off", "int8", "fp")
    off_by = lambda c: float(np.abs(modelled(block, shares, keys, c) - of_fp).max())
    return dict(layers=len(stack.layers), phase=phase, batch_size=b, n_tokens=n, mean_keys=keys,
        costs_ms=dict(zip(states, costs.tolist())),
        costs_of_fp=dict(zip(states, (costs / costs[2]).tolist())), residual=residual, cost_int8=c,
        model_residual=off_by(c), model_residual_now=off_by(CPU_COST_INT8),
        per_pass=per_pass and dict(
            costs_ms=dict(zip(("always", "if any token is in int8", "if any token is in fp"),
                per_pass[0].tolist())), residual=per_pass[1]),
        off_in_model=float(modelled(block, np.eye(3), keys, c)[0]), plain_ms=ms["plain"],
        fp_over_plain=float(figures[0] / ms["plain"]["median"]),
        mixes=[dict(shares=s.tolist(), token_ms=ms[m], of_fp=float(ms[m]["median"] / figures[0]),
            of_int8=float(ms[m]["median"] / figures[1])) for m, s in zip(MIXES, shares)])


def settings(width, quick):
    "(phase, batch size, tokens a row, steps that a draw covers)"
    if quick: return [("prefill", 1, 64, 1), ("decode", 1, 1, 8), ("decode", 8, 1, 4)]
    return [("prefill", 1, n, 1) for n in PREFILL[width]] + ([("decode", 1, 1, 40),
        ("decode", 8, 1, 20)] if width < 1024 else [("decode", 1, 1, 20), ("decode", 8, 1, 10)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--widths", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-s", type=float, default=.15, help="of a mix in a round")
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds")
    parser.add_argument("--out", default="records/bench/block_costs.json")
    args = parser.parse_args()
    kept = keep_memory()
    (rounds, min_s), rows, products = (2, .02) if args.quick else (args.rounds, args.min_s), [], {}
    began = time.process_time()
    for width in args.widths:
        base = random_backbone(llama_config(width, LAYERS[width], 8))
        products |= chosen_products(calibrate_int8(shapes_of(base.model.layers), file=None))
        for dtype in args.dtypes:
            model = copy.deepcopy(base).to(getattr(torch, dtype))
            stack = Stack(model)
            few = Stack(model, 2)
            for phase, b, n, steps in settings(width, args.quick):
                with torch.no_grad():
                    row = dict(width=width, intermediate=base.config.intermediate_size,
                        dtype=dtype) | measured(few if phase == "prefill" else stack, phase, b, n,
                            steps, rounds, min_s)
                rows.append(row)
                c = row["costs_of_fp"]
                print(f"{time.process_time() - began:5.0f} s  d {width:4} {dtype:8} " f"{phase:7} "
                    f"batch {b}, {n:4} tokens: fp {row['costs_ms']['fp']:.4f} ms " f"a token and "
                    f"layer; off {c['off']:.2f}, int8 {c['int8']:.2f} of it " f"(residual "
                    f"{row['residual']:.2f}); cost_int8 {row['cost_int8']:.2f} " f"(model off by "
                    f"{row['model_residual']:.2f})", flush=True)
            del model, stack, few
    record = circumstances(called(__file__), "cpu") | dict(rounds=rounds, freed_memory_kept=kept,
        cost_int8_now=CPU_COST_INT8, rows=rows, int8_products=products)
    write_record(args.out, record)


if __name__ == "__main__": main()
