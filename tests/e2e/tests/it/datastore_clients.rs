//! A datastore of the real daemon and other people's clients: libnfs, the client of a guest's kernel, and one that does
//! what an ESXi host does. Whether a small file or a disk of the cache is behind a name, they see the same.
//!
//! Exclusive: processors

use crate::host;
use crate::kernel_client;
use std::fs;

use crate::programs::{have, run};
use crate::stored::{Lab, lasting_address, root};
use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::machine::{Machine, Plan};

/// What libnfs puts into the datastore it finds again, before and after a kill, and so does the directory.
#[test]
fn libnfs_reads_what_it_wrote_also_after_a_kill() -> Result<()> {
    let test = "libnfs_reads_what_it_wrote_also_after_a_kill";
    if !have(test, &["nfs-ls", "nfs-cat", "nfs-cp"]) {
        return Ok(());
    }
    let mut lab = Lab::new()?;
    let data: Vec<u8> = (0..7_000_001u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let local = lab.hearth.dir().join("local");
    fs::write(&local, &data)?;
    let url = |lab: &Lab, name: &str| -> Result<String> {
        let port = lab.address()?.port();
        Ok(format!(
            "nfs://127.0.0.1/vms{name}?version=3&nfsport={port}&mountport={port}"
        ))
    };
    // A disk of the cache from its first byte on, and a file that becomes one when it is long.
    for name in ["/a.img", "/a.iso"] {
        run("nfs-cp", &[path(&local), &url(&lab, name)?])?;
    }
    let check = |lab: &Lab| -> Result<()> {
        let list = String::from_utf8(run("nfs-ls", &[&url(lab, "")?])?.stdout)?;
        ensure!(list.matches("7000001").count() == 2, "{list}");
        for name in ["/a.img", "/a.iso"] {
            ensure!(
                run("nfs-cat", &[&url(lab, name)?])?.stdout == data,
                "{name}"
            );
        }
        Ok(())
    };
    check(&lab)?;
    ensure!(lab.show()?["disks"] == 2, "{}", lab.show()?);
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    check(&lab)?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    for name in ["a.img", "a.iso"] {
        ensure!(fs::read(lab.vms.join(name))? == data, "{name}");
    }
    Ok(())
}

/// An ESXi host works with disks of the cache.
#[test]
fn a_host_keeps_its_datastore_under_load() -> Result<()> {
    let lab = Lab::new()?;
    let dir = root(&mut lab.client()?)?;
    host::work(lab.address()?, &dir, &lab.vms, || {
        lab.hearth.ok(&["datastore", "flush", "vms"]).map(drop)
    })
}

/// The same over two directories, which get little as long as nobody waits for them: the flash fills with what they lack, and from then on
/// the host's writes wait for the directories, and its heartbeats for nothing.
#[test]
fn a_host_keeps_a_mirrored_datastore_while_the_flash_is_full() -> Result<()> {
    let Some(mut lab) = mirrored()? else {
        return Ok(());
    };
    lab.hearth.stop()?;
    let slow = ["--destage-rate", "1M"].map(str::to_owned);
    lab.hearth.serve_args.extend(slow);
    lab.hearth.start()?;
    let dir = root(&mut lab.client()?)?;
    let both = ["a", "b"].map(|name| lab.hearth.dir().join(name));
    let both = both.each_ref().map(|dir| dir.as_path());
    host::work_long(lab.address()?, &dir, &both, (256 << 20, 6000), || {
        lab.hearth.ok(&["datastore", "flush", "vms"]).map(drop)
    })
}

/// Unless files of this host cannot be given what tells them apart in two trees.
fn mirrored() -> Result<Option<Lab>> {
    match Lab::mirrored() {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => {
            eprintln!("two directories: skipped: {e:#}");
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// The daemon is killed again and again while a guest's kernel writes and checks: the guest goes on, and nothing is lost or
/// false, neither for the guest nor, once it was flushed, in the directory.
#[test]
fn a_kernel_goes_on_while_the_daemon_is_killed() -> Result<()> {
    let address = lasting_address()?;
    let mut lab = Lab::with(&[], None, &address.to_string())?;
    let cycles: u32 = std::env::var("CYCLES")
        .ok()
        .and_then(|c| c.parse().ok())
        .unwrap_or(4);
    let plan = Plan::new(2).own_root()?.network();
    let mut guest = Machine::boot(lab.hearth.dir(), "g", &plan)?;
    guest.run("modprobe virtio_net && modprobe nfsv3")?;
    guest.run("ip link set lo up; ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0")?;
    let port = address.port();
    kernel_client::mount(&mut guest, port, "/mnt", "")?;
    // fio checks what it reads against what it wrote; with and without the client's cache, and on a file that is no disk.
    let job = |name: &str, size: &str, more: &str| {
        format!(
            "fio --name={name} --filename=/mnt/{name} --size={size} --rw=randrw --bs=4k-64k --ioengine=psync --verify=crc32c --verify_backlog=64 --verify_fatal=1 --do_verify=1 --loops=1000 --time_based --runtime=600 --minimal {more}"
        )
    };
    let mut jobs = Vec::new();
    for command in [
        job("direct.img", "24M", "--direct=1"),
        job("cached.img", "24M", "--fsync=16"),
        job("small.log", "768k", "--fsync=16"),
    ] {
        jobs.push(guest.start(&command)?);
    }
    // Disks that come and go, each noted outside of NFS when it was answered: made, written, renamed over the one before.
    jobs.push(guest.start("cd /mnt && i=0; while ! test -e /tmp/stop; do i=$((i+1)); (yes $i | head -c 300000; echo end $i) >new.img && sync && mv new.img disk.img || exit 1; echo $i >/tmp/done; done")?);
    for cycle in 0..cycles {
        // Some work has to be done between two kills, or nothing would be disturbed.
        let done = "$(cat /tmp/done 2>/dev/null || echo 0)";
        let before: u64 = guest.run(&format!("echo {done}"))?.trim().parse()?;
        let more = format!("test \"{done}\" -ge {}", before + 5);
        kernel_client::wait_until(&mut guest, port, &more)?;
        lab.hearth.kill9()?;
        lab.hearth.start()?;
        for job in &jobs {
            ensure!(
                !guest.has_ended(job)?,
                "a job ended in cycle {cycle}: {:?}",
                guest.wait(job)?
            );
        }
    }
    guest.run("touch /tmp/stop; killall -INT fio")?;
    let names = jobs.pop().context("a job")?;
    guest.wait_ok(&names)?;
    for job in jobs {
        let answer = guest.wait(&job)?;
        ensure!(
            !answer.text.contains("verify") && !answer.text.contains("error="),
            "{}",
            answer.text
        );
    }
    let done: u64 = guest.run("cat /tmp/done")?.trim().parse()?;
    guest.run("sync; umount /mnt")?;
    guest.no_disk_errors()?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let last = fs::read_to_string(lab.vms.join("disk.img"))?;
    let lines = format!("{done}\n").repeat(300_000);
    ensure!(last == format!("{}end {done}\n", &lines[..300_000]));
    eprintln!("{done} disks and {cycles} kills");
    Ok(())
}
