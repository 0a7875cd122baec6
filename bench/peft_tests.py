"""PEFT's own tests on the tuners of this package: how many pass, and why others are skipped.

    OMP_NUM_THREADS=1 python bench/peft_tests.py
    OMP_NUM_THREADS=1 python bench/peft_tests.py --adapter himalaya --source peft-0.21.2.tar.gz

Without --source pip brings the source distribution of the installed version. Each tuner's tests run
in a process of their own, --workers at once.
"""
import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft

from himalaya_hest.workshop.measuring import called, circumstances, write_record
from himalaya_hest.workshop.peft_subjects import SUBJECTS, find_subject
from himalaya_hest.workshop.peft_suite import (
    download_sdist, faults, run_subject, skip_reasons)


def told(name, source):
    subject, outcome = find_subject(name), run_subject(name, source, show=False)
    print(f"{name}: {len(outcome.passed)} passed, {len(outcome.failed)} failed", flush=True)
    return dict(passed=len(outcome.passed), failed=[n for n, _ in outcome.failed],
                skipped=dict(skip_reasons(outcome, subject).most_common()),
                left_out=outcome.left_out, faults=faults(outcome, subject),
                seconds=round(outcome.seconds, 1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--source", type=Path, help="PEFT's source distribution, or a checkout")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default="records/bench/peft_tests.json")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(a.workers) as pool:
        source = a.source or download_sdist(Path(folder))
        found = dict(zip(a.adapter, pool.map(lambda name: told(name, source), a.adapter)))
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        peft=peft.__version__, adapters=found))


if __name__ == "__main__": main()
