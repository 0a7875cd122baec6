r"""The bound of `fewer_passes` against an adversary: what the dearest prefix of many answers costs
beyond its budget.

    OMP_NUM_THREADS=1 python bench/drafts_bound.py

The drafter is the one that generation asks, its guesses are copies of what an answer says and what
a table knows, and what stands of them is as the adversary likes: all until some pass, so that
savings grow, then none; or by lot at every pass. Costs of passes over 1 to 7 tokens are drawn anew
for each answer, and by half of the answers do not rise with the number of tokens; so are the budget,
the credit, what a decision costs, the words, of which there are two or three so that there is always
something to guess, and whether the controller is sure of everything or of random drafts. An answer
is looked at after every payment, in the middle of a pass too: spent − E_max (t + 1) − credit.
`unasked`: the same where the drafter does not ask its budget, which has to break it.
"""
import argparse
from math import inf
from pathlib import Path

import numpy as np
import torch

from himalaya_hest.hest.acceptance import Acceptance
from himalaya_hest.hest.drafter import Drafter, Drafting
from himalaya_hest.hest.drafts import learn_table
from himalaya_hest.hest.pass_budget import PassCosts, Spending
from himalaya_hest.workshop.measuring import called, circumstances, write_record

PASSES, WORDS = 12, 9


def controllers():
    "One that is sure of every draft, and some whose weights are drawn."
    sure = Acceptance().requires_grad_(False)
    for p in sure.parameters(): p.zero_()
    sure.out.bias.fill_(99.)
    drawn = [Acceptance().requires_grad_(False) for _ in range(3)]
    for one in drawn:
        for p in one.parameters(): p.normal_(0., 3.)
    return [sure, sure, *drawn]


def drawn_costs(rng):
    row = 1 + rng.random(rng.integers(1, 7)) * rng.choice([.1, .3, 2.])
    if rng.random() < .5: row.sort()
    return PassCosts(((1., *row),), drafting=rng.choice([0., .02, .3]))


def dearest(rng, acceptances, asks):
    "What the dearest prefix of one answer costs beyond its budget, and how much was guessed."
    words, acceptance = rng.integers(2, 4), acceptances[rng.integers(len(acceptances))]
    budget, credit, turn = rng.choice([1., 1., 1.2]), rng.choice([0., 1.]), rng.integers(1, PASSES)
    text = torch.from_numpy(rng.integers(words, size=(1, 8)))
    table = learn_table(text.repeat(1, 4).tolist()) if rng.random() < .5 else None
    spending, by_lot = Spending(drawn_costs(rng), budget, credit), rng.random() < .3
    drafter = Drafter(text, Drafting(table, acceptance, spending), 99, [])
    answer, most = drafter.answer, -inf
    if not asks: answer.payable = lambda: answer.costs.at(0)
    for k in range(PASSES):
        asked, _ = drafter.get_candidates(text)
        # the pass is paid, and has given nothing yet
        most = max(most, answer.spent - budget * (answer.earned + 1) - credit)
        guess = asked[0, text.shape[1]:].tolist()
        stood = rng.integers(len(guess) + 1) if by_lot else len(guess) * (k < turn)
        own = (guess[stood] + 1) % words if stood < len(guess) else rng.integers(words)
        text = torch.cat([text, torch.tensor([[*guess[:stood], int(own)]])], 1)
        drafter.update_candidate_strategy(text, torch.zeros(1, WORDS, WORDS), stood)
    return most, drafter.told.drafted


def searched(n, seed, acceptances, asks=True):
    rng, drafted, most = np.random.default_rng(seed), 0, -inf
    for k in range(n):
        excess, guessed = dearest(rng, acceptances, asks)
        most, drafted = max(most, float(excess)), drafted + guessed
        if k % 1000 == 0: print(f"answer {k}: {most:.3g}", end="\r", flush=True)
    return dict(answers=n, prefixes=n * PASSES, drafted=drafted, most=most)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default="records/bench/drafts_bound.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    of = controllers()
    found = dict(asked=searched(a.answers, a.seed, of),
                 unasked=searched(1000, a.seed, of, asks=False))
    write_record(a.out, circumstances(called(__file__), "cpu") | found)
    print(found)


if __name__ == "__main__": main()
