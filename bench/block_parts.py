"""What block_costs.py, block_speed.py and gpu_blocks.py share: random backbones, draws of states
with exact shares, gates that take given states, clocks, intervals."""
import copy
import os
import platform
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from peft import get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from himalaya_hest.hest import shell as gated_shell
from himalaya_hest.hest.blocks import GatedBlocks
from himalaya_hest.hest.bucket import TokenBuckets
from himalaya_hest.hest.directions import TokenGates
from himalaya_hest.hest.gate_costs import PROJECTIONS
from himalaya_hest.hest.shell import BlockForward
from himalaya_hest.hest.int8 import machine_name

INTERMEDIATE = {128: 344} # of the mini backbone; others 2.75 d


def llama_config(width, n_layers, vocab_size=2048, **kw):
    "A Llama of that width, with heads of 32 to 128 numbers."
    head = 32 if width < 512 else 64 if width < 4096 else 128
    return LlamaConfig(
        **(
            dict(
                hidden_size=width,
                intermediate_size=INTERMEDIATE.get(width, round(2.75 * width / 8) * 8),
                num_hidden_layers=n_layers,
                num_attention_heads=width // head,
                num_key_value_heads=width // head,
                vocab_size=vocab_size,
                max_position_embeddings=8192,
            )
            | kw
        )
    )


def random_backbone(config, dtype=torch.float32, device="cpu"):
    "Random weights, made on the device in that type."
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = (Qwen2ForCausalLM if isinstance(config, Qwen2Config) else LlamaForCausalLM)(
                config
            )
    finally: torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def twin(model):
    "A copy with modules of its own and the same weights."
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def drawn(shares, n, rng):
    """(n,) states 0 off, 1 int8, 2 fp in random order, each as often as its share says (to the
    nearest whole token)."""
    wanted = np.asarray(shares, dtype=float) * n
    counts = np.floor(wanted + 1e-9).astype(int)
    short = n - counts.sum()
    counts[np.argsort(counts - wanted + rng.uniform(0, 1e-6, 3))[:short]] += 1
    return torch.from_numpy(rng.permutation(np.repeat(np.arange(3), counts)))


def attached(model, config):
    """A PEFT adapter on modules of its own with the weights of `model`; weights are rounded once
    for all of them."""
    base = twin(model)
    peft = get_peft_model(base, config).eval()
    for mine, first in zip(base.model.layers, model.model.layers):
        if isinstance(mine.__dict__.get("forward"), BlockForward):
            mine.forward.matrices.int8 = first.__dict__.setdefault(
                "_int8_of_bench", mine.forward.matrices.int8
            )
    return peft


# time does not hang on them, and decomposing all matrices takes longer than a benchmark
def _random_start(module, rank, seed):
    w = getattr(module, "base_layer", module).weight
    return tuple(torch.randn(rank, d, device=w.device) / d ** .5 for d in w.shape)

gated_shell._start = _random_start


def without_adapter(peft):
    "As if its directions had been merged into the weights: a bound for what they cost."
    core = peft.base_model.core()
    core.site, core.act = {}, lambda i, x, y, *open_: y
    return peft


class Given:
    """States that the gates of a core are given in place of what they decide; controller and gates
    run all the same, and a bucket works on them without a say."""
    def __init__(self, core):
        self.core, self.step, self.steps = core, 0, []
        core.logits = self.logits
    def load(self, shares, b, lengths, rng):
        """Draw states for passes of so many tokens, those of each block (or of each layer's
        directions) in exact shares over all passes."""
        core, n = self.core, sum(lengths)
        units = 1 if isinstance(core, GatedBlocks) else core.places.n_slots * core.rank
        self.states = torch.stack(
            [drawn(shares, b * n * units, rng).view(b, n, units) for _ in core.layers]
        )
        # the drawn state is the likeliest, by more or less
        utilities = (
            nn.functional.one_hot(self.states, 3) * torch.tensor([4.0, 4.0, 8.0])
            + torch.from_numpy(rng.uniform(0, 1, (*self.states.shape, 3))).float()
        )
        self.step, self.steps = 0, [list(u.to(core.s.device)) for u in utilities.split(lengths, 2)]
    def logits(self, tokens, row):
        type(self.core).logits(self.core, tokens, row)
        return self.steps[self.step][row]


def scope_share(core, states, keys): # states (rows, b, n, 1), keys (n,)
    """Mean scope share of given states, in the units of the budget; tokens that are asked for no
    logits."""
    weights = nn.functional.one_hot(states.to(core.constant.device), 3).float()
    spent = sum(
        core.spend(r, weights[r], keys.expand(states.shape[1:3]).to(core.constant.device))
        for r in range(len(states))
    )
    fixed, full = core.whole(keys.to(spent), 0.)
    return float(((spent + fixed) / full).mean())


class Parts:
    """Within, seconds of deciding are summed: `controller` of TokenGates.enter without the buckets,
    `bucket` of these. Without a clock nothing is summed. A bucket gives back the states that
    were asked for, so that all do equal work."""
    def __init__(self, clock=None):
        self.clock, self.s, self.lowered = clock, dict(controller=0., bucket=0.), []
    def __enter__(self):
        self.kept = TokenGates.enter, TokenBuckets.spend
        enter, spend = self.kept
        def timed_spend(buckets, wishes, *more):
            start = self.clock() if self.clock else 0.
            states = spend(buckets, wishes, *more)
            if self.clock:
                self.s["bucket"] += self.clock() - start
                self.lowered.append(float((states != wishes).any(-1).float().mean()))
            return wishes
        def timed_enter(gates, *more):
            before, start = self.s["bucket"], self.clock()
            enter(gates, *more)
            self.s["controller"] += self.clock() - start - (self.s["bucket"] - before)
        TokenBuckets.spend = timed_spend
        if self.clock: TokenGates.enter = timed_enter
        return self
    def __exit__(self, *error): TokenGates.enter, TokenBuckets.spend = self.kept


def clock_of(device):
    "Process time on a CPU; on a GPU the wall between synchronisations."
    if not str(device).startswith("cuda"): return time.process_time
    def clock():
        torch.cuda.synchronize()
        return time.perf_counter()
    return clock


def spread(values):
    "Median and quartiles."
    low, mid, high = np.percentile(values, [25, 50, 75])
    return dict(median=float(mid), q1=float(low), q3=float(high))


def ratio(a, b, seed=0, draws=4000):
    "Median over rounds of a / b, with the 95 % interval of a bootstrap over rounds."
    r = np.asarray(a, dtype=float) / np.asarray(b, dtype=float)
    again = np.median(np.random.default_rng(seed).choice(r, (draws, len(r))), 1)
    return dict(
        median=float(np.median(r)),
        low=float(np.percentile(again, 2.5)),
        high=float(np.percentile(again, 97.5)),
    )


def shapes_of(layers):
    "(d_in, d_out) of all matrices of some blocks."
    return {
        (m.in_features, m.out_features)
        for l in layers
        for p in PROJECTIONS
        for m in [l.get_submodule(p)]
    }


def chosen_products(calibration):
    "{shape and rows: the int8 product that the figures chose}."
    return {
        key: min(times, key=times.get)
        for shapes in calibration.times.values()
        for key, times in sorted(shapes.items())
    }


def commit():
    "Of this checkout, marked where the package has uncommitted changes."
    git = lambda *a: subprocess.run(
        ["git", "-C", str(Path(__file__).resolve().parent.parent), *a],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return git("rev-parse", "--short=10", "HEAD") + (
        " and changes" if git("status", "--porcelain", "himalaya_hest") else ""
    )


def circumstances(command, device):
    "What figures hang on."
    on_gpu = str(device).startswith("cuda")
    return dict(
        command=command,
        device=torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        machine=machine_name(torch.empty(0, device=device).device),
        threads=torch.get_num_threads(),
        cpu_count=os.cpu_count(),
        torch=torch.__version__,
        commit=commit(),
    )
