"""Run every combination of a grid file, several at once, and keep one small record of each in nbs/records/{name}.

    python bench/grid.py bench/grids/main.yaml
    python bench/grid.py bench/grids/main.yaml --pairs 3        # the first three (seed, order) pairs only
    python bench/grid.py bench/grids/main.yaml --dry-run        # lists the runs, and about how long they take
    python bench/grid.py bench/grids/main.yaml --status         # how far each run is, from any machine that sees the folder

This is `python -m himalaya_hest.jobs.grid`, on this machine or on Slurm, with the folder of the records given. A grid file is YAML: `name`, `base` (parameters of `run_continual`), `axes` (a list of
dictionaries parameter → list of values; each dictionary is a product, the dictionaries are joined), and `pairs`: how often each run is repeated, with seed and order_seed 0, 1, ... (an entry of
`axes` may name its own `pairs`). A nested parameter is written with a dot (training.learning_rate). Runs go to {results_dir}/{run_id}/ as always: finished ones are shown, killed ones go on.
Each record is written as soon as its run has ended, without histories (but of studies of energy), with the command beside it.
"""
import sys
from pathlib import Path

from himalaya_hest.jobs.grid import main
# which other benchmarks read grids with
from himalaya_hest.jobs.grid_runs import combinations, load_grid

if __name__ == "__main__":
    sys.exit(main(records=lambda name: Path("nbs/records")/name, called="python bench/grid.py"))
