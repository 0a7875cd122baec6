"""Attention of one layer forward and back on a processor: PyTorch's fused form and plain products.

    OMP_NUM_THREADS=1 python bench/attention.py # records/bench/attention.json

Both forms are transformers' own (`sdpa` and `eager`), called as a Llama layer calls them: eight
rows, nine heads of width 64 of which three for keys and values (SmolLM2-135M), a causal mask.
Process time, the forms in turns, medians over rounds with the smallest and largest round.
"""
import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

FORMS = dict(sdpa=sdpa_attention_forward, eager=eager_attention_forward)
HEADS, KEYS, WIDTH, ROWS = 9, 3, 64, 8


def masks(n, dtype):
    "A causal mask as each form takes it."
    seen = torch.ones(n, n, dtype=torch.bool).tril().expand(ROWS, 1, n, n)
    added = torch.zeros(ROWS, 1, n, n, dtype=dtype)
    return dict(sdpa=seen, eager=added.masked_fill(~seen, torch.finfo(dtype).min))


def pass_ms(form, layer, qkv, mask):
    "Milliseconds of process time of one pass forward and back."
    start = time.process_time()
    out, _ = FORMS[form](layer, *qkv, mask, scaling=WIDTH ** -.5, dropout=0.)
    torch.autograd.grad(out, qkv, torch.ones_like(out))
    return 1e3 * (time.process_time() - start)


def measured(n, dtype, rounds):
    "Form → the milliseconds of each round."
    layer = SimpleNamespace(num_key_value_groups=HEADS // KEYS, training=True, is_causal=True)
    make = lambda heads: (torch.randn(ROWS, n, heads, WIDTH).to(dtype).transpose(1, 2)
                          .requires_grad_())
    qkv, mask = (make(HEADS), make(KEYS), make(KEYS)), masks(n, dtype)
    out = {form: [] for form in FORMS}
    for _ in range(rounds + 2):
        for form in FORMS: out[form].append(pass_ms(form, layer, qkv, mask[form]))
    # the first two warm up
    return {form: ms[2:] for form, ms in out.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64, 96, 128, 192, 256, 384])
    parser.add_argument("--out", type=Path, default=Path("records/bench/attention.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    from himalaya_hest.running.record import cpu_info, versions
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for n in args.tokens:
            ms = measured(n, dtype, args.rounds)
            rows.append(dict(dtype=str(dtype).removeprefix("torch."), tokens=n) | {
                form: dict(median_ms=round(statistics.median(v), 2), min_ms=round(min(v), 2),
                           max_ms=round(max(v), 2)) for form, v in ms.items()})
            print(rows[-1], flush=True)
    record = dict(command="OMP_NUM_THREADS=1 python bench/attention.py", rounds=args.rounds,
        threads=torch.get_num_threads(), device=cpu_info(), versions=versions(), rows=rows)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
