//! What an origin holds, told before it becomes a disk.
//!
//! Who picks a file by its name may have picked another one than he means: an image in a format its name hides, a
//! disk of another host, a file that is empty. So the daemon, which is the one that can read it, says what it finds. It looks
//! and no more: no lock is taken, no program started, no server asked, nothing written. That somebody else uses it is
//! found when it is added.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use axum::Json;
use axum::extract::State;
use hearth_io::{BlockFile, OpenMode, OriginSpec, Source};
use hearth_origin::Backing;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::server::{Body, Control, Panel, Shared, change_at};
use super::types::{DiskInfo, ErrorBody};
use crate::error::{Error, Result};
use crate::{origin, spot};

/// Where a qcow2 has the size of its disk, a big-endian number.
const QCOW2_SIZE_AT: usize = 24;

/// An origin to look at.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OriginAsked {
    /// As for a new disk.
    pub origin: String,
}

/// What was found in an origin. Nothing of it was opened for anything but reading.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OriginFound {
    /// The origin as it is understood.
    pub origin: String,
    /// `file`, `device`, `image`, or `elsewhere` for what lies on a server, which was not asked.
    pub kind: String,
    /// Bytes of the disk it would be, if that can be told without opening it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Bytes it takes where it lies, if it is a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<u64>,
    /// Of an image, its format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// What its bytes begin or end with, in words: a partition table, a file system, an image; nothing if nothing is known there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holds: Option<String>,
    /// The origin to give instead for the disk in the image that the file is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instead: Option<String>,
    /// The disk of this pool that has it already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Why it would be refused as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<ErrorBody>,
}

/// A file that is read, whoever else uses it.
fn open(path: &Path) -> Result<BlockFile> {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    BlockFile::open(path, mode).map_err(|e| {
        Error::unavailable(
            format!("cannot look at {}: {e}", path.display()),
            "check that it is a file or a block device, and that the daemon's user may read it",
        )
    })
}

/// Looks at what lies at `path`: its size and what is in it.
fn look_at(path: &Path, found: &mut OriginFound) -> Result<BlockFile> {
    let file = open(path)?;
    if let Ok(meta) = std::fs::metadata(path)
        && meta.is_file()
    {
        found.stored = Some(meta.blocks().saturating_mul(512));
    }
    let mut read = |offset, data: &mut [u8]| file.read_at(offset, data);
    let known = hearth_format::identify(&mut read, file.size()).map_err(|e| {
        Error::unavailable(
            format!("cannot read {}: {e}", path.display()),
            "see the kernel's log",
        )
    })?;
    found.holds = known.as_ref().map(|known| known.what.clone());
    found.format = known
        .as_ref()
        .and_then(|known| known.image_format())
        .map(str::to_owned);
    Ok(file)
}

/// The size of the disk in a qcow2.
fn virtual_size(file: &BlockFile) -> Option<u64> {
    let mut head = vec![0; 4096];
    if file.size() < head.len() as u64 {
        return None;
    }
    file.read_at(0, &mut head).ok()?;
    let size = head.get(QCOW2_SIZE_AT..QCOW2_SIZE_AT + 8)?;
    Some(u64::from_be_bytes(size.try_into().ok()?))
}

/// What is found in an origin.
pub fn look(text: &str, flash: &[&Path]) -> Result<OriginFound> {
    let spec = origin::parse(text)?;
    let mut found = OriginFound {
        origin: spec.to_string(),
        ..OriginFound::default()
    };
    match &spec.source {
        Source::File(path) => {
            let file = look_at(path, &mut found)?;
            found.kind = if std::fs::metadata(path).is_ok_and(|m| m.is_file()) {
                "file".to_owned()
            } else {
                "device".to_owned()
            };
            found.size = Some(file.size());
            if let Some(format) = found.format.as_deref().filter(|_| !spec.raw_bytes)
                && hearth_origin::is_image_format(format)
            {
                found.instead = Some(format!("{format}:{}", path.display()));
            }
            let flash = flash.first().copied().unwrap_or(Path::new(""));
            if let Err(e) = origin::check_plain(&spec, flash) {
                found.refused = Some(e.into());
            } else if file.size() == 0 {
                found.refused = Some(ErrorBody {
                    error: format!("{} is empty", path.display()),
                    remedy: "give it its size first, for instance with `truncate -s 100G`"
                        .to_owned(),
                });
            }
        }
        Source::Other { scheme, .. } => {
            "elsewhere".clone_into(&mut found.kind);
            if let Some(path) = hearth_origin::local_path(&spec)
                && hearth_origin::is_image_format(scheme)
            {
                let file = look_at(&path, &mut found)?;
                "image".clone_into(&mut found.kind);
                if found.format.as_deref() == Some("qcow2") {
                    found.size = virtual_size(&file);
                }
                // Files that it names are not followed: what they are called is said.
                if let Err(e) = origin::chain(&spec, &Backing::default()) {
                    found.refused = Some(e.into());
                }
            }
        }
    }
    Ok(found)
}

/// The disk that lies on the same file.
fn used_by(spec: &OriginSpec, disks: &[DiskInfo]) -> Option<String> {
    let mine = hearth_origin::local_path(spec);
    let same = |text: &str| {
        let Ok(other) = text.parse::<OriginSpec>() else {
            return false;
        };
        match (&mine, hearth_origin::local_path(&other)) {
            (Some(a), Some(b)) => origin::is_same_file(a, &b),
            _ => other.source == spec.source,
        }
    };
    let has =
        |disk: &&DiskInfo| same(&disk.origin) || disk.legs.iter().any(|leg| same(&leg.origin));
    disks.iter().find(has).map(|disk| disk.name.clone())
}

/// Look at an origin, before it becomes a disk.
#[utoipa::path(post, path = "/v1/origins/look", tag = "disks", request_body = OriginAsked,
    responses((status = 200, body = OriginFound), (status = "default", body = ErrorBody)))]
async fn look_at_origin(
    State(panel): Shared,
    Body(asked): Body<OriginAsked>,
) -> Result<Json<OriginFound>> {
    let text = asked.origin.clone();
    let find = move |_: &dyn Control| Ok(spot::of(&text));
    let work = move |c: &dyn Control| {
        let pool = c.pool()?;
        let flash: Vec<&Path> = pool.flash.iter().map(Path::new).collect();
        let mut found = look(&asked.origin, &flash)?;
        if let Ok(spec) = origin::parse(&asked.origin) {
            found.disk = used_by(&spec, &c.disks()?);
        }
        Ok(found)
    };
    change_at(panel, find, work).await
}

pub(super) fn routes() -> OpenApiRouter<Panel> {
    OpenApiRouter::new().routes(routes!(look_at_origin))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with these bytes at these places.
    fn file(dir: &Path, name: &str, size: u64, bytes: &[(usize, &[u8])]) -> String {
        let mut data = vec![0; size as usize];
        for (at, bytes) in bytes {
            data[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        let path = dir.join(name);
        std::fs::write(&path, data).unwrap();
        path.display().to_string()
    }

    #[test]
    fn a_file_says_what_is_in_it() {
        let tmp = tempfile::tempdir().unwrap();
        let size = 1 << 20;
        let empty = file(tmp.path(), "empty.raw", size, &[]);
        let found = look(&empty, &[]).unwrap();
        assert_eq!(
            (found.kind.as_str(), found.size, found.holds, found.refused),
            ("file", Some(size), None, None)
        );
        let xfs = file(tmp.path(), "xfs.raw", size, &[(0, b"XFSB")]);
        let found = look(&xfs, &[]).unwrap();
        assert_eq!(found.holds.as_deref(), Some("an XFS file system"));
        assert_eq!(found.refused, None);
        let nothing = file(tmp.path(), "nothing", 0, &[]);
        let why = look(&nothing, &[]).unwrap().refused.unwrap();
        assert!(why.error.contains("is empty"), "{why:?}");
        assert!(look("/nowhere/at/all", &[]).is_err());
        let far = look("nbd://h/x", &[]).unwrap();
        assert_eq!((far.kind.as_str(), far.size), ("elsewhere", None));
    }

    #[test]
    fn an_image_is_known_whatever_it_is_called() {
        let tmp = tempfile::tempdir().unwrap();
        let version = 3u32.to_be_bytes();
        let bytes = (64u64 << 30).to_be_bytes();
        let name = b"/etc/shadow";
        let head = |backing: &[u8]| {
            let (at, len) = match backing.len() {
                0 => (0, 0),
                len => (512u64, len as u32),
            };
            (at.to_be_bytes(), len.to_be_bytes())
        };
        let image = |called: &str, backing: &'static [u8]| {
            let (at, len) = head(backing);
            let parts: [(usize, &[u8]); 8] = [
                (0, b"QFI\xfb"),
                (4, &version),
                (8, &at),
                (16, &len),
                (20, &16u32.to_be_bytes()),
                (24, &bytes),
                (100, &104u32.to_be_bytes()),
                (512, backing),
            ];
            file(tmp.path(), called, 1 << 18, &parts)
        };
        let plain = image("disk.raw", b"");
        let found = look(&plain, &[]).unwrap();
        assert_eq!(found.format.as_deref(), Some("qcow2"));
        assert_eq!(found.instead, Some(format!("qcow2:{plain}")));
        assert!(found.refused.is_some());
        let found = look(&format!("qcow2:{plain}"), &[]).unwrap();
        assert_eq!(
            (found.kind.as_str(), found.size, found.refused),
            ("image", Some(64 << 30), None)
        );
        // What it names is said, and not looked at.
        let overlay = image("overlay.qcow2", name);
        let why = look(&format!("qcow2:{overlay}"), &[])
            .unwrap()
            .refused
            .unwrap();
        assert!(why.error.contains("/etc/shadow"), "{why:?}");
        assert!(why.error.contains("not followed"), "{why:?}");
    }
}
