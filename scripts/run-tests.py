#!/usr/bin/env python3
"""Runs test programs several at a time, for most end-to-end tests wait: for a guest, a deadline, a disk.

    scripts/run-tests.py --jobs 3 -p hearth-e2e             every program of the package
    scripts/run-tests.py --jobs 3 -p hearth-e2e --test tls  one of them

What it does not know goes to `cargo test --no-run`, which builds the programs. Of one program's tests one runs after the
other. What a program says comes in one piece, when it has ended.

A program whose tests change something that the whole host has says so in its description, and never runs beside another
that says the same; `everything` stands for a program that runs beside none, `processors` for one with an emulated guest,
which is busy while others wait:

    //! Takes of the host: swap, loop devices

A test that failed is run once more, with nothing beside it: many wait for real processes on a machine that others use as
well. Whoever fails twice fails, and who passed only then is named at the end (and in the file of --unsteady), for a test
that sometimes fails is a fault of its own. Where more than AGAIN_MOST fail, none is run again.
"""

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AGAIN_MOST = 3
# How many of the slowest are told.
SLOWEST = 15
# How often is read on while nothing ends: by that it is known how long each test takes.
LOOK_EVERY = 0.05
TAKES = re.compile(r"^//! Takes of the host: (.+)$", re.MULTILINE)
BEGINS = re.compile(r"^test (\S+) \.\.\. ", re.MULTILINE)
ENDS = re.compile(r"^test result: ", re.MULTILINE)


class Program:
    def __init__(self, message):
        self.package = Path(message["manifest_path"]).parent
        self.file = Path(message["target"]["src_path"])
        self.path = message["executable"]
        self.name = str(self.file.relative_to(ROOT))
        takes = TAKES.search(self.file.read_text())
        self.takes = set(re.split(r",\s*", takes[1].strip())) if takes else set()

    def fits(self, running):
        """Whether it can run beside all of these."""
        taken = set().union(*(run.program.takes for run in running))
        return not running or not ("everything" in self.takes | taken or self.takes & taken)


class Run:
    """A program that runs, and what it said so far."""

    def __init__(self, program, more=()):
        self.program = program
        self.began = self.looked = time.monotonic()
        # A file: a pipe would be held open by whoever is left behind.
        self.out = tempfile.TemporaryFile()
        self.text, self.read = "", 0
        self.tests = {}
        self.last = None
        self.status = None
        words = [program.path, *more, "--nocapture", "--test-threads=1"]
        env = os.environ | {"CARGO_MANIFEST_DIR": str(program.package)}
        self.child = subprocess.Popen(
            words, cwd=program.package, env=env, stdin=subprocess.DEVNULL, stdout=self.out, stderr=subprocess.STDOUT
        )
        # It can be read from once the program has ended.
        self.end = open(os.pidfd_open(self.child.pid), "rb", buffering=0)

    def look(self):
        """Reads on; true once it has ended."""
        if self.status is None:
            pid, status, usage = os.wait4(self.child.pid, os.WNOHANG)
            if pid:
                self.status = self.child.returncode = os.waitstatus_to_exitcode(status)
                self.cpu = usage.ru_utime + usage.ru_stime
                self.end.close()
        now = time.monotonic()
        more = os.pread(self.out.fileno(), 1 << 30, self.read)
        self.read += len(more)
        self.text += more.decode(errors="replace")
        # From the beginning of the last line that may have been cut off.
        start = self.last[1] if self.last else 0
        for match in BEGINS.finditer(self.text, start):
            if self.last and match.start() == start:
                continue
            self.end_test(now)
            self.last = (match[1], match.start(), now)
        if self.last and ENDS.search(self.text, self.last[1]):
            self.end_test(now)
        if self.status is not None:
            self.end_test(now)
            self.took = now - self.began
        return self.status is not None

    def end_test(self, now):
        if self.last and self.last[0] not in self.tests:
            self.tests[self.last[0]] = now - self.last[2]

    def failed(self):
        """The tests that failed; none if it is no test that failed: the program was killed, say."""
        lists = re.findall(r"(?m)^failures:\n((?:    \S+\n)+)\ntest result:", self.text)
        return lists[-1].split() if lists and self.status == 101 else []

    def show(self):
        print(f"     Running {self.program.name}: {self.took:.1f} s, {self.cpu:.1f} s of CPU\n{self.text}", flush=True)
        if self.status < 0:
            print(f"{self.program.name} was ended by {signal.Signals(-self.status).name}\n", flush=True)


def build(arguments):
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    out = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if out.returncode:
        sys.exit(out.returncode)
    messages = (json.loads(line) for line in out.stdout.splitlines() if line.startswith("{"))
    return [
        Program(message)
        for message in messages
        if message["reason"] == "compiler-artifact" and message["executable"] and message["profile"]["test"]
    ]


def wait_for(running):
    """Until one of them ends, or it is time to read on."""
    select.select([run.end for run in running], [], [], LOOK_EVERY)


def run_all(programs, jobs):
    """Runs them all. Those that cannot run beside every other come first, or they would be left over; those that run alone, last."""
    waiting = sorted(programs, key=lambda p: ("everything" in p.takes, not p.takes, p.name))
    running, ended = [], []

    def cut_off(number, _):
        for run in running:
            run.child.terminate()
            run.look()
            print(f"     Running {run.program.name}, cut off:\n{run.text}", flush=True)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, cut_off)
    while waiting or running:
        while len(running) < jobs:
            fits = next((p for p in waiting if p.fits(running)), None)
            if not fits:
                break
            waiting.remove(fits)
            running.append(Run(fits))
        for run in [run for run in running if run.look()]:
            running.remove(run)
            ended.append(run)
            run.show()
        wait_for(running)
    return ended


def tell_times(ended, took):
    tests = [(seconds, f"{run.program.name} {test}") for run in ended for test, seconds in run.tests.items()]
    print(f"The slowest of {len(tests)} tests:")
    for seconds, test in sorted(tests, reverse=True)[:SLOWEST]:
        print(f"   {seconds:6.1f} s  {test}")
    one_by_one, cpu = sum(run.took for run in ended), sum(run.cpu for run in ended)
    print(f"{took:.0f} s, one by one {one_by_one:.0f} s, of CPU {cpu:.0f} s", flush=True)


def again(bad):
    """Runs the tests that failed once more; which passed then, or nothing if one did not."""
    failed = [(run.program, run.failed()) for run in bad]
    count = sum(len(tests) for _, tests in failed)
    if count > AGAIN_MOST or not all(tests for _, tests in failed):
        return None
    passed = []
    for program, tests in failed:
        print(f"Once more: {' '.join(tests)}", flush=True)
        run = Run(program, ["--exact", *tests])
        while not run.look():
            wait_for([run])
        run.show()
        if run.status:
            return None
        passed += tests
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="so many programs at a time (3)")
    parser.add_argument("--below", default=".", help="of what was built, only programs of packages in this directory")
    parser.add_argument("--unsteady", type=Path, help="where tests are noted that passed when they were run once more")
    arguments, cargo = parser.parse_known_args()
    below = (ROOT / arguments.below).resolve()
    programs = [p for p in build(cargo) if p.package.is_relative_to(below)]
    if not programs:
        sys.exit("error: there are no test programs; see scripts/run-tests.py --help")
    began = time.monotonic()
    ended = run_all(programs, arguments.jobs)
    tell_times(ended, time.monotonic() - began)
    bad = [run for run in ended if run.status]
    for run in bad:
        print(f"FAILED {run.program.name}: {' '.join(run.failed()) or f'status {run.status}'}", flush=True)
    unsteady = again(bad)
    if unsteady is None:
        sys.exit(1)
    for test in unsteady:
        print(f"UNSTEADY: {test} failed, and passed when it was run once more", flush=True)
    if arguments.unsteady:
        arguments.unsteady.write_text("".join(f"{test}\n" for test in unsteady))


main()
