"""Run every combination of a grid file: several at once, with one small record of each in
records/{name}.parquet.

    python bench/grid.py bench/grids/main.yaml
    python bench/grid.py bench/grids/main.yaml --pairs 3   # the first three (seed, order) pairs only
    python bench/grid.py bench/grids/main.yaml --dry-run   # lists the runs, and about how long they take
    python bench/grid.py bench/grids/main.yaml --status    # how far each run is, from any machine that sees the folder

This is `himalaya-hest grid`, on this machine or on Slurm, with places for the records given. A grid
file is YAML: `name`, `base` (parameters of `run_continual`), `axes` (a list of dictionaries
parameter → list of values; each dictionary is a product, the dictionaries are joined), and `pairs`:
how often each run is repeated, with seed and order_seed 0, 1, ... (an entry of `axes` may name its
own `pairs`). A nested parameter is written with a dot (training.learning_rate). Runs go to
{results_dir}/{run_id}/ as always: finished ones are shown, killed ones go on. A small record,
without histories (but of studies of energy) and with the command beside it, is written to
runs/records/{name}/ as soon as its run has ended; at the end those are laid over the records of
records/{name}.parquet, as `himalaya-hest records pack` does.
"""
import sys
from pathlib import Path

from himalaya_hest.jobs.grid import main
from himalaya_hest.measures.records import pack_folder

if __name__ == "__main__":
    asked = []
    def records(name):
        asked.append(name)
        return Path("runs/records")/name
    code = main(records=records, called="python bench/grid.py")
    # whatever is there, also of a grid that was stopped
    for name in asked:
        if any(Path("runs/records", name).glob("*.json")):
            print(pack_folder(f"runs/records/{name}", f"records/{name}.parquet"))
    sys.exit(code)
