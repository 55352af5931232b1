"""Counts the bytecodes that a process executes, by module. Python imports it at the start."""

import atexit
import json
import os
import sys
import threading
from collections import Counter

counts: Counter[str] = Counter()
# Children of the process are not counted, and tracing would only slow them down.
destination = os.environ.pop("BENCH_BYTECODE")
del os.environ["PYTHONPATH"]


def trace(frame, event, arg):
    file = frame.f_code.co_filename
    frame.f_trace_opcodes, frame.f_trace_lines = True, False

    def count(frame, event, arg):
        counts[file] += event == "opcode"
        return count

    return count


def write() -> None:
    sys.settrace(None)
    with open(f"{destination}.{os.getpid()}", "w") as file:
        json.dump(counts, file)


atexit.register(write)
threading.settrace(trace)
sys.settrace(trace)
