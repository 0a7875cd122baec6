r"""What it saves to share a product among layers that read one input, in eight bits: q, k and v,
gate and up.

    OMP_NUM_THREADS=1 python bench/shared_products.py model=FOLDER source=local data_dir=FOLDER \
        dtype=bfloat16

Two copies of the bare backbone of scale `small` within `in_eight_bits`, with activations (W8A8) and
with weights alone: of one the layers share, of the other each rounds its input and multiplies by
itself. Passes over --widths tokens behind --context tokens, copies in turns in each of --rounds
rounds, after one that is not counted: process time shared over alone, medians over rounds with the
95 % interval of a bootstrap.
"""
import contextlib
import copy
import tempfile
from pathlib import Path
from time import process_time
from unittest.mock import patch

import numpy as np
import torch
from acceptance import arguments, begun

from himalaya_hest.hest import eight_bits
from himalaya_hest.hest.head_groups import grouped_attention
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

WAYS = dict(shared=eight_bits.SAME_INPUT, alone=())
KINDS = {"W8A8": True, "weight-only int8": False}


@torch.no_grad()
def pass_times(models, width, context, rounds):
    "Way → process time of each round's pass."
    ids, found = torch.ones(1, context, dtype=torch.long), {w: [] for w in models}
    caches = {w: m(input_ids=ids, use_cache=True).past_key_values for w, m in models.items()}
    for k in range(rounds + 1):
        for w, model in models.items():
            start = process_time()
            model(input_ids=ids[:, :1].expand(1, width), past_key_values=caches[w], use_cache=True)
            if k: found[w].append(process_time() - start)
            caches[w].crop(-width) # the same text each time
    return found


def measured(model, a, activations):
    "By width: milliseconds both ways, and their ratio."
    models = {w: copy.deepcopy(model) for w in WAYS}
    with contextlib.ExitStack() as until:
        for w, one in models.items():
            with patch.object(eight_bits, "SAME_INPUT", WAYS[w]):
                until.enter_context(eight_bits.in_eight_bits(one, activations))
            until.enter_context(grouped_attention(one))
        times = {n: pass_times(models, n, a.context, a.rounds) for n in a.widths}
    return {str(n): dict(ms={w: 1e3 * float(np.median(of[w])) for w in WAYS},
                         ratio=ratio(of["shared"], of["alone"])) for n, of in times.items()}


def main():
    parser = arguments(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default="records/bench/shared_products.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder: run, model = begun(a, folder)
    found = {}
    for name, activations in KINDS.items():
        found[name] = measured(model, a, activations)
        print(name, found[name], flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        model=Path(run.config.model).name, context=a.context, rounds=a.rounds, kinds=found))


if __name__ == "__main__": main()
