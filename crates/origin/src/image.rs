//! Disk images and remote disks that QEMU can open: what was written, as a QEMU block device.
//!
//! Descriptions are built as JSON values, never as text, so that no name can become an option
//! or a command.

use crate::chain::Chain;
use hearth_nbd_client::uri::decode;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hearth_fault::Fault;

/// Image formats. `vpc` is QEMU's name of `vhd`.
const FORMATS: [&str; 7] = ["qcow2", "vmdk", "vhdx", "vhd", "vpc", "vdi", "raw"];

/// Requests at once to QEMU's driver for the web: with QEMU 7.2 it hangs for good now and then when
/// several are under way (`qemu-img bench -d 32` alone shows it).
const WEB_REQUESTS: usize = 1;

/// Something QEMU opens.
#[derive(Clone, Debug, PartialEq)]
pub enum Image {
    /// An image in a file or block device of this host.
    Local {
        /// One of [`FORMATS`].
        format: String,
        /// Absolute path.
        path: PathBuf,
    },
    /// A raw disk somewhere else: what QEMU calls a protocol.
    Remote {
        /// How it was written, for messages.
        name: String,
        /// QEMU's description of it.
        node: Value,
        /// It can only be read.
        read_only: bool,
    },
}

/// Why a description was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ImageError {
    /// No such form.
    Form {
        /// What was written.
        given: String,
        /// What should have been.
        form: &'static str,
    },
    /// A relative path.
    Relative(PathBuf),
    /// A password.
    Password(String),
}

impl ImageError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            ImageError::Form { given, form } => Fault::new(
                format!("\"{given}\" is not understood"),
                format!("write {form}"),
            ),
            ImageError::Relative(path) => Fault::new(
                format!("the image's path {} is relative", path.display()),
                "give an absolute path",
            ),
            ImageError::Password(scheme) => Fault::new(
                format!(
                    "\"{scheme}:\" origins with a password in them are not accepted, because everybody on the host could read it"
                ),
                "set up access without, or attach the device to the host and use it as a block device",
            ),
        }
    }
}

impl Image {
    /// Reads what stands before and behind the first colon; `None` if it is no image's scheme.
    pub fn parse(scheme: &str, rest: &str) -> Option<Result<Image, ImageError>> {
        if FORMATS.contains(&scheme) {
            return Some(local(scheme, rest));
        }
        let node = match scheme {
            "https" | "http" => https(scheme, rest),
            "ssh" => ssh(rest),
            "nfs" => nfs(rest),
            "iscsi" => iscsi(rest),
            "rbd" => rbd(rest),
            _ => return None,
        };
        Some(node.map(|node| Image::Remote {
            name: format!("{scheme}:{rest}"),
            read_only: matches!(scheme, "https" | "http") || node.get("snapshot").is_some(),
            node,
        }))
    }

    /// True if `scheme` is one of an image whose rest is a path on this host.
    pub fn is_path(scheme: &str) -> bool {
        FORMATS.contains(&scheme)
    }

    /// What to call it.
    pub fn name(&self) -> String {
        match self {
            Image::Local { format, path } => format!("{format}:{}", path.display()),
            Image::Remote { name, .. } => name.clone(),
        }
    }

    /// The file of this host, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Image::Local { path, .. } => Some(path),
            Image::Remote { .. } => None,
        }
    }

    /// True if it can only be read.
    pub fn is_read_only(&self) -> bool {
        matches!(
            self,
            Image::Remote {
                read_only: true,
                ..
            }
        )
    }

    /// True if it is on another host. QEMU's drivers for such may lose what is behind them and from
    /// then on answer everything with errors: the one for ssh has one session and no other, over HTTP a
    /// request that fails is not repeated, and librbd keeps what state it has got into. An error is
    /// then worth another process. (libiscsi and libnfs connect again by themselves, mostly.)
    pub fn is_remote(&self) -> bool {
        matches!(self, Image::Remote { .. })
    }

    /// True if its storage shuts out clients on purpose and says so: Ceph's blocklist.
    pub fn may_shut_out(&self) -> bool {
        matches!(self, Image::Remote { node, .. } if node["driver"] == "rbd")
    }

    /// Requests QEMU can bear at once.
    pub fn in_flight_max(&self) -> usize {
        match self {
            Image::Remote { node, .. }
                if matches!(node["driver"].as_str(), Some("http" | "https")) =>
            {
                WEB_REQUESTS
            }
            _ => usize::MAX,
        }
    }

    /// QEMU's description of the block device, with node name `disk`.
    ///
    /// The cache of this host is passed by where the file allows it, for what is cached twice is
    /// a waste; QEMU's own lock of image files stays on. `chain`: the files below the image.
    pub fn blockdev(&self, read_only: bool, chain: &Chain) -> Value {
        let mut disk = match self {
            Image::Local { format, path } => {
                let file = |path: &Path, read_only| {
                    let direct = takes_direct(path);
                    let driver = if is_device(path) {
                        "host_device"
                    } else {
                        "file"
                    };
                    let file = json!({
                        "driver": driver,
                        "filename": path.to_string_lossy(),
                        "aio": if direct { "native" } else { "threads" },
                    });
                    common(file, read_only, direct)
                };
                let node = |format: &str, path: &Path, read_only| {
                    let driver = if format == "vhd" { "vpc" } else { format };
                    let node = json!({ "driver": driver, "file": file(path, read_only) });
                    common(node, read_only, takes_direct(path))
                };
                chain.blockdev(format, path, read_only, &node, &file)
            }
            Image::Remote { node, .. } => {
                let file = common(node.clone(), read_only, false);
                let node = json!({ "driver": "raw", "file": file });
                common(node, read_only, false)
            }
        };
        disk["node-name"] = json!("disk");
        disk
    }
}

/// A node with the options that all have.
fn common(mut node: Value, read_only: bool, direct: bool) -> Value {
    for (key, value) in [
        ("read-only", json!(read_only)),
        ("discard", json!("unmap")),
        ("cache", json!({ "direct": direct })),
    ] {
        node[key] = value;
    }
    node
}

fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device())
}

/// True if the file may be opened for direct I/O.
fn takes_direct(path: &Path) -> bool {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
        .is_ok()
}

fn local(format: &str, path: &str) -> Result<Image, ImageError> {
    let path = PathBuf::from(path);
    if !path.is_absolute() {
        return Err(ImageError::Relative(path));
    }
    Ok(Image::Local {
        format: format.to_owned(),
        path,
    })
}

/// An address of the form `//[user@]host[:port]/path`.
struct Place {
    user: Option<String>,
    host: String,
    port: Option<u16>,
    path: String,
}

fn place(scheme: &str, rest: &str, form: &'static str) -> Result<Place, ImageError> {
    let bad = || ImageError::Form {
        given: format!("{scheme}:{rest}"),
        form,
    };
    let decoded = |text: &str| decode(text).map_err(|_| bad());
    let (authority, path) = rest
        .strip_prefix("//")
        .and_then(|r| r.split_once('/'))
        .ok_or_else(bad)?;
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    };
    // iscsi has user%password, everybody else user:password.
    if user.is_some_and(|u| u.contains([':', '%'])) {
        return Err(ImageError::Password(scheme.to_owned()));
    }
    let (host, port) = match host.strip_prefix('[').and_then(|h| h.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => match host.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (host, None),
        },
    };
    let port = port.map(|p| p.parse().map_err(|_| bad())).transpose()?;
    if host.is_empty() || path.is_empty() {
        return Err(bad());
    }
    Ok(Place {
        user: user.map(str::to_owned),
        host: decoded(host)?,
        port,
        path: decoded(path)?,
    })
}

fn https(scheme: &str, rest: &str) -> Result<Value, ImageError> {
    // Only checked: QEMU wants the address as it is.
    place(scheme, rest, "https://HOST/PATH")?;
    Ok(json!({ "driver": scheme, "url": format!("{scheme}:{rest}") }))
}

fn ssh(rest: &str) -> Result<Value, ImageError> {
    let at = place("ssh", rest, "ssh://[USER@]HOST[:PORT]/PATH")?;
    let mut node = json!({
        "driver": "ssh",
        "server": { "host": at.host, "port": at.port.unwrap_or(22).to_string() },
        "path": format!("/{}", at.path),
        // Of a host nobody knows, anybody could play the part.
        "host-key-check": { "mode": "known_hosts" },
    });
    if let Some(user) = at.user {
        node["user"] = json!(user);
    }
    Ok(node)
}

fn nfs(rest: &str) -> Result<Value, ImageError> {
    let at = place("nfs", rest, "nfs://HOST/PATH")?;
    Ok(json!({
        "driver": "nfs",
        "server": { "type": "inet", "host": at.host },
        "path": format!("/{}", at.path),
    }))
}

fn iscsi(rest: &str) -> Result<Value, ImageError> {
    let form = "iscsi://HOST[:PORT]/TARGET/LUN";
    let at = place("iscsi", rest, form)?;
    let (target, lun) = at
        .path
        .rsplit_once('/')
        .and_then(|(target, lun)| Some((target, lun.parse::<u16>().ok()?)))
        .ok_or_else(|| ImageError::Form {
            given: format!("iscsi:{rest}"),
            form,
        })?;
    let host = if at.host.contains(':') {
        format!("[{}]", at.host)
    } else {
        at.host
    };
    Ok(json!({
        "driver": "iscsi",
        "transport": "tcp",
        "portal": format!("{host}:{}", at.port.unwrap_or(3260)),
        "target": target,
        "lun": lun,
    }))
}

fn rbd(rest: &str) -> Result<Value, ImageError> {
    let bad = || ImageError::Form {
        given: format!("rbd:{rest}"),
        form: "rbd:POOL/IMAGE[@SNAPSHOT][:id=USER][:conf=PATH]",
    };
    let mut parts = rest.split(':');
    let name = parts.next().unwrap_or_default();
    let (pool, image) = name.split_once('/').ok_or_else(bad)?;
    let (image, snapshot) = match image.split_once('@') {
        Some((image, snapshot)) => (image, Some(snapshot)),
        None => (image, None),
    };
    if pool.is_empty() || image.is_empty() || image.contains('/') {
        return Err(bad());
    }
    let mut node = json!({ "driver": "rbd", "pool": pool, "image": image });
    if let Some(snapshot) = snapshot {
        node["snapshot"] = json!(snapshot);
    }
    for part in parts {
        match part.split_once('=') {
            Some(("id", user)) => node["user"] = json!(user),
            Some(("conf", path)) => node["conf"] = json!(path),
            _ => return Err(bad()),
        }
    }
    Ok(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Image, ImageError> {
        let (scheme, rest) = text.split_once(':').unwrap();
        Image::parse(scheme, rest).unwrap()
    }

    fn file(text: &str) -> Value {
        parse(text).unwrap().blockdev(false, &Chain::default())["file"].clone()
    }

    #[test]
    fn local_images() {
        let dir = tempfile::tempdir().unwrap();
        // What would be an option or a command elsewhere is a name here.
        let path = dir.path().join("a,b\",\"read-only\":true $(x)");
        std::fs::write(&path, b"").unwrap();
        let node = parse(&format!("qcow2:{}", path.display()))
            .unwrap()
            .blockdev(true, &Chain::default());
        assert_eq!(node["driver"], "qcow2");
        for format in ["vhd", "vpc"] {
            let vhd = parse(&format!("{format}:{}", path.display())).unwrap();
            assert_eq!(vhd.blockdev(true, &Chain::default())["driver"], "vpc");
        }
        assert_eq!(node["file"]["driver"], "file");
        assert_eq!(node["file"]["filename"], path.to_str().unwrap());
        assert_eq!(node["read-only"], true);
        // Whatever its header says, QEMU follows nothing.
        assert_eq!(node["backing"], Value::Null);
        assert!(node.as_object().unwrap().contains_key("backing"));
        assert_eq!(node["file"]["discard"], "unmap");
        assert!(matches!(parse("vmdk:x"), Err(ImageError::Relative(_))));
        assert!(Image::parse("zip", "/x").is_none());
    }

    #[test]
    fn remote_disks() {
        assert_eq!(
            file("iscsi://san:99/iqn.2001-04.com.example:disk/3")["portal"],
            "san:99"
        );
        let iscsi = file("iscsi://[fe80::1]/iqn.x:y/0");
        assert_eq!(iscsi["portal"], "[fe80::1]:3260");
        assert_eq!(
            (&iscsi["target"], &iscsi["lun"]),
            (&json!("iqn.x:y"), &json!(0))
        );
        let ssh = file("ssh://me@h/srv/a%20b.img");
        assert_eq!(
            (&ssh["user"], &ssh["path"]),
            (&json!("me"), &json!("/srv/a b.img"))
        );
        assert_eq!(ssh["server"]["port"], "22");
        assert_eq!(file("nfs://h/e/x")["path"], "/e/x");
        assert_eq!(file("https://h/x?y")["url"], "https://h/x?y");
        for text in ["https://h/x", "rbd:p/i@snapshot"] {
            assert!(parse(text).unwrap().is_read_only(), "{text}");
        }
        assert!(!parse("rbd:p/i").unwrap().is_read_only());
        for (text, remote, shuts_out) in [
            ("https://h/x", true, false),
            ("ssh://h/x", true, false),
            ("nfs://h/x", true, false),
            ("iscsi://h/t/0", true, false),
            ("rbd:p/i", true, true),
            ("raw:/x", false, false),
        ] {
            let image = parse(text).unwrap();
            assert_eq!(image.is_remote(), remote, "{text}");
            assert_eq!(image.may_shut_out(), shuts_out, "{text}");
        }
        for (text, most) in [
            ("https://h/x", 1),
            ("http://h/x", 1),
            ("ssh://h/x", usize::MAX),
        ] {
            assert_eq!(parse(text).unwrap().in_flight_max(), most, "{text}");
        }
        let rbd = file("rbd:p/i@s:id=u:conf=/etc/c");
        assert_eq!(rbd["snapshot"], "s");
        assert_eq!(
            (&rbd["user"], &rbd["conf"]),
            (&json!("u"), &json!("/etc/c"))
        );
    }

    #[test]
    fn refused() {
        for text in [
            "ssh:host",
            "nfs://h",
            "nfs:///x",
            "iscsi://h/t",
            "iscsi://h/t/x",
            "rbd:x",
            "rbd:/x",
            "rbd:p/i:key=secret",
            "ssh://h:x/y",
        ] {
            assert!(
                matches!(parse(text), Err(ImageError::Form { .. })),
                "{text}"
            );
        }
        for text in ["iscsi://u%25p@h/t/0", "ssh://u:p@h/x", "https://u:p@h/x"] {
            assert!(
                matches!(parse(text), Err(ImageError::Password(_))),
                "{text}"
            );
        }
    }
}
