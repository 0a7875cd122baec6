r"""What it saves to share a product among layers that read one input, in eight bits: q, k and v,
gate and up.

    OMP_NUM_THREADS=1 python bench/shared_products.py model=FOLDER source=local data_dir=FOLDER \
        dtype=bfloat16

Two copies of the bare backbone of scale `small` within `in_eight_bits`, with activations (W8A8) and
with weights alone: of one the layers share, of the other each rounds its input and multiplies by
itself. Passes over --widths tokens behind --context tokens, both in turns in each of --rounds
rounds, after one that is not counted: process time shared over alone, medians over rounds with the
95 % interval of a bootstrap.
"""
import contextlib
import copy
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from acceptance import arguments, begun
from grouped_attention import pass_times

from himalaya_hest.hest import eight_bits
from himalaya_hest.hest.head_groups import grouped_attention
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

WAYS = dict(shared=eight_bits.SAME_INPUT, alone=())
KINDS = {"W8A8": True, "weight-only int8": False}


def measured(model, a, activations):
    "By width: milliseconds both ways, and their ratio."
    models = {w: copy.deepcopy(model) for w in WAYS}
    with contextlib.ExitStack() as until:
        for w, one in models.items():
            with patch.object(eight_bits, "SAME_INPUT", WAYS[w]):
                until.enter_context(eight_bits.in_eight_bits(one, activations))
            until.enter_context(grouped_attention(one))
        ways = {w: (one, contextlib.nullcontext) for w, one in models.items()}
        times = pass_times(ways, a.widths, a.context, a.rounds)
    return {str(n): dict(ms={w: 1e3 * float(np.median(times[w][n])) for w in WAYS},
                         ratio=ratio(times["shared"][n], times["alone"][n])) for n in a.widths}


def main():
    parser = arguments(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default="records/bench/shared_products.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    run, model = begun(a)
    found = {}
    for name, activations in KINDS.items():
        found[name] = measured(model, a, activations)
        print(name, found[name], flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        model=Path(run.config.model).name, context=a.context, rounds=a.rounds, kinds=found))


if __name__ == "__main__": main()
