"""What block_costs.py, block_speed.py and gpu_blocks.py share: draws of states with exact shares,
gates that take given states, and what they spend."""
import copy

import numpy as np
import torch
from peft import get_peft_model
from torch import nn

from himalaya_hest.hest import shell as gated_shell
from himalaya_hest.hest.blocks import GatedBlocks
from himalaya_hest.hest.bucket import TokenBuckets
from himalaya_hest.hest.directions import TokenGates
from himalaya_hest.hest.gate_costs import PROJECTIONS
from himalaya_hest.hest.passing import BlockForward


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
            mine.forward.matrices.int8 = first.__dict__.setdefault("_int8_of_bench",
                mine.forward.matrices.int8)
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
            [drawn(shares, b * n * units, rng).view(b, n, units) for _ in core.layers])
        # the drawn state is the likeliest, by more or less
        utilities = (nn.functional.one_hot(self.states, 3) * torch.tensor([4.0, 4.0, 8.0])
            + torch.from_numpy(rng.uniform(0, 1, (*self.states.shape, 3))).float())
        self.step, self.steps = 0, [list(u.to(core.s.device)) for u in utilities.split(lengths, 2)]
    def logits(self, tokens, row):
        type(self.core).logits(self.core, tokens, row)
        return self.steps[self.step][row]


def scope_share(core, states, keys): # states (rows, b, n, 1), keys (n,)
    """Mean scope share of given states, in the units of the budget; tokens that are asked for no
    logits."""
    weights = nn.functional.one_hot(states.to(core.constant.device), 3).float()
    spent = sum(core.spend(r, weights[r], keys.expand(states.shape[1:3]).to(core.constant.device))
        for r in range(len(states)))
    fixed, full = core.whole(keys.to(spent), 0.)
    return float(((spent + fixed) / full).mean())


class Parts:
    """Within, seconds of deciding are summed: `controller` of TokenGates.enter without the buckets,
    `bucket` of these. Without a clock nothing is summed. A bucket gives back the states that were
    asked for, so that all do equal work."""
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


def shapes_of(layers):
    "(d_in, d_out) of all matrices of some blocks."
    return {(m.in_features, m.out_features) for l in layers for p in PROJECTIONS
        for m in [l.get_submodule(p)]}


def chosen_products(calibration):
    "{shape and rows: the int8 product that the figures chose}."
    return {key: min(times, key=times.get) for shapes in calibration.times.values()
        for key, times in sorted(shapes.items())}
