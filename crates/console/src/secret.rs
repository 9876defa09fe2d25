//! Secrets that prove who somebody is: made of the system's random numbers, kept only as their digests.
//!
//! Who reads our memory's image or our files finds nothing that opens a session.

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};

use crate::assets::hex;

/// What of a secret is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Digest([u8; 32]);

impl Digest {
    /// Of a secret that somebody gives.
    pub(crate) fn of(secret: &str) -> Digest {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, secret.as_bytes()).as_ref());
        Digest(bytes)
    }

    /// As a word.
    pub(crate) fn word(&self) -> String {
        hex(&self.0)
    }
}

/// A secret of 256 bits, as hexadecimal digits; `None` if the system has no random numbers to give.
pub(crate) fn fresh() -> Option<String> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).ok()?;
    Some(hex(&bytes))
}
