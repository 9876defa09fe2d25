//! What an export keeps over restarts: its number, the key its handles are authenticated with, how
//! its files are found, and its write verifier.
//!
//! Number and key are made once, in a directory of the daemon's own, which only it may read: whoever knows the key can
//! make handles. They are neither on flash nor in the directory that is served, so that they outlive
//! the loss of both. Should the file itself be lost, every handle becomes stale, and clients have to mount again; so
//! a damaged one is an error, and never a reason to make another.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ring::rand::{SecureRandom, SystemRandom};

use crate::local::By;

const NAME: &str = "identity";
const MAGIC: &[u8; 8] = b"HRTHNFS1";
const VERIFIER: &str = "verifier";
const WAY: &str = "files";

/// An export's number and key.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// Its number.
    pub store: u64,
    /// See [`handle`](crate::handle).
    pub secret: [u8; 32],
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| io::Error::other("the system gives no random numbers"))?;
    Ok(bytes)
}

/// Writes a file so that after a crash it is there whole, or as it was before.
pub fn replace(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = dir.join(format!("{name}.new"));
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, dir.join(name))?;
    fs::File::open(dir)?.sync_all()
}

impl Identity {
    /// The identity kept in `dir`; made, with the directory, if there is none.
    pub fn load(dir: &Path) -> io::Result<Identity> {
        match fs::read(dir.join(NAME)) {
            Ok(bytes) => parse(&bytes).ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{} is damaged", dir.join(NAME).display()),
                )
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(dir)?;
                let identity = Identity {
                    store: u64::from_be_bytes(random()?),
                    secret: random()?,
                };
                let body = [&MAGIC[..], &identity.store.to_be_bytes(), &identity.secret].concat();
                let check = ring::digest::digest(&ring::digest::SHA256, &body);
                replace(dir, NAME, &[&body, check.as_ref()].concat())?;
                Ok(identity)
            }
            Err(error) => Err(error),
        }
    }
}

fn parse(bytes: &[u8]) -> Option<Identity> {
    let (body, check) = bytes.split_at_checked(48)?;
    let (magic, rest) = body.split_first_chunk::<8>()?;
    let (store, secret) = rest.split_first_chunk()?;
    let sum = ring::digest::digest(&ring::digest::SHA256, body);
    (magic == MAGIC && check == sum.as_ref()).then_some(())?;
    Some(Identity {
        store: u64::from_be_bytes(*store),
        secret: secret.try_into().ok()?,
    })
}

/// How a directory's files are found, if that was decided.
pub(crate) fn way(dir: &Path) -> io::Result<Option<By>> {
    match fs::read(dir.join(WAY)) {
        Ok(text) => match text.trim_ascii() {
            b"handle" => Ok(Some(By::Handle)),
            b"number" => Ok(Some(By::Number)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is damaged", dir.join(WAY).display()),
            )),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Decides it.
pub(crate) fn keep_way(dir: &Path, by: By) -> io::Result<()> {
    let text = match by {
        By::Handle => "handle\n",
        By::Number => "number\n",
    };
    replace(dir, WAY, text.as_bytes())
}

/// The number by which clients notice that data they were told is unstable may be lost.
///
/// Such data is in the kernel's memory. It outlives the daemon, but not the kernel, and not a
/// failure to write it back. So the number belongs to a boot of the host, and is replaced when the kernel
/// reports such a failure: kept in a file, so that a restart of the daemon does not bring back a number from
/// before a failure.
#[derive(Debug)]
pub struct Verifier {
    dir: PathBuf,
    boot: String,
    now: Mutex<[u8; 8]>,
}

impl Verifier {
    /// The verifier kept in `dir`, or a new one if the host was booted since.
    pub fn load(dir: &Path) -> io::Result<Verifier> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?
            .trim()
            .to_owned();
        Verifier::of_boot(dir, boot)
    }

    fn of_boot(dir: &Path, boot: String) -> io::Result<Verifier> {
        let kept = fs::read_to_string(dir.join(VERIFIER)).ok();
        let kept = kept.as_deref().and_then(|text| text.trim().split_once(' '));
        let kept = kept
            .filter(|(of, _)| *of == boot)
            .and_then(|(_, hex)| u64::from_str_radix(hex, 16).ok());
        let verifier = Verifier {
            dir: dir.to_owned(),
            boot,
            now: Mutex::default(),
        };
        match kept {
            Some(number) => verifier.set(number.to_be_bytes()),
            None => {
                let number = random()?;
                verifier.keep(number)?;
                verifier.set(number);
            }
        }
        Ok(verifier)
    }

    fn keep(&self, number: [u8; 8]) -> io::Result<()> {
        let line = format!("{} {:016x}\n", self.boot, u64::from_be_bytes(number));
        replace(&self.dir, VERIFIER, line.as_bytes())
    }

    fn set(&self, number: [u8; 8]) {
        *self
            .now
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = number;
    }

    /// What it is now.
    pub fn get(&self) -> [u8; 8] {
        *self
            .now
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Unstable data may have been lost.
    pub fn replace(&self) {
        let number = random()
            .unwrap_or_else(|_| (u64::from_be_bytes(self.get()).wrapping_add(1)).to_be_bytes());
        self.set(number);
        if let Err(error) = self.keep(number) {
            // A new start must not find the old one.
            tracing::warn!(%error, "the new write verifier could not be kept");
            if let Err(error) = fs::remove_file(self.dir.join(VERIFIER)) {
                tracing::error!(%error, "the old write verifier could not be removed; do not restart before clients have written again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_kept_and_damage_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let state = dir.path().join("a/b");
        let first = Identity::load(&state).expect("made");
        assert!(first == Identity::load(&state).expect("kept"));
        let other = Identity::load(&dir.path().join("c")).expect("made");
        assert!(other.store != first.store && other.secret != first.secret);
        let file = state.join(NAME);
        let mut bytes = fs::read(&file).expect("there");
        bytes[20] ^= 1;
        fs::write(&file, &bytes).expect("damaged");
        assert!(Identity::load(&state).is_err());
        fs::write(&file, b"").expect("emptied");
        assert!(Identity::load(&state).is_err());
    }

    #[test]
    fn a_verifier_lives_as_long_as_the_memory_it_stands_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let load = |boot: &str| Verifier::of_boot(dir.path(), boot.to_owned()).expect("loaded");
        let first = load("one").get();
        assert_eq!(load("one").get(), first);
        let after_reboot = load("two").get();
        assert_ne!(after_reboot, first);
        let verifier = load("two");
        verifier.replace();
        assert_ne!(verifier.get(), after_reboot);
        // A restart does not bring back the one from before the failure.
        assert_eq!(load("two").get(), verifier.get());
    }
}
