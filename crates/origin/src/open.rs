//! From what was written to a device.

use crate::chain::{Backing, Chain, ChainError, files_of};
use crate::image::{Image, ImageError};
use crate::imaged::ImageOrigin;
use crate::legs;
use hearth_io::file::{claim_for_other, claim_unchanging, write_protection};
use hearth_io::spec::OpenSpecError;
use hearth_io::{BlockFile, Claim, Device, OpenMode, OriginSpec, Source};
use hearth_nbd_client::{Address, NbdOrigin, Options, Uri, UriError};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_fault::Fault;

/// How long [`is_there`] waits for a host.
const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// How to open an origin.
#[derive(Clone, Debug)]
pub struct How {
    /// Never write.
    pub read_only: bool,
    /// How long operations wait for a server that is gone before they fail.
    pub timeout: Duration,
    /// Directory for the sockets of image processes, of ours alone.
    pub images: PathBuf,
    /// What may lie below an image.
    pub backing: Backing,
}

/// Why an origin could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum OpenError {
    /// A file, or a wrapper around anything.
    #[error(transparent)]
    File(#[from] OpenSpecError),
    /// A path that depends on where one stands.
    Relative(PathBuf),
    /// A scheme nobody knows.
    Scheme(String),
    /// An NBD address that is none.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// An image's description that is none.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An image's file is not there, or may not be read.
    Missing {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// What lies below an image.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// It can only be read.
    ReadOnly {
        /// Its name.
        name: String,
        /// The reason.
        why: &'static str,
    },
    /// An NBD server.
    #[error(transparent)]
    Nbd(#[from] hearth_nbd_client::OpenError),
    /// A mirror that is none.
    Mirror(String),
}

impl OpenError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            OpenError::File(e) => e.fault(),
            OpenError::Relative(path) => Fault::new(
                format!("the origin's path {} is relative", path.display()),
                "give an absolute path",
            ),
            OpenError::Scheme(scheme) => Fault::new(
                format!("\"{scheme}:\" is no kind of origin"),
                format!(
                    "write a path (file:{scheme}:… if it is the name of a file), nbd://HOST/EXPORT, nbd+unix:///EXPORT?socket=PATH, or qcow2:, vmdk:, vhdx:, vhd:, vdi: or raw: and the path of an image; docs/origins.md has all"
                ),
            ),
            OpenError::Uri(e) => e.fault(),
            OpenError::Image(e) => e.fault(),
            OpenError::Missing { path, source } => Fault::new(
                format!("the image {} cannot be opened: {source}", path.display()),
                "check that it exists and that the daemon's user may read and write it",
            ),
            OpenError::Chain(e) => e.fault(),
            OpenError::ReadOnly { name, why } => Fault::new(
                format!("{name} can only be read: {why}"),
                "make it writable, or add the disk with --read-only",
            ),
            OpenError::Nbd(e) => e.fault(),
            OpenError::Mirror(why) => Fault::new(
                format!("the mirror is not understood: {why}"),
                "name each leg with --mirror, at least two and at most 8",
            ),
        }
    }
}

/// What a source is, once its scheme is understood.
pub(crate) enum Kind {
    File(PathBuf),
    Nbd(Uri),
    Image(Image),
    Mirror(Vec<OriginSpec>),
    /// A disk that has none: what stands there is a name.
    Nowhere,
}

/// The scheme of what stands for the origin of a disk that lives on flash.
pub const FLASH: &str = "flash";

pub(crate) fn kind(source: &Source) -> Result<Kind, OpenError> {
    match source {
        Source::File(path) if path.is_absolute() => Ok(Kind::File(path.clone())),
        Source::File(path) => Err(OpenError::Relative(path.clone())),
        Source::Other { scheme, rest } => match scheme.as_str() {
            legs::MIRROR => {
                let legs = legs::read(rest)?;
                legs.iter().try_for_each(check)?;
                Ok(Kind::Mirror(legs))
            }
            FLASH => Ok(Kind::Nowhere),
            s if s.starts_with("nbd") => Ok(Kind::Nbd(Uri::parse(scheme, rest)?)),
            _ => match Image::parse(scheme, rest) {
                Some(image) => Ok(Kind::Image(image?)),
                None => Err(OpenError::Scheme(scheme.clone())),
            },
        },
    }
}

/// True if `FORMAT:PATH` is an image on this host.
pub fn is_image_format(format: &str) -> bool {
    Image::is_path(format)
}

/// Says what is wrong with a spec's form, without opening anything.
pub fn check(spec: &OriginSpec) -> Result<(), OpenError> {
    kind(&spec.source).map(drop)
}

/// Says whether a spec names something that can only be read, without opening anything.
pub fn check_writable(spec: &OriginSpec) -> Result<(), OpenError> {
    match kind(&spec.source)? {
        Kind::Image(image) if image.is_read_only() => Err(read_only(&image)),
        Kind::Mirror(legs) => legs.iter().try_for_each(check_writable),
        _ => Ok(()),
    }
}

/// Opens what a spec names. Blocks while a server is connected to.
pub fn open(spec: &OriginSpec, how: &How) -> Result<Device, OpenError> {
    let device = match kind(&spec.source)? {
        Kind::File(path) => {
            if !how.read_only {
                refuse_protected(&path, &path.display())?;
            }
            return Ok(spec.open(OpenMode {
                read_only: how.read_only,
                unlocked: false,
            })?);
        }
        Kind::Nbd(uri) => {
            let options = Options {
                export: uri.export.clone(),
                read_only: how.read_only,
                timeout: how.timeout,
                errors_are_losses: false,
                shutdown_is_fencing: false,
                in_flight_max: usize::MAX,
            };
            Device::remote(Arc::new(NbdOrigin::open(Arc::new(uri), options)?))
        }
        Kind::Mirror(_) => return Err(OpenError::Mirror("its legs are opened one by one".into())),
        // Whoever has a disk that lives on flash knows its size, and opens nothing.
        Kind::Nowhere => return Err(OpenError::Scheme(FLASH.to_owned())),
        Kind::Image(image) if image.is_read_only() && !how.read_only => {
            return Err(read_only(&image));
        }
        Kind::Image(image) => {
            // QEMU would say it, too, but only after a process was started for it.
            if let Some(path) = image.path() {
                readable(path).map_err(|source| OpenError::Missing {
                    path: path.to_owned(),
                    source,
                })?;
            }
            // QEMU locks the image itself, but does not say who has it, nor look at what the image
            // lies on.
            let mut claims = Vec::new();
            if let Some(path) = image.path() {
                if !how.read_only {
                    refuse_protected(path, &image.name())?;
                }
                claims.push(claim(path, how.read_only)?);
            }
            let rules = &how.backing;
            let chain = match &image {
                Image::Local { format, path } => Chain::resolve(format, path, rules)?,
                Image::Remote { .. } => Chain::default(),
            };
            if chain.write_once && !how.read_only {
                return Err(OpenError::ReadOnly {
                    name: image.name(),
                    why: "its data is compressed (streamOptimized), and no block of it can be written twice",
                });
            }
            // What it is written through below the image is written like the image. Bases are not, but
            // QEMU lets others write them.
            for (path, written) in files_of(&chain.text()) {
                if written {
                    if !how.read_only {
                        refuse_protected(&path, &image.name())?;
                    }
                    claims.push(claim(&path, how.read_only)?);
                } else if rules.hold_bases {
                    claims.push(claim_unchanging(&path).map_err(OpenSpecError::Open)?);
                }
            }
            let origin = ImageOrigin::open(
                &image,
                (chain, rules),
                &how.images,
                how.read_only,
                how.timeout,
            )?;
            Device::remote(Arc::new(origin)).holding(claims)
        }
    };
    Ok(spec.wrap(device)?)
}

fn read_only(image: &Image) -> OpenError {
    OpenError::ReadOnly {
        name: image.name(),
        why: "what it names is read-only",
    }
}

/// Refuses a file or device that the kernel does not let us write. Otherwise the first write back would
/// detect it, after the guest was answered.
fn refuse_protected(path: &Path, name: &dyn std::fmt::Display) -> Result<(), OpenError> {
    match write_protection(path) {
        Some(why) => Err(OpenError::ReadOnly {
            name: name.to_string(),
            why,
        }),
        None => Ok(()),
    }
}

fn claim(path: &Path, read_only: bool) -> Result<Claim, OpenError> {
    Ok(claim_for_other(path, read_only).map_err(OpenSpecError::Open)?)
}

/// What lies below the image a spec names, a line for each file; nothing for what is no image.
/// Opens and reads the files' headers; blocks.
pub fn chain(spec: &OriginSpec, rules: &Backing) -> Result<Vec<String>, OpenError> {
    match kind(&spec.source)? {
        Kind::Image(Image::Local { format, path }) => {
            readable(&path).map_err(|source| OpenError::Missing {
                path: path.clone(),
                source,
            })?;
            Ok(Chain::resolve(&format, &path, rules)?.text())
        }
        Kind::Mirror(legs) => {
            let chains: Result<Vec<_>, _> = legs.iter().map(|leg| chain(leg, rules)).collect();
            Ok(chains?.concat())
        }
        _ => Ok(Vec::new()),
    }
}

/// True if what a spec names may have files below it.
pub fn may_have_chain(spec: &OriginSpec) -> bool {
    matches!(&spec.source, Source::Other { scheme, .. } if matches!(scheme.as_str(), "qcow2" | "vmdk"))
}

fn readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    // A named pipe must not keep us waiting for somebody to write into it.
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_dir() {
        return Err(std::io::ErrorKind::IsADirectory.into());
    }
    Ok(())
}

/// True if what a spec names seems to be there, with at least `size` bytes where that can be
/// seen from outside. Looks only; takes no lock.
pub fn is_there(spec: &OriginSpec, size: u64) -> bool {
    let look = OpenMode {
        read_only: true,
        unlocked: true,
    };
    match kind(&spec.source) {
        Ok(Kind::File(path)) => BlockFile::open(path, look).is_ok_and(|f| f.size() >= size),
        Ok(Kind::Nbd(uri)) => match &uri.address {
            Address::Unix(path) => UnixStream::connect(path).is_ok(),
            Address::Tcp { host, port } => {
                (host.as_str(), *port)
                    .to_socket_addrs()
                    .is_ok_and(|mut all| {
                        all.any(|a| TcpStream::connect_timeout(&a, LOOK_LIMIT).is_ok())
                    })
            }
        },
        // Whether it will open, only opening it can tell.
        Ok(Kind::Image(image)) => image.path().is_none_or(Path::exists),
        Ok(Kind::Mirror(legs)) => legs.iter().any(|leg| is_there(leg, size)),
        Ok(Kind::Nowhere) => true,
        Err(_) => false,
    }
}

/// The spec with its path as the file is called, if there is none called as written, and one if `%25` and the like are decoded
/// as in an address. What is called as written comes first.
pub fn decoded(spec: &OriginSpec) -> Option<OriginSpec> {
    let real = |path: &Path| {
        let decoded = hearth_nbd_client::uri::decode(path.to_str()?).ok()?;
        let is_there = |path: &Path| path.symlink_metadata().is_ok();
        (!is_there(path) && is_there(Path::new(&decoded))).then_some(decoded)
    };
    let source = match &spec.source {
        Source::File(path) => Source::File(real(path)?.into()),
        Source::Other { scheme, rest } if Image::is_path(scheme) => Source::Other {
            scheme: scheme.clone(),
            rest: real(Path::new(rest))?,
        },
        Source::Other { .. } => return None,
    };
    Some(OriginSpec {
        source,
        ..spec.clone()
    })
}

/// Makes the path in a spec absolute, if there is one: it is relative to whoever wrote it.
pub fn absolute(spec: &mut OriginSpec) -> std::io::Result<()> {
    match &mut spec.source {
        Source::File(path) => *path = std::path::absolute(&*path)?,
        Source::Other { scheme, rest } if Image::is_path(scheme) => {
            let path = std::path::absolute(&*rest)?;
            // Built of what was text, in a directory that may be none.
            *rest = path
                .into_os_string()
                .into_string()
                .map_err(|_| std::io::Error::other("the current directory's name is no text"))?;
        }
        Source::Other { scheme, rest } if scheme == legs::MIRROR => {
            let mut all = legs::read(rest).map_err(|e| std::io::Error::other(e.to_string()))?;
            all.iter_mut().try_for_each(absolute)?;
            *rest = legs::write(&all);
        }
        Source::Other { .. } => {}
    }
    Ok(())
}

/// The unix socket a spec names, if its origin is an NBD server behind one.
pub fn socket(spec: &OriginSpec) -> Option<PathBuf> {
    match kind(&spec.source).ok()? {
        Kind::Nbd(Uri {
            address: Address::Unix(path),
            ..
        }) => Some(path),
        _ => None,
    }
}

/// The file or block device of this host that a spec names, if it names one.
pub fn local_path(spec: &OriginSpec) -> Option<PathBuf> {
    match kind(&spec.source).ok()? {
        Kind::File(path) => Some(path),
        Kind::Nbd(_) | Kind::Mirror(_) | Kind::Nowhere => None,
        Kind::Image(image) => image.path().map(Path::to_owned),
    }
}
