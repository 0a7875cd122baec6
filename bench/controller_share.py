"""What deciding about gates takes of a forward pass: time and multiply-adds, over lengths, batch
sizes and widths.

    python bench/controller_share.py
    python bench/controller_share.py --widths 1024 4096 --lengths 512 4096 --batches 1 4 16 --out gpu.json   # a GPU

Random weights, since time does not hang on them, and gates that are open in all the states that
they have. Time is taken inside of one forward pass: that of the controller and its gates
(TokenGates.enter) over that of the whole pass, on a CPU process time, on a GPU the wall between
synchronisations (which adds the launches' own time to the controller's share). Needs torch,
transformers and peft alone. Settings are visited in turns, round after round, short passes after
one that is not timed (what ran before it has filled the caches) and up to 20 times; a figure is the
median over rounds with the smallest and the largest. Multiply-adds are counted by formula
(energy.forward_cost, gate_costs) at the mean number of keys; the head once, as in the pass that is
timed.
"""
import argparse
import json
import platform
import statistics

import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from himalaya_hest.ground.clock import clock_of
from himalaya_hest.hest.directions import TokenGates
from himalaya_hest.hest.costs import forward_cost
from himalaya_hest.hest.tuner import HestConfig
from himalaya_hest.adapters.tabs import TabsConfig
from himalaya_hest.workshop.measuring import called, write_record

LAYERS = {128: 4, 256: 6, 512: 8, 1024: 8, 2048: 8, 4096: 32}


def backbone(width, device):
    "A random Llama of that width, with heads of 32 to 128 numbers."
    head = 32 if width < 512 else 64 if width < 4096 else 128
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=width, intermediate_size=int(2.69 * width) // 8 * 8,
        num_hidden_layers=LAYERS[width], num_attention_heads=width // head,
        num_key_value_heads=width // head, vocab_size=2048, max_position_embeddings=8192)
    with torch.device(device):
        return (LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda"
            else torch.float32).eval())


def attached(method, width, device):
    "The adapter with all its states in use."
    model = (get_peft_model(backbone(width, device),
        (HestConfig(task_type="CAUSAL_LM", scope="directions", e_max=0.33, hardening="argmax")
            if method == "hest" else TabsConfig(task_type="CAUSAL_LM"))).to(device).eval())
    core = model.base_model.core()
    with torch.no_grad():
        core.s.normal_()
        for p in core.controller.parameters(): p.normal_()
        if hasattr(core.gate, "theta"): core.gate.theta.uniform_(.1, .4)
    return model


def clock(device): return clock_of(device)()


def one_pass(model, ids, device):
    "(seconds of the controller, seconds of the pass)"
    spent, enter = [0.], TokenGates.enter
    def timed(self, layer, h):
        start = clock(device); enter(self, layer, h); spent[0] += clock(device) - start
    TokenGates.enter = timed
    try:
        start = clock(device)
        with torch.no_grad(): model(input_ids=ids, logits_to_keep=1)
        return spent[0], clock(device) - start
    finally: TokenGates.enter = enter


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--methods", nargs="+", default=["hest", "tabs"])
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--most-tokens", type=int, default=8192,
        help="of a batch; larger ones are left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="records/bench/controller_share.json")
    args = parser.parse_args()
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    for width in args.widths:
        for method in args.methods:
            model = attached(method, width, device)
            cost, gates = forward_cost(model.get_base_model()), model.base_model.gate_costs()
            shapes = [(b, n) for b in args.batches for n in args.lengths
                if b * n <= args.most_tokens]
            found = {s: [] for s in shapes}
            for _ in range(args.rounds):
                for b, n in shapes:
                    ids = torch.randint(3, 2000, (b, n), device=device)
                    first = one_pass(model, ids, device)
                    passes = [one_pass(model, ids, device)
                        for _ in range(min(20, int(1 / first[1])))] or [first]
                    inside, whole = (sum(x) / len(passes) for x in zip(*passes))
                    found[b, n].append((inside / whole, whole))
            for (b, n), seen in found.items():
                shares = [s for s, _ in seen]
                rows.append(dict(method=method, width=width, layers=LAYERS[width], batch_size=b,
                    n_tokens=n, time_share=statistics.median(shares), time_share_low=min(shares),
                    time_share_high=max(shares), pass_s=statistics.median(t for _, t in seen),
                    multiply_add_share=gates["controller"] / (cost.at((n + 1) / 2) - cost.head
                        * (n - 1) / n + gates["controller"] + gates["directions"]),
                    controller_parameters=model.base_model.controller_parameters()))
                print(json.dumps(rows[-1]), flush=True)
            del model
    record = dict(command=called(__file__), rounds=args.rounds, device=torch.cuda.get_device_name()
        if device == "cuda" else platform.machine(), threads=torch.get_num_threads(),
        torch=torch.__version__, rows=rows)
    write_record(args.out, record)


if __name__ == "__main__": main()
