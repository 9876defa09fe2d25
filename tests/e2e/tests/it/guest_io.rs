//! One guest with disks over vhost-user and over NBD, and everything an administrator or an
//! accident does to a disk that is in use.
//!
//! The machine is booted once: its root and a data disk are on vhost-user-blk, another data disk
//! is on NBD, all in one pool. fio verifies what it wrote while modes are switched and the daemon
//! is restarted; then discard and resize, as the guest sees them.
//!
//! Exclusive: processors

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::run_ok;
use hearth_rig::daemon::path;
use hearth_rig::machine::{GUEST_LIMIT, Job, Machine, Plan, copy_root};
use hearth_rig::{Hearth, wait};
use std::time::Instant;

const MIB: u64 = 1 << 20;
/// Bytes of a data disk.
const SIZE: u64 = 64 * MIB;
/// Bytes of the disk that is only read.
const RO_SIZE: u64 = 4 * MIB;
/// Requests each disk must have served before the next disturbance.
const REQUESTS_BETWEEN: u64 = 500;

/// A guest and the daemon behind its disks: `vda` is `root`, `vdb` is `v` (both vhost-user), `vdc`
/// is `n` (NBD), `vdd` is `ro` (vhost-user, read-only).
struct Lab {
    hearth: Hearth,
    guest: Machine,
    since: Instant,
}

impl Lab {
    fn new() -> Result<Lab> {
        // Smaller than the disks together, so that eviction and destaging run, too.
        let hearth = Hearth::serving("160M")?;
        let root = hearth.dir().join("root.img");
        copy_root(&root)?;
        hearth.add("root", path(&root), &[])?;
        for name in ["v", "n"] {
            let origin = hearth.origin(&format!("{name}.img"), SIZE)?;
            hearth.add(name, path(&origin), &[])?;
        }
        let origin = hearth.origin("ro.img", RO_SIZE)?;
        hearth.add("ro", path(&origin), &["--read-only"])?;
        let plan = Plan::new(2)
            .disk(&hearth, "root", "vhost-user")?
            .disk(&hearth, "v", "vhost-user")?
            .disk(&hearth, "n", "nbd")?
            .disk(&hearth, "ro", "vhost-user")?;
        let since = Instant::now();
        let guest = Machine::boot(hearth.dir(), "g", &plan)?;
        Ok(Lab {
            hearth,
            guest,
            since,
        })
    }

    /// Says what has just been shown.
    fn shown(&mut self, what: &str) -> Result<()> {
        self.guest.no_disk_errors()?;
        ensure!(self.guest.qmp.status()? == "running");
        ensure!(
            !self.hearth.log().contains("cut off"),
            "{}",
            self.hearth.log()
        );
        println!("{:>4} s  {what}", self.since.elapsed().as_secs());
        Ok(())
    }

    /// Requests a disk has served since the daemon started.
    fn requests(&self, disk: &str) -> Result<u64> {
        let stats = self.hearth.stats(disk)?;
        let counters = stats["spans"][0]["counters"]
            .as_object()
            .with_context(|| format!("no counters in {stats}"))?;
        Ok(["hits", "partial_hits", "misses"]
            .iter()
            .flat_map(|kind| ["read", "write"].map(|op| format!("{op}_{kind}")))
            .filter_map(|name| counters.get(&name)?.as_u64())
            .sum())
    }

    /// Waits until every given disk has served some more requests of a load that is still running.
    fn progress(&mut self, load: &Job, disks: &[&str]) -> Result<()> {
        for disk in disks {
            let from = self.requests(disk)?;
            wait::until("the load goes on", GUEST_LIMIT, || {
                match self.guest.has_ended(load) {
                    Ok(false) => {}
                    Ok(true) => return Some(Err(anyhow::anyhow!("the load has ended"))),
                    Err(e) => return Some(Err(e)),
                }
                match self.requests(disk) {
                    Ok(now) => (now >= from + REQUESTS_BETWEEN).then_some(Ok(())),
                    Err(e) => Some(Err(e)),
                }
            })
            .and_then(|outcome| outcome)
            .or_else(|e| {
                // What the load said is worth more than that it ended.
                if self.guest.has_ended(load)? {
                    self.guest.wait_ok(load)?;
                }
                Err(e)
            })?;
        }
        Ok(())
    }

    /// Starts fio on both data disks: random reads and writes of several sizes, every block
    /// verified by its checksum soon after it was written and again at the end; over and over
    /// until [`Lab::stop_load`].
    fn start_load(&mut self) -> Result<Job> {
        self.guest.start(
            "rm -f /run/stop; runs=0; while [ ! -e /run/stop ]; do \
             fio --direct=1 --ioengine=libaio --iodepth=8 --rw=randrw --rwmixread=40 \
             --bssplit=4k/70:16k/20:64k/10 --size=56m --io_size=24m --verify=crc32c \
             --verify_backlog=64 --verify_fatal=1 --verify_state_save=0 --randrepeat=0 \
             --thread --name=vhost --filename=/dev/vdb --name=nbd --filename=/dev/vdc \
             >/run/fio.out 2>&1 || { cat /run/fio.out; exit 1; }; \
             runs=$((runs+1)); done; echo $runs",
        )
    }

    /// Lets the load come to its end, which must be a good one.
    fn stop_load(&mut self, load: &Job) -> Result<()> {
        self.guest.run("touch /run/stop")?;
        let runs = self.guest.wait_ok(load)?;
        ensure!(runs.trim().parse::<u64>()? >= 1, "fio ran {runs} times");
        Ok(())
    }

    /// What the guest's kernel knows of its disks: their names as serial numbers, and that one of
    /// them cannot be written.
    fn identities(&mut self) -> Result<()> {
        for (disk, dev) in [("root", "vda"), ("v", "vdb"), ("ro", "vdd")] {
            let serial = self.guest.run(&format!("cat /sys/block/{dev}/serial"))?;
            ensure!(serial == disk, "{dev} has the serial number {serial:?}");
        }
        let read_only = self.guest.run("cat /sys/block/vda/ro /sys/block/vdd/ro")?;
        ensure!(read_only == "0\n1\n", "{read_only:?}");
        self.guest
            .run("! dd if=/dev/zero of=/dev/vdd bs=4096 count=1 conv=fsync 2>/dev/null")?;
        let origin = path(&self.hearth.dir().join("ro.img")).to_owned();
        let want = run_ok("sha256sum", &[&origin], self.hearth.dir())?;
        let got = self.guest.run("sha256sum /dev/vdd")?;
        ensure!(
            got.split(' ').next() == want.split(' ').next(),
            "{got} is not {want}"
        );
        self.shown("disks have their names; a read-only one is read and not written")
    }

    /// Every mode and back to write-back, under load.
    fn switch_modes(&mut self) -> Result<()> {
        let load = self.start_load()?;
        for mode in [
            "write-back",
            "write-through",
            "write-around",
            "off",
            "write-back",
        ] {
            for disk in ["v", "n"] {
                self.hearth.ok(&["disk", "set", disk, "--mode", mode])?;
            }
            self.progress(&load, &["v", "n"])?;
        }
        self.stop_load(&load)?;
        self.shown("fio's checksums hold while the modes are switched")
    }

    /// Restarts and kills of the daemon that nothing in the guest notices.
    fn restart_daemon(&mut self, rounds: u64) -> Result<()> {
        let load = self.start_load()?;
        let files = self.guest.start(
            "mkdir -p /files; n=0; while [ ! -e /run/stop ]; do n=$((n+1)); \
             head -c $((n*7919%300000)) /dev/urandom >/files/$((n%20)) && sync /files/$((n%20)) && \
             (cd /files && sha256sum $((n%20)) >$((n%20)).sum) || exit 1; \
             [ $((n%8)) != 0 ] || echo 3 >/proc/sys/vm/drop_caches; \
             for sum in /files/*.sum; do (cd /files && sha256sum -c $sum >/run/files.out 2>&1) || \
             { cat /run/files.out; exit 1; }; done; done; echo $n",
        )?;
        for round in 0..rounds {
            self.progress(&load, &["v", "n"])?;
            self.progress(&files, &["root"])?;
            if round % 2 == 0 {
                self.hearth.stop()?;
            } else {
                self.hearth.kill9()?;
            }
            self.hearth.start()?;
        }
        self.progress(&load, &["v", "n"])?;
        self.progress(&files, &["root"])?;
        self.stop_load(&load)?;
        self.guest.wait_ok(&files)?;
        self.hearth
            .logged_times("client connected", 2 * rounds as usize)?;
        self.shown("neither stops nor kills of the daemon reach the guest")
    }

    /// Bytes of a disk on flash.
    fn cached(&self, disk: &str) -> Result<u64> {
        let stats = self.hearth.stats(disk)?;
        stats["cached"].as_u64().context("no figure `cached`")
    }

    /// A file system's TRIM frees flash; a whole disk's discard reads as zeros.
    fn discard(&mut self, disk: &str, dev: &str) -> Result<()> {
        const FILE: u64 = 24 * MIB;
        self.guest.run(&format!(
            "mkdir -p /mnt/t && mkfs.ext4 -q -F /dev/{dev} && mount -o nodiscard /dev/{dev} /mnt/t && \
             dd if=/dev/urandom of=/mnt/t/big bs=1M count={} conv=fsync",
            FILE / MIB
        ))?;
        let full = self.cached(disk)?;
        ensure!(full >= FILE, "only {full} bytes are cached");
        self.guest
            .run("rm /mnt/t/big && sync && fstrim -v /mnt/t && umount /mnt/t")?;
        wait::until(
            "what was trimmed leaves flash",
            GUEST_LIMIT,
            || match self.cached(disk) {
                Ok(now) => (now + FILE * 9 / 10 <= full).then_some(Ok(())),
                Err(e) => Some(Err(e)),
            },
        )??;
        self.guest.run(&format!(
            "fsck.ext4 -f -n /dev/{dev} && blkdiscard -f /dev/{dev}"
        ))?;
        // Before anybody reads it: zeros that the origin has by then are cached as whatever else is read there.
        wait::until(
            "what was discarded leaves flash",
            GUEST_LIMIT,
            || match self.cached(disk) {
                Ok(now) => (now == 0).then_some(Ok(())),
                Err(e) => Some(Err(e)),
            },
        )??;
        self.guest.run(&format!(
            "echo 3 >/proc/sys/vm/drop_caches && cmp -n {SIZE} /dev/{dev} /dev/zero"
        ))?;
        // The origin is told, too.
        self.hearth.ok(&["disk", "flush", disk])?;
        let origin = self.hearth.dir().join(format!("{disk}.img"));
        ensure!(
            std::fs::read(&origin)?.iter().all(|b| *b == 0),
            "the origin of {disk} still has data"
        );
        self.shown(&format!(
            "discards of /dev/{dev} free flash and read as zeros"
        ))
    }

    /// The origin of the vhost-user disk grows under a mounted file system that is written to.
    fn grow(&mut self) -> Result<()> {
        let size = SIZE + 32 * MIB;
        self.guest.run(
            "mkfs.ext4 -q -F /dev/vdb && mount /dev/vdb /mnt/t && head -c 8000000 /dev/urandom >/mnt/t/before && \
             sha256sum /mnt/t/before >/run/sums",
        )?;
        std::fs::OpenOptions::new()
            .write(true)
            .open(self.hearth.dir().join("v.img"))?
            .set_len(size)?;
        self.hearth
            .ok(&["disk", "set", "v", "--size-from-origin"])?;
        self.guest.run(&format!(
            "until [ $(blockdev --getsize64 /dev/vdb) = {size} ]; do sleep 0.1; done"
        ))?;
        // More than had room before.
        let fits = SIZE;
        self.guest.run(&format!(
            "resize2fs /dev/vdb && df /mnt/t && head -c {fits} /dev/urandom >/mnt/t/after && sync && \
             sha256sum /mnt/t/after >>/run/sums && umount /mnt/t && fsck.ext4 -f -n /dev/vdb && \
             mount /dev/vdb /mnt/t && sha256sum -c /run/sums && umount /mnt/t"
        ))?;
        self.shown("a disk grows under a mounted file system")
    }
}

#[test]
fn a_guest_in_service() -> Result<()> {
    // Pairs of a stop and a kill.
    let rounds = std::env::var("GUEST_ROUNDS")
        .ok()
        .map_or(Ok(1), |r| r.parse::<u64>())
        .context("GUEST_ROUNDS is no number")?;
    let mut lab = Lab::new()?;
    lab.shown("up")?;
    lab.identities()?;
    lab.switch_modes()?;
    lab.restart_daemon(2 * rounds)?;
    lab.discard("v", "vdb")?;
    lab.discard("n", "vdc")?;
    lab.grow()?;
    let Lab { hearth, guest, .. } = lab;
    guest.shut_down()?;
    ensure!(!hearth.log().contains("panicked"), "{}", hearth.log());
    Ok(())
}
