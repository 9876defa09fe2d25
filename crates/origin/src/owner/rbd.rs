//! The owner of an RBD image: a lock on an object of ours beside it.
//!
//! Ceph's object stores have locks that are taken and broken in one step, with a word of their
//! holder: of two hosts one gets it, whatever the timing, which setting an image's metadata could
//! not promise. It is not the lock of the image itself (`rbd lock`), which would stop QEMU's own
//! writes. The object is named after the image's number, so that an image that is deleted and made
//! again under its name is nobody's.
//!
//! RBD's exclusive lock goes to and fro between its clients and keeps nobody out. What it is good
//! for is signs of life: whoever has an image open for writing watches it, and the watch ends half
//! a minute after its client. The addresses our own watch had are kept in the object; who takes over
//! has them shut out (`ceph osd blocklist`), should that host come back and go on as if nothing had
//! happened.

use super::{ClaimError, Owner, Take, Watch, taken_over};
use crate::process;
use hearth_fault::Fault;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest run of one of Ceph's programs: they wait for ever for a cluster that is away.
const LIMIT: Duration = Duration::from_secs(20);
/// How often its end is looked for.
const POLL: Duration = Duration::from_millis(10);
/// Most of its output that is read.
const OUTPUT_MAX: u64 = 64 << 10;
/// How often the owner looks whether it still is; each look runs two programs.
const BEAT: Duration = Duration::from_secs(30);
/// When it does so first: the image is open by then.
const FIRST: Duration = Duration::from_secs(2);
/// Name of the lock.
const LOCK: &str = "hearth";
/// Attribute with the addresses of the owner's clients.
const CLIENTS: &str = "hearth.clients";
/// Most addresses kept.
const CLIENTS_MAX: usize = 16;

/// An image and how to reach it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RbdImage {
    pool: String,
    image: String,
    /// `--id` and `-c`, if they were given.
    access: Vec<String>,
    name: String,
}

/// True if Ceph's own programs are there.
pub(super) fn is_installed() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    has("rbd") && has("rados")
}

/// A program's answer, or what it said.
fn run(program: &str, args: &[&str]) -> Result<String, Fault> {
    let mut child = process::hand_on_nothing(&mut Command::new(program))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| {
            Fault::new(
                format!("cannot run {program}: {e}"),
                "see that Ceph's programs are installed",
            )
        })?;
    let end = Instant::now() + LIMIT;
    // What they say fits into a pipe; should it not, they are stuck and ended.
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => std::thread::sleep(POLL),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Fault::new(
                    format!("{program} did not answer within {} s", LIMIT.as_secs()),
                    "see whether the cluster can be reached",
                ));
            }
        }
    };
    let text = |pipe: &mut dyn Read| {
        let mut bytes = Vec::new();
        // What cannot be read was not said.
        let _ = pipe.take(OUTPUT_MAX).read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let said = child.stdout.as_mut().map_or(String::new(), |p| text(p));
    if status.success() {
        return Ok(said);
    }
    let error = child.stderr.as_mut().map_or(String::new(), |p| text(p));
    let line = error.lines().rfind(|l| !l.trim().is_empty());
    Err(Fault::bare(format!(
        "{program}: {}",
        line.unwrap_or("it failed").trim()
    )))
}

/// Who holds the lock.
struct Holder {
    /// Ceph's name of the client that took it.
    locker: String,
    cookie: String,
    owner: Owner,
    /// Its host's address.
    address: String,
}

/// What stands before the port of a client's address.
fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// Of those who have an image open that is ours, the ones that are not we.
///
/// Our own watch of an earlier run, on this host, goes by itself, and is not waited for. It must have
/// been noted: a virtual machine of this host that was started on the image meanwhile has the same
/// host's address. A watch that ended before it was noted is taken for somebody else's until it goes.
fn others(watchers: Vec<String>, holder: &str, noted: &str) -> Vec<String> {
    let is_ours =
        |w: &String| host(w) == host(holder) && noted.split_whitespace().any(|noted| noted == w);
    let mut watchers = watchers;
    watchers.retain(|w| !is_ours(w));
    watchers
}

impl RbdImage {
    /// Of QEMU's description of a block device, if its driver is rbd.
    pub(super) fn new(node: &Value, name: &str) -> Option<RbdImage> {
        if node["driver"] != "rbd" {
            return None;
        }
        let mut access = Vec::new();
        for (key, option) in [("user", "--id"), ("conf", "-c")] {
            if let Some(value) = node[key].as_str() {
                access.extend([option.to_owned(), value.to_owned()]);
            }
        }
        Some(RbdImage {
            pool: node["pool"].as_str()?.to_owned(),
            image: node["image"].as_str()?.to_owned(),
            access,
            name: name.to_owned(),
        })
    }

    fn access(&self) -> Vec<&str> {
        self.access.iter().map(String::as_str).collect()
    }

    fn rbd(&self, command: &str) -> Result<Value, Fault> {
        let (pool, image) = (
            format!("--pool={}", self.pool),
            format!("--image={}", self.image),
        );
        let mut args = self.access();
        args.extend([command, &pool, &image, "--format", "json"]);
        let said = run("rbd", &args)?;
        serde_json::from_str(&said)
            .map_err(|e| Fault::bare(format!("rbd {command} is not understood: {e}")))
    }

    fn rados(&self, command: &[&str]) -> Result<String, Fault> {
        let pool = format!("--pool={}", self.pool);
        let mut args = self.access();
        args.push(&pool);
        args.extend(command);
        run("rados", &args)
    }

    /// The object of ours.
    fn object(&self) -> Result<String, Fault> {
        let info = self.rbd("info")?;
        match info["id"].as_str() {
            Some(id) => Ok(format!("hearth.owner.{id}")),
            None => Err(Fault::bare(format!("{} has no number", self.name))),
        }
    }

    /// Addresses of those who have the image open for writing.
    fn watchers(&self) -> Result<Vec<String>, Fault> {
        let status = self.rbd("status")?;
        let all = status["watchers"].as_array().map_or(&[][..], Vec::as_slice);
        let address = |w: &Value| Some(w["address"].as_str()?.to_owned());
        Ok(all.iter().filter_map(address).collect())
    }

    fn holder(&self, object: &str) -> Result<Option<Holder>, Fault> {
        let said = match self.rados(&["lock", "info", object, LOCK]) {
            Ok(said) => said,
            Err(e) if e.what.contains("(2)") => return Ok(None),
            Err(e) => return Err(e),
        };
        let info: Value = serde_json::from_str(&said)
            .map_err(|e| Fault::bare(format!("rados is not understood: {e}")))?;
        let Some(locker) = info["lockers"].as_array().and_then(|all| all.first()) else {
            return Ok(None);
        };
        let word = |key: &str| locker[key].as_str().unwrap_or_default().to_owned();
        let owner = Owner::from_json(&word("description")).unwrap_or(Owner {
            pool: word("cookie"),
            host: word("addr"),
            ..Owner::default()
        });
        Ok(Some(Holder {
            locker: word("name"),
            cookie: word("cookie"),
            owner,
            address: word("addr"),
        }))
    }

    /// Takes the lock; false if somebody has it.
    fn lock(&self, object: &str, me: &Owner) -> Result<bool, Fault> {
        let cookie = format!("--lock-cookie={}", me.pool);
        let description = format!("--lock-description={}", me.to_json());
        match self.rados(&["lock", "get", object, LOCK, &cookie, &description]) {
            Ok(_) => Ok(true),
            Err(e) if e.what.contains("(16)") || e.what.contains("(17)") => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn unlock(&self, object: &str, holder: &Holder) -> Result<(), Fault> {
        let cookie = format!("--lock-cookie={}", holder.cookie);
        self.rados(&["lock", "break", object, LOCK, &holder.locker, &cookie])
            .map(drop)
    }

    /// Makes the image ours; true if nobody owned it.
    pub(super) fn claim(&self, origin: &str, me: &Owner, take: Take) -> Result<bool, ClaimError> {
        let failed = |why| ClaimError::Unavailable {
            origin: origin.to_owned(),
            why,
        };
        let object = self.object().map_err(failed)?;
        let watchers = self.watchers().map_err(failed)?;
        let in_use = |who: &[String]| ClaimError::InUse {
            origin: origin.to_owned(),
            who: format!("Ceph's client at {}", who.join(", ")),
        };
        let before = self.holder(&object).map_err(failed)?;
        if let Some(holder) = &before {
            let (origin, owner) = (origin.to_owned(), Box::new(holder.owner.clone()));
            if holder.cookie == me.pool {
                let noted = self.noted(&object);
                let others = others(watchers, &holder.address, &noted);
                return match others.as_slice() {
                    [] => Ok(false),
                    others => Err(in_use(others)),
                };
            }
            if take == Take::Free {
                return Err(ClaimError::Owned { origin, owner });
            }
            if !watchers.is_empty() {
                return Err(ClaimError::Alive {
                    origin,
                    owner,
                    seen: format!("; {} has the image open", watchers.join(", ")),
                });
            }
            self.shut_out(&object);
            // Of two who take over at once, one finds it gone.
            self.unlock(&object, holder).map_err(failed)?;
        } else if !watchers.is_empty() {
            return Err(in_use(&watchers));
        }
        if self.lock(&object, me).map_err(failed)? {
            let Some(holder) = before else {
                return Ok(true);
            };
            // Its owner, should it come back at this very moment, opens the image and then looks at the
            // lock ([`confirm`](Self::confirm)); we have the lock, and look who has the image open.
            let watchers = self.watchers().map_err(failed)?;
            if watchers.is_empty() {
                return Ok(true);
            }
            self.give_back(&object, me, &holder.owner).map_err(failed)?;
            return Err(ClaimError::Alive {
                origin: origin.to_owned(),
                owner: Box::new(holder.owner),
                seen: format!("; {} has just opened the image", watchers.join(", ")),
            });
        }
        match self.holder(&object).map_err(failed)? {
            Some(Holder { owner, .. }) => Err(ClaimError::Owned {
                origin: origin.to_owned(),
                owner: Box::new(owner),
            }),
            None => Err(failed(Fault::new(
                "its owner has just changed",
                "try again",
            ))),
        }
    }

    /// Makes the lock the last owner's again.
    fn give_back(&self, object: &str, me: &Owner, last: &Owner) -> Result<(), Fault> {
        if let Some(ours) = self.holder(object)?.filter(|h| h.cookie == me.pool) {
            self.unlock(object, &ours)?;
            self.lock(object, last)?;
        }
        Ok(())
    }

    /// Looks again, once the image is open: why it is not ours, if so.
    pub(super) fn confirm(&self, me: &Owner) -> Result<Option<String>, Fault> {
        let holder = self.holder(&self.object()?)?;
        Ok(holder
            .filter(|holder| holder.cookie != me.pool)
            .map(|holder| taken_over(&holder.owner)))
    }

    /// The addresses the owner has noted of its own clients; none if there are none.
    fn noted(&self, object: &str) -> String {
        self.rados(&["getxattr", object, CLIENTS])
            .unwrap_or_default()
    }

    /// Has the cluster refuse what the last owner may still send.
    fn shut_out(&self, object: &str) {
        let known = self.noted(object);
        for address in known.split_whitespace().take(CLIENTS_MAX) {
            let mut args = self.access();
            args.extend(["osd", "blocklist", "add", address]);
            match run("ceph", &args) {
                Ok(_) => {
                    tracing::warn!(origin = %self.name, "the last owner's client {address} is shut out of the cluster")
                }
                Err(e) => {
                    tracing::error!(origin = %self.name, "the last owner's client {address} cannot be shut out: {e}; make sure that its host is off")
                }
            }
        }
    }

    /// Removes our object, if it is ours.
    pub(super) fn remove(&self, me: &Owner) -> Result<(), Fault> {
        let object = self.object()?;
        match self.holder(&object)? {
            Some(holder) if holder.cookie == me.pool => self.rados(&["rm", &object]).map(drop),
            _ => Ok(()),
        }
    }

    /// Sees whether the image is still ours, and notes by which address we use it.
    pub(super) fn watcher(&self, me: &Owner) -> Watch {
        let (image, me) = (self.clone(), me.clone());
        let mut known = BTreeSet::new();
        let mut told = false;
        let mut round = move || -> Result<Option<String>, Fault> {
            let object = image.object()?;
            match image.holder(&object)? {
                Some(holder) if holder.cookie == me.pool => {}
                Some(holder) => {
                    return Ok(Some(taken_over(&holder.owner)));
                }
                // Somebody removed it. Should another be faster, the next look says so.
                None => drop(image.lock(&object, &me)?),
            }
            let now: BTreeSet<String> = image.watchers()?.into_iter().collect();
            if now != known && !now.is_empty() {
                let all: Vec<&str> = now.iter().take(CLIENTS_MAX).map(String::as_str).collect();
                image.rados(&["setxattr", &object, CLIENTS, &all.join(" ")])?;
                known = now;
            }
            Ok(None)
        };
        let name = self.name.clone();
        Watch {
            first: FIRST,
            every: BEAT,
            look: Box::new(move || match round() {
                Ok(lost) => {
                    told = false;
                    lost
                }
                Err(e) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(origin = %name, "cannot see who owns the image: {e}");
                    }
                    None
                }
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_access() {
        assert_eq!(host("10.0.0.1:0/77"), host("10.0.0.1:6800/1"));
        assert_ne!(host("[fe80::1]:0/77"), host("[fe80::2]:0/77"));
        let node = serde_json::json!({"driver": "rbd", "pool": "p", "image": "i", "user": "u", "conf": "/c"});
        let image = RbdImage::new(&node, "rbd:p/i").unwrap();
        assert_eq!(image.access, ["--id", "u", "-c", "/c"]);
        assert!(RbdImage::new(&serde_json::json!({"driver": "ssh"}), "x").is_none());
    }

    #[test]
    fn a_guest_on_our_own_host_is_not_we() {
        let all = ["10.0.0.1:0/7", "10.0.0.1:0/8", "10.0.0.2:0/7"].map(str::to_owned);
        let others = |noted: &str| others(all.to_vec(), "10.0.0.1:0/1", noted);
        assert_eq!(others("10.0.0.1:0/6 10.0.0.1:0/7 10.0.0.2:0/7\n"), all[1..]);
        assert_eq!(others(""), all);
    }

    #[test]
    fn a_program_that_fails_says_why() {
        assert_eq!(
            run("sh", &["-c", "echo one; exit 0"]),
            Ok("one\n".to_owned())
        );
        assert_eq!(
            run("sh", &["-c", "echo one >&2; echo two >&2; exit 3"]),
            Err(Fault::bare("sh: two"))
        );
        assert!(
            run("/nowhere/x", &[])
                .unwrap_err()
                .what
                .contains("cannot run")
        );
    }
}
