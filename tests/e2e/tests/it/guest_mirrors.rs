//! A guest with a mirrored disk, of which one leg returns errors, hangs and vanishes under fio that verifies what it
//! wrote. The guest sees no error.
//!
//! Exclusive: processors

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::machine::{GUEST_LIMIT, Job, Machine, Plan, copy_root};
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};

/// Bytes of the disk.
const SIZE: u64 = 64 << 20;
/// Requests it must have served before the next disturbance.
const REQUESTS_BETWEEN: u64 = 200;

struct Lab {
    hearth: Hearth,
    guest: Machine,
    load: Job,
}

impl Lab {
    fn info(&self) -> Result<serde_json::Value> {
        Ok(serde_json::from_str(
            &self.hearth.ok(&["disk", "show", "d", "--json"])?,
        )?)
    }

    /// Waits until the second leg is this, under a load that goes on.
    fn wait_leg(&mut self, state: &str) -> Result<()> {
        wait::until(&format!("the leg is {state}"), GUEST_LIMIT, || {
            if let Ok(true) = self.guest.has_ended(&self.load) {
                return Some(Err(anyhow::anyhow!("the load has ended")));
            }
            (self.info().ok()?["legs"][1]["state"] == state).then_some(Ok(()))
        })
        .and_then(|outcome| outcome)
        .or_else(|e| {
            if self.guest.has_ended(&self.load)? {
                self.guest.wait_ok(&self.load)?;
            }
            Err(e)
        })
        .with_context(|| self.hearth.log())
    }

    fn requests(&self) -> Result<u64> {
        let stats = self.hearth.stats("d")?;
        let counters = &stats["spans"][0]["counters"];
        let kinds = ["write_hits", "write_partial_hits", "write_misses"];
        Ok(kinds
            .iter()
            .filter_map(|kind| counters[kind].as_u64())
            .sum())
    }

    /// Waits until the guest has gone on.
    fn progress(&mut self) -> Result<()> {
        let from = self.requests()?;
        wait::until("the guest goes on", GUEST_LIMIT, || {
            (self.requests().ok()? >= from + REQUESTS_BETWEEN).then_some(())
        })
    }
}

#[test]
fn a_guest_sees_nothing_of_a_leg_that_fails() -> Result<()> {
    if !have("a guest on a mirror", &["nbdkit"]) {
        return Ok(());
    }
    let rounds: u32 = std::env::var("GUEST_ROUNDS")
        .unwrap_or_else(|_| "1".to_owned())
        .parse()
        .context("GUEST_ROUNDS is no number")?;
    let hearth = Hearth::serving("160M")?;
    let (a, b, fail) = (
        hearth.dir().join("a"),
        hearth.dir().join("b"),
        hearth.dir().join("fail"),
    );
    for leg in [&a, &b] {
        std::fs::File::create(leg)?.set_len(SIZE)?;
    }
    let error = format!("error-file={}", path(&fail));
    let mut remote = Server::start(
        "nbdkit",
        &[
            "-f",
            "-U",
            "{socket}",
            "--filter=error",
            "file",
            path(&b),
            "error=EIO",
            "error-rate=100%",
            &error,
        ],
        hearth.dir().join("b.s"),
    )?;
    hearth.ok(&[
        "disk",
        "add",
        "d",
        "--mirror",
        path(&a),
        "--mirror",
        &remote.uri(""),
        "--sole-user",
        "--mode",
        "write-through",
        "--origin-timeout",
        "10",
    ])?;
    let root = hearth.dir().join("root.img");
    copy_root(&root)?;
    hearth.add("root", path(&root), &[])?;
    let plan =
        Plan::new(1)
            .disk(&hearth, "root", "vhost-user")?
            .disk(&hearth, "d", "vhost-user")?;
    let mut guest = Machine::boot(hearth.dir(), "m", &plan)?;
    guest.forget_kernel_log()?;
    let load = guest.start(
        "rm -f /run/stop; runs=0; while [ ! -e /run/stop ]; do \
         fio --direct=1 --ioengine=libaio --iodepth=8 --rw=randrw --rwmixread=40 --bs=4k --size=56m \
         --io_size=8m --verify=crc32c --verify_backlog=64 --verify_fatal=1 --verify_state_save=0 \
         --randrepeat=0 --thread --name=d --filename=/dev/vdb --fsync=16 \
         >/run/fio.out 2>&1 || { cat /run/fio.out; exit 1; }; \
         runs=$((runs+1)); done; echo $runs",
    )?;
    let mut lab = Lab {
        hearth,
        guest,
        load,
    };
    lab.wait_leg("current")?;
    lab.progress()?;
    for _ in 0..rounds {
        // Errors.
        std::fs::write(&fail, b"")?;
        lab.wait_leg("out")?;
        lab.progress()?;
        std::fs::remove_file(&fail)?;
        lab.wait_leg("current")?;
        // It hangs: what it was asked may still arrive until the server is gone.
        remote.signal(libc::SIGSTOP)?;
        lab.wait_leg("out")?;
        lab.progress()?;
        remote.signal(libc::SIGCONT)?;
        remote.kill9()?;
        remote.up()?;
        lab.wait_leg("current")?;
        // It vanishes, and comes back.
        remote.kill9()?;
        lab.wait_leg("out")?;
        lab.progress()?;
        remote.up()?;
        lab.wait_leg("current")?;
        lab.progress()?;
    }
    lab.guest.run("touch /run/stop")?;
    let runs = lab.guest.wait_ok(&lab.load)?;
    ensure!(runs.trim().parse::<u64>()? >= 1, "fio ran {runs} times");
    lab.guest.no_disk_errors()?;
    ensure!(lab.guest.qmp.status()? == "running");
    let Lab {
        mut hearth, guest, ..
    } = lab;
    guest.shut_down()?;
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    ensure!(
        std::fs::read(&a)? == std::fs::read(&b)?,
        "the legs are not the same"
    );
    remote.stop()
}
