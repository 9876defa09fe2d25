#!/usr/bin/env python3
"""Runs the documentation as written: every command block of the Markdown files named, in their order.

Runs inside the guest of scripts/docs-lab.sh, as root, and prints one line per step and a summary.

What is run, by the word behind a block's opening fence:

  ```sh    each command by itself, in one shell per document. `hearth stats --watch` and the like are
           interrupted after a while. A qemu-system command with an ellipsis is completed (the "…"
           stands for the rest of a machine) and has done its part when it has read from the disk.
  ```ini   a block that begins with "# /a/path" is written to that path.
  ```xml   a libvirt domain, or elements of one: completed, defined, started, and it has done its part
           when it has read from the disk.
  ```text, ```json, ```mermaid   output or a picture: not run.

Other words, and none at all, are an error: it must be plain what a block is.

HTML comments, which a reader of the page does not see, say what is different about the next block:

  <!-- lab: not run: REASON -->
  <!-- lab: fails: WORDS -->       its last command fails, and says WORDS
  <!-- lab                         commands of the lab's own, run at this place
  COMMANDS
  -->
"""

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

WORK = Path("/run/docs-lab")
# Seconds: an ordinary command, one that writes a large file (emulated), what is interrupted, and a
# machine until its firmware has read the disk.
LIMIT, LONG_LIMIT, WATCH, BOOT_LIMIT = 180, 1800, 8, 120
LONG = re.compile(r"over_restart|pool create|bench|qemu-img convert|disk remove|pool export|disk flush")
NOT_RUN = {"text", "json", "mermaid"}
# The machine that "…" stands for. The guest has no KVM to give on.
MACHINE = "-accel tcg -display none -serial none -monitor none -nodefaults"
QEMU_NS = "http://libvirt.org/schemas/domain/qemu/1.0"
ET.register_namespace("qemu", QEMU_NS)


class Failed(Exception):
    """A step that did not do what the document says."""


def steps(text):
    """The blocks of a document, in order: (line number, kind, lines, remark)."""
    lines = text.splitlines()
    found, remark, at = [], None, 0
    while at < len(lines):
        line = lines[at]
        if line.strip() == "<!-- lab":
            end = next(i for i in range(at, len(lines)) if lines[i].strip() == "-->")
            found.append((at + 2, "sh", lines[at + 1 : end], None))
            at = end
        elif match := re.fullmatch(r"\s*<!-- lab: (.*?) -->\s*", line):
            remark = match[1]
        elif match := re.fullmatch(r"(\s*)```(\w*)\s*", line):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            indent = len(match[1])
            found.append((at + 2, match[2], [l[indent:] for l in lines[at + 1 : end]], remark))
            remark, at = None, end
        at += 1
    return found


def commands(first, lines):
    """The commands of a block: (line number, text). A backslash at the end goes on, as does a here-document."""
    found, held, ends = [], None, None
    for number, line in enumerate(lines, first):
        if held is None:
            if not line.strip() or line.strip().startswith("#"):
                continue
            held = (number, line)
        else:
            held = (held[0], f"{held[1]}\n{line}")
        if ends is None and (match := re.search(r"<<-?\s*'?(\w+)'?", line)):
            ends = match[1]
            continue
        if ends is not None:
            if line.strip() != ends:
                continue
            ends = None
        elif line.endswith("\\"):
            continue
        found.append(held)
        held = None
    return found


class Shell:
    """One shell, which keeps its directory, variables and background jobs from command to command."""

    count = 0

    def __init__(self):
        self.shell = subprocess.Popen(["bash"], stdin=subprocess.PIPE, text=True, cwd="/root/hearth")

    def run(self, command, limit):
        """(status, output); Failed if it does not end."""
        Shell.count += 1
        script, out, status = (WORK / f"{Shell.count}.{name}" for name in ("command", "out", "status"))
        script.write_text(command + "\n")
        self.shell.stdin.write(
            f'eval "$(cat {script})" </dev/null >{out} 2>&1; echo $? >{status}.new; mv {status}.new {status}\n'
        )
        self.shell.stdin.flush()
        end = time.monotonic() + limit
        while not status.exists():
            if self.shell.poll() is not None:
                raise Failed(f"the shell ended: {out.read_text(errors='replace')}")
            if time.monotonic() > end:
                subprocess.run(["pkill", "-KILL", "-P", str(self.shell.pid), "-n"], check=False)
                raise Failed(f"not done after {limit} s: {out.read_text(errors='replace')}")
            time.sleep(0.1)
        return int(status.read_text()), out.read_text(errors="replace")

    def end(self):
        self.shell.stdin.close()
        self.shell.wait()


def reads():
    """Reads that Hearth's disks have answered so far, all disks together."""
    out = subprocess.run(["hearth", "stats", "--json"], capture_output=True, text=True, check=False)
    if out.returncode:
        raise Failed(f"hearth stats: {out.stderr}")
    total = 0

    def walk(value):
        nonlocal total
        if isinstance(value, dict):
            for span in value.get("spans", [])[:1]:
                for key, count in span["counters"].items():
                    if re.fullmatch(r"read_(hits|partial_hits|misses|bypassed)", key):
                        total += count
            for key, inner in value.items():
                if key != "spans":
                    walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(json.loads(out.stdout))
    return total


def until_read(before, alive):
    """Waits until a machine has read from a disk of Hearth's."""
    end = time.monotonic() + BOOT_LIMIT
    while reads() <= before:
        if why := alive():
            raise Failed(why)
        if time.monotonic() > end:
            raise Failed(f"nothing was read from the disk in {BOOT_LIMIT} s")
        time.sleep(0.5)


def machine(command):
    """A QEMU command line of the document."""
    command = re.sub(r"^qemu-system-x86_64 …", f"exec qemu-system-x86_64 {MACHINE}", command)
    before = reads()
    log = WORK / "qemu.log"
    with log.open("w") as out:
        qemu = subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        until_read(before, lambda: qemu.poll() is not None and f"QEMU ended: {log.read_text()}")
    finally:
        qemu.kill()
        qemu.wait()


def whole_domain(lines):
    """A domain with what the document leaves out."""
    text = "\n".join(l for l in lines if l.strip() != "…")
    root = ET.fromstring(f"<all>{text}</all>")
    domain = root.find("domain")
    parts = list(root) if domain is None else list(domain)
    made = ET.Element("domain", {"type": "qemu"})
    for name, value in (("name", "docs-lab"), ("memory", "131072"), ("vcpu", "1")):
        ET.SubElement(made, name).text = value
    ET.SubElement(ET.SubElement(made, "os"), "type", {"arch": "x86_64", "machine": "q35"}).text = "hvm"
    devices = ET.SubElement(made, "devices")
    for part in parts:
        if part.tag == "devices":
            devices.extend(list(part))
        elif part.tag in ("disk", "controller"):
            devices.append(part)
        elif part.tag not in ("name", "memory", "vcpu", "os"):
            made.append(part)
    return ET.tostring(made, encoding="unicode")


def virsh(*args, check=True):
    out = subprocess.run(
        ["virsh", "-c", "qemu:///system", *args], capture_output=True, text=True, timeout=BOOT_LIMIT, check=False
    )
    if check and out.returncode:
        log = Path("/var/log/libvirt/qemu/docs-lab.log")
        tail = log.read_text()[-1500:] if log.exists() else ""
        raise Failed(f"virsh {args[0]}: {out.stderr.strip()}\n{tail}")
    return out.stdout


def libvirt(lines):
    """A libvirt domain of the document."""
    file = WORK / "domain.xml"
    file.write_text(whole_domain(lines))
    before = reads()
    virsh("define", str(file))
    try:
        virsh("start", "docs-lab")

        def ended():
            state = virsh("domstate", "docs-lab").strip()
            return state != "running" and f"the domain is {state}"

        until_read(before, ended)
        # QEMU reads a little itself when it opens a disk. libvirt counts what the guest reads, of
        # disks it knows.
        disk = re.search(r"<disk type=.network.*?<target dev=.(\w+).", file.read_text(), re.DOTALL)
        end = time.monotonic() + BOOT_LIMIT
        while disk and not re.search(r"rd_req [1-9]", virsh("domblkstat", "docs-lab", disk[1])):
            if time.monotonic() > end:
                raise Failed("libvirt saw no read of the guest's")
            time.sleep(0.5)
    finally:
        virsh("destroy", "docs-lab", check=False)
        virsh("undefine", "docs-lab", check=False)


def one(shell, command):
    """A command as typed."""
    if re.match(r"qemu-system-\S+ …", command):
        machine(command)
        return 0, ""
    if "--watch" in command:
        status, out = shell.run(f"timeout -s INT {WATCH} {command}", LIMIT)
        # 124 is timeout's own word, 130 an interrupted program's.
        return (0 if status in (0, 124, 130) else status), out
    return shell.run(command, LONG_LIMIT if LONG.search(command) else LIMIT)


def say(*words):
    print("DOCS-LAB", *words, flush=True)


class Tally:
    """What came of all steps."""

    def __init__(self):
        self.passed, self.skipped, self.failures = 0, 0, []

    def step(self, where, what, action):
        started = time.monotonic()
        shown = what.splitlines()[0]
        try:
            action()
        except (Failed, ET.ParseError, OSError, subprocess.TimeoutExpired) as e:
            self.failures.append(f"{where}: {shown}")
            say(f"FAILED  {where}: {shown}")
            for line in str(e).strip().splitlines()[-30:]:
                say(f"        | {line}")
        else:
            self.passed += 1
            say(f"ok      {where}: {shown} ({time.monotonic() - started:.1f} s)")


def block(tally, shell, document, step):
    first, kind, lines, remark = step
    where = f"{document}:{first}"
    if kind in NOT_RUN:
        return
    if remark and remark.startswith("not run: "):
        tally.skipped += 1
        say(f"not run {where}: {remark[9:]}")
        return
    wanted = remark[7:] if remark and remark.startswith("fails: ") else None
    if kind == "ini":
        path = re.fullmatch(r"# (/\S+)", lines[0])

        def install():
            if not path:
                raise Failed("the block does not begin with the path of the file")
            Path(path[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(path[1]).write_text("\n".join(lines) + "\n")

        tally.step(where, lines[0], install)
    elif kind == "xml":
        tally.step(where, "libvirt domain with " + lines[0].strip(), lambda: libvirt(lines))
    elif kind == "sh":
        all_commands = commands(first, lines)
        for number, command in all_commands:
            last = number == all_commands[-1][0]

            def go():
                status, out = one(shell, command)
                if wanted and last:
                    if status == 0 or wanted not in out:
                        raise Failed(f"should fail and say {wanted!r}; status {status}: {out}")
                elif status != 0:
                    raise Failed(f"status {status}: {out}")

            tally.step(f"{document}:{number}", command, go)
    else:

        def refuse():
            raise Failed(f"the block is marked {kind!r}: use sh, ini, xml, or text for what is not run")

        tally.step(where, lines[0] if lines else "", refuse)


def main():
    WORK.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    for document in sys.argv[1:]:
        shell = Shell()
        for step in steps((Path("/lab") / document).read_text()):
            block(tally, shell, document, step)
        shell.end()
    say(f"{tally.passed} steps passed, {len(tally.failures)} failed, {tally.skipped} not run")
    for failure in tally.failures:
        say("failed:", failure)
    say("END", "passed" if not tally.failures else "failed")


if __name__ == "__main__":
    main()
