"""A stream of many tasks that is killed and goes on, beside one that is not: are all values of the
record and all bytes of the adapter the same?

    OMP_NUM_THREADS=1 python bench/killed_stream.py                     # 60 tasks of the thousand
    OMP_NUM_THREADS=1 python bench/killed_stream.py --tasks 12 --kills 1 --out /tmp/killed.json

The run is a process of its own, started by the same command each time. It is sent SIGKILL when the
log tells of so many finished tasks, the numbers drawn by a seed, and a moment later, drawn as well.
"""
import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from himalaya_hest.jobs.again import compare_records
from himalaya_hest.workshop.measuring import called, circumstances, write_record

def begun(folder, tasks):
    "The run as a process; the same command begins it and goes on with it."
    form = "r=5", "n_coordinates=256", "n_core=52" # as the grid tasks_1000 has it
    of = ["stream=mini1000", f"n_tasks={tasks}", *(f"adapter_config.{x}" for x in form),
        "evaluation.latency_pairs=0", f"results_dir={folder}"]
    return subprocess.Popen([sys.executable, "-m", "himalaya_hest.jobs.run", *of], stdout=subprocess.DEVNULL)


def finished(folder): # tasks, as its log says
    log = next(folder.glob("*/run.log"), None)
    return len(re.findall("just learned", log.read_text())) if log else 0


def killed(folder, process, at, later):
    "Whether the process was still there when it was killed."
    while process.poll() is None and finished(folder) < at: time.sleep(.05)
    time.sleep(later)
    alive = process.poll() is None
    process.kill(); process.wait()
    return alive


def done(process):
    if process.wait(): raise SystemExit(f"the run ended with status {process.returncode}")


def left(folder): # the record, and a digest of the adapter's file
    path = next(folder.glob("*/record.json"))
    weights = (path.parent/"adapter"/"adapter_model.safetensors").read_bytes()
    return json.loads(path.read_text()), hashlib.sha256(weights).hexdigest()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default="records/bench/killed_stream.json")
    a = parser.parse_args()
    dice = random.Random(a.seed)
    moments = sorted(dice.sample(range(1, a.tasks), a.kills))
    with tempfile.TemporaryDirectory() as place:
        whole, broken = Path(place)/"whole", Path(place)/"broken"
        done(begun(whole, a.tasks))
        later = [dice.uniform(0, 2) for _ in moments]
        hit = [killed(broken, begun(broken, a.tasks), at, wait) for at, wait in zip(moments, later)]
        done(begun(broken, a.tasks))
        (record, weights), (again, weights_again) = left(whole), left(broken)
    found = compare_records(record, again)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        tasks=a.tasks, kills=[dict(after_tasks=n, later_s=s, killed=k)
                              for n, s, k in zip(moments, later, hit)],
        values=sum(n for n, _ in found.counts.values()), differ=len(found.differences),
        adapter_same=weights == weights_again))
    print(found)


if __name__ == "__main__": main()
