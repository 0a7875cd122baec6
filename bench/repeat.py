"""Do the committed records still come out? Runs drawn by a seed over all grids and methods are run
again, and every value is compared (`himalaya-hest rerun`).

    OMP_NUM_THREADS=1 python bench/repeat.py                 # thirty runs
    OMP_NUM_THREADS=1 python bench/repeat.py --runs 3 --out /tmp/repeat.json
    OMP_NUM_THREADS=1 python bench/repeat.py --runs 10 --grids main tasks_main small

A draw is a grid and a method of it, and then a run of these. Runs of an older version of their
method are left out: they cannot come out. Another make of processor may give other last bits, and a
stream makes scores of them: `moved` says by how much the score over the stream and the one at its
end are others than recorded. What is in the file already is not run again, so the command goes on
where it was stopped; another command begins the file anew.
"""
import argparse
import json
import random
from pathlib import Path

from himalaya_hest.compare.questions import older_parts
from himalaya_hest.jobs.again import repeat_run
from himalaya_hest.measures.records import read_grid
from himalaya_hest.workshop.measuring import circumstances


FIGURES = ("retained_accuracy_auc", "average_accuracy")


def moved(again): # figure → now less recorded
    "Changes of the two scores of a run that was repeated."
    changed = {place.strip("[']"): now - then for group, place, then, now in again.differences
               if group == "summary" and place.strip("[']") in FIGURES}
    return {name: changed.get(name, 0.) for name in FIGURES}


def drawn(folder, n, seed, grids):
    "(file of the grid, run_id) of n runs, no two of them of one grid and one method at first."
    groups = {}
    for path in sorted(folder/f"{g}.parquet" for g in grids) or sorted(folder.glob("*.parquet")):
        for record in read_grid(path):
            if older_parts(record): continue
            method = record["config"]["adapter"], record["config"]["preset"]
            groups.setdefault((path, *method), []).append(record["run_id"])
    draw, out = random.Random(seed), []
    # every group once in random order, then every group again
    while len(out) < n and any(groups.values()):
        turn = [key for key in sorted(groups) if groups[key]]
        draw.shuffle(turn)
        for key in turn[:n - len(out)]:
            run = draw.choice(groups[key])
            groups[key].remove(run)
            out.append((key[0], run))
    return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grids", nargs="*", default=[], help="draw from these alone")
    parser.add_argument("--records", type=Path, default=Path("records"))
    parser.add_argument("--cache-dir", default=".cache")
    parser.add_argument("--out", type=Path, default=Path("records/bench/repeat.json"))
    a = parser.parse_args()
    command = f"python bench/repeat.py --runs {a.runs} --seed {a.seed}"
    if a.grids: command += f" --grids {' '.join(a.grids)}"
    if unknown := [g for g in a.grids if not (a.records/f"{g}.parquet").exists()]:
        known = ", ".join(sorted(p.stem for p in a.records.glob("*.parquet")))
        parser.error(f"{a.records} has no grid {unknown[0]!r}: {known}")
    record = json.loads(a.out.read_text(encoding="utf-8")) if a.out.exists() else {}
    # runs of another draw are none of this command's
    if record.get("command") != command: record = dict(runs={})
    record |= circumstances(command, "cpu")
    todo = drawn(a.records, a.runs, a.seed, a.grids)
    for i, (path, run_id) in enumerate(todo, 1):
        if run_id not in record["runs"]:
            again = repeat_run(path, cache_dir=a.cache_dir, quiet=True, run_id=run_id)
            record["runs"][run_id] = dict(
                grid=path.stem, same=again.same(), values=sum(n for n, _ in again.counts.values()),
                differ=len(again.differences), moved=moved(again), notes=again.notes)
            # a run takes a minute, and what is known is kept
            a.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n",
                             encoding="utf-8")
        found = record["runs"][run_id]
        told = "the same" if found["same"] else (
            f"{found['differ']} of {found['values']} differ, the score over the stream by "
            f"{found['moved']['retained_accuracy_auc']:+.3f}")
        print(f"{i}/{len(todo)} {path.stem} {run_id}: {told}", flush=True)
    print(f"{sum(r['same'] for r in record['runs'].values())} of {len(record['runs'])} the same")


if __name__ == "__main__":
    main()
