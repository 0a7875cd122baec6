"""Products with a frozen weight: fp32, bfloat16 and the int8 products of himalaya_hest.hest.int8,
over shapes and numbers of rows.

    python bench/int8_products.py
    python bench/int8_products.py --widths 4096 --rows 1 16 128 2048 --out products_gpu.json   # a GPU

Random numbers, since time does not hang on them. Shapes are square and those of an MLP, d to 2.75 d
and back. Every product of one shape and number of rows is visited in turns, round after round, each
time for some milliseconds after one call that is not timed; a figure is the median over rounds with
its quartiles, in microseconds of a call: of process time on a CPU, on a GPU of the wall between
synchronisations. `+ rounding` adds the rounding of the activations, which matrices with the same
input share; all int8 figures hold the multiplication by both scales. Products that
himalaya_hest.hest.int8 has left out are here to be compared: `int_mm, transposed` (weight kept as
(d_in, d_out)), `int8pack` (torch._weight_int8pack_mm, activations and sums in bfloat16; only for
widths that are multiples of 64, since torch 2.13 crashes at ones such as 344), `integers in bf16`;
on a CPU alone. `layers`: the seven products of a Llama block, three of the same input and two of
another, without attention and norms. Needs torch alone.
"""
import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import nn

from himalaya_hest.ground.clock import clock_of
from himalaya_hest.ground.freed_memory import keep_memory
from himalaya_hest.hest.int8 import (
    PRODUCTS, Calibration, Int8Matrix, RoundedWeight, machine_name, quantised, usable,
    use_calibration,
)
from himalaya_hest.workshop.measuring import called


def clock(device): return clock_of(device)()


def in_turns(calls, rounds, device, spend_s):
    "name → (lower quartile, median, upper quartile) in µs of a call."
    n, found = {}, {name: [] for name in calls}
    for name, f in calls.items():
        f(); start = clock(device); f()
        n[name] = max(1, min(500, int(spend_s / max(clock(device) - start, 1e-6))))
    for _ in range(rounds):
        for name, f in calls.items():
            f(); start = clock(device)
            for _ in range(n[name]): f()
            found[name].append(1e6 * (clock(device) - start) / n[name])
    return {name: [round(q, 1) for q in statistics.quantiles(v, n=4, method="inclusive")]
        for name, v in found.items()}


def left_out(codes, scale, a, per_row):
    "Products that were measured and not kept."
    transposed, integers, ones = (codes.t().contiguous(), codes.bfloat16(),
        torch.ones(len(codes), dtype=torch.bfloat16))
    scaled = lambda sums: sums.float().mul_(scale).mul_(per_row)
    out = {"int_mm, transposed": lambda: scaled(torch._int_mm(a, transposed)),
        "integers in bf16": lambda: scaled(a.bfloat16() @ integers.t())}
    if all(d % 64 == 0 for d in codes.shape):
        out["int8pack"] = lambda: scaled(torch._weight_int8pack_mm(a.bfloat16(), codes, ones))
    return out


def products(d_in, d_out, n, device):
    "What is timed for one shape and number of rows."
    weight, x = torch.randn(d_out, d_in, device=device), torch.randn(n, d_in, device=device)
    weight16, x16, (codes, scale), (a, per_row) = (weight.bfloat16(), x.bfloat16(),
        quantised(weight), quantised(x))
    w = RoundedWeight(codes, scale[:, 0])
    def rounding(product):
        q, s = quantised(x)
        return product(q, w).mul_(s)
    calls = {"fp32": lambda: x @ weight.t(), "bf16": lambda: x16 @ weight16.t(),
        "rounding": lambda: quantised(x)}
    for name in dict.fromkeys([*usable(device, d_in, d_out), "float"]):
        calls[name] = lambda f=PRODUCTS[name]: f(a, w).mul_(per_row)
        calls[f"{name} + rounding"] = lambda f=PRODUCTS[name]: rounding(f)
    return calls | (left_out(codes, w.scale, a, per_row) if device.type == "cpu" else {})


SHARED = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)) # matrices of the same input


def layers(width, device):
    "n → what is timed for a block: by torch in two types, and by its int8 twins."
    ffn = width * 11 // 4
    shapes = dict.fromkeys("qkvo", (width, width)) | dict(gate=(width, ffn), up=(width, ffn),
        down=(ffn, width))
    fp = {k: nn.Linear(*s, bias=False, device=device).requires_grad_(False)
        for k, s in shapes.items()}
    bf = {k: nn.Linear(*s, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
        for k, s in shapes.items()}
    twins = {k: Int8Matrix(m) for k, m in fp.items()}
    def whole(of, x, wide):
        for group in SHARED:
            for k in group: of[k](wide if k == "down" else x)
    def in_int8(x, wide):
        for group in SHARED:
            t = wide if group == ("down",) else x
            q, s = quantised(t)
            for k in group: twins[k].product(q, s, t.dtype)
    def of(n):
        x, wide = torch.randn(n, width, device=device), torch.randn(n, ffn, device=device)
        y, broad = x.bfloat16(), wide.bfloat16()
        return {"fp32": lambda: whole(fp, x, wide), "bf16": lambda: whole(bf, y, broad),
            "int8 of fp32": lambda: in_int8(x, wide), "int8 of bf16": lambda: in_int8(y, broad)}
    return of, twins


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 256, 344, 1024, 2048])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spend-ms", type=float, default=4., help="on each product in each round")
    parser.add_argument("--out", default="records/bench/int8_products.json")
    args = parser.parse_args()
    torch.set_num_threads(1); torch.set_grad_enabled(False); torch.manual_seed(0)
    kept, device, rows, blocks = (keep_memory(), torch.empty(0, device="cuda"
        if torch.cuda.is_available() else "cpu").device, [], [])
    for width in args.widths:
        for d_in, d_out in ((width, width), (width, width * 11 // 4), (width * 11 // 4, width)):
            for n in args.rows:
                rows.append(dict(d_in=d_in, d_out=d_out, n_rows=n,
                    us=in_turns(products(d_in, d_out, n, device), args.rounds, device,
                        args.spend_ms / 1e3)))
                print(json.dumps(rows[-1]), flush=True)
        use_calibration(Calibration(None)) # what is fastest here, measured in this process
        of, twins = layers(width, device)
        for n in args.rows:
            us = in_turns(of(n), args.rounds, device, args.spend_ms / 1e3)
            blocks.append(dict(width=width, mlp=width * 11 // 4, n_rows=n, us=us,
                int8_bytes=sum(m.weight_bytes() for m in twins.values())))
            print(json.dumps(blocks[-1]), flush=True)
    record = dict(command=called(__file__), rounds=args.rounds,
        device=machine_name(device).split(" | ")[0], threads=torch.get_num_threads(),
        torch=torch.__version__, keeps_memory=kept, us="lower quartile, median, upper quartile")
    lines = lambda of: "[\n" + ",\n".join("  " + json.dumps(r) for r in of) + "\n ]" # one line each
    Path(args.out).write_text(
        json.dumps(record, indent=1)[:-2]
        + f',\n "rows": {lines(rows)},\n "layers": {lines(blocks)}\n}}\n')
    print(args.out)


if __name__ == "__main__": main()
