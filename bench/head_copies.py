"""A head in bfloat16 on a CPU, on states that lie apart in memory and side by side: the last states
of a batch of prompts lie apart (`himalaya_hest.running.evaluation.one_product`).

    OMP_NUM_THREADS=1 python bench/head_copies.py
    OMP_NUM_THREADS=1 python bench/head_copies.py --rows 8 --rounds 2 --out /tmp/head.json

Sizes are SmolLM2-135M's, numbers are random. Both ways take turns in random order, after one round
that is not counted: process time, and how much the process grew to at most (`grown_mb`, of a
process of its own that does one of both, once).
"""
import argparse
import random
import subprocess
import sys
from pathlib import Path
from time import process_time

import torch

from himalaya_hest.running.record import peak_memory_mb
from himalaya_hest.workshop.measuring import called, circumstances, ratio, spread, write_record

WORDS, WIDTH, TOKENS = 49_152, 576, 64
APART, TOGETHER = "apart", "side by side"


def made(n_rows):
    "A head, and the last states of rows of prompts."
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.bfloat16)
    return head.requires_grad_(False), torch.randn(n_rows, TOKENS, WIDTH).bfloat16()[:, -1:]


def product(head, states, way): return head(states if way == APART else states.contiguous())


def grown_mb(n_rows, way): # in a process of its own
    alone = [sys.executable, __file__, "--alone", way, "--rows", str(n_rows)]
    return float(subprocess.run(alone, capture_output=True, text=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", help="print how much one such product makes this process grow")
    parser.add_argument("--out", type=Path, default="records/bench/head_copies.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    head, states = made(a.rows)
    if a.alone:
        before = peak_memory_mb()
        product(head, states, a.alone)
        return print(peak_memory_mb() - before)
    times, dice = {APART: [], TOGETHER: []}, random.Random(0)
    for k in range(a.rounds + 1):
        for way in dice.sample(list(times), 2):
            start = process_time()
            product(head, states, way)
            if k: times[way].append(process_time() - start)
    same = torch.equal(product(head, states, APART), product(head, states, TOGETHER))
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        rows=a.rows, rounds=a.rounds, same_bits=same, of_apart=ratio(times[TOGETHER], times[APART]),
        ways={w: dict(s=spread(t), grown_mb=grown_mb(a.rows, w)) for w, t in times.items()}))


if __name__ == "__main__": main()
