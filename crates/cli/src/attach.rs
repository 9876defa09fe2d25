//! `hearth attach-help`: what to type to give a disk to a virtual machine.
//!
//! Every hypervisor wants the same three facts (socket, name, how to reconnect) in its own words,
//! and a missing word shows only when something breaks. So the words are printed, for this disk
//! and this daemon's sockets, ready to be pasted.

use std::path::Path;

use hearth_daemon::api::types::DiskInfo;
use hearth_daemon::client::{Client, disk_path};
use hearth_daemon::error::Error;
use hearth_daemon::rundir::{nbd_socket, vhost_socket};
use serde::Serialize;

use crate::args::{AttachHelp, Global, Hypervisor, Over};
use crate::{Outcome, print_json};

/// Seconds a guest's requests wait for a daemon that restarts.
const RECONNECT_DELAY: u32 = 60;

/// One way to attach a disk.
#[derive(Debug, Serialize)]
struct Way {
    /// `vhost-user` or `nbd`.
    over: &'static str,
    /// When to take it.
    when: &'static str,
    /// What to paste.
    text: String,
    /// The same for QEMU, word by word.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    args: Vec<String>,
    /// What else to know.
    notes: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct Help {
    disk: String,
    #[serde(rename = "for")]
    hypervisor: &'static str,
    ways: Vec<Way>,
}

pub fn run(global: &Global, args: &AttachHelp) -> Outcome {
    let info: DiskInfo = Client::new(&global.dir()).get(&disk_path(&args.name, ""))?;
    let dir = std::path::absolute(global.dir()).unwrap_or_else(|_| global.dir());
    let help = Help {
        disk: info.name.clone(),
        hypervisor: args.hypervisor.word(),
        ways: ways(args.hypervisor, args.over, &dir, &info.name, info.read_only)?,
    };
    if global.json {
        return print_json(&help);
    }
    for (i, way) in help.ways.iter().enumerate() {
        if i > 0 {
            println!();
        }
        println!("# over {}: {}", way.over, way.when);
        for note in &way.notes {
            println!("# - {note}");
        }
        println!("{}", way.text);
    }
    Ok(())
}

const FAST: &str = "fastest; snapshots, block jobs and I/O limits of the hypervisor do not apply";
const PLAIN: &str = "an ordinary block node: snapshots, block jobs and backup work";
const SHARED: &str =
    "the guest's memory must be shared (memfd here; hugepages work, too): set size= as in -m";
const NEWER: &str = "QEMU 9.2 and newer spell reconnect=1 as reconnect-ms=1000";
const RIGHTS: &str = "the user that runs QEMU needs access to the socket";
const MEMORY: &str = "memoryBacking belongs into <domain>, the disk into <devices>";

fn ways(
    hypervisor: Hypervisor,
    over: Option<Over>,
    dir: &Path,
    disk: &str,
    read_only: bool,
) -> Result<Vec<Way>, Error> {
    let nbd = nbd_socket(dir);
    let vhost = vhost_socket(dir, disk);
    if hypervisor == Hypervisor::Proxmox && over == Some(Over::VhostUser) {
        return Err(Error::invalid(
            "Proxmox VE's QEMU cannot attach vhost-user-blk disks",
            "leave --over out; on Proxmox a disk is attached over NBD",
        ));
    }
    let mut ways = Vec::new();
    if over != Some(Over::Nbd) {
        match hypervisor {
            Hypervisor::Qemu => ways.push(qemu_vhost(&vhost, disk)),
            Hypervisor::Libvirt => ways.push(libvirt_vhost(&vhost)),
            Hypervisor::Proxmox => {}
        }
    }
    if over != Some(Over::VhostUser) {
        ways.push(match hypervisor {
            Hypervisor::Qemu => qemu_nbd(&nbd, disk, read_only),
            Hypervisor::Libvirt => libvirt_nbd(&nbd, disk, read_only),
            Hypervisor::Proxmox => proxmox_nbd(&nbd, disk, read_only),
        });
    }
    Ok(ways)
}

/// A value in a QEMU option list: a comma is written twice.
fn value(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// QEMU's identifiers begin with a letter; disks' names need not.
fn id(disk: &str) -> String {
    format!("hearth-{disk}")
}

/// A word of a shell command.
fn quoted(word: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Text in an XML attribute between single quotes.
fn xml(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&apos;")
        .replace('"', "&quot;")
}

/// Options and their values as lines of a shell command.
fn lines(args: &[String]) -> String {
    let pairs: Vec<String> = args
        .chunks(2)
        .map(|pair| {
            let words: Vec<String> = pair.iter().map(|w| quoted(w)).collect();
            words.join(" ")
        })
        .collect();
    pairs.join(" \\\n")
}

fn words(args: &[(&str, String)]) -> Vec<String> {
    args.iter()
        .flat_map(|(option, value)| [(*option).to_owned(), value.clone()])
        .collect()
}

fn qemu_vhost(socket: &Path, disk: &str) -> Way {
    let id = id(disk);
    let args = words(&[
        (
            "-object",
            "memory-backend-memfd,id=hearth-mem,size=4G,share=on".to_owned(),
        ),
        ("-machine", "memory-backend=hearth-mem".to_owned()),
        (
            "-chardev",
            format!("socket,id={id},path={},reconnect=1", value(socket)),
        ),
        ("-device", format!("vhost-user-blk-pci,chardev={id}")),
    ]);
    Way {
        over: "vhost-user",
        when: FAST,
        text: lines(&args),
        args,
        notes: vec![SHARED, NEWER, RIGHTS],
    }
}

fn nbd_node(socket: &Path, disk: &str, read_only: bool) -> String {
    let more = if read_only {
        ",read-only=on"
    } else {
        ",discard=unmap"
    };
    format!(
        "driver=nbd,node-name={},server.type=unix,server.path={},export={disk},reconnect-delay={RECONNECT_DELAY}{more}",
        node(disk),
        value(socket)
    )
}

/// Block nodes' names have at most 31 characters.
fn node(disk: &str) -> String {
    let id = id(disk);
    if id.len() <= 31 {
        return id;
    }
    let sum = hearth_io::checksum::crc32c(disk.as_bytes());
    format!("{}-{sum:08x}", &id[..22])
}

fn qemu_nbd(socket: &Path, disk: &str, read_only: bool) -> Way {
    let args = words(&[
        ("-blockdev", nbd_node(socket, disk, read_only)),
        ("-device", format!("virtio-blk-pci,drive={}", node(disk))),
    ]);
    Way {
        over: "nbd",
        when: PLAIN,
        text: lines(&args),
        args,
        notes: vec![RIGHTS],
    }
}

fn libvirt_vhost(socket: &Path) -> Way {
    let path = xml(&socket.display().to_string());
    Way {
        over: "vhost-user",
        when: FAST,
        text: format!(
            "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\
             <disk type='vhostuser' device='disk'>\n  <driver name='qemu' type='raw'/>\n  \
             <source type='unix' path='{path}'>\n    <reconnect enabled='yes' timeout='1'/>\n  </source>\n  \
             <target dev='vda' bus='virtio'/>\n</disk>"
        ),
        args: Vec::new(),
        notes: vec![
            MEMORY,
            "needs libvirt 7.1 or newer; queues='4' on <driver> gives four processors a queue each",
        ],
    }
}

fn libvirt_nbd(socket: &Path, disk: &str, read_only: bool) -> Way {
    let path = xml(&socket.display().to_string());
    let (discard, end) = if read_only {
        ("", "\n  <readonly/>")
    } else {
        (" discard='unmap'", "")
    };
    Way {
        over: "nbd",
        when: PLAIN,
        text: format!(
            "<disk type='network' device='disk'>\n  <driver name='qemu' type='raw' cache='none'{discard}/>\n  \
             <source protocol='nbd' name='{disk}'>\n    <host transport='unix' socket='{path}'/>\n    \
             <reconnect delay='{RECONNECT_DELAY}'/>\n  </source>\n  \
             <target dev='vda' bus='virtio'/>{end}\n</disk>"
        ),
        args: Vec::new(),
        notes: vec!["an older libvirt without <reconnect>: see docs/attach.md"],
    }
}

fn proxmox_nbd(socket: &Path, disk: &str, read_only: bool) -> Way {
    let inner = format!(
        "-blockdev {} -device virtio-blk-pci,drive={}",
        quoted(&nbd_node(socket, disk, read_only)),
        node(disk)
    );
    Way {
        over: "nbd",
        when: "what Proxmox VE's QEMU can do",
        text: format!("qm set VMID --args {}", quoted(&inner)),
        args: Vec::new(),
        notes: vec![
            "put the machine's number for VMID; arguments it has already must be repeated",
            "Proxmox does not know such a disk: its snapshots, backup and migration leave it out",
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(hypervisor: Hypervisor, over: Option<Over>, dir: &str, disk: &str) -> Vec<String> {
        ways(hypervisor, over, Path::new(dir), disk, false)
            .unwrap()
            .into_iter()
            .map(|w| w.text)
            .collect()
    }

    #[test]
    fn qemu_gets_both_ways() {
        assert_eq!(
            text(Hypervisor::Qemu, None, "/run/hearth", "vm1"),
            [
                "-object memory-backend-memfd,id=hearth-mem,size=4G,share=on \\\n\
                 -machine memory-backend=hearth-mem \\\n\
                 -chardev socket,id=hearth-vm1,path=/run/hearth/vhost/vm1.sock,reconnect=1 \\\n\
                 -device vhost-user-blk-pci,chardev=hearth-vm1",
                "-blockdev driver=nbd,node-name=hearth-vm1,server.type=unix,\
                 server.path=/run/hearth/nbd.sock,export=vm1,reconnect-delay=60,discard=unmap \\\n\
                 -device virtio-blk-pci,drive=hearth-vm1",
            ]
        );
    }

    #[test]
    fn libvirt_gets_xml_that_closes() {
        for xml in text(Hypervisor::Libvirt, None, "/a&b/'c'", "vm1") {
            assert!(xml.contains("/a&amp;b/&apos;c&apos;/"), "{xml}");
            let open = xml.matches('<').count() - xml.matches("</").count();
            let closed = xml.matches("</").count() + xml.matches("/>").count();
            assert_eq!(open, closed, "{xml}");
        }
    }

    #[test]
    fn proxmox_has_one_way() {
        assert_eq!(
            text(Hypervisor::Proxmox, None, "/run/hearth", "vm1"),
            [
                "qm set VMID --args '-blockdev driver=nbd,node-name=hearth-vm1,server.type=unix,\
              server.path=/run/hearth/nbd.sock,export=vm1,reconnect-delay=60,discard=unmap \
              -device virtio-blk-pci,drive=hearth-vm1'"
            ]
        );
        let vhost = Some(Over::VhostUser);
        let refused = ways(Hypervisor::Proxmox, vhost, Path::new("/r"), "d", false);
        assert!(refused.unwrap_err().remedy.contains("NBD"));
    }

    #[test]
    fn odd_paths_and_names_stay_whole() {
        let one =
            |dir: &str, disk: &str| text(Hypervisor::Qemu, Some(Over::Nbd), dir, disk).remove(0);
        assert!(one("/a,b", "d").contains("server.path=/a,,b/nbd.sock"));
        assert!(one("/a b", "d").contains("'driver=nbd,"));
        let long = "a-name-that-is-longer-than-a-node-name-may-be";
        let text = one("/r", long);
        assert!(text.contains(&format!("export={long},")));
        let name = text
            .split("node-name=")
            .nth(1)
            .unwrap()
            .split(',')
            .next()
            .unwrap();
        assert_eq!(name.len(), 31);
        assert!(text.ends_with(&format!("drive={name}")));
    }

    #[test]
    fn read_only_disks_are_attached_read_only() {
        let text = |h| {
            ways(h, Some(Over::Nbd), Path::new("/r"), "d", true)
                .unwrap()
                .remove(0)
                .text
        };
        assert!(text(Hypervisor::Qemu).contains("read-only=on"));
        assert!(text(Hypervisor::Libvirt).contains("<readonly/>"));
    }
}
