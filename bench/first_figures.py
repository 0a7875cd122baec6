"""From a clone to the first figures: the README's first block of commands in an empty folder, each
command timed.

    python bench/first_figures.py

The committed state is cloned; no virtual environment, cache of tasks or library setting of this
machine is visible to the commands, but pip takes wheels from its cache and from the index that it
is set to, so the time of the installation is that of unpacking and compiling, and a download comes
on top of it. Wall-clock times, since that is what a newcomer waits for; the machine has to be idle.
"""
import argparse
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from pathlib import Path
from himalaya_hest.workshop.measuring import write_record

ROOT = Path(__file__).resolve().parent.parent
UNSEEN = ("VIRTUAL_ENV", "PYTHONPATH", "CONDA_PREFIX", "OMP_NUM_THREADS", "HF_HUB_OFFLINE",
    "WANDB_MODE")


def first_block(readme: str) -> list[str]:
    "The commands of the first `sh` block."
    return [line for line in re.search(r"^```sh\n(.*?)^```", readme, re.M | re.S)[1].splitlines()
        if line.strip()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT/"records"/"bench"/"first_figures.json")
    out, steps = parser.parse_args().out, []
    with tempfile.TemporaryDirectory() as d:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{d}/project"], check=True)
        env = {k: v for k, v in os.environ.items()
            if k not in UNSEEN} | dict(XDG_CACHE_HOME=f"{d}/cache", HF_HOME=f"{d}/hf")
        env |= dict(PIP_CACHE_DIR=os.environ.get("PIP_CACHE_DIR", str(Path.home()/".cache"/"pip")))
        env["PATH"] = os.pathsep.join(p for p in env["PATH"].split(os.pathsep)
            if not (Path(p) / "activate").exists())
        for command in first_block((ROOT/"README.md").read_text(encoding="utf-8")):
            start = time.monotonic()
            subprocess.run(["bash", "-c", command], cwd=f"{d}/project", env=env, check=True,
                stdout=subprocess.DEVNULL)
            steps.append(dict(command=command, wall_s=round(time.monotonic() - start, 1)))
            print(steps[-1], flush=True)
        made = json.loads((Path(d)/"project"/"out.ipynb").read_text(encoding="utf-8"))
        figures = sum("image/png" in o.get("data", {}) for c in made["cells"]
            for o in c.get("outputs", []))
        size = sum(p.lstat().st_size for p in (Path(d) / "project" / ".venv").rglob("*")
            if not p.is_symlink())
    record = dict(command="python bench/first_figures.py", steps=steps, figures=figures,
        venv_gb=round(size / 1e9, 2), device=dict(cpu_count=os.cpu_count(), name=platform.machine(),
            system=platform.system()), python=platform.python_version())
    write_record(out, record)


if __name__ == "__main__": main()
