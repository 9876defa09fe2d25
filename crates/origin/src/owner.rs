//! Who may write an origin that more than one host can reach.
//!
//! A file or device of this host has locks. A file on a network file system, an image in a Ceph
//! cluster or an export of an NBD server can be opened by another host's Hearth as well, and each
//! would then serve its own version: what one has on its flash the other does not see. So until
//! hosts cooperate such an origin has one owner, which is a pool, and the owner is written down
//! where every host that can reach the origin sees it: beside a file ([`sidecar`]), or in an
//! object beside an RBD image ([`rbd`]). Where there is no such place the user has to vouch for it.
//!
//! A pool finds its own record and goes on, for a host must come back after its own power cut
//! without being asked. Another pool's record is a refusal, however old: its flash may hold writes
//! the origin does not have. Only a user can set it aside ([`Take::Over`]), and not while its owner
//! shows signs of life. An owner that was set aside notices ([`Claim::lost`]) and has to stop.

mod rbd;
mod sidecar;

use crate::image::Image;
use crate::open::{Kind, kind};
use hearth_io::OriginSpec;
use jiff::Timestamp;
use serde_json::{Value, json};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_fault::Fault;

pub(crate) use rbd::RbdImage;

/// Longest record that is read. A pool's number, three names and two numbers.
const RECORD_MAX: usize = 4096;
/// Longest name kept of a record that somebody else wrote.
const NAME_MAX: usize = 256;

/// Whose disk an origin is, as it stands beside the origin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The pool's number: this is who owns it.
    pub pool: String,
    /// The host it was served on, for people.
    pub host: String,
    /// The disk's name there.
    pub disk: String,
    /// Which run of the daemon wrote this.
    pub instance: String,
    /// When that was, seconds since 1970.
    pub since: u64,
}

impl Owner {
    fn to_json(&self) -> String {
        json!({
            "owner": "hearth",
            "pool": self.pool,
            "host": self.host,
            "disk": self.disk,
            "instance": self.instance,
            "since": self.since,
        })
        .to_string()
    }

    fn from_json(text: &str) -> Option<Owner> {
        let value: Value = serde_json::from_str(text.get(..RECORD_MAX).unwrap_or(text)).ok()?;
        let word = |key: &str| {
            let text = value[key].as_str()?;
            Some(text.chars().take(NAME_MAX).collect::<String>())
        };
        Some(Owner {
            pool: word("pool").filter(|pool| !pool.is_empty())?,
            host: word("host").unwrap_or_default(),
            disk: word("disk").unwrap_or_default(),
            instance: word("instance").unwrap_or_default(),
            since: value["since"].as_u64().unwrap_or_default(),
        })
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = match self.host.as_str() {
            "" => "an unnamed host",
            name => name,
        };
        write!(
            f,
            "disk {} of the pool {} on host {host}, since {}",
            self.disk,
            self.pool,
            utc(self.since)
        )
    }
}

/// Seconds since 1970 as a date and a time of day, in UTC. One beyond the year 9999 counts as its end.
pub fn utc(seconds: u64) -> String {
    let time = i64::try_from(seconds).unwrap_or(i64::MAX);
    let time = Timestamp::from_second(time).unwrap_or(Timestamp::MAX);
    time.strftime("%F %T UTC").to_string()
}

/// What an owner is told that is none any more.
fn taken_over(by: &Owner) -> String {
    format!("the origin was taken over by {by}")
}

/// How an origin is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Take {
    /// If nobody else owns it.
    #[default]
    Free,
    /// Also from an owner that shows no sign of life: the user said so.
    Over,
}

/// Why an origin is not ours.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ClaimError {
    /// Another pool's.
    Owned {
        /// The origin.
        origin: String,
        /// Whose it is.
        owner: Box<Owner>,
    },
    /// Another pool's, which is at work on it.
    Alive {
        /// The origin.
        origin: String,
        /// Whose it is.
        owner: Box<Owner>,
        /// What was seen of it.
        seen: String,
    },
    /// Somebody who left no record.
    InUse {
        /// The origin.
        origin: String,
        /// What is known of its user.
        who: String,
    },
    /// There is something in the place of the record that is none.
    Garbled {
        /// The origin.
        origin: String,
        /// Where the record is.
        place: String,
    },
    /// Nobody can know.
    Unknown {
        /// The origin.
        origin: String,
        /// Why not.
        why: String,
    },
    /// The storage does not answer.
    Unavailable {
        /// The origin.
        origin: String,
        /// What it said.
        why: Fault,
    },
}

impl ClaimError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            ClaimError::Owned { origin, owner } => Fault::new(
                format!("{origin} belongs to {owner}"),
                format!(
                    "remove the disk there (`hearth disk remove {}`) or export that pool, and try again; if that host is gone for good, take the origin over with --takeover --yes: what it had on its flash and not yet written back is then missing",
                    owner.disk
                ),
            ),
            ClaimError::Alive {
                origin,
                owner,
                seen,
            } => Fault::new(
                format!("{origin} cannot be taken over, because its owner is alive: {owner}{seen}"),
                "stop Hearth there first, or shut that host out of the storage, and try again",
            ),
            ClaimError::InUse { origin, who } => Fault::new(
                format!("{origin} is in use by {who}"),
                "stop its other user first",
            ),
            ClaimError::Garbled { origin, place } => Fault::new(
                format!("{origin} has an owner's record that cannot be read, {place}"),
                "see what it is, and remove it if no other host uses the origin",
            ),
            ClaimError::Unknown { origin, why } => Fault::new(
                format!("nobody can tell whether another host uses {origin}: {why}"),
                "if nobody does, say so with --sole-user",
            ),
            ClaimError::Unavailable { origin, why } => {
                why.clone().within(format!("cannot see who owns {origin}"))
            }
        }
    }
}

/// Where an origin's owner is written down.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    /// Nowhere: it is this host's own, and there are locks.
    Local,
    /// A file beside it.
    Beside(PathBuf),
    /// An object beside an image.
    Object(RbdImage),
    /// Nowhere, and others may reach it.
    Nowhere(String),
}

/// Where the owner of what a spec names is written down. Looks at the file system, and may hang with
/// it.
fn place(spec: &OriginSpec) -> std::io::Result<Place> {
    let of_path = |path: &Path| -> std::io::Result<Place> {
        Ok(match sidecar::shared(path)? {
            Some(place) => Place::Beside(place),
            None => Place::Local,
        })
    };
    Ok(match kind(&spec.source) {
        Ok(Kind::File(path)) => of_path(&path)?,
        Ok(Kind::Nbd(_)) => {
            Place::Nowhere("an NBD server does not tell its clients of each other".to_owned())
        }
        Ok(Kind::Image(image)) => match (&image, image.path()) {
            (_, Some(path)) => of_path(path)?,
            (Image::Remote { node, name, .. }, None) => match RbdImage::new(node, name) {
                Some(rbd) if rbd::is_installed() => Place::Object(rbd),
                Some(_) => Place::Nowhere(
                    "the programs rbd and rados, which look after that, are not installed (package ceph-common)".to_owned(),
                ),
                None => Place::Nowhere(format!(
                    "there is no place for that over {}",
                    node["driver"].as_str().unwrap_or("this protocol")
                )),
            },
            (Image::Local { .. }, None) => Place::Local,
        },
        Ok(Kind::Mirror(legs)) => {
            let local = |leg: &OriginSpec| matches!(place(leg), Ok(Place::Local));
            match legs.iter().all(local) {
                true => Place::Local,
                false => Place::Nowhere(
                    "of the legs of a mirror that other hosts can reach no book is kept".to_owned(),
                ),
            }
        }
        Ok(Kind::Nowhere) => Place::Local,
        // It will not open either, and says why.
        Err(_) => Place::Local,
    })
}

/// An origin that is ours until [given up](Claim::release). Dropped, the record stays, except that
/// of a claim that nobody [kept](Claim::keep).
#[derive(Debug)]
pub struct Claim {
    place: Place,
    me: Owner,
    /// Nobody owned it before.
    fresh: bool,
    lost: Arc<Mutex<Option<String>>>,
    /// Dropped, it ends the thread that keeps the record alive.
    beat: Option<Sender<()>>,
    /// Held while that thread looks; true: it shall not look again.
    over: Arc<Mutex<bool>>,
}

impl Claim {
    /// True if there was no owner's record before this claim.
    pub fn is_new(&self) -> bool {
        self.fresh
    }

    /// The disk is there to stay: so is its record.
    pub fn keep(&mut self) {
        self.fresh = false;
    }

    /// Asked once more when the origin is open, before it is used: somebody may have taken it over
    /// between our look at the record and that. Blocks. A file's record needs no such question: making
    /// it ours shows who takes over that we are there.
    pub fn confirm(&self) -> Result<(), Fault> {
        let Place::Object(image) = &self.place else {
            return Ok(());
        };
        match image.confirm(&self.me)? {
            None => Ok(()),
            Some(why) => Err(Fault::bare(why)),
        }
    }

    /// Why it is not ours any more, if so. Whoever asks must stop writing the origin.
    pub fn lost(&self) -> Option<String> {
        self.lost
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Gives the origin up: whoever comes next may have it. May hang with the storage.
    pub fn release(mut self) {
        self.fresh = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        drop(self.beat.take());
        if !self.fresh || self.lost().is_some() {
            return;
        }
        // A look that is under way would write again what is removed now.
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        let removed = match &self.place {
            Place::Beside(place) => sidecar::remove(place, &self.me),
            Place::Object(image) => image.remove(&self.me),
            Place::Local | Place::Nowhere(_) => Ok(()),
        };
        if let Err(why) = removed {
            tracing::warn!(disk = %self.me.disk, "the record that this pool owns an origin is still there: {why}");
        }
    }
}

/// Makes an origin ours, or says whose it is. `None` where it needs no owner's record: it is this
/// host's own. Blocks.
pub fn claim(spec: &OriginSpec, me: &Owner, take: Take) -> Result<Option<Claim>, ClaimError> {
    let origin = spec.to_string();
    let place = place(spec).map_err(|e| ClaimError::Unavailable {
        origin: origin.clone(),
        why: Fault::new(e.to_string(), "see that the storage can be reached"),
    })?;
    let lost = Arc::new(Mutex::new(None));
    let over = Arc::new(Mutex::new(false));
    let (fresh, beat) = match &place {
        Place::Local => return Ok(None),
        Place::Nowhere(why) => {
            return Err(ClaimError::Unknown {
                origin,
                why: why.clone(),
            });
        }
        Place::Beside(path) => {
            let fresh = sidecar::claim(path, &origin, me, take)?;
            (fresh, watch(&lost, &over, sidecar::watcher(path, me)))
        }
        Place::Object(image) => {
            let fresh = image.claim(&origin, me, take)?;
            (fresh, watch(&lost, &over, image.watcher(me)))
        }
    };
    Ok(Some(Claim {
        place,
        me: me.clone(),
        fresh,
        lost,
        beat,
        over,
    }))
}

/// Gives up what a pool that is not serving an origin may own of it.
pub fn forget(spec: &OriginSpec, me: &Owner) {
    let place = match place(spec) {
        Ok(place) => place,
        Err(e) => {
            tracing::warn!(disk = %me.disk, "the record that this pool owns {spec} is still there, if there was one: {e}");
            return;
        }
    };
    drop(Claim {
        place,
        me: me.clone(),
        fresh: true,
        lost: Arc::default(),
        beat: None,
        over: Arc::default(),
    });
}

/// What keeps a record alive and sees whether it still stands.
struct Watch {
    /// Until the first look.
    first: Duration,
    every: Duration,
    /// Why the origin is not ours any more, if so.
    look: Box<dyn FnMut() -> Option<String> + Send>,
}

/// A thread of its own for each: looking may hang with the storage, and others must not.
fn watch(
    lost: &Arc<Mutex<Option<String>>>,
    over: &Arc<Mutex<bool>>,
    mut watch: Watch,
) -> Option<Sender<()>> {
    let (lost, over) = (lost.clone(), over.clone());
    let (stop, stopped): (Sender<()>, Receiver<()>) = channel();
    let work = move || {
        let mut wait = watch.first;
        while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
            wait = watch.every;
            let over = over.lock().unwrap_or_else(PoisonError::into_inner);
            if *over {
                return;
            }
            if let Some(why) = (watch.look)() {
                *lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("hearth-owner".to_owned());
    if let Err(e) = thread.spawn(work) {
        tracing::error!("cannot start a thread: {e}; a takeover by another host is not noticed");
        return None;
    }
    Some(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_nonsense_is_none() {
        let owner = Owner {
            pool: "p".to_owned(),
            host: "h\"\n".to_owned(),
            disk: "d".to_owned(),
            instance: "i".to_owned(),
            since: 1_700_000_000,
        };
        assert_eq!(Owner::from_json(&owner.to_json()), Some(owner));
        let long = format!("{{\"pool\":\"p\",\"host\":\"{}\"}}", "é".repeat(RECORD_MAX));
        for text in [
            "",
            "{",
            "[]",
            "{}",
            "{\"pool\":\"\"}",
            "{\"pool\":7}",
            &long,
        ] {
            assert_eq!(Owner::from_json(text), None, "{text}");
        }
    }

    #[test]
    fn days_have_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_767_225_599), "2025-12-31 23:59:59 UTC");
    }

    /// Else it would write again what is being removed.
    #[test]
    fn a_look_under_way_is_waited_for_and_none_comes_after() {
        let (lost, over) = (Arc::default(), Arc::new(Mutex::new(false)));
        let (began, begun) = channel();
        let (go, gone) = channel::<()>();
        let looks = Arc::new(Mutex::new(0));
        let counted = looks.clone();
        let watching = Watch {
            first: Duration::ZERO,
            every: Duration::ZERO,
            look: Box::new(move || {
                let _ = began.send(());
                let _ = gone.recv();
                *counted.lock().unwrap() += 1;
                None
            }),
        };
        let beat = watch(&lost, &over, watching);
        begun.recv().unwrap();
        assert!(over.try_lock().is_err());
        drop(beat);
        go.send(()).unwrap();
        *over.lock().unwrap() = true;
        assert!(*looks.lock().unwrap() >= 1);
    }

    #[test]
    fn origins_whose_users_nobody_sees() {
        for text in [
            "nbd://h/x",
            "nbd+unix:///x?socket=/s",
            "iscsi://h/t/0",
            "ssh://h/x",
            "nfs://h/x/y",
            "model-latency=8ms:nbd://h/x",
        ] {
            let spec: OriginSpec = text.parse().unwrap();
            let refused = claim(&spec, &Owner::default(), Take::Over).unwrap_err();
            assert!(matches!(refused, ClaimError::Unknown { .. }), "{text}");
            assert!(refused.to_string().contains("--sole-user"), "{refused}");
        }
    }
}
