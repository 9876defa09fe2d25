//! Locks of two guests' kernels, each with Debian's rpcbind and statd, on a datastore that is mounted without `nolock`.
//!
//! The programs are no part of this repository: `LAB_STATD` names a directory with rpcbind, rpc.statd, sm-notify and flock, and the libraries they
//! need, as `scripts/nfs-lab.sh` makes it. Notices go from this host to guests, so the test runs once more in a network of its own, with a
//! bridge.
//!
//! Exclusive: processors

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use crate::stored::Lab;
use anyhow::{Context, Result, bail, ensure};
use hearth_rig::clients::run_ok;
use hearth_rig::daemon::path;
use hearth_rig::machine::{Machine, Plan, image};

const TEST: &str = "guest_locks::kernel_reclaims_its_lock_after_a_kill";
const INSIDE: &str = "HEARTH_TEST_INSIDE";
const NETWORK: &str = r#"
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add br0 type bridge
ip addr add 192.0.2.1/24 dev br0
ip link set br0 up
for tap in tap1 tap2; do
    ip tuntap add "$tap" mode tap
    ip link set "$tap" master br0 up
done
exec "$0" --exact "$1" --nocapture
"#;
/// Longer than the grace period, or than Linux waits before it asks again for a lock.
const PATIENCE: Duration = Duration::from_secs(180);

#[test]
fn kernel_reclaims_its_lock_after_a_kill() -> Result<()> {
    let Some(programs) = env::var_os("LAB_STATD").map(PathBuf::from) else {
        eprintln!("{TEST}: skipped: no statd is given (scripts/nfs-lab.sh gives one)");
        return Ok(());
    };
    if env::var_os(INSIDE).is_some() {
        return inside(&programs);
    }
    // What it is made of comes over the host's own network.
    image()?;
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "sh", "-c", NETWORK]);
    let output = command
        .arg(env::current_exe()?)
        .arg(TEST)
        .env(INSIDE, "1")
        .output()
        .context("unshare or ip")?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if let Some(why) = said.lines().find(|line| line.contains("not permitted")) {
        eprintln!("{TEST}: skipped: {why}");
        return Ok(());
    }
    ensure!(said.contains("1 passed"), "{said}");
    Ok(())
}

/// A disk with the programs.
fn programs_disk(dir: &Path, number: u8, programs: &Path) -> Result<PathBuf> {
    let image = dir.join(format!("statd-{number}.img"));
    fs::File::create(&image)?.set_len(256 << 20)?;
    run_ok(
        "mke2fs",
        &["-q", "-t", "ext4", "-d", path(programs), path(&image)],
        dir,
    )?;
    Ok(image)
}

/// A guest that has mounted the datastore as `mount -t nfs` does without options.
fn guest(lab: &Lab, number: u8, programs: &Path) -> Result<Machine> {
    let dir = lab.hearth.dir();
    let disk = programs_disk(dir, number, programs)?;
    let plan = Plan::new(1).own_root()?.image(&disk);
    let plan = plan.tap(&format!("tap{number}"), number);
    let mut guest = Machine::boot(dir, &format!("g{number}"), &plan)?;
    for command in [
        "modprobe virtio_net && modprobe nfsv3",
        "mkdir -p /b && mount -o ro /dev/vdb /b",
        &format!("hostname guest{number}; ip link set lo up; ip link set eth0 up"),
        &format!("ip addr add 192.0.2.1{number}/24 dev eth0"),
        "cp /b/etc/netconfig /b/etc/services /b/etc/protocols /b/etc/rpc /etc/",
        "cp $(ls /b/usr/bin/flock /b/bin/flock 2>/dev/null | head -1) /tmp/flock",
        "printf '%s\\n' root:x:0:0::/:/bin/sh _rpc:x:499:65534::/:/bin/false statd:x:498:65534::/:/bin/false >>/etc/passwd",
        "mkdir -p /run/rpcbind /var/lib/nfs/sm /var/lib/nfs/sm.bak && chown 498 /var/lib/nfs /var/lib/nfs/sm /var/lib/nfs/sm.bak",
    ] {
        guest.run(command).with_context(|| command.to_owned())?;
    }
    with_libraries(
        &mut guest,
        "/b/sbin/rpcbind -w && /b/sbin/rpc.statd --no-notify",
    )?;
    guest.run(
        "mount -i -t nfs -o vers=3,proto=tcp,mountproto=tcp,hard,port=2049,mountport=2049,addr=192.0.2.1,mountaddr=192.0.2.1 192.0.2.1:/vms /mnt",
    )?;
    Ok(guest)
}

fn with_libraries(guest: &mut Machine, command: &str) -> Result<String> {
    let all = "/b/lib/x86_64-linux-gnu:/b/usr/lib/x86_64-linux-gnu";
    guest.run(&format!("export LD_LIBRARY_PATH={all}; {command}"))
}

/// Whether a lock is to be had; it must not hang.
fn locks(guest: &mut Machine, how: &str) -> Result<bool> {
    let job = guest.start(&format!("/tmp/flock {how} /mnt/lock true"))?;
    match guest.wait_within(&job, PATIENCE)? {
        Some(ended) if ended.status == 0 => Ok(true),
        Some(ended) if ended.status == 1 && ended.text.is_empty() => Ok(false),
        Some(ended) => bail!("{ended:?}"),
        None => bail!("a lock hangs"),
    }
}

/// Holds a lock until `sleep` is killed.
const HOLD: &str = "/tmp/flock -x /mnt/lock -c 'touch /tmp/held; exec sleep 100000'";
const HELD: &str = "until [ -e /tmp/held ]; do usleep 20000; done; rm /tmp/held";

fn inside(programs: &Path) -> Result<()> {
    let mut lab = Lab::with(&[], None, "192.0.2.1:2049")?;
    lab.hearth.ok(&[
        "datastore",
        "set",
        "vms",
        "--client",
        "192.0.2.0/24=rw,root",
    ])?;
    let mut one = guest(&lab, 1, programs)?;
    let mut two = guest(&lab, 2, programs)?;
    one.run("touch /mnt/lock")?;
    ensure!(locks(&mut one, "-x -n")?, "a first lock is denied");
    let held = one.start(HOLD)?;
    one.run(HELD)?;
    ensure!(!locks(&mut two, "-x -n")? && !locks(&mut two, "-s -n")?);
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    lab.address()?;
    // Asked in the grace period, answered after it.
    ensure!(!locks(&mut two, "-x -n")?, "{}", lab.hearth.log());
    let waiting = two.start("/tmp/flock -x /mnt/lock true")?;
    one.run("killall sleep")?;
    let _ = one.wait(&held)?;
    let waited = two
        .wait_within(&waiting, PATIENCE)?
        .context("a lock is never granted")?;
    ensure!(waited.status == 0, "{waited:?}");
    // A client that restarts holds nothing.
    let _held = one.start(HOLD)?;
    one.run(HELD)?;
    ensure!(!locks(&mut two, "-x -n")?);
    with_libraries(&mut one, "kill $(pidof rpc.statd); /b/sbin/sm-notify -f")?;
    let since = std::time::Instant::now();
    while !locks(&mut two, "-x -n")? {
        ensure!(
            since.elapsed() < PATIENCE,
            "the notice of a restart released nothing"
        );
    }
    Ok(())
}
