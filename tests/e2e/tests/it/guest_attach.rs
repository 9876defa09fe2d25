//! What `hearth attach-help` prints is what works: two guests at once on two disks of one pool,
//! one attached over vhost-user and one over NBD with the printed arguments; and the printed
//! libvirt XML against libvirt's own schema.
//!
//! Exclusive: processors

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::clients::{have, run_ok};
use hearth_rig::daemon::path;
use hearth_rig::machine::{Machine, Plan, attach_args, copy_root};
use std::time::Instant;

/// The lines for people and the words for programs are the same.
fn printed_as_words(hearth: &Hearth, disk: &str, over: &str) -> Result<()> {
    let text = hearth.ok(&["attach-help", disk, "--for", "qemu", "--over", over])?;
    let code: String = text
        .lines()
        .filter(|l| !l.starts_with('#'))
        .collect::<Vec<_>>()
        .join("\n");
    let shell = format!("printf '%s\\n' {code}");
    let words = run_ok("sh", &["-c", &shell], hearth.dir())?;
    let words: Vec<&str> = words.lines().collect();
    ensure!(words == attach_args(hearth, disk, over)?, "{text}");
    Ok(())
}

#[test]
fn two_guests_boot_from_what_attach_help_prints() -> Result<()> {
    // Less than both guests read and write together.
    let hearth = Hearth::serving("192M")?;
    let since = Instant::now();
    let said = |what: &str| println!("{:>4} s  {what}", since.elapsed().as_secs());
    let ways = [("a", "vhost-user"), ("b", "nbd")];
    let mut guests = Vec::new();
    for (name, over) in ways {
        let origin = hearth.dir().join(format!("{name}.img"));
        copy_root(&origin)?;
        hearth.add(name, path(&origin), &[])?;
        printed_as_words(&hearth, name, over)?;
        let plan = Plan::new(1).disk(&hearth, name, over)?;
        guests.push((name, Machine::power_on(hearth.dir(), name, &plan)?));
    }
    for (name, guest) in &mut guests {
        guest.wait_up(1)?;
        // Each on its own disk, which says its name.
        guest.run(&format!("hostname {name}; echo {name} >/who; sync"))?;
    }
    said("up");
    // Both verify at the same time, on their file systems, and read all of their systems.
    let jobs = guests
        .iter_mut()
        .map(|(name, guest)| {
            let job = guest.start(&format!(
                "fio --directory=/root --name={name} --size=16m --direct=1 --ioengine=libaio --iodepth=4 \
                 --rw=randwrite --bs=4k --verify=crc32c --verify_backlog=256 --verify_fatal=1 \
                 --end_fsync=1 >/run/fio.out 2>&1 || {{ cat /run/fio.out; exit 1; }}; \
                 find /usr/bin /usr/sbin /usr/lib/modules -type f -exec sha256sum {{}} + | sort >/run/sums"
            ))?;
            Ok(job)
        })
        .collect::<Result<Vec<_>>>()?;
    for ((_, guest), job) in guests.iter_mut().zip(&jobs) {
        guest.wait_ok(job)?;
    }
    said("verified");
    // They were made from one image and still hold the same system, but each its own name.
    let mut sums = Vec::new();
    for (name, guest) in &mut guests {
        guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
        ensure!(guest.run("cat /who")?.trim() == *name);
        sums.push(guest.run("wc -l </run/sums; sha256sum </run/sums")?);
        guest.no_disk_errors()?;
    }
    ensure!(sums[0] == sums[1], "the systems differ: {sums:?}");
    for (_, guest) in guests {
        guest.shut_down()?;
    }
    said("shut down");
    for (name, _) in ways {
        hearth.ok(&["disk", "flush", name])?;
        let origin = hearth.dir().join(format!("{name}.img"));
        run_ok("e2fsck", &["-f", "-n", path(&origin)], hearth.dir())?;
        let who = run_ok("debugfs", &["-R", "cat /who", path(&origin)], hearth.dir())?;
        ensure!(who.trim() == name, "the disk of {name} says {who}");
    }
    Ok(())
}

/// A whole domain around what is printed passes libvirt's schema.
#[test]
fn libvirt_accepts_the_printed_xml() -> Result<()> {
    if !have(
        "libvirt_accepts_the_printed_xml",
        &["virt-xml-validate", "virsh"],
    ) {
        return Ok(());
    }
    let hearth = Hearth::serving("128M")?;
    let origin = hearth.origin("o.img", 1 << 20)?;
    hearth.add("d", path(&origin), &[])?;
    hearth.add(
        "ro",
        path(&hearth.origin("p.img", 1 << 20)?),
        &["--read-only"],
    )?;
    for (disk, over) in [("d", "vhost-user"), ("d", "nbd"), ("ro", "nbd")] {
        let args = [
            "attach-help",
            disk,
            "--for",
            "libvirt",
            "--over",
            over,
            "--json",
        ];
        let help: serde_json::Value = serde_json::from_str(&hearth.ok(&args)?)?;
        let ways = help["ways"].as_array().context("no ways")?;
        ensure!(!ways.is_empty(), "no way over {over}");
        for way in ways {
            let xml = way["text"].as_str().context("no text")?;
            let (memory, disk, end) = match xml.find("<disk") {
                Some(at) => (&xml[..at], &xml[at..], ""),
                None => ("", "", xml),
            };
            let domain = format!(
                "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
                 <name>vm</name><memory unit='GiB'>1</memory>{memory}\
                 <os><type arch='x86_64' machine='q35'>hvm</type></os>\
                 <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{disk}</devices>{end}</domain>\n"
            );
            let file = hearth.dir().join("domain.xml");
            let valid = |text: &str| {
                std::fs::write(&file, text)?;
                run_ok("virt-xml-validate", &[path(&file), "domain"], hearth.dir())
            };
            valid(&domain).with_context(|| format!("over {over}:\n{domain}"))?;
            // The validator does mind.
            let broken = domain.replace("<target ", "<trget ");
            ensure!(valid(&broken.replace("<qemu:arg ", "<qemu:rg ")).is_err());
        }
    }
    Ok(())
}
