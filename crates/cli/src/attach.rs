//! `hearth attach-help`: what to type to give a disk to a virtual machine.
//!
//! Every hypervisor wants the same three facts (socket, name, how to reconnect) in its own words,
//! and a missing word shows only when something breaks. So the words are printed, for this disk
//! and this daemon's sockets, ready to be pasted.

use std::path::Path;

use hearth_daemon::api::datastores::DatastoreInfo;
use hearth_daemon::api::types::DiskInfo;
use hearth_daemon::client::{Client, datastore_path, disk_path};
use hearth_daemon::error::{Error, Kind};
use hearth_daemon::rundir::{nbd_socket, vhost_socket};
use serde::Serialize;

use crate::args::{AttachHelp, Global, Hypervisor, Over};
use crate::versions::{self, LIBVIRT_RECONNECTS, Version};
use crate::{Outcome, mount, print_json};

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
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Help {
    disk: String,
    #[serde(rename = "for")]
    hypervisor: &'static str,
    /// The libvirt found on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    libvirt: Option<String>,
    /// The QEMU found on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    qemu: Option<String>,
    ways: Vec<Way>,
}

pub fn run(global: &Global, args: &AttachHelp) -> Outcome {
    if matches!(args.hypervisor, Hypervisor::Esxi | Hypervisor::Linux) {
        return mount::run(global, &args.name, args.hypervisor);
    }
    let found = Client::new(&global.dir()).get(&disk_path(&args.name, ""));
    let info: DiskInfo = match found {
        Ok(info) => info,
        // It may be a datastore; if it is not either, the first answer is the one that fits.
        Err(e) if e.kind == Kind::NotFound && args.over.is_none() => {
            let path = datastore_path(&args.name, "");
            let known = Client::new(&global.dir()).get::<DatastoreInfo>(&path);
            known.map_err(|_| e)?;
            return mount::run(global, &args.name, args.hypervisor);
        }
        Err(e) => return Err(e.into()),
    };
    let help = help(global, &info, args.hypervisor, args.over)?;
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

/// What to type to give a disk to guests of this hypervisor, as `--json` prints it.
pub fn of_disk(
    client: &Client,
    global: &Global,
    disk: &str,
    hypervisor: Hypervisor,
) -> Result<serde_json::Value, Error> {
    let info: DiskInfo = client.get(&disk_path(disk, ""))?;
    let help = help(global, &info, hypervisor, None)?;
    serde_json::to_value(&help)
        .map_err(|e| Error::internal(format!("cannot print an answer as JSON: {e}")))
}

fn help(
    global: &Global,
    info: &DiskInfo,
    hypervisor: Hypervisor,
    over: Option<Over>,
) -> Result<Help, Error> {
    let dir = std::path::absolute(global.dir()).unwrap_or_else(|_| global.dir());
    let installed = Installed::look(hypervisor);
    Ok(Help {
        disk: info.name.clone(),
        hypervisor: hypervisor.word(),
        libvirt: installed.libvirt.map(|v| v.to_string()),
        qemu: installed.qemu.map(|v| v.to_string()),
        ways: ways(
            hypervisor,
            over,
            &dir,
            &info.name,
            info.settings.read_only,
            installed,
        )?,
    })
}

/// What is installed here, as far as it is known and matters.
#[derive(Clone, Copy, Debug, Default)]
struct Installed {
    libvirt: Option<Version>,
    qemu: Option<Version>,
}

impl Installed {
    fn look(hypervisor: Hypervisor) -> Installed {
        Installed {
            libvirt: (hypervisor == Hypervisor::Libvirt)
                .then(versions::libvirt)
                .flatten(),
            qemu: versions::qemu(),
        }
    }
}

/// QEMU that spells `reconnect=1` as `reconnect-ms=1000`.
const QEMU_MILLISECONDS: Version = Version { major: 9, minor: 2 };
/// A slot of the root bus that libvirt leaves free on q35 and on pc.
const FREE_SLOT: &str = "0x1e";

const FAST: &str = "fastest; snapshots, block jobs and I/O limits of the hypervisor do not apply";
const PLAIN: &str = "an ordinary block node: snapshots, block jobs and backup work";
const SHARED: &str =
    "the guest's memory must be shared (memfd here; hugepages work, too): set size= as in -m";
const NEWER: &str =
    "QEMU 9.2 and newer spell reconnect=1 as reconnect-ms=1000, older ones the other way";
const RIGHTS: &str = "the user that runs QEMU must be in the group of the socket (hearth serve --socket-group; kvm by default)";
const MEMORY: &str = "memoryBacking belongs into <domain>, the disk into <devices>";

fn ways(
    hypervisor: Hypervisor,
    over: Option<Over>,
    dir: &Path,
    disk: &str,
    read_only: bool,
    installed: Installed,
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
            Hypervisor::Qemu => ways.push(qemu_vhost(&vhost, disk, installed.qemu)),
            Hypervisor::Libvirt => ways.push(libvirt_vhost(&vhost)),
            Hypervisor::Proxmox | Hypervisor::Esxi | Hypervisor::Linux => {}
        }
    }
    if over != Some(Over::VhostUser) {
        match hypervisor {
            Hypervisor::Qemu => ways.push(qemu_nbd(&nbd, disk, read_only)),
            Hypervisor::Libvirt => {
                ways.extend(libvirt_nbd(&nbd, disk, read_only, installed.libvirt))
            }
            Hypervisor::Proxmox => ways.push(proxmox_nbd(&nbd, disk, read_only)),
            Hypervisor::Esxi | Hypervisor::Linux => {}
        }
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

fn qemu_vhost(socket: &Path, disk: &str, qemu: Option<Version>) -> Way {
    let again = match qemu {
        Some(version) if version >= QEMU_MILLISECONDS => "reconnect-ms=1000",
        _ => "reconnect=1",
    };
    let id = id(disk);
    let args = words(&[
        (
            "-object",
            "memory-backend-memfd,id=hearth-mem,size=4G,share=on".to_owned(),
        ),
        ("-machine", "memory-backend=hearth-mem".to_owned()),
        (
            "-chardev",
            format!("socket,id={id},path={},{again}", value(socket)),
        ),
        ("-device", format!("vhost-user-blk-pci,chardev={id}")),
    ]);
    Way {
        over: "vhost-user",
        when: FAST,
        text: lines(&args),
        args,
        notes: [SHARED, NEWER, RIGHTS].map(str::to_owned).into(),
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
        notes: vec![RIGHTS.to_owned()],
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
        notes: [
            MEMORY,
            "needs libvirt 7.1 or newer; queues='4' on <driver> gives four processors a queue each",
            RIGHTS,
        ]
        .map(str::to_owned)
        .into(),
    }
}

/// Shows what libvirt would start QEMU with, before it does.
const CHECK: &str = "check it afterwards: virsh domxml-to-native qemu-argv --domain DOMAIN | grep -o 'reconnect-delay.*'";

fn libvirt_nbd(socket: &Path, disk: &str, read_only: bool, libvirt: Option<Version>) -> Vec<Way> {
    match libvirt {
        Some(version) if version >= LIBVIRT_RECONNECTS => {
            let mut way = libvirt_disk(socket, disk, read_only, true);
            way.notes = vec![CHECK.to_owned(), RIGHTS.to_owned()];
            vec![way]
        }
        found => {
            let found = match found {
                Some(version) => format!("libvirt {version} is installed, which"),
                None => format!(
                    "no libvirt was found here to ask for its version; one before {LIBVIRT_RECONNECTS}"
                ),
            };
            let why = format!(
                "{found} drops <reconnect delay=…> of NBD disks without a word: a restart of Hearth would \
                 then give the guest I/O errors"
            );
            vec![
                libvirt_commandline(socket, disk, read_only, &why),
                libvirt_stop(socket, disk, read_only, &why),
            ]
        }
    }
}

/// Past libvirt, which has no word for what QEMU can do.
fn libvirt_commandline(socket: &Path, disk: &str, read_only: bool, why: &str) -> Way {
    let node_text = xml(&nbd_node(socket, disk, read_only));
    let device = xml(&format!(
        "virtio-blk-pci,drive={},addr={FREE_SLOT}",
        node(disk)
    ));
    let text = format!(
        "<qemu:commandline>\n  <qemu:arg value='-blockdev'/>\n  <qemu:arg value='{node_text}'/>\n  \
         <qemu:arg value='-device'/>\n  <qemu:arg value='{device}'/>\n</qemu:commandline>"
    );
    Way {
        over: "nbd",
        when: "past libvirt, so that a restart of Hearth is a pause for the guest",
        text,
        args: Vec::new(),
        notes: vec![
            why.to_owned(),
            "put it before </domain>, and make the first line <domain type='kvm' \
             xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>"
                .to_owned(),
            format!(
                "addr={FREE_SLOT} is a slot libvirt leaves free on q35 and pc; a second such disk takes \
                 addr=0x1d; add ,bootindex=1 to boot from it"
            ),
            CHECK.to_owned(),
            RIGHTS.to_owned(),
        ],
    }
}

/// An ordinary disk of libvirt's, whose guest is paused rather than told of an error.
fn libvirt_stop(socket: &Path, disk: &str, read_only: bool, why: &str) -> Way {
    let mut way = libvirt_disk(socket, disk, read_only, false);
    way.when = "an ordinary libvirt disk (snapshots, block jobs): a restart of Hearth pauses the guest until `virsh resume`";
    way.notes = vec![
        why.to_owned(),
        "check it afterwards: virsh dumpxml DOMAIN | grep error_policy".to_owned(),
        RIGHTS.to_owned(),
    ];
    way
}

fn libvirt_disk(socket: &Path, disk: &str, read_only: bool, reconnects: bool) -> Way {
    let path = xml(&socket.display().to_string());
    let (discard, end) = if read_only {
        ("", "\n  <readonly/>")
    } else {
        (" discard='unmap'", "")
    };
    let (policy, reconnect) = if reconnects {
        ("", format!("\n    <reconnect delay='{RECONNECT_DELAY}'/>"))
    } else {
        (" error_policy='stop' rerror_policy='stop'", String::new())
    };
    Way {
        over: "nbd",
        when: PLAIN,
        text: format!(
            "<disk type='network' device='disk'>\n  <driver name='qemu' type='raw' cache='none'{policy}{discard}/>\n  \
             <source protocol='nbd' name='{disk}'>\n    <host transport='unix' socket='{path}'/>{reconnect}\n  \
             </source>\n  <target dev='vda' bus='virtio'/>{end}\n</disk>"
        ),
        args: Vec::new(),
        notes: Vec::new(),
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
        notes: [
            "put the machine's number for VMID; arguments it has already must be repeated",
            "Proxmox does not know such a disk: its snapshots, backup and migration leave it out",
        ]
        .map(str::to_owned)
        .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Installed = Installed {
        libvirt: Some(Version {
            major: 10,
            minor: 0,
        }),
        qemu: Some(Version { major: 9, minor: 2 }),
    };

    #[test]
    fn what_is_printed_works_with_what_is_installed() {
        let libvirt = |installed| {
            let over = Some(Over::Nbd);
            ways(
                Hypervisor::Libvirt,
                over,
                Path::new("/r"),
                "d",
                false,
                installed,
            )
            .unwrap()
        };
        let new = libvirt(NEW);
        assert_eq!(new.len(), 1);
        assert!(new[0].text.contains("<reconnect delay='60'/>"));
        let debian12 = Installed {
            libvirt: Some(Version { major: 9, minor: 0 }),
            qemu: None,
        };
        for installed in [debian12, Installed::default()] {
            let old = libvirt(installed);
            assert!(old.iter().all(|w| !w.text.contains("<reconnect")));
            assert!(old[0].text.contains("reconnect-delay=60"));
            assert!(old[0].text.contains("addr=0x1e"));
            assert!(
                old[1]
                    .text
                    .contains("error_policy='stop' rerror_policy='stop'")
            );
            assert!(
                old.iter()
                    .all(|w| w.notes.iter().any(|n| n.starts_with("check it")))
            );
        }
        assert!(libvirt(debian12)[0].notes[0].contains("libvirt 9.0 is installed"));
        let qemu = |installed| {
            let over = Some(Over::VhostUser);
            let ways = ways(
                Hypervisor::Qemu,
                over,
                Path::new("/r"),
                "d",
                false,
                installed,
            );
            ways.unwrap().remove(0).text
        };
        assert!(qemu(NEW).contains("reconnect-ms=1000"));
        assert!(qemu(debian12).contains("reconnect=1"));
    }

    fn text(hypervisor: Hypervisor, over: Option<Over>, dir: &str, disk: &str) -> Vec<String> {
        ways(
            hypervisor,
            over,
            Path::new(dir),
            disk,
            false,
            Installed::default(),
        )
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
        let refused = ways(
            Hypervisor::Proxmox,
            vhost,
            Path::new("/r"),
            "d",
            false,
            Installed::default(),
        );
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
            ways(h, Some(Over::Nbd), Path::new("/r"), "d", true, NEW)
                .unwrap()
                .remove(0)
                .text
        };
        assert!(text(Hypervisor::Qemu).contains("read-only=on"));
        assert!(text(Hypervisor::Libvirt).contains("<readonly/>"));
    }
}
