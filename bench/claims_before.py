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


def checkout(doc, out):
    "The other checkout, and where the record goes."
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--out", type=Path, default=out)
    a = parser.parse_args()
    return a.before.resolve(), a.out


def write_before(script, folder, told, out):
    "A record of another checkout, with what makes it again."
    at = commit(folder)
    command = f"git worktree add ../before {at}; python bench/{Path(script).name} ../before"
    write_record(out, dict(command=command, commit=at, **told))


def main():
    folder, out = checkout(__doc__, "records/bench/claims_before.json")
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", ASK], cwd=folder, check=True,
        capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(folder))).stdout
    write_before(__file__, folder, json.loads(said.splitlines()[-1]), out)
    print(out)


if __name__ == "__main__": main()
