#!/usr/bin/env python3
"""Does a guest of libvirt's go on over a restart of Hearth, as docs/attach.md promises?

  over_restart.py DISK [--upgrade]

Runs inside the guest of scripts/docs-lab.sh, where Hearth is a service. For each way that `hearth attach-help
DISK --for libvirt` prints, in its very words: a domain boots from the disk and reads it without end; Hearth is
killed, and then restarted; after each the domain must read on. With --upgrade it is neither: `hearth upgrade` takes its place,
under which a domain over NBD goes on without an error, and one over vhost-user is named first. The disk's content is lost.
"""

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from run import BOOT_LIMIT, WORK, Failed, reads, virsh, whole_domain

# A boot sector that reads 4 KiB after 4 KiB of the first 16 MiB, round and round, and halts for ever
# at the first error: `mov si, packet; mov ah, 42h; int 13h; jc halt; add [lba], 8; and [lba], 7fffh; jmp again`.
READER = bytes.fromhex(
    "31c08ed88ed0bc007cbe227cb442cd13720d83062a7c0881262a7cff7febeaf4ebfd10000800008000000000000000000000"
)
# Reads after which a guest counts as going on: more than any look QEMU takes at a disk it opens anew.
MANY = 500
# A guest that is paused by errors is resumed so often.
RESUMES = 3


def waited(what, limit=BOOT_LIMIT):
    end = time.monotonic() + limit
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def pid():
    out = subprocess.run(["systemctl", "show", "-P", "MainPID", "hearth"], capture_output=True, text=True, check=True)
    return out.stdout.strip()


def answered():
    """Reads answered by the daemon that runs now; none while none answers."""
    try:
        return reads()
    except (Failed, ValueError):
        return 0


def responds():
    try:
        reads()
        return True
    except (Failed, ValueError):
        return False


def goes_on():
    first = answered()
    # A daemon counts from where its predecessor's note ended, or anew: only growth says something.
    if not waited(lambda: answered() >= first + MANY):
        raise Failed(f"the guest does not read: {first}, then {answered()}; it is {virsh('domstate', 'docs-lab').strip()}")


def after(command, pauses):
    """Hearth ends and comes back, and the guest goes on."""
    old = pid()
    subprocess.run(command, check=True)
    if not waited(lambda: pid() not in ("0", old) and responds()):
        raise Failed("Hearth did not come back")
    if pauses:
        # Paused at the first error. What it asks first after that only makes QEMU connect again, and
        # may fail once more.
        waited(lambda: virsh("domstate", "docs-lab").strip() == "paused", 10)
        for _ in range(RESUMES):
            virsh("resume", "docs-lab", check=False)
            if not waited(lambda: virsh("domstate", "docs-lab").strip() == "paused", 3):
                break
    goes_on()


def confined():
    """A guest of a libvirt that confines guests is confined: what it reaches it reaches by the rules there are."""
    if "<model>apparmor</model>" not in virsh("capabilities"):
        return
    guest = Path("/run/libvirt/qemu/docs-lab.pid").read_text().strip()
    label = Path(f"/proc/{guest}/attr/current").read_text().strip("\0\n ")
    if not label.startswith("libvirt-") or "enforce" not in label:
        raise Failed(f"the guest is not confined: {label}")


def upgraded(nbd):
    """Another program takes Hearth's place, and the guest goes on."""
    old = pid()
    done = subprocess.run(["hearth", "upgrade"], capture_output=True, text=True, check=False)
    if not nbd:
        if done.returncode == 0 or "have to connect again" not in done.stderr:
            raise Failed(f"a guest that has to connect again was not named: {done.stdout}{done.stderr}")
        done = subprocess.run(["hearth", "upgrade", "--yes"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"hearth upgrade: {done.stderr}")
    if nbd and " 0 ended" not in done.stdout:
        raise Failed(f"a connection ended: {done.stdout}")
    if pid() != old:
        raise Failed("it is another process")
    print(done.stdout.splitlines()[0])
    goes_on()
    if virsh("domstate", "docs-lab").strip() != "running":
        raise Failed("the guest was paused")


def way(text, upgrade):
    name = text.splitlines()[0].lstrip("# ")
    lines = [l for l in text.splitlines() if not l.startswith("#")]
    fragment = "\n".join(lines)
    if "qemu:commandline" in fragment:
        fragment = fragment.replace("addr=0x1e", "addr=0x1e,bootindex=1")
        fragment = f"<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>{fragment}</domain>"
    file = WORK / "restart.xml"
    root = ET.fromstring(whole_domain([fragment]))
    if "qemu:commandline" not in fragment:
        ET.SubElement(root.find("os"), "boot", {"dev": "hd"})
    file.write_text(ET.tostring(root, encoding="unicode"))
    virsh("define", str(file))
    try:
        virsh("start", "docs-lab")
        goes_on()
        pauses = "error_policy" in fragment
        if upgrade:
            confined()
            upgraded("vhostuser" not in fragment)
        else:
            after(["systemctl", "kill", "-s", "KILL", "hearth"], pauses)
            after(["systemctl", "restart", "hearth"], pauses)
    finally:
        virsh("destroy", "docs-lab", check=False)
        virsh("undefine", "docs-lab", check=False)
    print("goes on:", name)


def main():
    disk, upgrade = sys.argv[1], "--upgrade" in sys.argv[2:]
    sector = WORK / "reader"
    sector.write_bytes(READER.ljust(510, b"\0") + b"\x55\xaa")
    uri = f"nbd+unix:///{disk}?socket=/run/hearth/nbd.sock"
    subprocess.run(["qemu-io", "-f", "raw", "-c", f"write -s {sector} 0 512", uri], check=True, stdout=subprocess.DEVNULL)
    told = subprocess.run(["hearth", "attach-help", disk, "--for", "libvirt"], capture_output=True, text=True, check=True)
    ways = [t for t in re.split(r"\n\s*\n", told.stdout) if "<" in t]
    if len(ways) < 2:
        sys.exit(f"attach-help prints {len(ways)} ways")
    for text in ways:
        try:
            way(text, upgrade)
        except Failed as e:
            sys.exit(f"{text.splitlines()[0]}: {e}")


main()
