"""The claims of Study 1 as another checkout of this project has them, with its code and its records.

    git worktree add ../before 8e59958e88   # HIMALAYA in slots, its last commit
    python bench/claims_before.py ../before

Goes to records/bench/claims_before.json, beside which the claims page puts today's.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from himalaya_hest.workshop.measuring import commit, write_record

ASK = """
import json
from himalaya_hest.study.claims import findings, who_wins
from himalaya_hest.study.findings import read_evidence
e = read_evidence("records")
print(json.dumps(dict(said=who_wins(e), parts=[dict(part=f.part, claim=f.claim, here=f.here,
    founding=f.founding, figure=f.figure, unit=f.unit, n=f.n) for f in findings(e)])))
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--out", type=Path, default="records/bench/claims_before.json")
    a = parser.parse_args()
    folder = a.before.resolve()
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", ASK], cwd=folder, check=True,
        capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(folder))).stdout
    at = commit(folder)
    write_record(a.out, dict(
        command=f"git worktree add ../before {at}; python bench/claims_before.py ../before",
        commit=at, **json.loads(said.splitlines()[-1])))
    print(a.out)


if __name__ == "__main__": main()
