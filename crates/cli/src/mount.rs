//! `hearth attach-help` for a datastore: what to type to mount it.
//!
//! A mount that lacks a word works until something breaks: without `hard` a restart of the daemon becomes an I/O error,
//! without `nolock`, where this host serves no locks, locks fail. So the words are printed, for this
//! datastore's address and port.

use std::net::SocketAddr;

use hearth_daemon::api::datastores::DatastoreInfo;
use hearth_daemon::client::{Client, datastore_path};
use hearth_daemon::error::Error;
use serde::Serialize;

use crate::args::{Global, Hypervisor};
use crate::table::plain;
use crate::{Outcome, print_json};

/// Where clients look if nobody tells them.
const PORT: u16 = 2049;

#[derive(Debug, Serialize)]
struct Help {
    datastore: String,
    #[serde(rename = "for")]
    hypervisor: &'static str,
    /// What to paste.
    text: String,
    /// What else to know.
    notes: Vec<String>,
}

pub fn run(global: &Global, name: &str, hypervisor: Hypervisor) -> Outcome {
    let info: DatastoreInfo = Client::new(&global.dir()).get(&datastore_path(name, ""))?;
    let help = help(&info, hypervisor)?;
    if global.json {
        return print_json(&help);
    }
    for note in &help.notes {
        println!("# - {}", plain(note));
    }
    println!("{}", plain_lines(&help.text));
    Ok(())
}

/// What to type to mount a datastore, as `--json` prints it.
pub fn of_datastore(
    client: &Client,
    name: &str,
    hypervisor: Hypervisor,
) -> Result<serde_json::Value, Error> {
    let info: DatastoreInfo = client.get(&datastore_path(name, ""))?;
    serde_json::to_value(help(&info, hypervisor)?)
        .map_err(|e| Error::internal(format!("cannot print an answer as JSON: {e}")))
}

fn plain_lines(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(plain).collect();
    lines.join("\n")
}

fn help(info: &DatastoreInfo, hypervisor: Hypervisor) -> Result<Help, Error> {
    let at: SocketAddr = info.listen.parse().map_err(|_| {
        Error::internal(format!("the daemon says it listens on \"{}\"", info.listen))
    })?;
    let mut notes = Vec::new();
    let host = if at.ip().is_unspecified() {
        notes.push(
            "put an address of this host in the place of ADDRESS, on every host the same"
                .to_owned(),
        );
        "ADDRESS".to_owned()
    } else {
        at.ip().to_string()
    };
    let (name, path, port) = (&info.name, &info.path, at.port());
    let far = !matches!(hypervisor, Hypervisor::Linux | Hypervisor::Proxmox);
    if at.ip().is_loopback() && far {
        notes.push(format!(
            "it listens on {host} only: `hearth datastore set {name} --listen ADDRESS` first"
        ));
    }
    if !info
        .clients
        .iter()
        .any(|client| client.root && client.write)
    {
        notes.push(format!(
            "no client may be root there, which hypervisors need: `hearth datastore set {name} --client HOST=rw,no_root_squash`"
        ));
    }
    let lock = if info.locks { "" } else { "nolock," };
    let options =
        format!("vers=3,proto=tcp,mountproto=tcp,hard,{lock}port={port},mountport={port}");
    let text = match hypervisor {
        Hypervisor::Esxi => {
            notes.push("give every ESXi host the same address, letter for letter: the datastore's identity is made of it".to_owned());
            if !info.portmapper || port != PORT {
                notes.push("ESXi asks a portmapper on port 111 for the port, and none tells it: see `hearth datastore show`".to_owned());
            }
            format!("esxcli storage nfs add --host={host} --share={path} --volume-name={name}")
        }
        Hypervisor::Linux => {
            notes.push("for /etc/fstab: the same words, with _netdev among the options".to_owned());
            format!("mkdir -p /mnt/{name}\nmount -t nfs -o {options} {host}:{path} /mnt/{name}")
        }
        Hypervisor::Proxmox => {
            notes.push("Proxmox VE's own NFS storage asks a portmapper and takes no port; a directory that is a mount point does without".to_owned());
            format!(
                "mkdir -p /mnt/{name}\necho '{host}:{path} /mnt/{name} nfs {options},_netdev 0 0' >> /etc/fstab\nmount /mnt/{name}\npvesm add dir {name} --path /mnt/{name} --content images,iso,backup --is_mountpoint yes --shared 1"
            )
        }
        Hypervisor::Qemu | Hypervisor::Libvirt => {
            return Err(Error::invalid(
                format!("{name} is a datastore, which is mounted by the host"),
                "give --for linux, and use the files below the mount",
            ));
        }
    };
    Ok(Help {
        datastore: name.clone(),
        hypervisor: hypervisor.word(),
        text,
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::api::datastores::DatastoreClient;

    fn info(listen: &str, root: bool) -> DatastoreInfo {
        DatastoreInfo {
            name: "vms".to_owned(),
            directory: "/srv/vms".to_owned(),
            scrub: None,
            trees: Vec::new(),
            served: true,
            reason: None,
            remedy: None,
            notices: Vec::new(),
            two_writers: None,
            listen: listen.to_owned(),
            portmapper: true,
            locks: false,
            path: "/vms".to_owned(),
            clients: vec![DatastoreClient {
                root,
                ..DatastoreClient::new("192.0.2.9")
            }],
            used_by: Vec::new(),
            read_only: false,
            hold: false,
            rules: Vec::new(),
            disks: 0,
            open: 0,
            dirty: 0,
            flushing: false,
        }
    }

    #[test]
    fn what_is_printed_mounts_it() {
        let text = |listen: &str, hypervisor| help(&info(listen, true), hypervisor).unwrap();
        let esxi = text("192.0.2.1:2049", Hypervisor::Esxi);
        assert_eq!(
            esxi.text,
            "esxcli storage nfs add --host=192.0.2.1 --share=/vms --volume-name=vms"
        );
        assert_eq!(esxi.notes.len(), 1);
        let linux = text("127.0.0.1:7000", Hypervisor::Linux);
        assert!(
            linux
                .text
                .contains("port=7000,mountport=7000 127.0.0.1:/vms /mnt/vms")
        );
        assert!(
            text("0.0.0.0:2049", Hypervisor::Esxi)
                .text
                .contains("ADDRESS")
        );
        assert!(help(&info("127.0.0.1:2049", true), Hypervisor::Qemu).is_err());
    }

    #[test]
    fn nolock_is_printed_where_locks_are_not_served() {
        for hypervisor in [Hypervisor::Linux, Hypervisor::Proxmox] {
            let mut info = info("192.0.2.1:2049", true);
            assert!(help(&info, hypervisor).unwrap().text.contains(",nolock,"));
            info.locks = true;
            assert!(!help(&info, hypervisor).unwrap().text.contains("nolock"));
        }
    }

    #[test]
    fn what_would_not_work_is_said() {
        let notes = help(&info("127.0.0.1:2049", false), Hypervisor::Esxi)
            .unwrap()
            .notes;
        let notes = notes.concat();
        assert!(
            notes.contains("--listen") && notes.contains("=rw,no_root_squash"),
            "{notes}"
        );
    }
}
