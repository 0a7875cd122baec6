"""HIMALAYA's scores under other instructions in its first form, whose router was masked.

    git worktree add ../before 857fbec971   # the last commit whose runs are all of that form
    python bench/instructions_before.py ../before

Goes to records/bench/instructions_before.json, beside which the results put today's.
"""
import json

from claims_before import checkout, write_before
from himalaya_hest.compare.questions import task_groups
from himalaya_hest.compare.standings import group_scores


def told(path):
    r = json.loads(path.read_text(encoding="utf-8"))
    c, s = r["config"], r["summary"]
    return dict(
        instructions=c["instructions"], seed=c["seed"], order_seed=c["order_seed"],
        world=r["world"].get("base_digest", r["world"]["digest"]), # with own instructions
        code=r["code_version"]["git"], adapter_config=c["adapter_config"],
        learning_rate=c["training"]["learning_rate"], auc=s["retained_accuracy_auc"],
        final=s["average_accuracy"], forgotten=s["average_forgetting"],
        groups={g: group_scores(r, names)["final"] for g, names in task_groups(r).items()})


def main():
    folder, out = checkout(__doc__, "records/bench/instructions_before.json")
    # a file of JSON a run at that time; ten orders with own instructions, three with others
    runs = [told(p) for grid in ("main", "instructions")
            for p in (folder/"nbs/records"/grid).glob("himalaya-default-*.json")]
    if not runs: raise SystemExit(f"{folder} has no nbs/records/main: check out 857fbec971 there")
    runs.sort(key=lambda r: (r["instructions"], r["seed"]))
    orders = {r["seed"] for r in runs if r["instructions"] != "own"}
    write_before(__file__, folder, dict(runs=[r for r in runs if r["seed"] in orders]), out)


if __name__ == "__main__": main()
