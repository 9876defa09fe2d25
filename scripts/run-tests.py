#!/usr/bin/env python3
"""Runs tests in parallel, each in a process of its own.

    scripts/run-tests.py --below tests/e2e                     all end-to-end tests
    scripts/run-tests.py --below tests/e2e --only tls          one module
    scripts/run-tests.py --below tests/e2e --only tls::expired one test

Unknown arguments are passed to `cargo test --no-run`, which builds the test programs. Each test has its own process:
some change signals, limits or hooks of the whole process, some measure its memory. End-to-end tests mostly wait (for a
guest, a deadline, a disk), so more of them run at a time than there are processors. The output of a test is printed
when the test ends, if it failed or was skipped.

A module whose tests use a resource of the whole host names it in its description, and no two tests that name the same
resource run at the same time. `processors` marks a test with an emulated guest, `everything` a test that runs alone:

    //! Exclusive: swap, loop devices

A failed test fails the run. There are no retries: an unsteady test is a defect, of the product or of the test.
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
SLOWEST_SHOWN = 20
# A test that passes in less than this many seconds is only counted.
SHORT = 1
EXCLUSIVE = re.compile(r"^//! Exclusive: (.+)$", re.MULTILINE)
SKIPPED = re.compile(r"\bskipped: |\bSKIPPED ")


class Test:
    """One test of a test program."""

    def __init__(self, program, package, source, name):
        self.program, self.package, self.name = program, package, name
        self.resources = set()
        # The description of the test's module; a module in a folder inherits that of its parent.
        folder = source.parent
        for part in name.split("::")[:-1]:
            for file in (folder / f"{part}.rs", folder / part / "mod.rs"):
                if file.exists() and (found := EXCLUSIVE.search(file.read_text())):
                    self.resources |= set(re.split(r",\s*", found[1].strip()))
            folder /= part

    def is_in(self, path):
        """Whether `path` names this test or a module around it."""
        return f"{self.name}::".startswith(f"{path}::")

    def can_run_with(self, running):
        used = set().union(*(run.test.resources for run in running))
        return not running or not ("everything" in self.resources | used or self.resources & used)


class Run:
    """A test in progress."""

    def __init__(self, test):
        self.test, self.began = test, time.monotonic()
        # A file: a pipe would be held open by processes that outlive the test.
        self.out = tempfile.TemporaryFile()
        env = os.environ | {"CARGO_MANIFEST_DIR": str(test.package)}
        words = [test.program, "--exact", test.name, "--nocapture"]
        self.child = subprocess.Popen(
            words, cwd=test.package, env=env, stdin=subprocess.DEVNULL, stdout=self.out, stderr=subprocess.STDOUT
        )
        # Becomes readable when the process ends.
        self.ended = open(os.pidfd_open(self.child.pid), "rb", buffering=0)

    def finish(self):
        """Collects the result of a process that ended."""
        _, status, usage = os.wait4(self.child.pid, 0)
        self.status = self.child.returncode = os.waitstatus_to_exitcode(status)
        self.cpu = usage.ru_utime + usage.ru_stime
        self.took = time.monotonic() - self.began
        self.ended.close()
        self.text = self.printed()
        self.out.close()
        # A test program that runs no test exits 0.
        self.passed = self.status == 0 and "test result: ok. 1 passed" in self.text
        self.skipped = self.passed and SKIPPED.search(self.text)

    def printed(self):
        return os.pread(self.out.fileno(), 1 << 30, 0).decode(errors="replace")

    def report(self, verbose):
        word = "skipped" if self.skipped else "ok" if self.passed else "FAILED"
        if word == "ok" and self.took < SHORT and not verbose:
            return
        print(f"{word:7} {self.took:6.1f} s {self.cpu:6.1f} s CPU  {self.test.name}", flush=True)
        if self.status < 0:
            print(f"{self.test.name} was ended by {signal.Signals(-self.status).name}")
        if verbose or self.skipped or not self.passed:
            print(self.text, flush=True)


def build(arguments):
    """The test programs, as (program, package, source)."""
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    out = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if out.returncode:
        sys.exit(out.returncode)
    messages = (json.loads(line) for line in out.stdout.splitlines() if line.startswith("{"))
    return [
        (message["executable"], Path(message["manifest_path"]).parent, Path(message["target"]["src_path"]))
        for message in messages
        if message["reason"] == "compiler-artifact" and message["executable"] and message["profile"]["test"]
    ]


def tests_of(program, package, source):
    listed = subprocess.run([program, "--list", "--format", "terse"], cwd=package, stdout=subprocess.PIPE, text=True, check=True)
    names = (line.removesuffix(": test") for line in listed.stdout.splitlines() if line.endswith(": test"))
    return [Test(program, package, source, name) for name in names]


def run_all(tests, jobs, verbose):
    """Runs all tests, in the given order where their resources allow it."""
    waiting, running, ended = list(tests), [], []

    def cut_off(number, _):
        for run in running:
            run.child.terminate()
            print(f"CUT OFF after {time.monotonic() - run.began:.0f} s: {run.test.name}\n{run.printed()}", flush=True)
        print("not started:", " ".join(test.name for test in waiting), flush=True)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, cut_off)
    while waiting or running:
        while len(running) < jobs and (test := next((t for t in waiting if t.can_run_with(running)), None)):
            waiting.remove(test)
            running.append(Run(test))
        ready, _, _ = select.select([run.ended for run in running], [], [])
        for run in [run for run in running if run.ended in ready]:
            running.remove(run)
            run.finish()
            run.report(verbose)
            ended.append(run)
    return ended


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="tests at a time (3)")
    parser.add_argument("--below", nargs="+", default=["."], help="only packages in these directories")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODULE", help="only these modules or tests")
    parser.add_argument("--skip", nargs="+", default=[], metavar="MODULE", help="not these modules or tests")
    parser.add_argument("--verbose", action="store_true", help="print the output of every test")
    parser.add_argument("--no-skips", action="store_true", help="fail if a test was skipped")
    arguments, cargo = parser.parse_known_args()
    below = [(ROOT / path).resolve() for path in arguments.below]

    programs = [program for program in build(cargo) if any(map(program[1].is_relative_to, below))]
    tests = [test for program in programs for test in tests_of(*program)]
    for path in arguments.only + arguments.skip:
        if not any(test.is_in(path) for test in tests):
            sys.exit(f"error: there is no test or module {path}")
    tests = [test for test in tests if not arguments.only or any(map(test.is_in, arguments.only))]
    tests = [test for test in tests if not any(map(test.is_in, arguments.skip))]
    if not tests:
        sys.exit("error: there are no tests; see scripts/run-tests.py --help")
    # Tests that share a resource run one after the other; they start first, or they would be left over at the end.
    tests.sort(key=lambda test: ("everything" in test.resources, not test.resources, test.name))
    began = time.monotonic()
    ended = run_all(tests, arguments.jobs, arguments.verbose)
    took = time.monotonic() - began

    print(f"The {SLOWEST_SHOWN} slowest of {len(ended)} tests:")
    for run in sorted(ended, key=lambda run: -run.took)[:SLOWEST_SHOWN]:
        print(f"   {run.took:6.1f} s {run.cpu:6.1f} s CPU  {run.test.name}")
    total, cpu = sum(run.took for run in ended), sum(run.cpu for run in ended)
    print(f"{took:.0f} s for {total:.0f} s of tests, {cpu:.0f} s of CPU")
    failed = [run.test.name for run in ended if not run.passed]
    skipped = sum(1 for run in ended if run.skipped)
    for name in failed:
        print(f"FAILED {name}")
    print(f"{len(ended) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped", flush=True)
    sys.exit(1 if failed or (skipped and arguments.no_skips) else 0)


main()
