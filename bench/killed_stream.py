"""A stream of many tasks that is killed and goes on, beside one that is not: are all values of the
record and all bytes of the adapter the same?

    OMP_NUM_THREADS=1 python bench/killed_stream.py                     # 60 tasks of the thousand
    OMP_NUM_THREADS=1 python bench/killed_stream.py --tasks 12 --kills 1 --out /tmp/killed.json

The run is a process of its own, started by the same command each time. It is sent SIGKILL when the
log says that so many tasks have been begun, the numbers drawn by a seed, and a moment later, drawn
as well.
"""
import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from himalaya_hest.compare.evaluate import load_record
from himalaya_hest.workshop.measuring import called, circumstances, write_record
