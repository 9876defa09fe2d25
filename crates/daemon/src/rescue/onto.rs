//! Whether what is saved may be written over what was named.
//!
//! It is written byte for byte, so what is named has to hold the disk itself: over an image in another format it would
//! destroy that. And the legs of a mirror have to stay the same: with one of them written, reads of the disk would
//! change their mind, and after a stop in order the next start would take that leg for spoilt and copy another one over it.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use hearth_format::DiskRecord;
use hearth_format::mirror::LegState;
use hearth_io::OriginSpec;

use crate::error::{Error, Result};
use crate::pool::change::same;

/// What is known of a part of an origin.
struct Part {
    spec: OriginSpec,
    /// The file or device it is.
    path: Option<PathBuf>,
    /// It holds the disk, as far as this pool knows.
    current: bool,
}

fn parts(record: &DiskRecord) -> Vec<Part> {
    let Ok(spec) = crate::origin::parse(&record.origin) else {
        return Vec::new();
    };
    let stamps = record.mirror.as_ref().map(|mirror| &mirror.legs);
    let current = |n: usize| {
        let stamp = stamps.and_then(|legs| legs.get(n));
        stamp.is_none_or(|leg| leg.state == LegState::Current)
    };
    let parts = hearth_origin::parts(&spec).into_iter().enumerate();
    parts
        .map(|(n, spec)| Part {
            path: hearth_origin::local_path(&spec),
            current: current(n),
            spec,
        })
        .collect()
}

fn listed<'a>(parts: impl Iterator<Item = &'a Part>) -> String {
    let names: Vec<String> = parts.map(|part| part.spec.to_string()).collect();
    names.join(" and ")
}

/// Could it be written, too?
fn is_there(part: &Part) -> bool {
    let path = part.path.as_ref();
    path.is_some_and(|path| OpenOptions::new().write(true).open(path).is_ok())
}

/// Refuses what would make a mess of it. `force`: although the legs of a mirror would differ, for one is dead or is not
/// to be had here; what has to be said of that then. It is asked for also where an origin may be newer, so a leg that could be written is not
/// left out for it.
pub(super) fn check(record: &DiskRecord, onto: &[PathBuf], force: bool) -> Result<Option<String>> {
    let parts = parts(record);
    let is = |part: &Part, path: &Path| part.path.as_ref().is_some_and(|p| same(p, path));
    let named = |part: &&Part| onto.iter().any(|path| is(part, path));
    // The path of an image is none of the spec itself.
    if let Some(image) = parts
        .iter()
        .find(|part| part.spec.path().is_none() && named(part))
    {
        return Err(Error::refused(
            format!(
                "{} is an image, whose bytes are not those of disk {}",
                image.spec, record.name
            ),
            "open it as a block device (`qemu-nbd --connect=/dev/nbd0 IMAGE`) and give that one to --onto",
        ));
    }
    if parts.len() < 2 || !parts.iter().any(|part| named(&part)) {
        return Ok(None);
    }
    let stale = listed(parts.iter().filter(|part| !part.current && named(part)));
    if !stale.is_empty() && !force {
        return Err(Error::refused(
            format!(
                "{stale} does not hold all of disk {}: it was out of the mirror, or was being copied to",
                record.name
            ),
            "leave it out: Hearth copies to it when the disk is served",
        ));
    }
    let lacking = || parts.iter().filter(|part| part.current && !named(part));
    if lacking().next().is_none() {
        return Ok(None);
    }
    if force && !lacking().any(is_there) {
        return Ok(Some(format!(
            "{} holds disk {} as well, and was not written: remove the disk before it is used, and add it anew with the leg that was written first",
            listed(lacking()),
            record.name
        )));
    }
    let remedy = match lacking().all(|part| part.spec.path().is_some()) {
        true => "name every leg, each with --onto; --force leaves out one that is dead",
        false => {
            "add --force to write this one alone; then remove the disk before it is used, and add it anew with this leg first"
        }
    };
    Err(Error::refused(
        format!(
            "{} holds disk {} as well: the legs of its mirror would not be the same any more",
            listed(lacking()),
            record.name
        ),
        remedy,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_format::Uuid;
    use hearth_format::mirror::{LegStamp, MirrorStamps};

    fn disk(origin: &str, states: &[LegState]) -> DiskRecord {
        let legs = states.iter().map(|state| LegStamp {
            id: Uuid::new_v4(),
            generation: 1,
            state: *state,
            whole: false,
            copied: 0,
            left: (0, 0),
        });
        DiskRecord {
            mirror: (!states.is_empty()).then(|| MirrorStamps {
                generation: 1,
                legs: legs.collect(),
                ..MirrorStamps::default()
            }),
            id: 1,
            name: "vm1".to_owned(),
            origin: origin.to_owned(),
            size: 1 << 20,
            ..DiskRecord::default()
        }
    }

    fn refused(disk: &DiskRecord, onto: &[&str]) -> Option<String> {
        let onto: Vec<PathBuf> = onto.iter().map(PathBuf::from).collect();
        check(disk, &onto, false).err().map(|e| e.to_string())
    }

    #[test]
    fn every_leg_of_a_mirror_gets_it_or_none() {
        use LegState::{Behind, Current, Out};
        let mirror = disk("mirror:/a|/b", &[Current, Current]);
        assert_eq!(refused(&mirror, &["/a", "/b"]), None);
        assert_eq!(refused(&mirror, &["/b", "/a"]), None);
        // A copy is nobody's leg.
        assert_eq!(refused(&mirror, &["/copy-of-a"]), None);
        for one in ["/a", "/b"] {
            let why = refused(&mirror, &[one]).expect("the other one would lack it");
            assert!(
                why.contains("not be the same") && why.contains("--onto"),
                "{why}"
            );
            let said = check(&mirror, &[one.into()], true).expect("the other one is dead");
            assert!(said.is_some_and(|said| said.contains("was not written")));
        }
        // One that does not hold the disk is copied to anyway.
        for state in [Behind, Out] {
            let mirror = disk("mirror:/a|/b", &[Current, state]);
            assert_eq!(refused(&mirror, &["/a"]), None);
            let why = refused(&mirror, &["/a", "/b"]).expect("it is stale");
            assert!(why.contains("/b does not hold all"), "{why}");
        }
        let remote = disk("mirror:/a|nbd://there/b", &[Current, Current]);
        let why = refused(&remote, &["/a"]).expect("the other one would lack it");
        assert!(
            why.contains("nbd://there/b") && why.contains("--force"),
            "{why}"
        );
    }

    /// Force is asked for because of what the origin may hold, too.
    #[test]
    fn force_leaves_out_no_leg_that_could_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let legs = ["a", "b"].map(|name| dir.path().join(name));
        legs.iter().for_each(|leg| std::fs::write(leg, "").unwrap());
        let origin = format!("mirror:{}|{}", legs[0].display(), legs[1].display());
        let mirror = disk(&origin, &[LegState::Current, LegState::Current]);
        let why = check(&mirror, &legs[..1], true).expect_err("the other one is there");
        assert!(why.to_string().contains("name every leg"), "{why}");
        assert_eq!(check(&mirror, &legs, true), Ok(None));
        std::fs::remove_file(&legs[1]).unwrap();
        assert!(check(&mirror, &legs[..1], true).unwrap().is_some());
    }

    #[test]
    fn an_image_is_not_written_over_as_if_it_were_the_disk() {
        let plain = disk("/a", &[]);
        assert_eq!(refused(&plain, &["/a"]), None);
        for image in ["qcow2:/a", "mirror:/b|qcow2:/a"] {
            let image = disk(image, &[]);
            let why = refused(&image, &["/a"]).expect("its bytes are not the disk's");
            assert!(why.contains("qcow2:/a is an image"), "{why}");
            assert!(
                check(&image, &["/a".into()], true).is_err(),
                "not even by force"
            );
            assert_eq!(refused(&image, &["/dev/nbd0"]), None);
        }
    }
}
